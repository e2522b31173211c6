"""Arrivals have the rates they promise, and a trace is the same whatever is done with it."""

import json
import random
import statistics
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path

import pytest

from vlmopt.errors import VlmoptError
from vlmopt.serving.prompts import Prompt, embedded_prompts
from vlmopt.serving.workload import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Arrival,
    LogNormal,
    Request,
    Trace,
    absolute_slo,
    bursts,
    closed_loop,
    poisson,
    relative_slo,
    trace_of_lengths,
    trace_of_prompts,
)

ROOT = Path(__file__).parents[3]
MIX = {"question": 2, "explain": 1, "summary": 1}


def seconds(arrivals, count: int) -> list[float]:
    return [arrival.seconds for arrival in islice(arrivals, count)]


def lengths_trace(count: int = 200, rate: float = 5.0, seed: int = 3, **options) -> Trace:
    return trace_of_lengths(MIX, poisson(rate, seed), count, seed=seed, **options)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_independent_ones():
    gaps = [later - earlier for earlier, later in pairwise([0.0, *seconds(poisson(4.0, 1), 20_000)])]
    assert statistics.mean(gaps) == pytest.approx(1 / 4, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 4, rel=0.03)  # an exponential's equals its mean
    assert min(gaps) > 0


def test_bursts_come_together_at_the_same_mean_rate():
    times = seconds(bursts(4.0, 8, 1), 40_000)
    groups = [times[first : first + 8] for first in range(0, len(times), 8)]
    assert all(len(set(group)) == 1 for group in groups)
    assert len({group[0] for group in groups}) == len(groups)
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.05)


def test_a_closed_loop_lets_each_user_wait_for_its_own_answer():
    arrivals = list(islice(closed_loop(3, 2.0, 1), 20_000))
    assert [arrival.after for arrival in arrivals[:7]] == [None, None, None, 0, 1, 2, 3]
    assert statistics.mean(arrival.seconds for arrival in arrivals) == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize(
    "make", [lambda seed: poisson(2.0, seed), lambda seed: bursts(2.0, 4, seed), lambda seed: closed_loop(2, 1.0, seed)]
)
def test_arrivals_come_from_the_seed_alone(make):
    assert list(islice(make(1), 50)) == list(islice(make(1), 50))
    assert list(islice(make(1), 50)) != list(islice(make(2), 50))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: poisson(0, 1), "rate must be above 0"),
        (lambda: poisson(float("inf"), 1), "rate must be above 0"),
        (lambda: bursts(1.0, 0, 1), "size must be above 0"),
        (lambda: closed_loop(0, 1.0, 1), "users must be above 0"),
        (lambda: closed_loop(1, float("nan"), 1), "think must be above 0"),
        (lambda: lengths_trace(count=0), "count must be above 0"),
        (lambda: trace_of_prompts([], poisson(1.0, 1), 5, seed=1), "prompts must be above 0"),
        (lambda: trace_of_lengths({"chat": 0}, poisson(1.0, 1), 5, seed=1), "shares must be above 0"),
        (lambda: trace_of_lengths({"chat": 2, "summary": -1}, poisson(1.0, 1), 5, seed=1), "not be below 0"),
        (lambda: trace_of_lengths({"poem": 1}, poisson(1.0, 1), 5, seed=1), "no length .* of the kind poem"),
        (lambda: trace_of_lengths(MIX, iter([Arrival(1.0)]), 5, seed=1), "end after 1 of 5 requests"),
        (lambda: relative_slo({"chat": 0.0}), "chat must be above 0"),
        (lambda: relative_slo({"chat": 1.0}, factor=-1), "factor must be above 0"),
        (lambda: absolute_slo(["chat"], 0), "seconds must be above 0"),
        (lambda: lengths_trace().with_slo({"question": 1.0}), "of the kind explain and summary"),
    ],
)
def test_a_load_that_means_nothing_is_refused_at_once(make, says):
    with pytest.raises(VlmoptError, match=says):
        make()


def test_log_normal_lengths_have_their_median_and_stay_in_range():
    generator = random.Random(1)
    lengths = [LogNormal(100, 0.5, 20, 400).draw(generator) for _ in range(20_000)]
    assert statistics.median(lengths) == pytest.approx(100, rel=0.03)
    assert (min(lengths), max(lengths)) == (20, 400)
    assert statistics.quantiles(lengths, n=100)[83] == pytest.approx(100 * 2.718281828**0.5, rel=0.05)  # one sigma up
    assert all(isinstance(length, int) for length in lengths)


def test_a_trace_of_lengths_mixes_kinds_and_lengths_as_asked():
    trace = lengths_trace(count=8000)
    of = {kind: [request for request in trace.requests if request.kind == kind] for kind in MIX}
    assert len(of["question"]) / len(trace.requests) == pytest.approx(0.5, abs=0.03)
    for kind, requests in of.items():
        assert statistics.median(r.output_tokens for r in requests) == pytest.approx(
            OUTPUT_TOKENS[kind].median, rel=0.1
        )
        assert statistics.median(r.prompt_tokens for r in requests) == pytest.approx(
            PROMPT_TOKENS[kind].median, rel=0.1
        )
        sizes = [(r.prompt_tokens, r.output_tokens) for r in requests]
        assert statistics.correlation(*zip(*sizes, strict=True)) == pytest.approx(0, abs=0.08)
    assert [r.arrival for r in trace.requests] == seconds(poisson(5.0, 3), 8000)
    assert len({r.id for r in trace.requests}) == 8000


def test_another_rate_changes_the_arrivals_and_nothing_else():
    slow, fast = lengths_trace(rate=1.0), lengths_trace(rate=10.0)
    for one, other in zip(slow.requests, fast.requests, strict=True):
        assert one.arrival == pytest.approx(other.arrival * 10)
        assert (one.kind, one.prompt_tokens, one.output_tokens) == (
            other.kind,
            other.prompt_tokens,
            other.output_tokens,
        )
    assert lengths_trace(seed=4).requests != lengths_trace(seed=3).requests


def test_every_prompt_is_sent_once_before_any_comes_again():
    prompts = embedded_prompts()
    trace = trace_of_prompts(prompts, poisson(5.0, 1), 2 * len(prompts), seed=1)
    rounds = [[r.prompt for r in part] for part in (trace.requests[: len(prompts)], trace.requests[len(prompts) :])]
    assert sorted(rounds[0]) == sorted(rounds[1]) == sorted(prompt.text for prompt in prompts)
    assert rounds[0] != rounds[1]
    by_text = {prompt.text: prompt for prompt in prompts}
    assert all(r.kind == by_text[r.prompt].kind and r.reference == by_text[r.prompt].reference for r in trace.requests)


def test_a_trace_is_the_same_in_a_process_that_lacks_the_optional_packages():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['datasets', 'rouge_score', 'bert_score']));"
        "import vlmopt.serving.metrics; from vlmopt.serving.workload import *;"
        "print(repr(trace_of_lengths({'chat': 1}, bursts(2.0, 3, 7), 50, seed=7).requests))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert out.strip() == repr(trace_of_lengths({"chat": 1}, bursts(2.0, 3, 7), 50, seed=7).requests)


def test_objectives_are_set_per_kind_and_leave_the_trace_alone():
    trace = lengths_trace(count=50)
    slo = relative_slo({"question": 1.0, "explain": 4.0, "summary": 2.0}, 3.0)
    assert slo == {"question": 3.0, "explain": 12.0, "summary": 6.0}
    tight = trace.with_slo(slo)
    for before, after in zip(trace.requests, tight.requests, strict=True):
        assert (before.slo, before.deadline()) == (None, None)
        assert after.deadline() == pytest.approx(before.arrival + slo[before.kind])
        assert (after.id, after.arrival, after.output_tokens) == (before.id, before.arrival, before.output_tokens)
    assert tight.made["slo"] == slo
    assert {r.slo for r in trace.with_slo(absolute_slo(list(MIX))).requests} == {30.0}


def test_in_a_closed_loop_times_count_from_the_end_of_the_request_before():
    trace = trace_of_lengths({"chat": 1}, closed_loop(2, 1.0, 1), 4, seed=1).with_slo({"chat": 5.0})
    assert [r.after for r in trace.requests] == [None, None, trace.requests[0].id, trace.requests[1].id]
    last = trace.requests[3]
    assert last.arrives(10.0) == pytest.approx(10.0 + last.arrival)
    assert last.deadline(10.0) == pytest.approx(15.0 + last.arrival)


def traces() -> list[Trace]:
    prompts = [Prompt("a", "summary", "zh", "概括\n\n“文章”", "要点"), Prompt("b", "question", "en", "Why?", "So.")]
    return [
        lengths_trace(count=20, made={"process": "poisson", "rate": 5.0}).with_slo(absolute_slo(list(MIX))),
        trace_of_prompts(prompts, closed_loop(2, 1.0, 1), 7, seed=1),
    ]


@pytest.mark.parametrize("trace", traces(), ids=["lengths", "prompts"])
def test_a_trace_survives_its_file_bit_for_bit(tmp_path, trace):
    path = trace.save(tmp_path / "t.json")
    assert Trace.load(path) == trace
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_a_trace_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = lengths_trace(count=5).save(tmp_path / "t.json")
    before = path.read_bytes()
    with pytest.raises(TypeError):
        Trace(lengths_trace(count=5).requests, {"rate": object()}).save(path)
    assert path.read_bytes() == before


GOOD = {"id": "a", "arrival": 0.5, "kind": "chat", "output_tokens": 3, "prompt_tokens": 4}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{**GOOD, "arrival": -1.0}], "request a arrives at -1.0"),
        ([{**GOOD, "arrival": float("nan")}], "request a arrives at nan"),
        ([{**GOOD, "arrival": "soon"}], "arrival of request a is 'soon'"),
        ([{**GOOD, "output_tokens": 0}], "length or objective of request a is not above 0"),
        ([{**GOOD, "output_tokens": 2.5}], "output_tokens of request a is 2.5"),
        ([{**GOOD, "output_tokens": True}], "output_tokens of request a is True"),
        ([{**GOOD, "slo": 0.0}], "length or objective of request a"),
        ([{**GOOD, "prompt_tokens": None}], "neither a prompt nor its length"),
        ([GOOD, GOOD], "the id a stands twice"),
        ([{**GOOD, "after": "z"}], "request a follows z, which does not stand before it"),
        ([{**GOOD, "colour": 1}], "not a trace of requests"),
        ([{"id": "a"}], "not a trace of requests"),
        ([5], "not a trace of requests"),
    ],
)
def test_a_damaged_trace_is_refused(tmp_path, rows, says):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"schema": 1, "made": {}, "requests": [GOOD | {"id": "first"}]}))
    assert Trace.load(path).requests == (Request(**{**GOOD, "id": "first"}),)
    path.write_text(json.dumps({"schema": 1, "made": {}, "requests": rows}))
    with pytest.raises(VlmoptError, match=says):
        Trace.load(path)


@pytest.mark.parametrize(
    ("content", "says"), [("{", "not a trace"), ("[]", "not a trace"), ('{"schema": 2}', "has schema 2, not 1")]
)
def test_another_file_is_no_trace(tmp_path, content, says):
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(VlmoptError, match=says):
        Trace.load(path)
    with pytest.raises(VlmoptError, match="cannot read the trace"):
        Trace.load(tmp_path / "missing.json")
