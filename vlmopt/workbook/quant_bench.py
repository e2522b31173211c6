"""What notebook 40 measures beside accuracy: the kernels over copies, launch configurations, presets on one model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from vlmopt.bench import models
from vlmopt.kernels import gemv_q4, gemv_q8, lm_head_q8
from vlmopt.kernels.case import Case
from vlmopt.quant import pack
from vlmopt.quant.copies import quantize, row_errors
from vlmopt.quant.schemes import SCHEMES
from vlmopt.weights import TextWeights
from vlmopt.workbook import answers, end_to_end, gemv_study, kernel_study, plots, quant_study
from vlmopt.workbook.kernel_study import Bench, Target
from vlmopt.workbook.record import Record

TARGETS = (Target(gemv_q8, "gemv_q8"), Target(gemv_q4, "gemv_q4"), Target(lm_head_q8, "lm_head_q8", launches=6))
PRESETS = {"fast8": "int8", "fast4": "int4"}
DECODE_MS = {"fast8": 0.63, "fast4": 0.48}
"""Predicted ms a further token of the 2B shapes: the copies' bytes at 80 % of the read rate, the rest as in `fast`."""
POINTS = {"int8 all": 0.1, "fp8 all": 0.3, "int4 all": 1.0}
"""Predicted loss of accuracy on the embedded model, in points."""
MEASURED = {"smoke": ("int8", "int4"), "full": tuple(SCHEMES)}
"""Whose answers a profile asks for."""
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


def predictions(bench: Bench) -> list[tuple[str, float, str]]:
    """What `Record.predict` takes: what the kernels, the answers and, on a GPU in `full`, the presets shall do."""
    found = [prediction for chosen in TARGETS for prediction in kernel_study.predictions(chosen, bench)]
    found += [
        (f"{scheme} all: points of accuracy lost", POINTS[f"{scheme} all"], "points")
        for scheme in MEASURED[bench.profile]
    ]
    if bench.on_gpu and bench.profile == "full":
        found += [(f"{preset} (lossy): a further token", ms, "ms") for preset, ms in DECODE_MS.items()]
    return found


def measure_sweep(record: Record, bench: Bench, seed: int) -> None:
    """Times other tiles of the products, one thing changed at a time, as `draft_us`; slower ones are kept as lost."""
    if not bench.on_gpu:
        record.skip("drafts", "there is no GPU to time them on")
        return
    for chosen in TARGETS[:2]:
        for case in tqdm(_main_cases(chosen, bench), desc=chosen.op, leave=False):
            shape = case.params["out"], case.params["width"]
            base = chosen.module.LAUNCH.get(shape, chosen.module.OTHER)
            tiles = (base, *(gemv_study.candidates(base) if chosen.module is gemv_q8 else candidates_q4(base)))
            drafts = {str(config): partial(chosen.launch, config=config) for config in tiles}
            draws = kernel_study.cold_draws(chosen, case, bench, seed)
            samples = kernel_study.interleaved(drafts, draws, bench, rounds=2)
            work = *bench.cost(chosen, case), bench.roof
            kernel_study.record_drafts(record, chosen, case, samples, str(base), *work)


def _main_cases(chosen: Target, bench: Bench) -> list[Case]:
    return [case for case in bench.cases(chosen) if case.params["rows"] == 1 and chosen.is_bounded(case)]


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
    found = quant_study.measure(samples, long_prompts=0, schemes=MEASURED[record.profile])
    case = f"{found['model']}, {found['samples']} samples"
    units = {"accuracy": "share", "ids_equal": "share", "tokens_equal": "share", "kl": "nats", "bytes_per_token": "B"}
    others = round((1 - found["rows"][quant_study.HEAD]["ids_equal"]) * found["samples"])
    record.check(f"{quant_study.HEAD}: answers with other ids, {case}", "exact", others, 0)
    for name, row in found["rows"].items():
        for metric, unit in units.items():
            record.measure(case, name, metric, unit, [row[metric]])


def measure_presets(record: Record, samples: Any, seed: int, rounds: int) -> None:
    """Adds speed and memory of `fast` and of the presets with copies on one model, in one process, interleaved."""
    subject = end_to_end.subject(record.profile, samples, seed)
    field = end_to_end.contenders(subject.target, ["fast", *PRESETS], record)
    if "fast" not in field:
        return
    record.config["providers"] = {name: contender.describe() for name, contender in field.items()}
    for metric, providers in end_to_end.speed(field, subject.sample, rounds, rounds).items():
        unit = "tokens/s" if metric == "tokens_per_s" else "ms"
        for name, values in providers.items():
            if values:
                record.measure(subject.case, name, metric, unit, values)
    end_to_end.measure_memory(record, subject.case, field, subject.sample)


def measure_row_errors(record: Record, name: str, text: TextWeights) -> None:
    """Adds `row_error`, every row's relative error in float64, of the last layer's products and of the head."""
    last = f"layers.{len(text.layers) - 1}."
    found = {key.removeprefix(last): own for key, own in pack.products_of(text).items() if key.startswith(last)}
    for part, linears in {**found, pack.HEAD: (text.head,)}.items():
        for scheme in SCHEMES.values():
            errors = torch.cat([row_errors(own.weight, quantize(own.weight, scheme)) for own in linears])
            record.measure(f"{name} {part}", scheme.name, "row_error", "share", errors.tolist())


def measure_answers(record: Record, samples: Any, bench: Bench) -> None:
    """Adds what stock, `fast` and the presets with copies answer by their kernels, over all samples (on a GPU)."""
    if not bench.on_gpu:
        record.skip("answers by the kernels", "there is no GPU to run them on; the references answered")
        return
    field = end_to_end.contenders(models.load(models.TINY), ["fast", *PRESETS], record)
    record.config["providers"] = {name: contender.describe() for name, contender in field.items()}
    indices = range(len(samples) if record.profile == "full" else 10)
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


def lost(record: Record, name: str) -> float:
    """Points of accuracy that a variant loses."""
    return 100 * (record.value("accuracy", quant_study.NONE) - record.value("accuracy", name))


def conclude(record: Record) -> tuple[str, str]:
    """The record's answer and verdict, from the record alone."""
    n = plots.number
    whole = record.value("bytes_per_token", quant_study.NONE)
    told = [
        f"{name.removesuffix(' all')} {n(100 * row['p50'] / whole)} % of the bytes, {_points(lost(record, name))}"
        for name in POINTS
        for row in record.find("bytes_per_token", name)
    ]
    case = record.find("accuracy", quant_study.NONE)[0]["case"]
    answer = (
        f"Weights that decode reads, with the int8 head ({case}): {'; '.join(told)}. The int8 head's ids are the same."
    )
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
