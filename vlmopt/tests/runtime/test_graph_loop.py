"""The loop over graphs without a GPU: stock's tokens and draws up to any limit, never more than a batch ahead."""

from types import SimpleNamespace

import pytest
import torch

import vlmopt
from vlmopt.runtime import generate as runtime
from vlmopt.runtime import graphs
from vlmopt.runtime.generate import ENGINES
from vlmopt.runtime.graphs import DecodeGraphs
from vlmopt.tests.runtime.test_generate import GREEDY, Recorder, served


class Replays(DecodeGraphs):
    """Graphs without a GPU: a replay runs the captured steps at once."""

    def _capture(self, step, capacity, steps):
        return SimpleNamespace(replay=lambda: [step() for _ in range(steps)])


@pytest.fixture
def replaying(tiny, monkeypatch):
    """The loop over graphs on a CPU, whose host has a token as soon as it asks; `batches` notes how many at a time."""
    vlmopt.optimize(tiny.model, "exact")
    engine = ENGINES[tiny.model]
    engine.graphs = Replays(engine.weights.text, engine.ops, engine.cache)
    engine.graphs.batches = []

    def to_host(tokens):
        engine.graphs.batches.append(len(tokens))
        return tokens.clone(), SimpleNamespace(synchronize=list)

    monkeypatch.setattr(runtime, "to_host", to_host)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state))
    monkeypatch.setattr(engine, "_decode_eager", None)
    return tiny.model


@pytest.mark.parametrize("limit", [1, 2, 8, 9, 17, 30])
def test_the_loop_over_graphs_gives_and_streams_stocks_tokens_up_to_any_limit(replaying, reference, prompt, limit):
    inputs, mine, theirs = prompt((64, 96), "read", (96, 64), "all"), Recorder(), Recorder()
    options = {**GREEDY, "max_new_tokens": limit, "eos_token_id": None}
    ids = replaying.generate(**inputs, **options, streamer=mine)
    assert torch.equal(ids, reference.model.generate(**inputs, **options, streamer=theirs))
    assert mine.values == theirs.values
    steps = ({8} if limit > 8 else set()) | ({1} if (limit - 1) % 8 else set())
    assert set(ENGINES[replaying].graphs._graphs) == {(512, False, count) for count in steps}


def test_the_loop_over_graphs_ends_where_stock_does(replaying, reference, prompt):
    inputs = prompt((64, 64), "x")
    length = inputs["input_ids"].shape[1]
    free = reference.model.generate(**inputs, **GREEDY, max_new_tokens=30, eos_token_id=None)[0, length:].tolist()
    for end in {free[k] for k in (0, 1, 8, 9, 20, 29)}:
        ids = replaying.generate(**inputs, **GREEDY, max_new_tokens=30, eos_token_id=end)[0, length:].tolist()
        assert ids == free[: free.index(end) + 1]
    assert torch.equal(
        replaying.generate(**prompt("text"), **GREEDY, max_new_tokens=6),
        reference.model.generate(**prompt("text"), **GREEDY, max_new_tokens=6),
    )


def test_the_loop_over_graphs_is_one_batch_ahead_of_the_host_and_no_more(replaying, prompt):
    inputs, found = prompt("x" * 480), ENGINES[replaying].graphs
    length = inputs["input_ids"].shape[1]
    assert 482 < length < 512
    free = replaying.generate(**inputs, **GREEDY, max_new_tokens=30, eos_token_id=None)[0, length:].tolist()
    assert found.batches == [1, 8, 8, 8, 5] and {key[0] for key in found._graphs} == {1024}
    found.batches.clear()
    replaying.generate(**inputs, **GREEDY, max_new_tokens=30, eos_token_id=free[0])
    assert found.batches == [1, 8]


def test_steps_attend_to_a_short_cache_as_long_as_that_is_enough(replaying, reference, prompt, monkeypatch):
    monkeypatch.setattr(graphs, "SHORT", 512)
    inputs = prompt("x" * 460)
    length = inputs["input_ids"].shape[1]
    options = {**GREEDY, "max_new_tokens": 600, "eos_token_id": None}
    found, used = ENGINES[replaying].graphs, []
    get = found.get
    monkeypatch.setattr(found, "get", lambda *args, **steps: (used.append((args[0], steps)), get(*args, **steps))[1])
    assert torch.equal(replaying.generate(**inputs, **options), reference.model.generate(**inputs, **options))
    assert graphs.capacities(length, length + 600) == [512, 1024, 2048]
    captured, replayed = used[:6], [capacity for capacity, _ in used[6:]]
    assert [capacity for capacity, _ in captured] == [512, 512, 1024, 1024, 2048, 2048]
    # the batch that begins at row `length + 8 i` reaches row `length + 8 i + 9`
    reached = [length + 8 * i + 9 for i in range(74)]
    assert replayed[:74] == [512 if rows <= 512 else 1024 if rows <= 1024 else 2048 for rows in reached]


@pytest.mark.parametrize(
    ("length", "end", "found"),
    [
        (5, 512, [512]),
        (5, 513, [1024]),
        (800, 8192, [8192]),
        (800, 8193, [8192, 16384]),
        (9000, 40000, [16384, 32768, 65536]),
    ],
)
def test_the_capacities_of_a_call(length, end, found):
    assert graphs.capacities(length, end) == found


@pytest.mark.parametrize("seed", range(3))
def test_draws_between_replays_are_stocks_and_leave_the_generator_where_stock_does(replaying, reference, prompt, seed):
    inputs = prompt((64, 96), "read")
    options = {"do_sample": True, "temperature": 4.0, "top_k": 40, "repetition_penalty": 1.3, "max_new_tokens": 21}
    drawn = []
    for model in (replaying, reference.model):
        torch.manual_seed(seed)
        drawn.append((model.generate(**inputs, **options), torch.rand(1)))
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
    assert served(replaying) == 1 and set(ENGINES[replaying].graphs._graphs) == {(512, True, 1)}
