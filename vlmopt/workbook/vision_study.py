"""The vision kernels inside the tower: right on activations captured from it, and what they make of it as a whole."""

import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vlmopt.bench import models
from vlmopt.bench.timing import interleave_series, loop_time
from vlmopt.config import settings
from vlmopt.errors import VlmoptError
from vlmopt.kernels import add_layer_norm, bias_gelu, oracle, patch_embed, vision_attention, vision_rotary
from vlmopt.kernels.case import Case
from vlmopt.kernels.vision_attention import Tiles
from vlmopt.ops import Ops
from vlmopt.stages.tables import GridTable, grid_table
from vlmopt.stages.vision import encode
from vlmopt.weights import VisionWeights, collect
from vlmopt.workbook import kernel_study, plots
from vlmopt.workbook import prefill_attention_study as library
from vlmopt.workbook.kernel_study import Bench, Target
from vlmopt.workbook.record import ROOT, Record

MODULES: dict[str, ModuleType] = {
    "vision_rotary": vision_rotary,
    "add_layer_norm": add_layer_norm,
    "bias_gelu": bias_gelu,
    "patch_embed": patch_embed,
    "vision_attention": vision_attention,
}
"""The kernels of this study by the name of their entry in the table of ops."""

TARGETS = tuple(map(kernel_study.target, MODULES.values()))
GRIDS = {"smoke": (1, 4, 6), "full": (1, 48, 64)}
NONE, ALL, SECOND_PASS = "references", "all five", "a second pass"
ONE_CALL, PUBLIC = library.VARLEN, "varlen_attn"
GAIN, EXPECTED_GAIN = "vision tower with all five kernels, times faster in a graph", 1.45
"""Predicted from the references' passes: a rotation moves some 13 times what its kernel does."""
PRODUCT_SHARE, ATTENTION_SHARE, ONE_CALL_SHARE = 0.75, 0.6, 0.5
"""Shares of the large product's rate that are expected of the products here, of our attention, and of the library's
one call, which does without Hopper's own matrix instructions."""
DRAFT_BUFFERS = 8
TILES = (Tiles(64, 4, 64, 2), Tiles(64, 4, 32, 4), Tiles(64, 4, 128, 2), Tiles(128, 4, 64, 3), Tiles(128, 8, 64, 3))
"""Other tiles of attention, to be held against the package's."""
UNSEEN_CASE = "vision_attention, a size never seen"


@dataclass(frozen=True)
class Attention(Target):
    """Attention beside the library's ways to it, each where it works: by the case's name, then by provider."""

    ways: Mapping[str, Mapping[str, Callable[..., Tensor]]] = field(default_factory=dict)

    def baselines(self, case: Case) -> dict[str, Callable[..., Any]]:
        """One call a segment by the backend that torch chooses, and the other ways."""
        return {**super().baselines(case), **self.ways.get(case.name, {})}


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
    if bench.on_gpu:
        rows += kernel_study.check_rows(f"vision_attention, {ONE_CALL}", _one_call_errors(bench, seed))
    return [*rows, (f"tower with {ALL}: RMS error / references'", "near", whole, oracle.RMS_BOUND)]


def _one_call_errors(bench: Bench, seed: int) -> oracle.Errors:
    chosen = TARGETS[-1]
    drawn = [_draw(case.params, bench, seed) for case in bench.cases(chosen)]
    library_call = vision_attention.launch_library
    return oracle.worst([oracle.compare(chosen.module, chosen.op, args, library_call) for args in drawn])


def _draw(params: dict[str, Any], bench: Bench, seed: int) -> tuple[Any, ...]:
    return vision_attention.make(params, bench.device, bench.dtype, torch.Generator(bench.device).manual_seed(seed))


def varlen_attn(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """torch's public call for all segments; since torch 2.14 that is cuDNN on a Hopper, before it FlashAttention-2."""
    from torch.nn.attention import varlen

    ends = vision_attention.table_of(vision_attention.bounds, lengths, q.device)
    return varlen.varlen_attn(q, k, v, ends, ends, max(lengths), max(lengths)).flatten(1)


def ways() -> dict[str, Callable[..., Tensor]]:
    """The library's ways to the tower's attention: a segment a call by each backend, and all segments in one."""
    segments = library.by_backend(vision_attention.vision_attention_ref)
    return {**segments, ONE_CALL: vision_attention.launch_library, PUBLIC: varlen_attn}


def beside_library(record: Record, bench: Bench, seed: int) -> tuple[Target, ...]:
    """The targets, attention's with the library's ways that work here; the others are skipped with the reason."""
    *others, chosen = TARGETS
    if not bench.on_gpu:
        record.skip("vision_attention: the library's ways", "they are a GPU's, and there is none")
        return TARGETS
    able = {}
    for case in bench.cases(chosen):
        args = _draw(case.params, bench, seed)
        able[case.name] = library.working(record, chosen.label(case), ways(), chosen.module, chosen.op, args)
    return *others, Attention(chosen.module, chosen.op, ways=able)


def measure_tiles(record: Record, bench: Bench, seed: int) -> None:
    """Times attention with other tiles as `draft_us`; the slower ones are kept as lost."""
    chosen = TARGETS[-1]
    if not bench.on_gpu:
        record.skip(f"{chosen.op}: drafts", "there is no GPU to time them on")
        return
    case = bench.cases(chosen)[0]
    arguments = [_draw(case.params, bench, seed + i) for i in range(DRAFT_BUFFERS)]
    drafts = {_describe(tiles): partial(chosen.launch, config=tiles) for tiles in TILES}
    samples = kernel_study.interleaved(
        {kernel_study.OWN: chosen.launch, **drafts}, arguments, bench, rounds=2, replays=5
    )
    kernel_study.record_drafts(record, chosen, case, samples, kernel_study.OWN)


def _describe(tiles: Tiles) -> str:
    return f"{tiles.block} rows, {tiles.keys} keys, {tiles.warps} warps, {tiles.stages} stages"


def measure_unseen(record: Record, bench: Bench, seed: int) -> None:
    """Wall time of attention's first and second call at sizes never seen, by who computes it."""
    if not bench.on_gpu:
        record.skip("vision_attention: sizes never seen", "there is no GPU")
        return
    params = vision_attention.CASES[0].params
    lengths = random.Random(seed).sample(range(516, 3000, 8), library.UNSEEN + 1)  # no case's: those are multiples of 8
    draws = [_draw({**params, "lengths": (length,)}, bench, seed) for length in lengths]
    able = library.working(record, UNSEEN_CASE, ways(), vision_attention, "vision_attention", draws[0])
    library.measure_unseen(record, UNSEEN_CASE, {kernel_study.OWN: vision_attention.launch, **able}, draws, bench)


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
    if bench.provider == kernel_study.REFERENCE or chosen.module not in (bias_gelu, patch_embed, vision_attention):
        return rows
    return [
        (what, us + _extra_us(chosen, case.params, bench), unit)
        for case, (what, us, unit) in zip(bench.cases(chosen), rows, strict=True)
    ]


def _extra_us(chosen: Target, params: dict[str, Any], bench: Bench) -> float:
    flops = chosen.module.cost(**params)[1]
    if chosen.module is vision_attention:
        return 1e6 * bench.roof.floor_s(flops=flops) * (1 / ATTENTION_SHARE - 1)
    again = 2 * params["rows"] * params.get("out", params.get("hidden")) * bench.dtype.itemsize
    product = 1e6 * bench.roof.floor_s(flops=flops)
    return product / PRODUCT_SHARE - product + 1e6 * bench.roof.floor_s(again) / kernel_study.SHARE


def all_predictions(bench: Bench) -> list[tuple[str, float, str]]:
    """Those of every kernel, and where they can be measured the library's attention and the tower's gain."""
    rows = [row for chosen in TARGETS for row in predictions(chosen, bench)]
    if not bench.on_gpu:
        return rows
    flops = vision_attention.cost(**vision_attention.CASES[0].params)[1]
    one_call = 1e6 * bench.roof.floor_s(flops=flops) / ONE_CALL_SHARE
    return [*rows, (_one_call(), one_call, "us"), (GAIN, EXPECTED_GAIN, "×")]


def _one_call() -> str:
    return f"{_main()}, {ONE_CALL}"


def _main() -> str:
    return TARGETS[-1].label(vision_attention.CASES[0])


def settle(record: Record, inside: Tower, bench: Bench) -> None:
    """Puts what was measured beside the predictions."""
    kernel_study.settle(record, TARGETS, bench)
    if bench.on_gpu:
        before, after = (record.value("tower_ms", name, inside.case) for name in (NONE, ALL))
        record.settle(GAIN, before / after)
        for row in record.find(kernel_study.METRIC, ONE_CALL, _main()):
            record.settle(_one_call(), row["p50"])


def measure_second_pass(record: Record, bench: Bench, seed: int) -> None:
    """Times a Triton pass over the product beside the library's epilogue, as `draft_us`, and keeps it as lost where it
    is slower. It is checked first."""
    if not bench.on_gpu:
        record.skip(f"bias_gelu: {SECOND_PASS}", "there is no GPU to time it on")
        return
    chosen = kernel_study.target(bias_gelu)
    case = bench.cases(chosen)[0]
    generator = torch.Generator(bench.device).manual_seed(seed)
    arguments = [bias_gelu.make(case.params, bench.device, bench.dtype, generator) for _ in range(DRAFT_BUFFERS)]
    errors = oracle.compare(bias_gelu, chosen.op, arguments[0], bias_gelu.second_pass)
    for row in kernel_study.check_rows(f"bias_gelu, {SECOND_PASS}", errors):
        record.check(*row)
    drafts = {kernel_study.OWN: bias_gelu.launch, SECOND_PASS: bias_gelu.second_pass}
    samples = kernel_study.interleaved(drafts, arguments, bench, rounds=4)
    for name, values in samples.items():
        record.measure(chosen.label(case), name, "draft_us", "us", values)
    own, other = (statistics.median(samples[name]) for name in drafts)
    if other > own:
        lesson = f"{plots.number(other)} µs against {plots.number(own)} of the library's epilogue"
        record.lose(f"bias_gelu, {SECOND_PASS}", lesson)


def measure_tower(record: Record, inside: Tower, bench: Bench, rounds: int = 3) -> None:
    """Times the tower with no kernel, each one, the library's one call for attention, and all kernels: `tower_ms` in a
    graph, `tower_eager_ms` launch by launch."""
    tables = {
        NONE: Ops(),
        **{f"with {name}": table([name]) for name in MODULES},
        f"with {ONE_CALL}": Ops(vision_attention=vision_attention.launch_library),
        ALL: table(MODULES),
    }
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
    better = SECOND_PASS if draft[SECOND_PASS] < draft[kernel_study.OWN] else "the epilogue"
    told = [
        f"{what}: {found}."
        for what, case, metric in (
            ("Attention of one image", _main(), kernel_study.METRIC),
            ("Its first call at a size never seen", UNSEEN_CASE, library.FIRST),
            ("Prefill attention", library.MAIN, library.METRIC),
        )
        if (found := library.told(record, case, metric))
    ]
    return (
        f"{answer} The tower goes from {n(graph[0])} to {n(graph[1])} ms in a graph.",
        f"{verdict} Launch by launch the tower goes from {n(eager[0])} to {n(eager[1])} ms. GELU in the library's "
        f"epilogue takes {n(draft[kernel_study.OWN])} µs and as a second pass {n(draft[SECOND_PASS])}: {better} wins. "
        + " ".join(told),
    )


def main(seed: str) -> None:
    """Prints the embedded tower's errors as one line of JSON, for a process that interprets."""
    torch.set_num_threads(1)
    errors, whole = found_errors(subject("smoke", int(seed)))
    print(json.dumps([{name: (found.rms, found.largest) for name, found in errors.items()}, whole]))


if __name__ == "__main__":
    main(*sys.argv[1:])
