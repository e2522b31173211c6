"""What one call leaves behind for the next: mRoPE deltas, caches, and calls that keep none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import GenerateDecoderOnlyOutput

from vlmopt.runtime import stock as stock_side
from vlmopt.tests.contract.compare import both, same, served

GREEDY = {"do_sample": False, "max_new_tokens": 5}
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
"""What this transformers calls the cache that an output holds and that the next call takes."""
PROMPTS = {
    "wide": ((64, 96), "A"),
    "tall": ((96, 32), "B"),
    "text": ("only text",),
    "two": ((32, 64), "one", (64, 64), "other"),
}


@pytest.fixture
def prompts(prompt):
    return {name: prompt(*parts) for name, parts in PROMPTS.items()}


@settings(max_examples=12)
@given(order=st.lists(st.sampled_from(sorted(PROMPTS)), min_size=2, max_size=6))
def test_no_call_changes_what_a_later_one_says(ours_for_all, stock, prompt, order):
    for name in order:
        mine, theirs = both(ours_for_all, stock, prompt(*PROMPTS[name]), **GREEDY)
        assert same(mine, theirs), order


def begin(model, inputs):
    return model.generate(**inputs, **GREEDY, return_dict_in_generate=True, eos_token_id=None)


def carry_on(model, said, inputs):
    """Three more tokens of the user's, then the model goes on; the cache lacks the last token that was said."""
    ids = torch.cat([said.sequences, torch.tensor([[104, 105, 33]])], dim=1)
    more = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    more["mm_token_type_ids"] = torch.nn.functional.pad(
        inputs["mm_token_type_ids"], (0, ids.shape[1] - inputs["input_ids"].shape[1])
    )
    again = model.generate(**more, **GREEDY, eos_token_id=None)
    more = {name: more[name] for name in ("input_ids", "attention_mask")}
    return again, model.generate(**more, **{CACHE: said[CACHE]}, **GREEDY, eos_token_id=None)


@pytest.mark.parametrize("between", [name for name in PROMPTS if name != "wide"])
@pytest.mark.parametrize("by_stock", [False, True], ids=["stages between", "stock between"])
def test_a_saved_conversation_goes_on_as_if_recomputed(ours, prompts, between, by_stock):
    """Stock itself goes on with the delta of whichever call was last; here the right answer is the recomputation."""
    said = begin(ours, prompts["wide"])
    ours.generate(**prompts[between], **GREEDY, return_dict_in_generate=by_stock)
    recomputed, continued = carry_on(ours, said, prompts["wide"])
    assert torch.equal(continued, recomputed)


def test_stock_alone_is_wrong_there(tiny, prompts):
    """If this fails, stock has been mended, and `call_stock` need not keep deltas any longer."""
    said = begin(tiny.model, prompts["wide"])
    delta = tiny.model.model.rope_deltas
    tiny.model.generate(**prompts["text"], **GREEDY)
    assert not torch.equal(tiny.model.model.rope_deltas, delta) and said[CACHE] is not None


def test_deltas_go_with_their_caches(ours, prompts):
    stock_side.DELTAS.clear()
    said = begin(ours, prompts["wide"])
    assert len(stock_side.DELTAS) == 1
    del said
    assert len(stock_side.DELTAS) == 0


@pytest.mark.parametrize("name", PROMPTS)
def test_without_a_cache_the_ids_are_the_same(ours, stock, prompts, name):
    cached, without = (both(ours, stock, prompts[name], **GREEDY, use_cache=use) for use in (True, False))
    assert same(cached[0], without[0]) and same(*cached) and same(*without)
    assert served(ours) == {"stages": 1, "stock": 1}


@torch.no_grad()
@pytest.mark.parametrize("name", PROMPTS)
def test_forward_is_stocks_with_and_without_a_cache(ours, stock, prompts, name):
    for use in (True, False):
        mine, theirs = (model(**prompts[name], use_cache=use).logits for model in (ours, stock))
        assert torch.equal(mine, theirs)
