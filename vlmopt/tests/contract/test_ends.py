"""How a call ends, and who is told on the way: limits, minima, criteria, streamers."""

from functools import partial

import pytest
import torch
from transformers import StoppingCriteriaList

import vlmopt
from vlmopt.tests.contract.compare import both, outcome, same, served

GREEDY = {"do_sample": False}


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append(value.tolist())

    def end(self):
        self.heard.append("end")


@pytest.fixture
def inputs(prompt):
    return prompt((64, 96), "what is it?")


@pytest.mark.parametrize("new", [1, 2, 9])
def test_so_many_tokens_and_no_more(ours, stock, inputs, new):
    length = inputs["input_ids"].shape[1]
    for options in ({"max_new_tokens": new}, {"max_length": length + new}):
        mine, theirs = both(ours, stock, inputs, **GREEDY, **options, eos_token_id=None)
        assert same(mine, theirs) and mine.shape[1] == length + new
    assert served(ours) == {"stages": 2}


@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"max_length": 5}, {"max_length": 69}, {"max_length": 70}])
def test_no_room_for_a_token(ours, stock, inputs, options):
    assert same(*both(ours, stock, inputs, **GREEDY, **options))


@pytest.mark.parametrize("new", [262_144, 10**9])
def test_a_limit_beyond_the_models_positions_reserves_nothing(ours, stock, inputs, new):
    assert same(*both(ours, stock, inputs, **GREEDY, max_new_tokens=new))
    assert vlmopt.status(ours).stock_reasons == {"more positions than the model was made for": 1}


@pytest.mark.parametrize("minimum", [{"min_new_tokens": 7}, {"min_length": 80}])
def test_a_minimum_outlasts_an_early_end(ours, stock, inputs, minimum):
    first = stock.generate(**inputs, **GREEDY, max_new_tokens=1)[0, -1].item()
    mine, theirs = both(ours, stock, inputs, **GREEDY, **minimum, max_new_tokens=12, eos_token_id=first)
    assert same(mine, theirs) and mine.shape[1] > inputs["input_ids"].shape[1] + 1


def test_a_criterion_is_asked_after_each_token_with_no_scores(ours, stock, inputs):
    def ask(model):
        asked = []

        def stop(ids, scores):
            asked.append((ids.shape[1], scores))
            return torch.tensor([len(asked) == 3])

        ids = model.generate(**inputs, **GREEDY, max_new_tokens=9, stopping_criteria=StoppingCriteriaList([stop]))
        return ids, asked

    (mine, asked), (theirs, asked_by_stock) = ask(ours), ask(stock)
    length = inputs["input_ids"].shape[1]
    assert same(mine, theirs) and asked == asked_by_stock == [(length + n, None) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"eos_token_id": [258, 101]}, {"max_new_tokens": 1}, {"repetition_penalty": 1.4}],
    ids=str,
)
def test_a_streamer_hears_what_stocks_would(ours, stock, inputs, options):
    heard = []
    for model in (ours, stock):
        recorder = Recorder()
        call = {**GREEDY, "max_new_tokens": 6, **options, "streamer": recorder}
        heard.append((outcome(partial(model.generate, **inputs, **call)), recorder.heard))
    assert same(*heard)
    assert heard[0][1] == [] or heard[0][1][-1] == "end"
