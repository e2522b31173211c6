"""The matrix-vector kernels' study: what arithmetic asks of them, launch configurations, and a whole decode step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from vlmopt.bench import models, roofline
from vlmopt.kernels import gemv, gemv_ring, linear, linear_swiglu, lm_head, oracle
from vlmopt.kernels.case import Case
from vlmopt.kernels.gemv import LAUNCH, OTHER, Tiles
from vlmopt.ops import Ops
from vlmopt.workbook import kernel_study, plots, text_study
from vlmopt.workbook.kernel_study import Bench, Target
from vlmopt.workbook.record import Record, Roof, measurement

GOALS_US = MappingProxyType({"qkv": 6.3, "o": 4.5, "gate_up": 14.7, "down": 7.5})
"""What each product of a layer may take at one row, cold and one after the other."""
PROCESSORS, LATENCY_US = 132, 1.0
"""Of an H200: its multiprocessors, and about how long a read of its memory takes under load."""
TRITON, ALONE = "vlmopt, Triton", "Triton, not dependent"
LATE = "vlmopt, dependents let go late"
LAYERS = 28


@dataclass(frozen=True)
class Products(Target):
    """The products as the table of ops serves them, timed beside the kernel in Triton."""

    def baselines(self, case: Case) -> dict[str, Callable[..., Any]]:
        """torch, and on a GPU `gemv`, which serves where `gemv_ring` cannot."""
        others = {kernel_study.REFERENCE: self.reference}
        if not torch.cuda.is_available():
            return others
        weight = torch.empty(case.params["out"], case.params["width"], dtype=torch.bfloat16, device="cuda")
        late = {LATE: _late} if gemv_ring.serves(weight) else {}
        return others | {TRITON: gemv.launch} | late

    @property
    def launch(self) -> Callable[..., Any]:
        """What the table calls for a few rows."""
        return linear.few_rows


def _late(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """`gemv_ring` whose dependents start once the kernel ahead of it is over."""
    config = replace(gemv_ring.LAUNCH.get(tuple(weight.shape), gemv_ring.OTHER), early=False)
    return gemv_ring.launch(x, weight, *rest, config=config)


TARGET = Products(gemv, "gemv")


def triton_launcher(chosen: Target) -> Callable[..., Any]:
    """The target's launcher that takes `Tiles`."""
    return getattr(chosen.module, "launch", None) or getattr(chosen.module, f"launch_{chosen.op}")


def prepare(profile: str) -> Bench:
    """`kernel_study.prepare` with the read-only rate in the copy rate's place: weights are read and next to nothing
    is written."""
    bench = kernel_study.prepare(profile)
    read = roofline.read_rate(bench.device).value * 1e9
    return replace(bench, roof=Roof(read, bench.roof.flops_per_s))


def in_flight_kib(rate: float) -> float:
    """KiB that each multiprocessor must have on their way at `rate` bytes a second (Little's law)."""
    return rate * LATENCY_US * 1e-6 / PROCESSORS / 1024


def arithmetic() -> list[dict[str, Any]]:
    """What the package's tiles mean on an H200 in bf16, one row a weight shape."""
    table = []
    for (out, n_in), tiles in LAUNCH.items():
        programs = out // tiles.block_n
        table.append(
            {
                "weight": f"{out}x{n_in}",
                "tiles": describe(tiles),
                "programs": programs,
                "of the last wave in use": f"{programs / PROCESSORS / math.ceil(programs / PROCESSORS):.0%}",
                "KiB a program": out * n_in * 2 // programs // 1024,
                "KiB in flight": (tiles.stages - 1) * tiles.block_n * tiles.block_k * 2 // 1024,
                "KiB shared": shared_bytes(tiles) // 1024,
            }
        )
    return table


def shared_bytes(tiles: Tiles) -> int:
    """Shared memory of the steps in flight, weights and the eight rows, in bytes (two a value)."""
    return (tiles.stages - 1) * (tiles.block_n + gemv.ROWS.value) * tiles.block_k * 2


def candidates(base: Tiles) -> tuple[Tiles, ...]:
    """`base` with one thing changed at a time, for the sweep."""
    return (
        replace(base, dependent=False),
        replace(base, slices=1 if base.slices > 1 else base.warps),
        replace(base, ahead=0 if base.ahead else 512),
        replace(base, ahead=0, held=True),
        replace(base, stages=base.stages + 2),
        replace(base, warps=2 if base.warps == 4 else 4),
        replace(base, block_k=base.block_k // 2, stages=2 * base.stages - 1),
        replace(base, block_n=base.block_n // 2 if base.block_n > 16 else 32),
    )


def describe(tiles: Tiles) -> str:
    """Such as `32x256, 4 warps, 5 stages, 2048 ahead`."""
    extra = [f"{tiles.slices} slices"] * (tiles.slices > 1)
    extra += [f"{tiles.ahead} ahead"] * bool(tiles.ahead) + ["first step held"] * tiles.held
    extra += ["not dependent"] * (not tiles.dependent)
    return ", ".join([f"{tiles.block_n}x{tiles.block_k}, {tiles.warps} warps, {tiles.stages} stages", *extra])


def main_cases(chosen: Target, bench: Bench) -> list[Case]:
    """One row a weight shape of the model, each shape once."""
    found: dict[tuple[int, int], Case] = {}
    for case in bench.cases(chosen):
        if case.params["rows"] == 1:
            found.setdefault(_shape(case), case)
    return list(found.values())


def _shape(case: Case) -> tuple[int, int]:
    return case.params["out"] if "out" in case.params else case.params["vocabulary"], case.params["width"]


def measure_sweep(record: Record, chosen: Target, bench: Bench, seed: int) -> None:
    """Times the candidates of every weight shape as `draft_us`; the slower ones are kept as lost."""
    if not bench.on_gpu:
        record.skip(f"{chosen.op}: drafts", "there is no GPU to time them on")
        return
    for case in tqdm(main_cases(chosen, bench), desc="sweep", leave=False):
        base = LAUNCH.get(_shape(case), OTHER)
        drafts = {
            describe(tiles): partial(triton_launcher(chosen), config=tiles) for tiles in (base, *candidates(base))
        }
        samples = kernel_study.interleaved(drafts, kernel_study.cold_draws(chosen, case, bench, seed), bench, rounds=2)
        kernel_study.record_drafts(record, chosen, case, samples, describe(base), *_work(chosen, case, bench))


def _work(chosen: Target, case: Case, bench: Bench) -> tuple[float, float, Roof]:
    return *bench.cost(chosen, case), bench.roof


def measure_alone(record: Record, chosen: Target, bench: Bench, seed: int) -> None:
    """Times the kernel without dependent launches, as one more provider of `us`."""
    if not bench.on_gpu:
        record.skip(f"{chosen.op}: without dependent launches", "there is no GPU to time it on")
        return
    for case in main_cases(chosen, bench):
        config = replace(LAUNCH.get(_shape(case), OTHER), dependent=False)
        alone = {ALONE: partial(triton_launcher(chosen), config=config)}
        samples = kernel_study.interleaved(alone, kernel_study.cold_draws(chosen, case, bench, seed), bench, rounds=2)
        record.measure(
            chosen.label(case), ALONE, kernel_study.METRIC, "us", samples[ALONE], *_work(chosen, case, bench)
        )


def sweep_rows(record: Record, chosen: Target, bench: Bench) -> list[dict[str, Any]]:
    """The package's choice and the fastest draft, one row a weight shape; none where nothing was swept."""
    table = []
    for case in main_cases(chosen, bench):
        drafts = record.find("draft_us", case=chosen.label(case))
        if drafts:
            best = min(drafts, key=lambda row: row["p50"])
            row = {"case": case.name, "fastest": best["provider"], "µs": best["p50"]}
            table.append({**row, "the package's": drafts[0]["provider"], "its µs": drafts[0]["p50"]})
    return table


PRODUCTS = {"linear": linear.launch, "linear_swiglu": linear_swiglu.launch}
TABLES: Mapping[str, Ops] = MappingProxyType(
    {
        "references": Ops(),
        "with gemv": Ops(**PRODUCTS),
        "with lm_head_argmax": Ops(lm_head_argmax=lm_head.launch_lm_head_argmax),
        "with both": Ops(**PRODUCTS, lm_head_argmax=lm_head.launch_lm_head_argmax),
    }
)


def step(subject: text_study.Prompt, ops: Ops) -> Tensor:
    """A whole decode step, head and greedy choice included; the token [1]."""
    weights = subject.weights
    h = subject.decode(ops)
    return ops.lm_head_argmax(h, weights.norm.weight, weights.norm.eps, weights.head.weight)


def steps(subject: text_study.Prompt, names: Sequence[str]) -> dict[str, Callable[[], Tensor]]:
    """A decode step with each of these tables, for `kernel_study.measure_effect`."""
    return {name: partial(step, subject, TABLES[name]) for name in names}


def captured(subject: text_study.Prompt) -> dict[str, list[tuple[Any, ...]]]:
    """Arguments of `gemv` and `lm_head_logits` in a decode step, of the last layer where there are many."""
    products: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        products[tuple(weight.shape)] = (x, weight, bias, None, False)
        return F.linear(x, weight, bias)

    heads: list[tuple[Any, ...]] = []

    def head(*args: Any) -> Tensor:
        heads.append(args)
        return lm_head.lm_head_argmax_ref(*args)

    step(subject, Ops(linear=product, lm_head_argmax=head))
    return {"gemv": list(products.values()), "lm_head_logits": heads}


def captured_checks(record: Record, op: str, bench: Bench, seed: int) -> list[tuple[str, str, float, float]]:
    """What `Record.check` takes for an op on activations of the embedded model; on a CPU a skip that says why."""
    if not bench.on_gpu:
        record.skip(f"{op} on captured activations", "there is no GPU; the interpreter has a process of its own")
        return []
    subject = text_study.prompt(models.load(models.TINY, bench.device, bench.dtype), 110, 60, seed)
    module = gemv if op == "gemv" else lm_head
    torch.cuda.synchronize(bench.device)  # a dependent launch reads its weight early
    fn = linear.few_rows if op == "gemv" else None
    errors = oracle.worst([oracle.compare(module, op, args, fn) for args in captured(subject)[op]])
    return kernel_study.check_rows(f"{op}, activations of {subject.name}", errors)


def goals(record: Record) -> list[dict[str, Any]]:
    """The four products of a layer beside what each may take; empty on a CPU."""
    table = []
    for row in record.find(kernel_study.METRIC, kernel_study.OWN):
        name, rows = row["case"].removeprefix("gemv ").split()[:2]
        if rows == "1" and name in GOALS_US and name not in [found["product"] for found in table]:
            (library,) = record.find(kernel_study.METRIC, kernel_study.REFERENCE, row["case"])
            rate = row["bytes"] / row["p50"] / 1e6
            told = {"product": name, "µs": row["p50"], "torch µs": library["p50"], "TB/s": rate}
            good = row["p50"] <= GOALS_US[name]
            table.append({**told, "goal": GOALS_US[name], "stands": "good" if good else "above its goal"})
    return table


def conclude(record: Record, chosen: Target, bench: Bench) -> tuple[str, str]:
    """The record's answer and verdict of the notebook on the products."""
    table = goals(record)
    if not bench.on_gpu or len(table) < len(GOALS_US):
        return kernel_study.conclude(record, [chosen], bench)
    n = plots.number
    told = ", ".join(f"{row['product']} {n(row['µs'])} µs ({n(row['torch µs'])})" for row in table)
    own, library = (LAYERS * sum(row[key] for row in table) / 1e3 for key in ("µs", "torch µs"))
    answer = (
        f"One row, cold weights, one product after the other (in brackets PyTorch's, for gate/up with its activation): "
        f"{told}; over {LAYERS} layers {n(own)} ms a token against {n(library)}."
    )
    faults = [f"{row['product']} is above its goal of {n(row['goal'])} µs" for row in table if row["stands"] != "good"]
    faults += [
        f"{row['case']}: {row['fastest']} is faster than the package's choice"
        for row in sweep_rows(record, chosen, bench)
        if row["µs"] < 0.98 * row["its µs"]
    ]
    return answer, "; ".join(faults) + "." if faults else "Every product reaches its goal with the fastest draft."


def one(chosen: Target, bench: Bench, name: str, block_n: int, block_k: int, warps: int, stages: int) -> dict[str, Any]:
    """One case with one launch configuration as a measurement, for a panel; on a CPU the reference."""
    case = next(case for case in bench.cases(chosen) if case.name == name)
    tiles = replace(LAUNCH.get(_shape(case), OTHER), block_n=block_n, block_k=block_k, warps=warps, stages=stages)
    arguments = kernel_study.cold_draws(chosen, case, bench, 0)
    fn, label = chosen.reference, "reference"
    if bench.on_gpu:
        fn, label = partial(triton_launcher(chosen), config=tiles), describe(tiles)
    samples = kernel_study.interleaved({label: fn}, arguments, bench, rounds=1)[label]
    name = f"{chosen.label(case)}, {label}"
    return measurement(name, bench.provider, kernel_study.METRIC, "us", samples, *_work(chosen, case, bench))
