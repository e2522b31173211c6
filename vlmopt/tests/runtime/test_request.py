"""Options in company, and arguments in other forms; each parameter and input by itself is tests/contract's."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

import vlmopt
from vlmopt.runtime.generate import ENGINES
from vlmopt.runtime.request import HandedToStock, read
from vlmopt.runtime.stock import NEUTRAL, _has_generation_options
from vlmopt.tests.contract.compare import both, same, served

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
    request = ENGINES[ours]._admit(ours, arguments)
    assert request.grids == ((1, 8, 10), (1, 10, 8)) and waits == ["cpu"]


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
