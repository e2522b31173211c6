"""Options in company, and arguments in other forms; each parameter and input by itself is tests/contract's."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

import vlmopt
from vlmopt.runtime.request import HandedToStock, read
from vlmopt.runtime.stock import NEUTRAL
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
