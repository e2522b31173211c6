"""The contract: which `generate` calls the stages serve; every other goes to stock with stock's result or exception."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, MinLengthLogitsProcessor, StoppingCriteriaList
from transformers.cache_utils import DynamicCache

import vlmopt
from vlmopt.runtime.request import HandedToStock, read
from vlmopt.runtime.stock import NEUTRAL

BASE = {"max_new_tokens": 5, "do_sample": False}


@pytest.fixture
def ours(tiny):
    vlmopt.optimize(tiny.model, "exact")
    return tiny.model


def outcome(call):
    """The ids, or the exception's type."""
    try:
        result = call()
    except Exception as error:
        return type(error)
    return result if torch.is_tensor(result) else result.sequences


def seeded(call):
    torch.manual_seed(0)
    return outcome(call)


def same(first, second):
    return torch.equal(first, second) if torch.is_tensor(first) else first is second


SERVED = {
    "plain": {},
    "harness": {"temperature": 0.0, "use_cache": True},
    "sampling flags unused": {"temperature": 0.3, "top_k": 3, "top_p": 0.5},
    "one token": {"max_new_tokens": 1},
    "max_length": {"max_new_tokens": None, "max_length": 90},
    "list of ends": {"eos_token_id": [258, 65, 66]},
    "no end": {"eos_token_id": None},
    "neutral penalty": {"repetition_penalty": 1.0, "num_beams": 1},
    "penalty": {"repetition_penalty": 1.3},
    "no repeated pairs": {"no_repeat_ngram_size": 2, "max_new_tokens": 20},
    "suppressed": {"suppress_tokens": [0, 32, 101]},
    "sampling": {"do_sample": True},
    "sampling from one": {"do_sample": True, "top_k": 1},
    "sampling as the 2B model's own defaults do": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "sampling hot": {"do_sample": True, "temperature": 2.5, "top_k": 0, "eos_token_id": None, "max_new_tokens": 24},
    "sampling with a penalty": {"do_sample": True, "temperature": 3.0, "repetition_penalty": 1.2, "min_p": 0.01},
    "sampling by other cuts": {"do_sample": True, "typical_p": 0.9, "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4},
    "renormalised": {"do_sample": True, "renormalize_logits": True, "remove_invalid_values": True},
}
STOCK = {
    "zero temperature sampling": {"do_sample": True, "temperature": 0.0},
    "negative penalty": {"repetition_penalty": -1.0},
    "no room": {"max_new_tokens": 0},
    "short max_length": {"max_new_tokens": None, "max_length": 3},
    "no length": {"max_new_tokens": None},
    "unknown keyword": {"max_new_token": 3},
    "beams": {"num_beams": 2},
    "several returns": {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
    "bad words": {"bad_words_ids": [[65], [256]]},
    "minimum": {"min_new_tokens": 4},
    "dict output": {"return_dict_in_generate": True, "output_scores": True},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "prefix function": {"prefix_allowed_tokens_fn": lambda batch, ids: [70, 71]},
    "processor": {"logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(120, 258)])},
    "criterion": {"stopping_criteria": StoppingCriteriaList([lambda ids, scores: torch.tensor([ids.shape[1] > 82])])},
    "time": {"max_time": 60.0},
    "forced end": {"forced_eos_token_id": 258},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("case", SERVED)
def test_served_by_the_stages_with_stocks_ids(ours, reference, prompt, case):
    inputs, options = prompt((64, 96), "what is it?"), {**BASE, **SERVED[case]}
    mine, theirs = (
        seeded(lambda model=model: model.generate(**inputs, **options)) for model in (ours, reference.model)
    )
    assert same(mine, theirs) and torch.is_tensor(mine)
    assert vlmopt.status(ours).calls == {"stages": 1, "kernels": 0, "stock": 0}


@pytest.mark.parametrize("case", STOCK)
def test_handed_to_stock_with_stocks_result_or_exception(ours, reference, prompt, case):
    inputs, options = prompt((64, 96), "what is it?"), {**BASE, **STOCK[case]}
    mine = seeded(lambda: ours.generate(**inputs, **options))
    assert same(mine, seeded(lambda: reference.model.generate(**inputs, **options)))
    report = vlmopt.status(ours)
    assert report.calls == {"stages": 0, "kernels": 0, "stock": 1} and len(report.stock_reasons) == 1


def cut(inputs):
    return {**inputs, **{name: inputs[name][:, :-30] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}}


ODD_INPUTS = {
    "types dropped": lambda x: {k: v for k, v in x.items() if k != "mm_token_type_ids"},
    "pixels dropped": lambda x: {k: v for k, v in x.items() if k != "pixel_values"},
    "image dropped": lambda x: {k: v for k, v in x.items() if k not in ("pixel_values", "image_grid_thw")},
    "truncated": cut,
    "no mask": lambda x: {k: v for k, v in x.items() if k != "attention_mask"},
    "padded": lambda x: {**x, "attention_mask": x["attention_mask"].clone().index_fill_(1, torch.tensor([0]), 0)},
    "batch": lambda x: {**x, **{k: v.repeat(2, 1) for k, v in x.items()}},
    "pixels None": lambda x: {**x, "pixel_values": None},
    "no rows": lambda x: {**x, "pixel_values": x["pixel_values"][:0], "image_grid_thw": x["image_grid_thw"][:0]},
    "grid of another image": lambda x: {**x, "image_grid_thw": x["image_grid_thw"] * 2},
    "empty prompt": lambda x: {"input_ids": x["input_ids"][:, :0]},
    "bool mask": lambda x: {**x, "attention_mask": x["attention_mask"].bool()},
    "float pixels in half": lambda x: {**x, "pixel_values": x["pixel_values"].half()},
    "types that disagree": lambda x: {**x, "mm_token_type_ids": x["mm_token_type_ids"] * 0},
    "tokens without their image": lambda x: {"input_ids": x["input_ids"], "attention_mask": x["attention_mask"]},
    "ids twice": lambda x: {**x, "inputs": x["input_ids"]},
}


@pytest.mark.parametrize("case", ODD_INPUTS)
def test_odd_inputs_give_stocks_result_or_exception(ours, reference, prompt, case):
    inputs = ODD_INPUTS[case](prompt((64, 96), "what is it?"))
    mine = outcome(lambda: ours.generate(**inputs, **BASE))
    assert same(mine, outcome(lambda: reference.model.generate(**inputs, **BASE)))
    assert sum(vlmopt.status(ours).calls[name] for name in ("stages", "stock")) == 1


def test_inputs_embeds_and_a_given_cache_go_to_stock(ours, reference, prompt):
    text = prompt("hello there")
    for make in (
        lambda model: {"inputs_embeds": model.get_input_embeddings()(text["input_ids"])},
        lambda model: {**text, "cache": DynamicCache(config=model.config.text_config)},
    ):
        expected = outcome(lambda make=make: reference.model.generate(**make(reference.model), **BASE))
        assert same(outcome(lambda make=make: ours.generate(**make(ours), **BASE)), expected)
    assert vlmopt.status(ours).calls["stock"] == 2


def test_positional_arguments_are_served_or_handed_over(ours, reference, prompt):
    ids = prompt("hello")["input_ids"]
    config = GenerationConfig(max_new_tokens=3, pad_token_id=256)
    assert torch.equal(ours.generate(ids, config), reference.model.generate(ids, config))
    assert torch.equal(
        ours.generate(ids, config, LogitsProcessorList()), reference.model.generate(ids, config, LogitsProcessorList())
    )
    assert vlmopt.status(ours).stock_reasons["positional arguments"] == 1


def test_an_option_of_a_later_transformers_is_handed_over_without_a_line_changed_here(prompt):
    weights = SimpleNamespace(tokens=SimpleNamespace(image=268, video=269))
    later = {**NEUTRAL, "from_the_future": 0}
    read({**prompt("hello"), **BASE, "from_the_future": 0}, later, torch.device("cpu"), weights, False)
    with pytest.raises(HandedToStock, match="option from_the_future"):
        read({**prompt("hello"), **BASE, "from_the_future": 1}, later, torch.device("cpu"), weights, False)


def test_a_custom_entry_in_the_models_generation_config_goes_to_stock(ours, prompt):
    ours.generation_config.update(**{"brand_new_option": 3}, allow_custom_entries=True)
    ours.generation_config.brand_new_option = 3
    ours.generate(**prompt("hello"), **BASE)
    assert vlmopt.status(ours).stock_reasons == {"option brand_new_option": 1}
