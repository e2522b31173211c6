"""The vision kernels inside the tower: right on activations captured from it, and what they make of it as a whole."""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vlmopt.bench import models
from vlmopt.bench.timing import interleave_series, loop_time
from vlmopt.config import settings
from vlmopt.errors import VlmoptError
from vlmopt.kernels import add_layer_norm, bias_gelu, oracle, patch_embed, vision_rotary
from vlmopt.ops import Ops
from vlmopt.stages.tables import GridTable, grid_table
from vlmopt.stages.vision import encode
from vlmopt.weights import VisionWeights, collect
from vlmopt.workbook import kernel_study, plots
from vlmopt.workbook.kernel_study import Bench, Target
from vlmopt.workbook.record import ROOT, Record

MODULES: dict[str, ModuleType] = {
    "vision_rotary": vision_rotary,
    "add_layer_norm": add_layer_norm,
    "bias_gelu": bias_gelu,
    "patch_embed": patch_embed,
}
"""The kernels of this study by the name of their entry in the table of ops."""

TARGETS = tuple(map(kernel_study.target, MODULES.values()))
GRIDS = {"smoke": (1, 4, 6), "full": (1, 48, 64)}
NONE, ALL, EPILOGUE = "references", "all four", "library's epilogue"
GAIN, EXPECTED_GAIN = "vision tower with all four kernels, times faster in a graph", 1.4
"""Predicted from the references' passes: a rotation moves some 13 times what its kernel does."""
PRODUCT_SHARE = 0.75
"""Share of the large product's rate that the shapes here are expected to reach."""
DRAFT_BUFFERS = 8


@dataclass(frozen=True)
class Tower:
    """A model's vision tower and one image of random pixels for it."""

    name: str
    weights: VisionWeights
    grid: GridTable
    pixels: Tensor

    @property
    def case(self) -> str:
        """Its name in a record."""
        return f"{self.name} {len(self.pixels)} patches"

    @torch.no_grad()
    def run(self, ops: Ops) -> Tensor:
        """Features and DeepStack taps, stacked [1 + taps, N / merge², hidden]."""
        features, taps = encode(self.pixels, self.grid, self.weights, ops)
        return torch.stack([features, *taps])


def tower(loaded: models.Loaded, grid: tuple[int, int, int], seed: int) -> Tower:
    """The tower of `loaded` for one image of `grid` (frames, rows, columns) in patches.

    Pixels are in fp32 from -1 to 1, as the processor gives them.
    """
    weights = collect(loaded.model, packed=False).vision
    generator = torch.Generator().manual_seed(seed)
    pixels = 2 * torch.rand(math.prod(grid), weights.patch.weight[0].numel(), generator=generator) - 1
    return Tower(loaded.name, weights, grid_table((grid,), weights), pixels.to(loaded.device))


def subject(profile: str, seed: int) -> Tower:
    """What the profile looks at: the embedded model's tower and a small image (`smoke`), or the tower of the real
    weights where they are there, else of random-2b, and a photo (`full`).

    On a CPU the tower is in fp32, since Triton's interpreter is not right in bf16.
    """
    real = settings().model_dir
    full = real if real.is_dir() else models.RANDOM_2B
    device = models.default_device()
    loaded = models.load(full if profile == "full" else models.TINY, device, torch.float32 if device == "cpu" else None)
    return tower(loaded, GRIDS[profile], seed)


def table(names: Iterable[str]) -> Ops:
    """The references, with the kernels of these names in their places."""
    return Ops(**{name: MODULES[name].launch for name in names})


def captured(inside: Tower) -> dict[str, list[tuple[Any, ...]]]:
    """Arguments that the tower gives to each kernel's reference: for every kind of call, those of the deepest layer."""
    found: dict[str, dict[str, tuple[Any, ...]]] = {name: {} for name in MODULES}

    def note(name: str, reference: Callable[..., Any], *args: Any) -> Any:
        kind = str([tuple(arg.shape) if isinstance(arg, Tensor) else arg for arg in args])
        found[name][kind] = args
        return reference(*args)

    plain = Ops()
    inside.run(Ops(**{name: partial(note, name, getattr(plain, name)) for name in MODULES}))
    return {name: list(calls.values()) for name, calls in found.items()}


def captured_errors(inside: Tower) -> dict[str, oracle.Errors]:
    """Each kernel's worst errors on the tower's own activations, in units of its reference's."""
    return {
        name: oracle.worst([oracle.compare(MODULES[name], name, args) for args in calls])
        for name, calls in captured(inside).items()
    }


def tower_error(inside: Tower) -> float:
    """Relative RMS error of the tower's results with all kernels, in units of that with none; both against float64."""
    exact = replace(inside, weights=widened(inside.weights)).run(Ops())
    ours, plain = (inside.run(ops).double() - exact for ops in (table(MODULES), Ops()))
    return (ours.norm() / plain.norm()).item()


def widened(value: Any) -> Any:
    """The same weights with every tensor in float64."""
    if isinstance(value, Tensor):
        return value.double()
    if is_dataclass(value):
        return replace(value, **{field.name: widened(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, tuple):
        return tuple(map(widened, value))
    return {key: widened(item) for key, item in value.items()} if isinstance(value, dict) else value


def checks(inside: Tower, bench: Bench, seed: int) -> list[tuple[str, str, float, float]]:
    """What `Record.check` takes: every kernel on the tower's activations, and the whole tower.

    On a CPU kernels run in Triton's interpreter, which must be set before Triton is imported and therefore has a
    process of its own with a tower of its own.
    """
    errors, whole = found_errors(inside) if bench.on_gpu else _interpreted_errors(seed)
    rows = [row for name in MODULES for row in kernel_study.check_rows(f"{name} in the tower", errors[name])]
    return [*rows, ("tower with all four: RMS error / references'", "near", whole, oracle.RMS_BOUND)]


def found_errors(inside: Tower) -> tuple[dict[str, oracle.Errors], float]:
    """Errors of every kernel on the tower's activations, and of the tower's results with all of them."""
    return captured_errors(inside), tower_error(inside)


def _interpreted_errors(seed: int) -> tuple[dict[str, oracle.Errors], float]:
    command = ["env", "TRITON_INTERPRET=1", sys.executable, "-m", "vlmopt.workbook.vision_study", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise VlmoptError(f"the check in Triton's interpreter failed: {last}")
    errors, whole = json.loads(done.stdout.splitlines()[-1])
    return {name: oracle.Errors(*pair) for name, pair in errors.items()}, whole


def predictions(chosen: Target, bench: Bench) -> list[tuple[str, float, str]]:
    """What `Record.predict` takes: the usual prediction, and for kernels behind a product what that costs more.

    The product runs at a share of the large one's rate; the pass over it reads and writes it at the copy's.
    """
    rows = kernel_study.predictions(chosen, bench)
    if bench.provider == kernel_study.REFERENCE or chosen.module not in (bias_gelu, patch_embed):
        return rows
    return [
        (what, us + _product_extra_us(chosen, case.params, bench), unit)
        for case, (what, us, unit) in zip(bench.cases(chosen), rows, strict=True)
    ]


def _product_extra_us(chosen: Target, params: dict[str, Any], bench: Bench) -> float:
    flops = chosen.module.cost(**params)[1]
    again = 2 * params["rows"] * params.get("out", params.get("hidden")) * bench.dtype.itemsize
    product = 1e6 * bench.roof.floor_s(flops=flops)
    return product / PRODUCT_SHARE - product + 1e6 * bench.roof.floor_s(again) / kernel_study.SHARE


def all_predictions(bench: Bench) -> list[tuple[str, float, str]]:
    """Those of every kernel, and the tower's gain where it can be measured."""
    rows = [row for chosen in TARGETS for row in predictions(chosen, bench)]
    return [*rows, (GAIN, EXPECTED_GAIN, "×")] if bench.on_gpu else rows


def settle(record: Record, inside: Tower, bench: Bench) -> None:
    """Puts what was measured beside the predictions."""
    kernel_study.settle(record, TARGETS, bench)
    if bench.on_gpu:
        before, after = (record.value("tower_ms", name, inside.case) for name in (NONE, ALL))
        record.settle(GAIN, before / after)


def measure_epilogue(record: Record, bench: Bench, seed: int) -> None:
    """Times the library's own epilogue beside the second pass, as `draft_us`, and keeps it as lost where it is slower.

    It is checked first: its single rounding must not be worse than the reference's two.
    """
    if not bench.on_gpu:
        record.skip("bias_gelu: the library's epilogue", "there is no GPU; a CPU's library has none")
        return
    chosen = kernel_study.target(bias_gelu)
    case = bench.cases(chosen)[0]
    generator = torch.Generator(bench.device).manual_seed(seed)
    arguments = [bias_gelu.make(case.params, bench.device, bench.dtype, generator) for _ in range(DRAFT_BUFFERS)]
    errors = oracle.compare(bias_gelu, chosen.op, arguments[0], bias_gelu.epilogue)
    for row in kernel_study.check_rows(f"bias_gelu, {EPILOGUE}", errors):
        record.check(*row)
    drafts = {kernel_study.OWN: bias_gelu.launch, EPILOGUE: bias_gelu.epilogue}
    samples = kernel_study.interleaved(drafts, arguments, bench, rounds=4)
    for name, values in samples.items():
        record.measure(chosen.label(case), name, "draft_us", "us", values)
    own, other = (statistics.median(samples[name]) for name in drafts)
    if other > own:
        lesson = f"{plots.number(other)} µs against {plots.number(own)} of a product and a pass"
        record.lose(f"bias_gelu, {EPILOGUE}", lesson)


def measure_tower(record: Record, inside: Tower, bench: Bench, rounds: int = 3) -> None:
    """Times the tower with no kernel, each one and all: `tower_ms` in a graph, `tower_eager_ms` launch by launch."""
    tables = {NONE: Ops(), **{f"with {name}": table([name]) for name in MODULES}, ALL: table(MODULES)}
    runs = {name: partial(inside.run, ops) for name, ops in tables.items()}
    kernel_study.measure_effect(record, inside.case, "tower_ms", runs, bench, rounds)
    if bench.on_gpu:
        times = {name: partial(loop_time, [runs[name]], rounds=5, device=bench.device) for name in (NONE, ALL)}
        for name, values in interleave_series(times, rounds).items():
            record.measure(inside.case, name, "tower_eager_ms", "ms", values)


def conclude(record: Record, inside: Tower, bench: Bench) -> tuple[str, str]:
    """The record's answer and verdict."""
    answer, verdict = kernel_study.conclude(record, TARGETS, bench)
    if not bench.on_gpu:
        return answer, verdict
    n = plots.number
    graph, eager = (
        tuple(record.value(metric, name, inside.case) for name in (NONE, ALL))
        for metric in ("tower_ms", "tower_eager_ms")
    )
    draft = {row["provider"]: row["p50"] for row in record.find("draft_us") if row["case"].startswith("bias_gelu")}
    better = EPILOGUE if draft[EPILOGUE] < draft[kernel_study.OWN] else "second pass"
    return (
        f"{answer} The tower goes from {n(graph[0])} to {n(graph[1])} ms in a graph.",
        f"{verdict} Launch by launch the tower goes from {n(eager[0])} to {n(eager[1])} ms. GELU in the library's "
        f"epilogue takes {n(draft[EPILOGUE])} µs and as a second pass {n(draft[kernel_study.OWN])}: the {better} wins.",
    )


def main(seed: str) -> None:
    """Prints the embedded tower's errors as one line of JSON, for a process that interprets."""
    torch.set_num_threads(1)
    errors, whole = found_errors(subject("smoke", int(seed)))
    print(json.dumps([{name: (found.rms, found.largest) for name, found in errors.items()}, whole]))


if __name__ == "__main__":
    main(*sys.argv[1:])
