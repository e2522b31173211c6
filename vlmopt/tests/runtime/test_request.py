"""Options in company, and arguments in other forms; each parameter and input by itself is tests/contract's."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

import vlmopt
from vlmopt.runtime.generate import ENGINES
from vlmopt.runtime.request import Batch, HandedToStock, Request, _as_set, read
from vlmopt.runtime.stock import NEUTRAL, _has_generation_options
from vlmopt.tests.contract.compare import both, same, served
from vlmopt.tests.runtime.test_generate import Recorder
from vlmopt.weights import collect
from vlmopt.workbook.conversations import padded

BASE = {"max_new_tokens": 5, "do_sample": False}


@pytest.fixture
def ours(tiny):
    vlmopt.optimize(tiny.model, "exact")
    return tiny.model


SERVED = {
    "plain": {},
    "harness": {"temperature": 0.0, "use_cache": True},
    "sampling flags unused": {"temperature": 0.3, "top_k": 3, "top_p": 0.5},
    "sampling flags silenced": {"temperature": None, "top_k": None, "top_p": None},
    "max_length": {"max_new_tokens": None, "max_length": 90},
    "neutral": {"repetition_penalty": 1.0, "num_beams": 1, "num_return_sequences": 1, "output_scores": False},
    "no repeated pairs": {"no_repeat_ngram_size": 2, "max_new_tokens": 20},
    "sampling": {"do_sample": True},
    "sampling from one": {"do_sample": True, "top_k": 1},
    "sampling as the 2B model's own defaults do": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "sampling hot": {"do_sample": True, "temperature": 2.5, "top_k": 0, "eos_token_id": None, "max_new_tokens": 24},
    "sampling from all": {"do_sample": True, "temperature": 2.5, "top_k": None, "top_p": None},
    "sampling with a penalty": {"do_sample": True, "temperature": 3.0, "repetition_penalty": 1.2, "min_p": 0.01},
    "sampling by other cuts": {"do_sample": True, "typical_p": 0.9, "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4},
    "renormalised": {"do_sample": True, "renormalize_logits": True, "remove_invalid_values": True},
}
STOCK = {
    "no length": {"max_new_tokens": None},
    "both lengths": {"max_new_tokens": 4, "max_length": 90},
    "several returns": {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
    "all that can be returned": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "beams with a penalty": {"num_beams": 2, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("case", [*SERVED, *STOCK])
def test_options_in_company_give_stocks_result(ours, reference, prompt, case):
    options = {**BASE, **SERVED.get(case, STOCK.get(case))}
    mine, theirs = both(ours, reference.model, prompt((64, 96), "what is it?"), **options)
    assert same(mine, theirs) and not isinstance(theirs, type)
    assert served(ours) == {"stages" if case in SERVED else "stock": 1}
    assert len(vlmopt.status(ours).stock_reasons) == (case in STOCK)


def test_positional_arguments_are_served_or_handed_over(ours, reference, prompt):
    ids = prompt("hello")["input_ids"]
    config = GenerationConfig(max_new_tokens=3, pad_token_id=256)
    assert torch.equal(ours.generate(ids, config), reference.model.generate(ids, config))
    assert torch.equal(
        ours.generate(ids, config, LogitsProcessorList()), reference.model.generate(ids, config, LogitsProcessorList())
    )
    assert vlmopt.status(ours).stock_reasons == {"positional arguments": 1} and served(ours)["stages"] == 1


def test_an_option_of_a_later_transformers_is_handed_over_without_a_line_changed_here(prompt):
    weights = SimpleNamespace(tokens=SimpleNamespace(image=268, video=269), text=SimpleNamespace(max_positions=99))
    later = {**NEUTRAL, "from_the_future": 0}
    read({**prompt("hello"), **BASE, "from_the_future": 0}, later, torch.device("cpu"), weights, False)
    with pytest.raises(HandedToStock, match="option from_the_future"):
        read({**prompt("hello"), **BASE, "from_the_future": 1}, later, torch.device("cpu"), weights, False)


def test_an_admission_waits_for_the_device_once(ours, prompt, monkeypatch):
    waits, arguments = [], {**prompt((64, 96), "one", (96, 64), "two"), **BASE}
    for name in ("cpu", "tolist", "item", "__bool__", "__int__"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *args, own=own, name=name: (waits.append(name), own(*args))[1])
    monkeypatch.setattr(ENGINES[ours], "_encode", lambda *_: None)
    request = ENGINES[ours]._admit(ours, arguments)
    assert request.grids == ((1, 8, 10), (1, 10, 8)) and waits == ["cpu"]


def test_the_tower_is_at_work_before_the_host_looks_at_the_model(ours, reference, prompt, monkeypatch):
    engine, order = ENGINES[ours], []
    encode, reason = engine._encode, engine.guard.reason
    monkeypatch.setattr(engine, "_encode", lambda *args: (order.append("tower"), encode(*args))[1])
    monkeypatch.setattr(engine.guard, "reason", lambda model: (order.append("look"), reason(model))[1])
    for inputs in (prompt((64, 96), "one"), prompt("text alone")):
        assert torch.equal(ours.generate(**inputs, **BASE), reference.model.generate(**inputs, **BASE))
    assert order == ["tower", "look", "look"]
    monkeypatch.setattr(engine, "config", engine.config.model_copy(update={"vision": False}))
    order.clear()
    ours.generate(**prompt((64, 96), "one"), **BASE)
    assert order == ["look", "tower"]


def test_nobody_sees_what_the_tower_made_for_a_model_that_has_changed(ours, reference, prompt):
    inputs, mine, theirs = prompt((64, 96), "one"), Recorder(), Recorder()
    hook = ours.model.language_model.layers[0].register_forward_hook(lambda *_: None)
    ids = ours.generate(**inputs, **BASE, streamer=mine)
    hook.remove()
    assert torch.equal(ids, reference.model.generate(**inputs, **BASE, streamer=theirs))
    assert mine.values == theirs.values and served(ours) == {"stock": 1}


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("change", [lambda grid: grid.flip(0), lambda grid: grid * torch.tensor([1, -1, -1])])
def test_images_that_do_not_fit_are_noticed_before_anything_is_computed(ours, prompt, batches, change):
    inputs = {**prompt((64, 64), "one", (64, 96), "two"), **BASE}
    inputs["image_grid_thw"] = change(inputs["image_grid_thw"])
    if batches:
        rows = ("input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw")
        inputs.update({name: inputs[name].repeat(2, 1) for name in rows}, pad_token_id=256)
    with pytest.raises(HandedToStock, match="image tokens that do not fit the images"):
        read(inputs, NEUTRAL, torch.device("cpu"), ENGINES[ours].weights, batches)


@pytest.mark.parametrize("where", ["nowhere", "the configuration", "its class", "another name"])
def test_generation_options_in_a_configuration_are_found_where_stock_finds_them(tiny, monkeypatch, where):
    config = tiny.model.config
    if where == "another name":
        config.__dict__["warmth"] = 0.5
        monkeypatch.setattr(type(config), "attribute_map", {"temperature": "warmth"})
    elif where != "nowhere":
        monkeypatch.setattr(config if where == "the configuration" else type(config), "temperature", 0.5, raising=False)
    assert _has_generation_options(config) == bool(config._get_generation_parameters()) == (where != "nowhere")


def test_options_in_the_models_configuration_are_stocks_to_refuse(tiny, prompt):
    vlmopt.optimize(tiny.model, "exact")
    tiny.model.config.temperature = 0.5
    with pytest.raises(ValueError, match="modified the pretrained model configuration"):
        tiny.model.generate(**prompt("hello"), **BASE)
    assert served(tiny.model) == {"stock": 1}


def test_a_custom_entry_in_the_models_generation_config_goes_to_stock(ours, prompt):
    ours.generation_config.update(**{"brand_new_option": 3}, allow_custom_entries=True)
    ours.generation_config.brand_new_option = 3
    ours.generate(**prompt("hello"), **BASE)
    assert vlmopt.status(ours).stock_reasons == {"option brand_new_option": 1}


CPU, META = torch.device("cpu"), torch.device("meta")
PAD, IMAGE, VIDEO = 256, 268, 269
GRIDS = ((1, 8, 10), (1, 10, 8))


@pytest.fixture(scope="module")
def weights(reference):
    return collect(reference.model, packed=False)


@pytest.fixture
def reading(weights, prompt):
    """Reads a call with two images and `changes`; a name whose change is `...` is left out."""

    def run(changes, inputs=None, batches=False, device=CPU):
        given = {**(inputs or prompt((64, 96), "one", (96, 64), "two")), **BASE}
        changes = changes(given) if callable(changes) else changes
        given = {name: value for name, value in {**given, **changes}.items() if value is not ...}
        return read(given, NEUTRAL, device, weights, batches)

    return run


def at(tensor, place, value):
    """The tensor with `value` at [0, place]."""
    return tensor.index_fill(1, torch.tensor([place]), value)


IMAGELESS = {"pixel_values": ..., "image_grid_thw": ...}
NO_IDS, NO_PLACE = "input_ids is not an int64 matrix", "no attention mask, and padding cannot be excluded"
REFUSALS = [
    ("pixel_values=None", {"pixel_values": None}),
    ("logits_to_keep=None", {"logits_to_keep": None}),
    ("nobodys=None", {"nobodys": None}),
    ("argument nobodys", {"nobodys": torch.zeros(1)}),
    ("argument position_ids", {"position_ids": torch.zeros(1)}),
    ("attention_mask is not a tensor", lambda x: {"attention_mask": x["attention_mask"].tolist()}),
    ("use_cache=False", {"use_cache": False}),
    ("do_sample is not a bool", {"do_sample": 1}),
    ("option num_beams", {"num_beams": 2}),
    ("option num_beams", {"num_beams": None}),
    ("option num_beams", {"num_beams": False}),
    ("option low_memory", {"low_memory": True}),
    ("option num_beams", {"temperature": 0.5, "num_beams": 2}),
    ("option num_beams", {"min_new_tokens": None, "num_beams": 2}),
    ("option repetition_penalty", {"repetition_penalty": "much"}),
    ("option suppress_tokens", {"suppress_tokens": torch.tensor([1])}),
    ("option guidance_scale", {"guidance_scale": torch.tensor(2.0)}),
    ("no input_ids", {"input_ids": ...}),
    ("both inputs and input_ids", lambda x: {"inputs": x["input_ids"]}),
    (NO_IDS, lambda x: {"input_ids": x["input_ids"].int()}),
    (NO_IDS, lambda x: {"input_ids": x["input_ids"][0]}),
    (NO_IDS, lambda x: {"input_ids": x["input_ids"][:, :0]}),
    (NO_IDS, lambda x: {"input_ids": x["input_ids"].tolist()}),
    ("attention_mask of another shape, device or type", lambda x: {"attention_mask": x["attention_mask"][:, 1:]}),
    ("attention_mask of another shape, device or type", lambda x: {"attention_mask": x["attention_mask"].float()}),
    ("attention_mask of another shape, device or type", lambda x: {"attention_mask": x["attention_mask"].to(META)}),
    ("mm_token_type_ids of another shape, device or type", {"mm_token_type_ids": torch.zeros(1, 3).long()}),
    (NO_PLACE, {"attention_mask": ...}),
    (NO_PLACE, lambda x: {"attention_mask": ..., "pad_token_id": int(x["input_ids"][0, -1])}),
    ("padding", lambda x: {"attention_mask": at(x["attention_mask"], 0, 0)}),
    ("padding", lambda x: {"attention_mask": at(x["attention_mask"], 0, 2)}),
    ("padding", lambda x: {"attention_mask": at(x["attention_mask"], 30, 0)}),
    ("padding", lambda x: {"attention_mask": at(x["attention_mask"], -1, 0)}),
    ("padding", lambda x: {"attention_mask": x["attention_mask"] * 0}),
    ("pixel_values without image_grid_thw, or the reverse", {"pixel_values": ...}),
    ("pixel_values without image_grid_thw, or the reverse", {"image_grid_thw": ...}),
    ("image tokens without images", IMAGELESS),
    ("image tokens without images", {**IMAGELESS, "mm_token_type_ids": ...}),
    ("image tokens without images", lambda x: {**IMAGELESS, "input_ids": x["input_ids"] * 0}),
    (
        "image tokens without images",
        lambda x: {**IMAGELESS, "mm_token_type_ids": ..., "input_ids": at(x["input_ids"] * 0, 3, VIDEO)},
    ),
    ("images without mm_token_type_ids", {"mm_token_type_ids": ...}),
    (
        "token types that do not match the image tokens",
        lambda x: {"mm_token_type_ids": at(x["mm_token_type_ids"], 0, 1)},
    ),
    ("images of an unusual shape", lambda x: {"image_grid_thw": x["image_grid_thw"].flatten()}),
    ("images of an unusual shape", lambda x: {"image_grid_thw": x["image_grid_thw"].repeat(1, 2)}),
    ("images of an unusual shape", lambda x: {"image_grid_thw": x["image_grid_thw"].float()}),
    ("images of an unusual shape", lambda x: {"pixel_values": x["pixel_values"][None]}),
    ("pixel_values of another width", lambda x: {"pixel_values": x["pixel_values"][:, 1:]}),
    ("pixel_values on another device", lambda x: {"pixel_values": x["pixel_values"].to(META)}),
    ("pixel_values that do not fit image_grid_thw", lambda x: {"pixel_values": x["pixel_values"][1:]}),
    (
        "pixel_values that do not fit image_grid_thw",
        lambda x: {"pixel_values": x["pixel_values"][:0], "image_grid_thw": x["image_grid_thw"][:0]},
    ),
    (
        "image tokens that do not fit the images",
        {"image_grid_thw": torch.tensor([[1, 4, 10], [1, 12, 10]])},
    ),
    ("neither or both of max_new_tokens and max_length", {"max_new_tokens": ...}),
    ("neither or both of max_new_tokens and max_length", {"max_length": 200}),
    ("no room for a new token", {"max_new_tokens": 0}),
    ("no room for a new token", {"max_new_tokens": 2.5}),
    ("no room for a new token", lambda x: {"max_new_tokens": ..., "max_length": x["input_ids"].shape[1]}),
]


@pytest.mark.parametrize(("reason", "changes"), REFUSALS)
def test_what_is_not_served_is_named_by_its_own_reason(reading, reason, changes):
    with pytest.raises(HandedToStock) as handed:
        reading(changes)
    assert str(handed.value) == reason


def test_ids_on_another_device_are_named(reading):
    with pytest.raises(HandedToStock, match=r"^input_ids on another device$"):
        reading({}, device=META)


def test_a_prompt_is_read_as_it_was_given(reading, prompt):
    inputs, streamer = prompt((64, 96), "one", (96, 64), "two"), object()
    request = reading({"streamer": streamer, "eos_token_id": [3, 4]}, inputs)
    assert type(request) is Request
    assert request.ids is inputs["input_ids"] and request.id_list == inputs["input_ids"][0].tolist()
    assert request.types.tolist() == inputs["mm_token_type_ids"][0].tolist()
    assert request.pixels is inputs["pixel_values"] and request.grids == GRIDS
    assert (request.max_new_tokens, request.eos, request.streamer) == (5, {3, 4}, streamer)
    assert (request.draws, request.shaping) == (False, {})


@pytest.mark.parametrize("left_out", [{"mm_token_type_ids": ...}, {"attention_mask": ..., "pad_token_id": 999}])
def test_a_text_needs_neither_token_types_nor_a_mask_where_nothing_can_be_padding(reading, prompt, left_out):
    request = reading(left_out, prompt("hello"))
    assert not request.types.any() and len(request.types) == len(request.id_list) > 5
    assert (request.pixels, request.grids) == (None, ())


def test_the_last_position_of_the_model_is_served_and_no_later_one(reading, prompt, weights):
    inputs = prompt("hello")
    length, most = inputs["input_ids"].shape[1], weights.text.max_positions
    assert reading({"max_new_tokens": most - length}, inputs).max_new_tokens == most - length
    assert reading({"max_new_tokens": ..., "max_length": most}, inputs).max_new_tokens == most - length
    assert reading({"max_new_tokens": 1, "max_length": None, "min_new_tokens": None}, inputs).max_new_tokens == 1
    with pytest.raises(HandedToStock, match=r"^more positions than the model was made for$"):
        reading({"max_new_tokens": most - length + 1}, inputs)
    pair = padded([inputs, inputs], PAD)
    each = most // 2 - length
    assert reading({"max_new_tokens": each, "pad_token_id": 0}, pair, batches=True).first.max_new_tokens == each
    with pytest.raises(HandedToStock, match=r"^more positions than the model was made for$"):
        reading({"max_new_tokens": each + 1, "pad_token_id": 0}, pair, batches=True)


def test_shaping_options_are_read_with_stocks_defaults_and_left_out_where_they_do_nothing(reading, prompt):
    def shaping(**changes):
        request = reading(changes, prompt("hello"))
        return request.draws, request.shaping

    idle = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "remove_invalid_values": False}
    assert shaping(**idle, renormalize_logits=False, low_memory=False, temperature=0.5, top_k=3) == (False, {})
    assert shaping(remove_invalid_values=True)[1]["remove_invalid_values"] is True
    names = ["no_repeat_ngram_size", "remove_invalid_values", "renormalize_logits", "repetition_penalty"]
    draws, values = shaping(**idle | {"repetition_penalty": 1.5}, temperature=0.5)
    assert not draws and sorted(values) == [*names, "suppress_tokens"]
    assert values["repetition_penalty"] == 1.5 and values["suppress_tokens"] is NEUTRAL["suppress_tokens"]
    draws, values = shaping(do_sample=True, top_k=3, suppress_tokens=[4])
    assert draws and {"temperature", "top_p", "min_p", *names} < set(values)
    assert (values["top_k"], values["suppress_tokens"]) == (3, [4])
    assert values["temperature"] == NEUTRAL["temperature"] and values["top_p"] == NEUTRAL["top_p"]


@pytest.mark.parametrize("eos", [7, [7], torch.tensor(7), torch.tensor([7]), (7, 7)], ids=str)
def test_an_end_is_a_number_a_list_or_a_tensor(eos):
    assert _as_set(eos) == frozenset({7}) and _as_set(None) == frozenset()


@pytest.fixture
def rows(prompt):
    parts = [("text",), ((64, 96), "one", (96, 64), "two"), ("a longer text " * 9,), ((32, 64), "x")]
    return [prompt(*part, seed=number) for number, part in enumerate(parts)]


def test_every_prompt_of_a_batch_is_read_without_its_padding_and_with_its_own_images(reading, rows):
    together = padded(rows, PAD)
    batch = reading({"pad_token_id": 9, "eos_token_id": 3}, together, batches=True)
    assert type(batch) is Batch and batch.ids is together["input_ids"] and batch.pad == 9
    assert batch.first is batch.rows[0] and len(batch.rows) == len(rows)
    for request, alone in zip(batch.rows, rows, strict=True):
        assert torch.equal(request.ids, alone["input_ids"]) and request.id_list == alone["input_ids"][0].tolist()
        assert request.types.tolist() == alone["mm_token_type_ids"][0].tolist()
        assert request.grids == tuple(map(tuple, alone["image_grid_thw"].tolist() if request.grids else ()))
        assert (request.pixels is None) == ("pixel_values" not in alone)
        assert request.pixels is None or torch.equal(request.pixels, alone["pixel_values"])
        assert (request.max_new_tokens, request.eos, request.streamer, request.draws) == (5, {3}, None, False)


def types_in_the_padding(x):
    return {"mm_token_type_ids": at(x["mm_token_type_ids"], 0, 1), "pad_token_id": PAD}


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("several prompts", {"streamer": object()}),
        ("several prompts without a pad_token_id", {"eos_token_id": 3}),
        ("padding", types_in_the_padding),
        ("padding", lambda x: {"attention_mask": x["attention_mask"].flip(1), "pad_token_id": PAD}),
        (
            "image tokens that do not fit the images",
            lambda x: {"pixel_values": x["pixel_values"][:80], "image_grid_thw": x["image_grid_thw"][:1]},
        ),
        ("image tokens that do not fit the images", lambda x: {"image_grid_thw": x["image_grid_thw"].flip(0)}),
    ],
)
def test_what_is_not_served_of_a_batch_is_named_by_its_own_reason(reading, rows, reason, changes):
    with pytest.raises(HandedToStock) as handed:
        reading(changes, padded(rows, PAD), batches=True)
    assert str(handed.value) == reason


def test_eight_prompts_are_served_and_no_ninth_and_none_but_one_where_batches_are_off(reading, rows):
    assert len(reading({}, padded(rows[:1] * 8, PAD), batches=True).rows) == 8
    for count, batches in ((9, True), (2, False)):
        with pytest.raises(HandedToStock, match=r"^several prompts$"):
            reading({}, padded(rows[:1] * count, PAD), batches=batches)
