"""Several prompts in one call: stock's ids for every row, each ending by itself, served by the stages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vlmopt
from vlmopt import OptimizeConfig
from vlmopt.runtime.generate import ENGINES
from vlmopt.tests.contract.compare import both, same, served
from vlmopt.tests.contract.test_ends import Recorder
from vlmopt.workbook.conversations import padded

PAD = 256
GREEDY = {"do_sample": False, "max_new_tokens": 12}
PROMPTS = [
    ("short",),
    ((64, 96), "what is it?"),
    ("a text of some length, so that others are padded",),
    ((32, 64), "x", (96, 32), "y", (64, 64), "z"),
    ("before", (40, 40)),
    ((1, 1),),
    ("ü" * 20, (100, 30), "after"),
    ("",),
]
SERVING = {
    "separate": OptimizeConfig.preset("exact", batches=True),
    "packed": OptimizeConfig.preset("exact", batches=True, packed=True),
    "stock's connector": OptimizeConfig.preset("exact", batches=True, connector=False),
}


@pytest.fixture
def serving(ours):
    vlmopt.optimize(ours, SERVING["separate"])
    return ours


@pytest.fixture
def rows(prompt):
    return lambda *chosen: padded([prompt(*PROMPTS[i], seed=i) for i in chosen], PAD)


@pytest.mark.parametrize("name", SERVING)
@pytest.mark.parametrize("chosen", [(0, 1), (2, 0, 3), (1, 1), (0, 2), tuple(range(8))], ids=str)
def test_rows_of_every_sort_are_stocks(ours, stock, rows, name, chosen):
    vlmopt.optimize(ours, SERVING[name])
    mine, theirs = both(ours, stock, rows(*chosen), **GREEDY)
    assert same(mine, theirs), (mine, theirs)
    assert served(ours) == {"stages": 1}


@settings(max_examples=15)
@given(
    chosen=st.lists(st.integers(0, 7), min_size=2, max_size=5),
    options=st.fixed_dictionaries(
        {"do_sample": st.booleans(), "max_new_tokens": st.integers(1, 9)},
        optional={
            "temperature": st.floats(0.5, 5.0),
            "top_k": st.integers(0, 60),
            "repetition_penalty": st.floats(0.7, 1.6),
            "no_repeat_ngram_size": st.integers(0, 3),
            "eos_token_id": st.lists(st.integers(60, 125), min_size=1, max_size=9),
            "pad_token_id": st.integers(0, 256),
        },
    ),
)
def test_options_do_to_every_row_what_stock_does(ours_for_all, stock, prompt, chosen, options):
    vlmopt.optimize(ours_for_all, SERVING["separate"])
    inputs = padded([prompt(*PROMPTS[i], seed=i) for i in chosen], PAD)
    assert same(*both(ours_for_all, stock, inputs, **options))
    assert served(ours_for_all) == {"stages": 1}


def test_a_row_says_what_its_prompt_says_alone(serving, rows, prompt):
    together = serving.generate(**rows(1, 2, 3), **GREEDY, eos_token_id=None)
    for row, i in zip(together, (1, 2, 3), strict=True):
        alone = serving.generate(**prompt(*PROMPTS[i], seed=i), **GREEDY, eos_token_id=None)
        assert row[-12:].tolist() == alone[0, -12:].tolist()


def test_each_row_ends_by_itself_and_the_call_with_the_last(serving, stock, rows):
    inputs = rows(1, 2, 3)
    length = inputs["input_ids"].shape[1]
    free = stock.generate(**inputs, **GREEDY, eos_token_id=None)[:, length:]
    for end in {int(row[k]) for row in free for k in (0, 2, 5)}:
        mine, theirs = both(serving, stock, inputs, **GREEDY, eos_token_id=end, pad_token_id=7)
        assert same(mine, theirs), end
        for row in mine[:, length:].tolist():
            assert end not in row or set(row[row.index(end) + 1 :]) <= {7}


def test_a_batch_after_single_prompts_and_before_them(serving, stock, rows, prompt):
    """They share the cache: neither may read what the other left there."""
    calls = [prompt((64, 64), "x"), rows(1, 0, 3), prompt("y" * 400), rows(*range(8)), prompt((64, 64), "x")]
    for inputs in calls:
        ENGINES[serving].cache.buffer.fill_(float("nan"))
        assert same(*both(serving, stock, inputs, **GREEDY))
    assert served(serving) == {"stages": len(calls)}


def drop(inputs, *names):
    return {name: value for name, value in inputs.items() if name not in names}


TO_STOCK = {
    "nine prompts": lambda x: {name: value.repeat(5, 1)[:9] for name, value in x.items()},
    "padding on the right": lambda x: {**x, "attention_mask": x["attention_mask"].flip(1)},
    "a row of padding alone": lambda x: {**x, "attention_mask": x["attention_mask"] * torch.tensor([[0], [1]])},
    "no mask": lambda x: drop(x, "attention_mask"),
    "images of one row alone": lambda x: {**x, "image_grid_thw": x["image_grid_thw"][:1]},
    "images in the other order": lambda x: {
        **x,
        "image_grid_thw": x["image_grid_thw"].flip(0),
    },
    "no token types": lambda x: drop(x, "mm_token_type_ids"),
    "no images": lambda x: drop(x, "pixel_values", "image_grid_thw"),
}


@pytest.mark.parametrize("case", TO_STOCK)
def test_batches_that_do_not_fit_give_stocks_result_or_exception(serving, stock, rows, case):
    mine, theirs = both(serving, stock, TO_STOCK[case](rows(1, 6)), **GREEDY)
    assert same(mine, theirs), (mine, theirs)
    assert served(serving) == {"stock": 1}


@pytest.mark.parametrize(
    "options",
    [{"streamer": Recorder()}, {"pad_token_id": None}, {"num_beams": 2}],
    ids=["streamer", "no padding", "beams"],
)
def test_what_is_asked_of_a_batch_may_be_stocks(serving, stock, rows, options):
    assert same(*both(serving, stock, rows(0, 1), **GREEDY, **options))
    assert served(serving) == {"stock": 1}


def test_exact_hands_batches_over_since_stock_rounds_padded_rows_otherwise(ours, stock, rows):
    assert same(*both(ours, stock, rows(0, 1), **GREEDY))
    assert vlmopt.status(ours).stock_reasons == {"several prompts": 1}
    assert vlmopt.plan(ours, OptimizeConfig.preset("exact", batches=True)).cls == "near"
