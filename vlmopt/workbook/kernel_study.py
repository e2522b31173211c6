"""What the notebooks of single kernels share: check, prediction, timing against torch and torch.compile, verdict.

On a GPU a kernel is timed inside CUDA graphs of at least 200 launches that rotate through buffers well larger than the
L2 cache, results included. On a CPU kernels run in Triton's interpreter only, which says whether they are right but
nothing of their speed: there the reference alone is timed, on the small cases.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import triton
from tqdm.auto import tqdm

from vlmopt.bench import models, roofline
from vlmopt.bench.timing import graph_time, interleave_series, loop_time, warm_chip
from vlmopt.kernels import oracle
from vlmopt.kernels.case import Case, Launch
from vlmopt.workbook import interpreted, plots, text_study
from vlmopt.workbook.record import Record, Roof, measurement

OWN, REFERENCE, COMPILED = "vlmopt", "torch", "compile"
GOOD, STOCK = "good", "stock's own launches"
METRIC = "us"
SHARE, EXTRA_US = 0.8, 1.0
"""A prediction: an empty replay, the bytes at this share of the copy rate, and this many µs."""
LIMIT_US = 1.5
"""What a kernel may take above an empty replay and its bytes."""
COMPILED_CASES = 3
SHAPES_TO_PROVE = ("odd", "wide", "small")
"""How the names of cases begin that no model of ours has."""
ROTATIONS = 200
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Target:
    """One op of a kernel's module."""

    module: ModuleType
    op: str
    launches: int = 1
    limit: tuple[float, float] = (LIMIT_US, SHARE)
    """What it may take: µs above an empty replay, and the share of the copy rate for its bytes."""

    def baselines(self, case: Case) -> dict[str, Callable[..., Any]]:
        """What it is timed against by provider; `torch` is what torch.compile gets."""
        return {REFERENCE: self.reference}

    def is_bounded(self, case: Case) -> bool:
        """Whether its bytes say what the kernel may take: at the model's shapes, not at those that prove it right."""
        return case.name.split()[0] not in SHAPES_TO_PROVE

    def is_stock(self, case: Case) -> bool:
        """Whether the op leaves this case to the launches of its reference."""
        return getattr(self.module, "is_stock", lambda **_: False)(**case.params)

    @property
    def reference(self) -> Callable[..., Any]:
        """The op's reference in PyTorch."""
        return getattr(self.module, f"{self.op}_ref")

    @property
    def launch(self) -> Callable[..., Any]:
        """The raw launcher."""
        return getattr(self.module, "launch", None) or getattr(self.module, f"launch_{self.op}")

    def label(self, case: Case) -> str:
        """The case's name in a record."""
        return f"{self.op} {case.name}"


def target(module: ModuleType, op: str = "") -> Target:
    """The module's op, by default the one of its own name."""
    return Target(module, op or module.__name__.rpartition(".")[2])


@dataclass(frozen=True)
class Bench:
    """The machine that a notebook measures on, with its ceilings."""

    device: torch.device
    dtype: torch.dtype
    profile: str
    roof: Roof
    empty_us: tuple[float, ...]
    """Replays of a kernel that does nothing (on a CPU: calls of an operation on one value)."""

    @property
    def on_gpu(self) -> bool:
        """Whether kernels can be timed here."""
        return self.device.type == "cuda"

    @property
    def provider(self) -> str:
        """Whose time is predicted: the kernel's, or where there is no GPU the reference's."""
        return OWN if self.on_gpu else REFERENCE

    def cases(self, chosen: Target) -> list[Case]:
        """The cases to time: the model's shapes on a GPU (the first two in `smoke`), the small ones on a CPU."""
        if not self.on_gpu:
            return [case for case in chosen.module.CASES if case.cpu]
        large = [case for case in chosen.module.CASES if not case.cpu]
        return large if self.profile == "full" else large[:2]

    def cost(self, chosen: Target, case: Case) -> tuple[int, int]:
        """Bytes moved and FLOPs in this bench's dtype."""
        return chosen.module.cost(**case.params, itemsize=self.dtype.itemsize)

    def floor_us(self, chosen: Target, case: Case, share: float = 1.0) -> float:
        """The roofline's time in µs, the copy rate taken at `share`."""
        moved, flops = self.cost(chosen, case)
        return max(1e6 * self.roof.floor_s(moved) / share, 1e6 * self.roof.floor_s(flops=flops))

    def moves(self, chosen: Target, case: Case) -> bool:
        """Whether moving bytes takes longer than computing, so that the bytes say what a kernel may take."""
        moved, flops = self.cost(chosen, case)
        return self.roof.floor_s(moved) >= self.roof.floor_s(flops=flops)


@triton.jit
def _nothing(x_ptr):
    pass


def prepare(profile: str) -> Bench:
    """Warms the chip and takes its ceilings: copy and GEMM rate, and an empty replay."""
    device = torch.device(models.default_device())
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    warm_chip(device, 1.0 if on_gpu else 0.2)
    one = torch.zeros(1, device=device)
    if on_gpu:
        times = graph_time([lambda: _nothing[(1,)](one, num_warps=1)], device=device)
    else:
        times = loop_time([one.neg_], rounds=200, device=device)
    roof = Roof(roofline.copy_rate(device).value * 1e9, roofline.gemm_rate(device, dtype=dtype).value * 1e12)
    return Bench(device, dtype, profile, roof, tuple(1e3 * ms for ms in times))


def predictions(chosen: Target, bench: Bench) -> list[tuple[str, float, str]]:
    """What `Record.predict` takes for every case that will be timed."""
    empty = statistics.median(bench.empty_us)
    launches = chosen.launches if bench.provider == OWN else 1
    return [
        (_what(chosen, case, bench), launches * (empty + EXTRA_US) + bench.floor_us(chosen, case, SHARE), "us")
        for case in bench.cases(chosen)
    ]


def _what(chosen: Target, case: Case, bench: Bench) -> str:
    return f"{chosen.label(case)}, {bench.provider}"


def checks(targets: Sequence[Target], bench: Bench, seed: int) -> list[tuple[str, str, float, float]]:
    """What `Record.check` takes: each op's worst errors, over its cases and on the embedded model's own activations.

    On a GPU all cases in bf16 and fp16; on a CPU the small cases in fp32, in Triton's interpreter, which must be set
    before Triton is imported and therefore has a process of its own.
    """
    if not bench.on_gpu:
        found = interpreted.run([f"{t.module.__name__}:{t.op}" for t in targets], seed)
        return [row for what, errors in found.items() for row in check_rows(what, errors)]
    rows = []
    for t in targets:
        for dtype in (torch.bfloat16, torch.float16):
            errors = worst_errors(t.module, t.op, t.module.CASES, bench.device, dtype, seed)
            rows += check_rows(f"{t.op} {_NAMES[dtype]}, worst of {len(t.module.CASES)} cases", errors)
        if t.op in text_study.MODULES:
            model = models.load(models.TINY, bench.device, bench.dtype)
            errors = text_study.captured_errors(text_study.prompt(model, 110, 60, seed), t.op)
            rows += check_rows(f"{t.op} {_NAMES[bench.dtype]}, activations of {model.name}", errors)
    return rows


def worst_errors(
    module: ModuleType, op: str, cases: Sequence[Case], device: Any, dtype: torch.dtype, seed: int
) -> oracle.Errors:
    """The largest of both errors over these cases."""
    return oracle.worst([oracle.compare_case(module, op, case, device, dtype, seed) for case in cases])


def check_rows(name: str, errors: oracle.Errors) -> list[tuple[str, str, float, float]]:
    """Both errors with their bounds, as `Record.check` takes them."""
    return [
        (f"{name}: RMS error / reference's", "near", errors.rms, oracle.RMS_BOUND),
        (f"{name}: largest error / reference's", "near", errors.largest, oracle.MAX_BOUND),
    ]


def measure_kernel(
    record: Record, chosen: Target, bench: Bench, seed: int, rounds: int = 4, compiled: int = COMPILED_CASES
) -> None:
    """Times every case and adds it as the metric `us`: providers `torch`, `compile` (the first `compiled` cases) and
    `vlmopt`.

    The empty replay goes in as `empty_us`; how many buffers each case rotated through, and whether together they
    exceed four times the L2 cache, into the record's config under `buffers`.
    """
    if not bench.on_gpu:
        reason = "there is no GPU; the kernel runs in Triton's interpreter only, whose time says nothing"
        record.skip(f"{chosen.op}: time of the kernel and of torch.compile", reason)
    for number, case in enumerate(tqdm(bench.cases(chosen), desc=chosen.op, leave=False)):
        arguments = _rotated(record, chosen, case, bench, seed)
        providers = dict(chosen.baselines(case))
        if bench.on_gpu:
            if number < compiled:
                providers |= _compiled(record, chosen, case, arguments[0])
            providers[OWN] = chosen.launch
        moved, flops = bench.cost(chosen, case)
        for provider, samples in interleaved(providers, arguments, bench, rounds).items():
            record.measure(
                *(chosen.label(case), provider, METRIC, "us", samples), bytes=moved, flops=flops, ceiling=bench.roof
            )
    record.measure("empty", "empty", "empty_us", "us", bench.empty_us)


def _compiled(record: Record, chosen: Target, case: Case, args: Sequence[Any]) -> dict[str, Callable[..., Any]]:
    torch._dynamo.reset()
    fn = torch.compile(chosen.baselines(case)[REFERENCE], dynamic=False)
    try:
        fn(*args)
    except Exception as error:  # whatever the compiler raises is a reason not to compare with it
        record.skip(
            f"{chosen.label(case)}: torch.compile", (str(error).strip() or type(error).__name__).splitlines()[0]
        )
        return {}
    return {COMPILED: fn}


def _rotated(record: Record, chosen: Target, case: Case, bench: Bench, seed: int) -> list[tuple[Any, ...]]:
    arguments = cold_draws(chosen, case, bench, seed)
    if bench.on_gpu:
        cold = len(arguments) * bench.cost(chosen, case)[0] >= _cold_bytes(bench)
        record.config.setdefault("buffers", {})[chosen.label(case)] = {"copies": len(arguments), "cold": cold}
    return arguments


def cold_draws(chosen: Target, case: Case, bench: Bench, seed: int) -> list[tuple[Any, ...]]:
    """As many draws of the arguments as exceed the L2 cache four times, within reason and the memory; one on a CPU."""
    generator = torch.Generator(bench.device).manual_seed(seed)
    make = partial(chosen.module.make, case.params, bench.device, bench.dtype, generator)
    first = make()
    if not bench.on_gpu:
        return [first]
    held = sum(tensor.numel() * tensor.element_size() for tensor in oracle.flatten(list(first)))
    room = int(0.3 * torch.cuda.mem_get_info(bench.device)[0])
    wanted = math.ceil(_cold_bytes(bench) / bench.cost(chosen, case)[0])
    return [first, *(make() for _ in range(min(wanted, ROTATIONS, room // held) - 1))]


def _cold_bytes(bench: Bench) -> int:
    return 4 * torch.cuda.get_device_properties(bench.device).L2_cache_size


def interleaved(
    providers: Mapping[str, Callable[..., Any]],
    arguments: Sequence[Sequence[Any]],
    bench: Bench,
    rounds: int,
    replays: int = 10,
) -> dict[str, list[float]]:
    """Times in µs of one call by provider, in the order A B B A: replays of a graph on a GPU, else plain calls."""
    times = {name: partial(_times_us, fn, arguments, bench, replays) for name, fn in providers.items()}
    return interleave_series(times, rounds)


def _times_us(fn: Callable[..., Any], arguments: Sequence[Sequence[Any]], bench: Bench, replays: int) -> list[float]:
    # results are kept as long as a rotation lasts, else each would be written where the last one was, inside the cache
    kept: deque[Any] = deque(maxlen=len(arguments))
    launches = [lambda args=args: kept.append(fn(*args)) for args in arguments]
    if bench.on_gpu:
        times = graph_time(launches, min_nodes=ROTATIONS, replays=replays, device=bench.device)
    else:
        times = loop_time(launches, rounds=replays, device=bench.device)
    return [1e3 * ms for ms in times]


def measure_drafts(record: Record, chosen: Target, bench: Bench, configs: Sequence[Launch], seed: int) -> None:
    """Times other launch configurations on the first two cases, as `draft_us`; the slower ones are kept as lost."""
    if not bench.on_gpu:
        record.skip(f"{chosen.op}: drafts", "there is no GPU to time them on")
        return
    for case in bench.cases(chosen)[:2]:
        arguments = _rotated(record, chosen, case, bench, seed)
        drafts = {_describe(config): _configured(chosen, config) for config in configs}
        samples = interleaved({OWN: chosen.launch, **drafts}, arguments, bench, rounds=2)
        record_drafts(record, chosen, case, samples, OWN)


def record_drafts(
    record: Record, chosen: Target, case: Case, samples: Mapping[str, Sequence[float]], own: str, *work: Any
) -> None:
    """Measures `draft_us` from the times in µs by draft; drafts slower than `own` by more than 1 % are kept as lost.

    `work` is what `measurement` takes after the samples: bytes, operations and the ceiling.
    """
    best = statistics.median(samples[own])
    for name, values in samples.items():
        record.measure(chosen.label(case), name, "draft_us", "us", values, *work)
        if statistics.median(values) > 1.01 * best:
            lesson = f"{plots.number(statistics.median(values))} µs against {plots.number(best)} at {case.name}"
            record.lose(f"{chosen.op}, {name}", lesson)


def _describe(config: Launch) -> str:
    return f"block {config.block}, {config.warps} warps"


def _configured(chosen: Target, config: Launch) -> Callable[..., Any]:
    return lambda *args: chosen.launch(*args, config=config)


def measure_effect(
    record: Record, case: str, metric: str, runs: Mapping[str, Callable[[], Any]], bench: Bench, rounds: int = 4
) -> None:
    """Device time in ms of a part of the model by provider, such as with the references and with one entry switched."""
    if not bench.on_gpu:
        record.skip(f"{case}: {', '.join(list(runs)[1:])}", "there is no GPU to run the kernel on")
        return
    once = partial(graph_time, min_nodes=1, replays=5, device=bench.device)
    times = {name: partial(once, [run]) for name, run in runs.items()}
    for provider, values in interleave_series(times, rounds).items():
        record.measure(case, provider, metric, "ms", values)


def settle(record: Record, targets: Sequence[Target], bench: Bench) -> None:
    """Puts the measured times beside the predictions."""
    for chosen in targets:
        for case in bench.cases(chosen):
            record.settle(_what(chosen, case, bench), record.value(METRIC, bench.provider, chosen.label(case)))


def rows(record: Record, targets: Sequence[Target], bench: Bench) -> list[dict[str, Any]]:
    """One row a case: times in µs, share of the roofline, and how the kernel stands to what it has to reach."""
    table = []
    for chosen in targets:
        for case in bench.cases(chosen):
            label = chosen.label(case)
            times = {row["provider"]: row for row in record.find(METRIC, case=label)}
            row: dict[str, Any] = {"case": label, **{name: float(times[name]["p50"]) for name in times}}
            if OWN in times:
                row["% of roofline"] = round(100 * times[OWN]["roofline_share"], 1)
                if bench.moves(chosen, case) and chosen.is_bounded(case):
                    extra, share = chosen.limit
                    row["allowed"] = statistics.median(bench.empty_us) + extra + bench.floor_us(chosen, case, share)
                row["stands"] = STOCK if chosen.is_stock(case) else _standing(row)
            table.append(row)
    return table


def _standing(row: Mapping[str, Any]) -> str:
    faults = []
    if row[OWN] >= row[REFERENCE]:
        faults.append("not faster than torch")
    if row[OWN] > 1.03 * row.get(COMPILED, math.inf):
        faults.append("behind torch.compile")
    if row[OWN] > row.get("allowed", math.inf):
        faults.append("above what its bytes allow")
    return ", ".join(faults) or GOOD


def conclude(record: Record, targets: Sequence[Target], bench: Bench) -> tuple[str, str]:
    """The record's answer and verdict."""
    n = plots.number
    worst = max(check["measured"] / check["bound"] for check in record.checks)
    table = rows(record, targets, bench)
    if not bench.on_gpu:
        right = f"In Triton's interpreter the kernels agree with their references ({worst:.0%} of the allowed error at"
        answer = f"{right} the worst); what they gain shows on a GPU only."
        return answer, "Right, as far as a CPU can tell; no speed is claimed from here."
    main = [next(row for row in table if row["case"].startswith(t.op + " ")) for t in targets]
    told = [
        f"`{row['case']}` takes {n(row[OWN])} µs against {n(row[REFERENCE])} of torch"
        + (f" and {n(row[COMPILED])} of torch.compile" if COMPILED in row else "")
        for row in main
    ]
    behind = [f"{row['case']}: {row['stands']}" for row in table if row["stands"] not in (GOOD, STOCK)]
    answer = "; ".join(told) + f"; errors reach {worst:.0%} of what is allowed."
    good = "Every case is as fast as its bytes allow and faster than torch."
    return answer, "; ".join(behind) + "." if behind else good


def one(chosen: Target, bench: Bench, name: str, block: int, warps: int, seed: int = 0) -> dict[str, Any]:
    """One case with one launch configuration as a measurement, for a panel; on a CPU the reference."""
    case = next(case for case in bench.cases(chosen) if case.name == name)
    scratch = Record("00_panel", "", bench.profile, "", {})
    fn = _configured(chosen, Launch(block, warps)) if bench.on_gpu else chosen.reference
    samples = interleaved({"one": fn}, _rotated(scratch, chosen, case, bench, seed), bench, rounds=1)["one"]
    moved, flops = bench.cost(chosen, case)
    label = (
        f"{chosen.label(case)}, block {block}, {warps} warps" if bench.on_gpu else f"{chosen.label(case)}, reference"
    )
    return measurement(label, bench.provider, METRIC, "us", samples, bytes=moved, flops=flops, ceiling=bench.roof)
