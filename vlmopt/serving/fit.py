"""The step time of a measured engine, from the request times of its runs, and how well a simulated run agrees.

No step is timed. From its first token to its last, a request of n tokens takes n - 1 steps; who else ran meanwhile, how
much they held, and which prompts were computed follows from the times of the others. So every request gives an equation
for the four coefficients of `StepTime`, and another up to its first token where it did not have to queue. A preempted
request waits between two of its tokens, so runs with preemptions are refused.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from vlmopt.errors import VlmoptError
from vlmopt.serving.replica import Request, StepTime

WITHIN = 0.15  # of the measured mean latency: closer than this a simulated run counts as agreeing


class Answer(NamedTuple):
    """A request that ended: seconds of its arrival, first and last token, tokens of its prompt and of its answer."""

    arrival: float
    first: float
    end: float
    prompt: int
    output: int


class Work(NamedTuple):
    """Sums over some steps: prompt tokens, running requests and tokens held, and the seconds that all of it took."""

    steps: float
    prefill: float
    running: float
    kv: float
    seconds: float


def answers_of(result: Mapping[str, Any]) -> list[Answer]:
    """The finished requests of an evaluation's result file.

    Raises:
        VlmoptError: the run preempted, or its prompts' lengths were not recorded.
    """
    if result["metrics"]["preemptions"]:
        raise VlmoptError(
            f"the run {result['mode']} preempted {result['metrics']['preemptions']} times; fit from runs without"
        )
    rows = [row for row in result["requests"] if row["outcome"] == "finished"]
    _need_lengths(rows, result)
    names = ("arrival", "first_token", "end", "prompt_tokens", "output_tokens")
    return [Answer(*(row[name] for name in names)) for row in rows]


def requests_of(result: Mapping[str, Any]) -> list[Request]:
    """The requests of a result file as the simulator takes them; those that did not finish are left out.

    Raises:
        VlmoptError: its prompts' lengths were not recorded.
    """
    rows = [row for row in result["requests"] if row["outcome"] == "finished"]
    _need_lengths(rows, result)
    return [
        Request(
            row["arrival"],
            row["prompt_tokens"],
            row["output_tokens"],
            row["kind"],
            row["arrival"] + row["slo"] if "slo" in row else None,
        )
        for row in rows
    ]


def work_of(answers: Sequence[Answer]) -> list[Work]:
    """What the engine did for the answers of one run: between the first and the last token of each that has two, and
    up to the first of each during whose wait no other prompt was waiting (one step, and half of one that already ran).
    """
    arrival, first, end, prompt, output = (np.array(column, float) for column in zip(*answers, strict=True))
    pace = (output - 1) / np.maximum(end - first, 1e-9)  # tokens a second
    found = []
    for i in np.flatnonzero((output > 1) & (end > first)):
        begin, until = np.maximum(first, first[i]), np.minimum(end, end[i])
        beside = np.maximum(until - begin, 0.0)
        held = prompt + 1 + pace * ((begin + until) / 2 - first)
        steps, seconds = output[i] - 1, end[i] - first[i]
        started = (first > first[i]) & (first <= end[i])
        share = steps / seconds
        found.append((steps, prompt[started].sum(), share * beside.sum(), share * (beside * held).sum(), seconds))
    for i in np.flatnonzero(first > arrival):
        if ((arrival < first[i]) & (first > arrival[i])).sum() > 1:
            continue
        runs = (first <= arrival[i]) & (end > first[i])
        steps = 1.5 if runs.any() else 1.0
        held = (prompt + 1 + pace * (first[i] - first))[runs].sum()
        found.append((steps, prompt[i], steps * runs.sum() + 1, steps * held + prompt[i], first[i] - arrival[i]))
    return [Work(*map(float, work)) for work in found]


def fit(works: Sequence[Work]) -> StepTime:
    """The step time with the least squared error over the works; no coefficient is negative.

    A work weighs as the inverse of its steps: the error of n steps' time has n times the variance of one's.

    Raises:
        VlmoptError: fewer than four works, or works that leave a step no time of its own.
    """
    if len(works) < 4:
        raise VlmoptError(
            f"{len(works)} answers do not give the 4 coefficients of a step's time; measure more requests"
        )
    rows = np.array(works, float)
    rows /= np.sqrt(rows[:, :1])
    features, seconds = rows[:, :4], rows[:, 4]
    best, least = None, np.inf
    for kept in (list(chosen) for size in range(1, 5) for chosen in combinations(range(4), size) if 0 in chosen):
        found, *_ = np.linalg.lstsq(features[:, kept], seconds, rcond=None)
        error = float(((features[:, kept] @ found - seconds) ** 2).sum())
        if found.min() >= 0 < found[0] and error < least:
            best, least = dict(zip(kept, map(float, found), strict=True)), error
    if best is None:
        raise VlmoptError("these answers give a step no time of its own; fit from runs at several loads")
    return StepTime(*(best.get(place, 0.0) for place in range(4)))


def mean_error(measured: Sequence[float], simulated: Sequence[float]) -> float:
    """How far the mean of simulated latencies lies from that of measured ones, as a share of the latter.

    Raises:
        VlmoptError: not as many simulated as measured, or none.
    """
    if not measured or len(measured) != len(simulated):
        raise VlmoptError(f"{len(simulated)} simulated latencies do not compare with {len(measured)} measured ones")
    mean = sum(measured) / len(measured)
    return abs(sum(simulated) / len(simulated) - mean) / mean


def _need_lengths(rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> None:
    if not rows or any("prompt_tokens" not in row for row in rows):
        raise VlmoptError(f"the run {result['mode']} has no finished requests with known prompt lengths; take another")
