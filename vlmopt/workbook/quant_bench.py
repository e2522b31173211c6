"""What notebook 40 measures beside accuracy: the kernels over copies, launch configurations, presets on one model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from triton.runtime.errors import TritonError

from vlmopt.bench import models
from vlmopt.errors import VlmoptError
from vlmopt.kernels import gemv_q4, gemv_q8, gemv_ring_copies, lm_head_q8, native, oracle
from vlmopt.kernels.case import Case
from vlmopt.kernels.gemv_ring import Ring
from vlmopt.quant import pack
from vlmopt.quant.calibration import GPTQ
from vlmopt.quant.copies import quantize, row_errors
from vlmopt.quant.schemes import SCHEMES
from vlmopt.weights import TextWeights
from vlmopt.workbook import (
    answers,
    end_to_end,
    fresh,
    gemv_study,
    kernel_study,
    kv_study,
    plots,
    quant_study,
    quant_variants,
)
from vlmopt.workbook.kernel_study import Bench, Target
from vlmopt.workbook.record import Record


@dataclass(frozen=True)
class Products(Target):
    """Products over copies as the table of ops serves them: on Hopper of int8 and int4 by the ring, else in Triton."""

    @property
    def launch(self) -> Callable[..., Any]:
        """What the table calls for a few rows."""
        return _few_rows_q8 if self.module is gemv_q8 else gemv_ring_copies.few_rows

    def own(self, case: Case) -> bool:
        """Whether on Hopper the ring serves the case."""
        line = gemv_ring_copies.LINE * (2 if self.module is gemv_q4 else 1)
        return not case.params.get("fp8") and case.params["width"] % line == 0


def _few_rows_q8(x: Tensor, weight: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    return gemv_ring_copies.few_rows(x, weight, scale, None, *rest)


HEAD = Target(lm_head_q8, "lm_head_q8", launches=6)
PRODUCTS = Products(gemv_q8, "gemv_q8"), Products(gemv_q4, "gemv_q4")
TARGETS = (*PRODUCTS, HEAD)
TRITON = "Triton"
PRESETS = {"fast8": "int8", "fast4": "int4"}
PREDICTED_US = {
    "gemv_q8": {"qkv": 3.0, "o": 2.1, "gate_up": 6.9, "down": 4.2},
    "gemv_q4": {"qkv": 2.3, "o": 1.8, "gate_up": 4.3, "down": 2.9},
    "lm_head_q8": {"head": 85},
}
"""Of the ring at one row: the bytes at the read rate of `gemv_ring`, and what it takes beside them in bf16; of the head
also its five small launches."""
DECODE_MS = {"fast8": 0.74, "fast4": 0.60}
"""Predicted ms a further token of the 2B shapes: the products above in every layer, attention and head beside them."""
POINTS = {"int8 all": 0.1, "fp8 all": 0.3, "int4 all": 1.0, "int4-gptq all": 0.3}
"""Predicted loss of accuracy on the embedded model, in points."""
MEASURED = {"smoke": ("int8", "int4", GPTQ.name), "full": quant_variants.STUDIED}
"""Whose answers a profile asks for."""
CALIBRATION = {"smoke": 16, "full": quant_study.CALIBRATION}
STEP = "decode_ms_per_token"


@dataclass(frozen=True)
class Saving:
    """Bytes of weights that a decode step reads: in bf16 and as a scheme's copies with the int8 head."""

    plain: int
    copied: int


def savings(text: TextWeights) -> dict[str, Saving]:
    """By scheme, for a text model's shapes."""
    weights = [linear.weight for layer in text.layers for linear in (*layer.qkv, layer.o, *layer.gate_up, layer.down)]
    plain = 2 * sum(weight.numel() for weight in (*weights, text.head.weight))
    return {name: Saving(plain, pack.bytes_of(text, scheme, True)) for name, scheme in SCHEMES.items()}


def saving_rows(text: TextWeights) -> list[dict[str, Any]]:
    """`savings` as a table."""
    return [
        {"scheme": name, "MB a token, bf16": found.plain / 1e6, "MB a token": found.copied / 1e6}
        | {"share": f"{found.copied / found.plain:.0%}"}
        for name, found in savings(text).items()
    ]


def has_ring(bench: Bench) -> bool:
    """Whether the ring over copies runs on this machine; compiles it where that has not been done yet."""
    if native.refusal(bench.device) is not None:
        return False
    return native.works("gemv_ring_copies", torch.cuda.current_device(), "gemv_q8 and gemv_q4")


def predictions(bench: Bench) -> list[tuple[str, float, str]]:
    """What `Record.predict` takes: what the kernels, the answers and, on a GPU in `full`, the presets shall do."""
    ring = has_ring(bench)
    found = []
    for chosen in TARGETS:
        pairs = zip(kernel_study.predictions(chosen, bench), bench.cases(chosen), strict=True)
        found += [(what, (ring and _by_ring(chosen, case)) or us, unit) for (what, us, unit), case in pairs]
    found += [
        (f"{scheme} all: points of accuracy lost", POINTS[f"{scheme} all"], "points")
        for scheme in MEASURED[bench.profile]
    ]
    if bench.on_gpu and bench.profile == "full":
        found += [(f"{preset} (lossy): a further token", ms, "ms") for preset, ms in DECODE_MS.items()]
    return found + kv_study.predictions(bench)


def _by_ring(chosen: Target, case: Case) -> float | None:
    if case.params["rows"] != 1 or (isinstance(chosen, Products) and not chosen.own(case)):
        return None
    return PREDICTED_US[chosen.op].get(case.name.split()[0])


def checks(bench: Bench, seed: int) -> list[tuple[str, str, float, float]]:
    """What `Record.check` takes: on Hopper the ring's errors over its cases in both half dtypes, and of the head and of
    products in Triton those at the cases that are timed; elsewhere `kernel_study.checks`."""
    if not has_ring(bench):
        return kernel_study.checks(TARGETS, bench, seed)
    rows = []
    for chosen in PRODUCTS:
        cases = [case for case in chosen.module.CASES if chosen.own(case)]
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            rows += _judged(f"{chosen.op} by the ring, {name}", chosen, cases, dtype, bench, seed)
    for chosen in (PRODUCTS[0], HEAD):
        cases = [case for case in bench.cases(chosen) if chosen is HEAD or not chosen.own(case)]
        what = chosen.op if chosen is HEAD else f"{chosen.op} in Triton"
        rows += _judged(what, chosen, cases, bench.dtype, bench, seed)
    return rows


def _judged(
    what: str, chosen: Target, cases: Sequence[Case], dtype: torch.dtype, bench: Bench, seed: int
) -> list[tuple[str, str, float, float]]:
    if not cases:
        return []

    def launch(*args: Any) -> Any:
        torch.cuda.synchronize()  # a dependent launch reads its weight early
        return chosen.launch(*args)

    own = chosen.module, chosen.op
    errors = oracle.worst([oracle.compare_case(*own, case, bench.device, dtype, seed, launch) for case in cases])
    return kernel_study.check_rows(f"{what}, worst of {len(cases)} cases", errors)


def measure_sweep(record: Record, bench: Bench, seed: int) -> None:
    """Times other launch data of the products, one thing changed at a time, as `draft_us`; slower drafts are kept as
    lost, and refused ones as skipped. Where the ring serves, the kernel in Triton is a draft too."""
    if not bench.on_gpu:
        record.skip("drafts", "there is no GPU to time them on")
        return
    ring = has_ring(bench)
    for chosen in PRODUCTS:
        for case in tqdm(_main_cases(chosen, bench), desc=chosen.op, leave=False):
            draws = kernel_study.cold_draws(chosen, case, bench, seed)
            drafts = drafts_of(chosen, case, ring and chosen.own(case))
            base = next(iter(drafts))
            drafts = usable(record, chosen.label(case), drafts, draws[0])
            if base in drafts:
                samples = kernel_study.interleaved(drafts, draws, bench, rounds=2)
                work = *bench.cost(chosen, case), bench.roof
                kernel_study.record_drafts(record, chosen, case, samples, base, *work)


def drafts_of(chosen: Target, case: Case, ring: bool) -> dict[str, Callable[..., Any]]:
    """Launchers by the name of a draft, the one that serves first."""
    shape = case.params["out"], case.params["width"]
    four = chosen.module is gemv_q4
    if ring:
        base = gemv_ring_copies.LAUNCH
        rings = {describe(draft): partial(_by_config, chosen, draft) for draft in (base, *candidates_ring(base))}
        return {**rings, TRITON: chosen.module.launch}
    tiles = chosen.module.LAUNCH.get(shape, chosen.module.OTHER)
    others = candidates_q4(tiles) if four else gemv_study.candidates(tiles)
    return {str(config): partial(chosen.module.launch, config=config) for config in (tiles, *others)}


def _by_config(chosen: Target, config: Ring, x: Tensor, weight: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    rest = rest if chosen.module is gemv_q4 else (None, *rest)
    return gemv_ring_copies.launch(x, weight, scale, *rest, config=config)


def describe(ring: Ring) -> str:
    """Such as `8 warps, 4 stages, 2 blocks a multiprocessor`."""
    extra = ["dependents let go late"] * (not ring.early) + ["not dependent"] * (not ring.dependent)
    blocks = f"{ring.blocks} block{'s' * (ring.blocks > 1)} a multiprocessor"
    return ", ".join([f"{ring.warps} warps", f"{ring.stages} stages", blocks, *extra])


def candidates_ring(base: Ring) -> tuple[Ring, ...]:
    """`base` with one thing changed at a time."""
    return (
        replace(base, stages=base.stages + 2),
        replace(base, stages=base.stages - 1),
        replace(base, warps=12 - base.warps),
        replace(base, blocks=3 - base.blocks if base.blocks < 3 else 2),
        replace(base, early=not base.early),
        replace(base, dependent=False),
    )


def usable(
    record: Record, case: str, drafts: Mapping[str, Callable[..., Any]], args: Sequence[Any]
) -> dict[str, Callable[..., Any]]:
    """The drafts that this machine launches; the others are recorded as skipped."""
    found = {}
    for name, fn in drafts.items():
        try:
            fn(*args)
        except (VlmoptError, TritonError) as error:
            record.skip(f"{case}: {name}", str(error))
        else:
            found[name] = fn
    return found


def _main_cases(chosen: Target, bench: Bench) -> list[Case]:
    found: dict[tuple[int, int], Case] = {}
    for case in bench.cases(chosen):
        if case.params["rows"] == 1 and chosen.is_bounded(case) and not case.params.get("fp8"):
            found.setdefault((case.params["out"], case.params["width"]), case)
    return list(found.values())


def candidates_q4(base: gemv_q4.Tiles) -> tuple[gemv_q4.Tiles, ...]:
    """`base` with one thing changed at a time."""
    return (
        replace(base, groups=2 * base.groups),
        replace(base, groups=max(1, base.groups // 2)),
        replace(base, warps=2 * base.warps),
        replace(base, warps=base.warps // 2),
        replace(base, stages=base.stages + 2),
        replace(base, stages=base.stages - 1),
        replace(base, block_n=32 if base.block_n == 16 else 16),
        replace(base, ahead=0 if base.ahead else 512),
    )


def measure_accuracy(record: Record, samples: Sequence[Any]) -> None:
    """Adds accuracy, agreement, KL and bytes a token of every variant over these samples of the embedded model."""
    profile = record.profile
    found = quant_study.measure(samples, 0, MEASURED[profile], CALIBRATION[profile])
    case = f"{found['model']}, {found['samples']} samples"
    units = {"accuracy": "share", "ids_equal": "share", "tokens_equal": "share", "kl": "nats", "bytes_per_token": "B"}
    others = round((1 - found["rows"][quant_variants.HEAD]["ids_equal"]) * found["samples"])
    record.check(f"{quant_variants.HEAD}: answers with other ids, {case}", "exact", others, 0)
    for name, row in found["rows"].items():
        for metric, unit in units.items():
            record.measure(case, name, metric, unit, [row[metric]])


def measure_presets(record: Record, samples: Any, seed: int, rounds: int) -> None:
    """Adds speed and memory of `fast` and of the presets with copies on one model, in one process, interleaved."""
    subject = end_to_end.subject(record.profile, samples, seed)
    field = end_to_end.contenders(subject.target, ["fast", *PRESETS], record)
    del field[end_to_end.STOCK]  # every copy is told against `fast`, which notebook 61 holds against stock
    if "fast" not in field:
        return
    record.config["providers"] = {name: contender.describe() for name, contender in field.items()}
    for metric, providers in end_to_end.speed(field, subject.sample, rounds, rounds).items():
        unit = "tokens/s" if metric == "tokens_per_s" else "ms"
        for name, values in providers.items():
            if values:
                record.measure(subject.case, name, metric, unit, values)
    fresh.measure_memory(record, subject.case, subject.model, field)


def measure_row_errors(record: Record, name: str, text: TextWeights) -> None:
    """Adds `row_error`, every row's relative error in float64, of the last layer's products and of the head."""
    last = f"layers.{len(text.layers) - 1}."
    found = {key.removeprefix(last): own for key, own in pack.products_of(text).items() if key.startswith(last)}
    for part, linears in {**found, pack.HEAD: (text.head,)}.items():
        for scheme in SCHEMES.values():
            errors = torch.cat([row_errors(own.weight, quantize(own.weight, scheme)) for own in linears])
            record.measure(f"{name} {part}", scheme.name, "row_error", "share", errors.tolist())


def measure_answers(record: Record, samples: Any, bench: Bench) -> None:
    """Adds what stock, `fast` and the presets with copies answer by their kernels, over a few samples (on a GPU)."""
    if not bench.on_gpu:
        record.skip("answers by the kernels", "there is no GPU to run them on; the references answered")
        return
    field = end_to_end.contenders(models.load(models.TINY), ["fast", *PRESETS], record)
    record.config["providers"] = {name: contender.describe() for name, contender in field.items()}
    indices = range(40 if record.profile == "full" else 10)
    answers.measure_answers(record, "tiny by kernels", answers.answer(field, samples, indices))


def settle(record: Record, bench: Bench) -> None:
    """Puts what was measured beside the predictions."""
    kernel_study.settle(record, TARGETS, bench)
    for name in POINTS:
        if record.find("accuracy", name):
            record.settle(f"{name}: points of accuracy lost", lost(record, name))
    for preset in DECODE_MS:
        if record.find(STEP, preset) and bench.profile == "full":
            record.settle(f"{preset} (lossy): a further token", record.value(STEP, preset))
    kv_study.settle(record)


def lost(record: Record, name: str) -> float:
    """Points of accuracy that a variant loses."""
    return 100 * (record.value("accuracy", quant_variants.NONE) - record.value("accuracy", name))


def conclude(record: Record) -> tuple[str, str]:
    """The record's answer and verdict, from the record alone."""
    n = plots.number
    whole = record.value("bytes_per_token", quant_variants.NONE)
    told = [
        f"{name.removesuffix(' all')} {n(100 * row['p50'] / whole)} % of the bytes, {_points(lost(record, name))}"
        for name in POINTS
        for row in record.find("bytes_per_token", name)
    ]
    case = record.find("accuracy", quant_variants.NONE)[0]["case"]
    answer = (
        f"Weights that decode reads, with the int8 head ({case}): {'; '.join(told)}. The int8 head's ids are the same."
    )
    if record.find("accuracy", quant_variants.KV):
        answer += f" Keys and values in e4m3: {_points(lost(record, quant_variants.KV))}.{kv_study.told(record)}"
    if not record.find(STEP, "fast"):
        return answer, "What the copies cost is measured; what they gain shows on a GPU only."
    fast = record.value(STEP, "fast")
    speeds = {preset: record.value(STEP, preset) for preset in PRESETS if record.find(STEP, preset)}
    answer += (
        " A further token: "
        + ", ".join(f"{end_to_end.named(record, name)} {n(ms)} ms" for name, ms in {"fast": fast, **speeds}.items())
        + "."
    )
    slower = [
        f"{end_to_end.named(record, name)} is not faster than `fast` and is dropped"
        for name, ms in speeds.items()
        if ms >= fast
    ]
    return answer, "; ".join(slower) + "." if slower else "Both presets are faster than `fast`; each states its cost."


def _points(points: float) -> str:
    return "no accuracy lost" if math.isclose(points, 0, abs_tol=5e-3) else f"{points:.2f} points of accuracy lost"


def one(rows: int, scheme: str, bench: Bench) -> dict[str, Any]:
    """One product of the 2B model's MLP over copies as a measurement, for a panel; on a CPU a small one's reference."""
    chosen = TARGETS[1] if scheme == "int4" else TARGETS[0]
    width, out = (2048, 12288) if bench.on_gpu else (256, 512)
    params = {"rows": rows, "width": width, "out": out, "form": "gated"}
    if scheme != "int4":
        params["fp8"] = scheme == "fp8"
    case = Case(f"gate_up {rows} x {out}x{width} {scheme}", params)
    fn = chosen.launch if bench.on_gpu else chosen.reference
    draws = kernel_study.cold_draws(chosen, case, bench, 0)
    samples = kernel_study.interleaved({"one": fn}, draws, bench, rounds=1)["one"]
    moved, flops = bench.cost(chosen, case)
    return kernel_study.measurement(
        chosen.label(case),
        bench.provider,
        kernel_study.METRIC,
        "us",
        samples,
        bytes=moved,
        flops=flops,
        ceiling=bench.roof,
    )


def load(profile: str) -> Any:
    """The model whose bytes are told: the 2B shapes in `full`, else the embedded one."""
    return models.load(models.RANDOM_2B if profile == "full" else models.TINY)
