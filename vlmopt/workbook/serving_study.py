"""Admission policies under load in the simulator: who contends, what a load is, and what goes into the record.

Load 1.0 is what plain vLLM finishes in requests per second while its queue never empties; the objective of each kind of
request is `OBJECTIVE` times the latency that it has on the idle engine. Both are found on traces of their own.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from vlmopt.serving import metrics
from vlmopt.serving.lengths import QUANTILE, OutputLengths
from vlmopt.serving.policy import ASK_EVERY, DEFAULTS, Options
from vlmopt.serving.replica import Engine, Lengths, Request, StepTime
from vlmopt.serving.shapes import BLOCK_SIZE, POOL, blocks_in, kv_bytes
from vlmopt.serving.simulate import Result, simulate
from vlmopt.serving.steptime import Shape, assumed
from vlmopt.serving.workload import PROMPT_TOKENS, Trace, bursts, poisson, relative_slo, trace_of_lengths
from vlmopt.workbook.record import Record

MIX = dict.fromkeys(PROMPT_TOKENS, 1.0)
OBJECTIVE = 3.0  # times the unloaded latency
COUNT = 1000  # requests of a run
LOADS = (0.5, 0.9, 1.3)
OVERLOAD = 1.3
STRETCHES = 60  # of a run, over each of which occupancy and preemptions are counted
PANEL = ("avg_latency", "p99_latency", "avg_ttft", "slo_attainment_rate", "preemptions")
_LONG = 1000  # requests at once, among which saturation is measured
_SHORT = 600  # requests of a tuning run
_ALONE = 200  # requests one by one, among which unloaded latencies are measured
_TUNING, _CALIBRATION = 1000, 2000  # added to a seed: no trace serves two purposes


class Most:
    """Expects every answer to take all its tokens."""

    def __init__(self, tokens: int):
        self.tokens = tokens

    def observe(self, kind: str, tokens: int) -> None:
        """Learns nothing."""

    def expected(self, kind: str, output_so_far: int = 0) -> float:
        """Always the most, or one more than there are."""
        return max(self.tokens, output_so_far + 1)


@dataclass(frozen=True)
class Contender:
    """A policy with its settings; `quantile` None expects every answer to take all its tokens."""

    name: str
    policy: str
    options: Options = DEFAULTS
    quantile: float | None = QUANTILE
    seats: int = 256

    def lengths(self, engine: Engine) -> Callable[[], Lengths]:
        """What predicts for it on `engine`."""
        if self.quantile is None:
            return lambda: Most(engine.max_tokens)
        return lambda: OutputLengths(self.quantile)


FCFS = Contender("fcfs", "fcfs")
WATERMARKS = [Contender(f"watermark {share:.2f}", "fcfs", Options(watermark=share)) for share in (0.02, 0.05, 0.10)]
SEATS = [Contender(f"max_num_seqs {seats}", "fcfs", seats=seats) for seats in (32, 48, 64, 96)]
BATCHES = [Contender(f"batch {size}", "batch", Options(batch=size)) for size in (16, 32, 64)]
PRIORITY = Contender("priority", "priority")
PRIORITY_WATERMARKS = [
    Contender(f"priority, watermark {share:.2f}", "priority", Options(watermark=share)) for share in (0.02, 0.05, 0.10)
]
BRAKES = Contender("brakes", "brakes")


@dataclass(frozen=True)
class Site:
    """An engine, and what loads and objectives are multiples of: requests a second, and seconds by kind."""

    name: str
    engine: Engine
    saturation: float
    unloaded: Mapping[str, float]

    def objectives(self, times: float = OBJECTIVE) -> dict[str, float]:
        """Seconds by kind from arrival to the last token."""
        return relative_slo(self.unloaded, times)

    def trace(self, load: float, seed: int, count: int = COUNT) -> Trace:
        """Requests in open loop with objectives."""
        made = trace_of_lengths(MIX, poisson(load * self.saturation, seed), count, seed=seed)
        return made.with_slo(self.objectives())


@dataclass(frozen=True)
class Run:
    """What one contender made of one trace."""

    times: list[metrics.Times]
    result: Result

    def numbers(self) -> dict[str, float]:
        """`metrics.summarise` of it."""
        return metrics.summarise(self.times)


def site(name: str, shape: Shape, step: StepTime | None = None, memory: float = POOL, seed: int = 0) -> Site:
    """A calibrated engine of `shape` with `memory` bytes of KV cache; the step time is assumed unless given."""
    blocks = blocks_in(memory, shape.kv)
    engine = Engine(step or assumed(shape), blocks=blocks, block_size=BLOCK_SIZE, ask_every=ASK_EVERY)
    endless = Site(name, engine, 1.0, dict.fromkeys(MIX, 1.0))
    at_once = run(endless, FCFS, _trace(bursts(1.0, _LONG, seed), _LONG, seed + _CALIBRATION))
    ends = sorted(time.end for time in at_once.times)
    fifth = len(ends) // 5
    one_by_one = run(endless, FCFS, _trace(poisson(1e-3, seed), _ALONE, seed + _CALIBRATION))
    kinds = metrics.summarise_kinds(one_by_one.times)
    return Site(
        name,
        engine,
        saturation=(len(ends) - 2 * fifth) / (ends[-fifth] - ends[fifth]),
        unloaded={kind: numbers["avg_latency"] for kind, numbers in kinds.items()},
    )


def with_step(where: Site, name: str, step: StepTime) -> Site:
    """The same blocks, arrival rates and objectives on an engine of another step time."""
    return replace(where, name=name, engine=replace(where.engine, step=step))


def with_pool(where: Site, name: str, memory: float, shape: Shape) -> Site:
    """The same arrival rates and objectives with `memory` bytes of KV cache."""
    return replace(where, name=name, engine=replace(where.engine, blocks=blocks_in(memory, shape.kv)))


def with_fp8(where: Site, name: str, config: Mapping[str, Any], step: StepTime | None = None) -> Site:
    """The same arrival rates and objectives with a cache of one byte an element in the same memory.

    Without a fitted step time the coefficient of the tokens held is taken to be half.
    """
    step = step or replace(where.engine.step, kv=where.engine.step.kv / 2)
    blocks = blocks_in(POOL, kv_bytes(config, width=1))
    return replace(where, name=name, engine=replace(where.engine, step=step, blocks=blocks))


def reserve(where: Site, quantile: float = QUANTILE, **options: bool | float) -> Contender:
    """`reserve` with an ageing of twice the longest objective."""
    ageing = 2 * max(where.objectives().values())
    return Contender("reserve", "reserve", Options(**{"ageing": ageing, **options}), quantile)


def run_requests(where: Site, contender: Contender, asked: Sequence[Request]) -> Result:
    """Simulate one contender on requests as the simulator takes them."""
    engine = replace(where.engine, max_running=contender.seats)
    return simulate(asked, engine, contender.policy, contender.options, lengths=contender.lengths(engine))


def run(where: Site, contender: Contender, trace: Trace) -> Run:
    """Simulate one contender on one trace."""
    asked = [Request(r.arrival, r.prompt_tokens, r.output_tokens, r.kind, r.deadline()) for r in trace.requests]
    result = run_requests(where, contender, asked)
    times = [
        metrics.Times(
            id=request.id,
            kind=request.kind,
            arrival=request.arrival,
            outcome="refused" if outcome.refused else "finished",
            first_token=outcome.first,
            end=outcome.end,
            output_tokens=request.output_tokens,
            preemptions=outcome.preemptions,
            slo=request.slo,
        )
        for request, outcome in zip(trace.requests, result.outcomes, strict=True)
    ]
    return Run(times, result)


def best(where: Site, contenders: Sequence[Contender], seeds: Iterable[int], load: float = OVERLOAD) -> Contender:
    """Of several settings the one with the highest SLO attainment on tuning traces, of equal ones the first."""
    seeds = [seed + _TUNING for seed in seeds]

    def attainment(contender: Contender) -> float:
        runs = [run(where, contender, where.trace(load, seed, _SHORT)) for seed in seeds]
        return statistics.fmean(made.numbers()["slo_attainment_rate"] for made in runs)

    return max(contenders, key=attainment)


def measure_runs(
    rec: Record, where: Site, contender: Contender, load: float, seeds: Iterable[int], count: int = COUNT
) -> list[Run]:
    """Simulate a contender on a trace a seed and put into the record what became of it, a sample a trace."""
    runs = [run(where, contender, where.trace(load, seed, count)) for seed in seeds]
    numbers = [made.numbers() for made in runs]
    case, name = case_of(where, load), contender.name
    for metric, unit, key in (
        ("mean_latency_s", "s", "avg_latency"),
        ("p99_latency_s", "s", "p99_latency"),
        ("slo_attainment_rate", "share", "slo_attainment_rate"),
        ("preemptions", "preemptions", "preemptions"),
    ):
        rec.measure(case, name, metric, unit, [row[key] for row in numbers])
    measure_latencies(rec, case, name, [time.latency for made in runs for time in made.times if time.finished])
    return runs


def measure_latencies(rec: Record, case: str, name: str, seconds: Iterable[float]) -> None:
    """Put the latencies of single requests into the record, to the millisecond."""
    rec.measure(case, name, "latency_s", "s", [round(value, 3) for value in seconds])


def measure_course(rec: Record, where: Site, contender: Contender, load: float, made: Run) -> None:
    """Put the course of one run into the record: KV occupancy and preemptions in STRETCHES equal parts of it."""
    begin, end = made.result.occupancy[0][0], max(time.end for time in made.times if time.finished)
    width = (end - begin) / STRETCHES
    shares: list[list[float]] = [[] for _ in range(STRETCHES)]
    for seconds, share in made.result.occupancy:
        shares[min(STRETCHES - 1, int((seconds - begin) / width))].append(share)
    counts = [0] * STRETCHES
    for seconds in made.result.preempted_at:
        counts[min(STRETCHES - 1, int((seconds - begin) / width))] += 1
    case = case_of(where, load)
    held = [statistics.fmean(stretch) if stretch else 0.0 for stretch in shares]
    rec.measure(case, contender.name, "kv_occupancy", "share of the blocks", held)
    rec.measure(case, contender.name, "preemptions_in_stretch", "preemptions", counts)
    rec.config.setdefault("stretch_s", {})[f"{contender.name}, load {load:g}"] = width


def note_site(rec: Record, where: Site, source: str) -> list[dict[str, float | str]]:
    """Put the engine into the record's configuration, with the source of its step time; rows of it to show."""
    step = where.engine.step
    known = {
        "step time from": source,
        "base, ms": 1e3 * step.base,
        "a prompt token, µs": 1e6 * step.prefill,
        "a running request, µs": 1e6 * step.running,
        "1000 tokens held, µs": 1e9 * step.kv,
        "KV blocks": where.engine.blocks,
        "tokens a block": where.engine.block_size,
        "saturation, requests/s": where.saturation,
        **{f"unloaded {kind}, s": seconds for kind, seconds in where.unloaded.items()},
    }
    rec.config[where.name] = known
    return [{"what": what, "value": value} for what, value in known.items()]


def error_alone(where: Site) -> float:
    """How far the simulated latency of a request alone lies from the sum of its steps, as a share of the latter."""
    step, prompt, output = where.engine.step, 100, 50
    (outcome,) = run_requests(where, FCFS, [Request(0.0, prompt, output, "chat")]).outcomes
    held = sum(prompt + i for i in range(output))
    counted = output * (step.base + step.running) + prompt * step.prefill + held * step.kv
    return abs(outcome.end - counted) / counted


def preemptions_under_bound(where: Site, seed: int) -> int:
    """Preemptions of `reserve` in overload where no answer exceeds its prediction: 0 is what the policy promises."""
    trace = where.trace(OVERLOAD, seed + _CALIBRATION, 200)
    asked = [Request(r.arrival, r.prompt_tokens, r.output_tokens, r.kind, r.deadline()) for r in trace.requests]
    longest = max(request.output for request in asked) + 1
    return simulate(asked, where.engine, "reserve", lengths=lambda: Most(longest)).preemptions


def knee(rec: Record, name: str, level: float = 0.9) -> float:
    """The load at which a contender's attainment falls below `level`, between two that were measured.

    It is the last load measured if it never does.
    """
    points = sorted((float(row["case"].split()[-1]), row["p50"]) for row in rec.find("slo_attainment_rate", name))
    for (low, above), (high, below) in pairwise(points):
        if above >= level > below:
            return low + (high - low) * (above - level) / (above - below)
    return points[-1][0]


def measure_gain(rec: Record, where: Site, contender: Contender, load: float, seeds: Sequence[int], count: int) -> None:
    """Put into the record how much more of the objectives a contender attains than plain vLLM on the same traces."""
    traces = [where.trace(load, seed, count) for seed in seeds]
    rates = [[run(where, one, trace).numbers()["slo_attainment_rate"] for trace in traces] for one in (contender, FCFS)]
    gains = [100 * (ours - plain) for ours, plain in zip(*rates, strict=True)]
    rec.measure(case_of(where, load), contender.name, "attainment_gain", "points", gains)


def duel(rec: Record, site: str, ours: str = "reserve", plain: str = "fcfs") -> dict[str, float]:
    """How a policy stands against plain vLLM on one site: points of attainment and, as ratios, mean latency, p99 and
    preemptions in overload, and mean latency at load 0.5."""

    def ratio(metric: str, load: float) -> float:
        mine, other = (rec.value(metric, name, f"{site} load {load:g}") for name in (ours, plain))
        return mine / other if other else mine

    kept, other = (rec.value("slo_attainment_rate", name, f"{site} load {OVERLOAD:g}") for name in (ours, plain))
    return {
        "points": 100 * (kept - other),
        "mean": ratio("mean_latency_s", OVERLOAD),
        "p99": ratio("p99_latency_s", OVERLOAD),
        "preemptions": ratio("preemptions", OVERLOAD),
        "calm": ratio("mean_latency_s", 0.5),
    }


def measure_alone(rec: Record, where: Site, seed: int, count: int = 100) -> None:
    """Put into the record what requests take on the idle engine, one after the other."""
    made = run(where, FCFS, _trace(poisson(1e-3, seed), count, seed))
    rec.measure(where.name, "fcfs", "unloaded_latency_s", "s", [time.latency for time in made.times])


def one(where: Site, contender: Contender, load: float, objective: float, seed: int) -> list[dict[str, float]]:
    """The numbers of one run with objectives of so many times the unloaded latency, for a panel."""
    trace = where.trace(load, seed).with_slo(where.objectives(objective))
    numbers = run(where, contender, trace).numbers()
    return [{"what": what, "value": numbers[what]} for what in PANEL]


def case_of(where: Site, load: float) -> str:
    """The case of a record: the site, and the load as its last word."""
    return f"{where.name} load {load:g}"


def rows(rec: Record, case: str) -> list[dict[str, float | str]]:
    """A row a contender with the medians over the traces of one case."""
    names = [row["provider"] for row in rec.find("mean_latency_s", case=case)]
    return [
        {
            "policy": name,
            "mean, s": rec.value("mean_latency_s", name, case),
            "p99, s": rec.value("p99_latency_s", name, case),
            "in SLO, %": 100 * rec.value("slo_attainment_rate", name, case),
            "preemptions": rec.value("preemptions", name, case),
        }
        for name in names
    ]


def _trace(arrivals: Iterable, count: int, seed: int) -> Trace:
    return trace_of_lengths(MIX, arrivals, count, seed=seed)
