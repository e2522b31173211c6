"""Inputs put together by hand: fields left out, embeddings, masks, padding, tokens and images that do not fit."""

import pytest
import torch

from vlmopt.tests.contract.compare import both, outcome, same, served
from vlmopt.workbook.conversations import SEQUENCES, padded

GREEDY = {"do_sample": False, "max_new_tokens": 6}
IMAGE, PAD = 268, 256


@pytest.fixture
def inputs(prompt):
    return prompt((64, 96), "what is it?")


def embedded(model, inputs):
    """The prompt's embeddings with the image tokens' own rows, and all else that came with it."""
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    return {**rest, "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}


def test_without_token_types_forward_refuses_and_generate_takes_text_positions(ours, stock, inputs):
    bare = {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}
    mine, theirs = (outcome(lambda model=model: model(**bare)) for model in (ours, stock))
    assert mine is theirs is ValueError
    mine, theirs = both(ours, stock, bare, **GREEDY)
    assert same(mine, theirs) and torch.is_tensor(mine)
    assert served(ours) == {"stock": 1}


@pytest.mark.parametrize("kind", ["text", "images", "images and positions"])
def test_embeddings_instead_of_ids(ours, stock, prompt, inputs, kind):
    given = embedded(stock, prompt("hello there") if kind == "text" else inputs)
    if kind == "images and positions":
        types, grid = inputs["mm_token_type_ids"], inputs["image_grid_thw"]
        given["position_ids"], _ = stock.model.get_rope_index(inputs["input_ids"], types, image_grid_thw=grid)
    mine, theirs = both(ours, stock, given, **GREEDY)
    assert same(mine, theirs)
    assert served(ours) == {"stock": 1}


@pytest.mark.parametrize("mask", ["none", "ones", "bool", "float"])
def test_the_four_ways_to_say_that_nothing_is_padded_agree(ours, stock, inputs, mask):
    plain = ours.generate(**inputs, **GREEDY)
    ones = inputs["attention_mask"]
    given = {"none": None, "ones": ones, "bool": ones.bool(), "float": ones.float()}[mask]
    mine, theirs = both(ours, stock, {**inputs, "attention_mask": given}, **GREEDY)
    assert same(mine, theirs) and same(mine, plain)
    assert served(ours)["stages"] == (1 if mask == "float" else 2)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "parts",
    [
        (("one",), ("a longer one",)),
        (((64, 96), "A"), ("text alone",)),
        (((64, 96), "A"), ((32, 64), "x", (96, 32), "y", (64, 64), "z")),
    ],
    ids=["text", "mixed", "one and three images"],
)
def test_padded_batches_are_stocks(ours, stock, prompt, parts, side):
    given = padded([prompt(*p) for p in parts], PAD, side)
    mine, theirs = both(ours, stock, given, **GREEDY)
    assert same(mine, theirs) and torch.is_tensor(mine)


def test_a_single_padded_prompt_equals_the_prompt_alone(ours, stock, inputs):
    given = {name: torch.nn.functional.pad(inputs[name], (3, 0)) for name in SEQUENCES}
    given = {**inputs, **given}
    mine, theirs = both(ours, stock, given, **GREEDY)
    assert same(mine, theirs)
    assert torch.equal(mine[:, 3:], ours.generate(**inputs, **GREEDY))


def without_text_between(inputs):
    """The last image's tokens moved right behind the first's: one run of image tokens for two images."""
    ids = inputs["input_ids"][0]
    order = torch.cat([(ids == IMAGE).nonzero(), (ids != IMAGE).nonzero()])[:, 0]
    return {**inputs, **{name: inputs[name][:, order] for name in SEQUENCES}}


MISFITS = {
    "the last image tokens cut off": lambda x: {**x, **{name: x[name][:, :40] for name in SEQUENCES}},
    "pixels without tokens": lambda x: {
        **x,
        **{name: x[name][:, x["input_ids"][0] != IMAGE] for name in SEQUENCES},
    },
    "tokens without pixels": lambda x: {name: x[name] for name in SEQUENCES},
    "two images with nothing between": without_text_between,
    "one image for two runs": lambda x: {**x, "image_grid_thw": x["image_grid_thw"][:1]},
    "images in the other order": lambda x: {**x, "image_grid_thw": x["image_grid_thw"].flip(0)},
    "a grid of nothing": lambda x: {**x, "image_grid_thw": x["image_grid_thw"] * 0},
    "a negative grid": lambda x: {**x, "image_grid_thw": -x["image_grid_thw"]},
    "an odd grid": lambda x: {**x, "image_grid_thw": x["image_grid_thw"] + torch.tensor([0, 1, 0])},
    "pixels of another width": lambda x: {**x, "pixel_values": x["pixel_values"][:, :-1]},
    "pixels as integers": lambda x: {**x, "pixel_values": x["pixel_values"].long()},
    "pixels in double": lambda x: {**x, "pixel_values": x["pixel_values"].double()},
    "no pixels at all": lambda x: {**x, "pixel_values": None, "image_grid_thw": None},
    "zero rows": lambda x: {**x, "pixel_values": x["pixel_values"][:0], "image_grid_thw": x["image_grid_thw"][:0]},
    "ids out of the vocabulary": lambda x: {**x, "input_ids": x["input_ids"] + 10**6},
    "negative ids": lambda x: {**x, "input_ids": -x["input_ids"]},
    "ids as int32": lambda x: {**x, "input_ids": x["input_ids"].int()},
    "ids as floats": lambda x: {**x, "input_ids": x["input_ids"].float()},
    "ids in one dimension": lambda x: {**x, "input_ids": x["input_ids"][0]},
    "a mask in three dimensions": lambda x: {**x, "attention_mask": x["attention_mask"][None]},
    "a mask with a hole": lambda x: {**x, "attention_mask": x["attention_mask"].index_fill(1, torch.tensor([30]), 0)},
    "a mask of twos": lambda x: {**x, "attention_mask": x["attention_mask"] * 2},
    "pixels dropped": lambda x: {name: value for name, value in x.items() if name != "pixel_values"},
    "pixels in half": lambda x: {**x, "pixel_values": x["pixel_values"].half()},
    "types that disagree": lambda x: {**x, "mm_token_type_ids": x["mm_token_type_ids"] * 0},
    "grids of other images": lambda x: {**x, "image_grid_thw": x["image_grid_thw"] * 2},
    "an empty prompt": lambda x: {"input_ids": x["input_ids"][:, :0]},
    "ids twice": lambda x: {**x, "inputs": x["input_ids"]},
    "the first token masked": lambda x: {
        **x,
        "attention_mask": x["attention_mask"].index_fill(1, torch.tensor([0]), 0),
    },
    "a list for ids": lambda x: {**x, "input_ids": x["input_ids"].tolist()},
    "types of video": lambda x: {**x, "mm_token_type_ids": x["mm_token_type_ids"] * 2},
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_gives_stocks_result_or_exception(ours, stock, prompt, case):
    given = MISFITS[case](prompt((64, 96), "one", (96, 64), "two"))
    mine, theirs = both(ours, stock, given, **GREEDY)
    assert same(mine, theirs), (mine, theirs)
    assert sum(served(ours).values()) == 1
    plain = prompt((64, 96), "after it")
    assert same(*both(ours, stock, plain, **GREEDY)), "the call left something behind"


def test_no_image_of_an_earlier_call_reaches_a_text(ours, stock, prompt):
    for given in (prompt((64, 96), "first"), prompt("text"), {**prompt("text"), "pixel_values": None}):
        assert same(*both(ours, stock, given, **GREEDY))
    assert served(ours) == {"stages": 2, "stock": 1}


def test_an_empty_list_of_images_is_the_processors_to_refuse(reference):
    with pytest.raises(IndexError):
        reference.processor(text=["hello"], images=[], return_tensors="pt")


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_model_may_say_the_image_token_itself(ours, stock, prompt, use_cache):
    others = [i for i in range(stock.config.text_config.vocab_size) if i != IMAGE]
    mine, theirs = both(ours, stock, prompt((64, 96), "x"), **GREEDY, suppress_tokens=others, use_cache=use_cache)
    assert same(mine, theirs)
    if use_cache:
        assert (mine[0, -6:] == IMAGE).all()
