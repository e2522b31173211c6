"""Experiments on one engine: the same trace for every policy at each load, and a result file for each run.

A file is written when its run starts, every few seconds, and at its end: it always holds what has finished.
"""

import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from vlmopt.errors import VlmoptError
from vlmopt.serving.admission import PLAIN, Settings, parse_policy
from vlmopt.serving.drive import Ask, Fate, drive, fates_of
from vlmopt.serving.models import ModelEntry
from vlmopt.serving.prompts import Prompt, embedded_prompts
from vlmopt.serving.results import Record, finished, quality
from vlmopt.serving.workload import (
    PROMPT_TOKENS,
    Request,
    Trace,
    absolute_slo,
    poisson,
    relative_slo,
    trace_of_lengths,
    trace_of_prompts,
)

SNAPSHOT = 10.0  # seconds between two writings of the file of a running experiment
SAMPLE = 0.5  # seconds between two looks at the engine's load
ALONE = 5  # requests of a kind whose median latency is the unloaded one
ENOUGH = 200  # requests among which every kind has that many
OTHER_SEED = 1000  # added for the trace on which saturation and unloaded latencies are measured


class Engine(Protocol):
    """What an evaluation needs of an engine; `engine.Engine` is vLLM's."""

    ask: Ask

    async def switch(self, **settings: Any) -> dict[str, Any]: ...
    async def memory(self, restart: bool = False) -> dict[str, Any]: ...
    async def environment(self) -> dict[str, Any]: ...
    def load(self) -> dict[str, float]: ...
    def versions(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class Plan:
    """What is run on each model: every policy at every load, `repeats` times with another trace each time.

    Attributes:
        policies: as `admission.parse_policy` reads them.
        loads: multiples of the saturation, which is what plain vLLM finishes in requests per second when all are there;
            one that stands here again is run again, with another trace.
        requests: of a run; several: one for each of `loads`.
        saturation: requests per second, if it is known; None measures it first.
        calibration: of another model's runs, which is taken instead of measuring any; None measures.
        resume: leave out the runs whose files in `output` have finished, and take their calibration.
        prompts: what to send; None sends the embedded prompts, or prompts of a length alone to random weights.
        bert_model: folder of the encoder for BERTScore; None computes none.
        arguments: vLLM's engine arguments, for the record.
    """

    policies: Sequence[str] = ("batch",)
    loads: Sequence[float] = (0.9,)
    requests: int | Sequence[int] = 300
    repeats: int = 1
    seed: int = 42
    saturation: float | None = None
    calibration: dict[str, Any] | None = None
    resume: bool = False
    prompts: Sequence[Prompt] | None = None
    bert_model: Path | None = None
    output: Path = Path("results")
    arguments: dict[str, Any] = field(default_factory=dict)

    def runs(self) -> Iterator[tuple[float, int, int]]:
        """Load, requests and number of the repeat of each trace, in order."""
        counts = repeat(self.requests) if isinstance(self.requests, int) else self.requests
        seen: Counter[float] = Counter()
        for _ in range(self.repeats):
            for load, count in zip(self.loads, counts, strict=False):
                yield load, count, seen[load]
                seen[load] += 1

    def mode(self, policy: str, load: float) -> str:
        """A run's name within its model's, fit for a file's."""
        name = "-".join(policy.replace(":", ",").split(","))
        return f"{name}-load{load:g}{'-spec' if 'speculative_config' in self.arguments else ''}"


async def evaluate(engine: Engine, model: str, entry: ModelEntry, plan: Plan, records: list[Record]) -> None:
    """All runs of `plan` on a started engine; each record joins `records` when its run begins.

    Raises:
        EngineDied: the engine ended; the record of the run in progress says so, later runs have none.
        asyncio.CancelledError: as for any coroutine; the record of the run in progress says `interrupted`.
    """
    with tqdm(unit="request", file=sys.stderr) as bar:
        there = finished(plan.output, model) if plan.resume else []
        calibration = there[0]["calibration"] if there else plan.calibration
        calibration = calibration or await calibrate(engine, entry, plan, bar)
        for load, count, number in plan.runs():
            made = make_trace(entry, plan, load * calibration["saturation"], plan.seed + number, count)
            trace = _with_slo(made, entry, calibration["unloaded"])
            for policy in plan.policies:
                config = {
                    "policy": parse_policy(policy),
                    "load": load,
                    "repeat": number,
                    "trace": dict(trace.made),
                    "engine": plan.arguments,
                }
                if any(result["config"] == config for result in there):
                    continue
                records.append(Record(plan.output, model, plan.mode(policy, load), config, calibration))
                bar.set_description(f"{model} {plan.mode(policy, load)}")
                await _Run(engine, entry, plan, trace, records[-1], bar).go()


async def calibrate(engine: Engine, entry: ModelEntry, plan: Plan, bar: tqdm) -> dict[str, Any]:
    """Requests per second at saturation, and the seconds that a request of each kind takes on the idle engine.

    Both by plain vLLM on another trace than the runs'; the first only where `plan` does not say it. The rate is taken
    between the first and the last tenth of what finishes, where the engine is full.

    Raises:
        VlmoptError: requests fail on an engine that has nothing else to do, or are too few.
    """
    await engine.switch(policy=PLAIN)
    many = max(count for _, count, _ in plan.runs())
    requests = make_trace(entry, plan, 1.0, plan.seed + OTHER_SEED, max(many, ENOUGH)).requests
    bar.set_description("unloaded latency")
    await _at_once(engine, requests[:1], bar)  # what the first request alone pays for is no one's latency
    latencies: dict[str, list[float]] = {}
    for request in requests:
        if len(latencies.setdefault(request.kind, [])) < ALONE:
            (fate,) = await _at_once(engine, [request], bar)
            latencies[request.kind].append(fate.end - fate.arrival)
    unloaded = {kind: statistics.median(values) for kind, values in sorted(latencies.items())}
    if plan.saturation is not None:
        return {"saturation": plan.saturation, "measured": False, "unloaded": unloaded}
    bar.set_description("saturation")
    ends = sorted(fate.end for fate in await _at_once(engine, requests[:many], bar))
    tenth = len(ends) // 10
    first, last = ends[tenth], ends[-1 - tenth]
    if last <= first:
        raise VlmoptError(f"{len(ends)} requests are too few to measure saturation; ask for more, or pass --saturation")
    return {"saturation": (len(ends) - 1 - 2 * tenth) / (last - first), "measured": True, "unloaded": unloaded}


def make_trace(entry: ModelEntry, plan: Plan, rate: float, seed: int, count: int) -> Trace:
    """The `count` requests of one run without objectives, in open loop at `rate` requests per second."""
    made = {"rate": rate}
    prompts = plan.prompts
    if prompts is None and entry.load_format == "dummy":
        shares = dict.fromkeys(PROMPT_TOKENS, 1.0)
        return trace_of_lengths(shares, poisson(rate, seed), count, seed=seed, made=made)
    return trace_of_prompts(prompts or embedded_prompts(), poisson(rate, seed), count, seed=seed, made=made)


class _Run:
    """One run; its record's file is right at every moment."""

    def __init__(self, engine: Engine, entry: ModelEntry, plan: Plan, trace: Trace, record: Record, bar: tqdm):
        self.engine, self.entry, self.plan, self.record, self.bar = engine, entry, plan, record, bar
        self.fates = fates_of(trace.requests)
        self.series: list[dict[str, float]] = []
        self.preempted_before = engine.load()["preemptions"]

    async def go(self) -> None:
        """Raises as `evaluate` does, once the record says so."""
        self.bar.reset(total=len(self.fates))
        watching = asyncio.create_task(self._watch())
        try:
            await self._measure()
        except (asyncio.CancelledError, KeyboardInterrupt):
            self._end("interrupted", "the evaluation was stopped")
            raise
        except Exception as error:
            self._end("failed", str(error) or type(error).__name__)
            raise
        else:
            self._end("finished")
        finally:
            watching.cancel()

    async def _measure(self) -> None:
        content = self.record.content
        await self.engine.switch(**_whole(content["config"]["policy"]))
        await self.engine.memory(restart=True)
        await drive(self.fates, self.engine.ask, lambda fate: self.bar.update())
        content["environment"] = await self.engine.environment()
        content["admission"] = await self.engine.switch()
        content["memory"] = await self.engine.memory()

    async def _watch(self) -> None:
        """Look at the engine's load again and again, and write the record from time to time."""
        start = time.monotonic()
        written = -SNAPSHOT
        while True:
            now = time.monotonic() - start
            load = self.engine.load()
            load["preemptions"] -= self.preempted_before
            self.series.append({"seconds": round(now, 3), **load})
            if now - written >= SNAPSHOT:
                written = now
                self._note()
                self.record.write()
            await asyncio.sleep(SAMPLE)

    def _note(self) -> None:
        preempted = self.engine.load()["preemptions"] - self.preempted_before
        self.record.note(self.fates, self.series, preempted)
        self.record.content["versions"] = self.engine.versions()

    def _end(self, outcome: str, error: str | None = None) -> None:
        self._note()
        content = self.record.content
        content["metrics"]["peak_memory"] = content.get("memory", {}).get("peak")
        content["quality"] = quality(self.fates, self.entry.load_format == "dummy", self.plan.bert_model)
        self.record.end(outcome, error)


def _whole(changes: dict[str, Any]) -> dict[str, Any]:
    """All settings that a running engine takes, so that none is left over from the run before."""
    return {name: value for name, value in Settings.make(changes).as_dict().items() if name != "control"}


def _with_slo(trace: Trace, entry: ModelEntry, unloaded: dict[str, float]) -> Trace:
    if isinstance(entry.slo, float):
        return trace.with_slo(absolute_slo(list(unloaded), entry.slo))
    return trace.with_slo(relative_slo(unloaded, entry.slo.times_unloaded))


async def _at_once(engine: Engine, requests: Sequence[Request], bar: tqdm) -> list[Fate]:
    """Fates of requests that are all sent at once, and must finish."""
    fates = fates_of([replace(request, arrival=0.0) for request in requests])
    bar.reset(total=len(fates))
    await drive(fates, engine.ask, lambda fate: bar.update())
    if bad := [fate for fate in fates if fate.outcome != "finished"]:
        raise VlmoptError(
            f"{len(bad)} of {len(fates)} requests do not finish on an engine that has nothing else to do: "
            f"{bad[0].outcome}, {bad[0].reason}; choose shorter prompts or a larger max_model_len"
        )
    return fates
