"""What each part and each kernel gives: the model built up from stock, and `fast` with one thing taken away."""

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tqdm.auto import tqdm

import vlmopt
from vlmopt.bench import protocol
from vlmopt.bench.timing import alternate
from vlmopt.config import PRESETS, OptimizeConfig
from vlmopt.ops import KERNELS
from vlmopt.workbook import decode_study, end_to_end, plots
from vlmopt.workbook.decode_study import REFERENCES, RUNGS, WHOLE
from vlmopt.workbook.end_to_end import STOCK
from vlmopt.workbook.record import Record, Roof

METRICS = ("ttft_ms", "decode_ms_per_token")
LOSS = MappingProxyType({"ttft_ms": "ttft_lost_ms", "decode_ms_per_token": "decode_lost_ms"})
FULL = "all of it"
EXACT, GRAPH, VISION, PREFILL = "exact", "+ packed, in a graph", "+ vision kernels", "+ attention over the prompt"
PREDICTED_MS = MappingProxyType(
    {
        **{STOCK: 27.5, EXACT: 18.0, GRAPH: 4.5, VISION: 4.5, PREFILL: 4.5},
        "+ attention over the live length": 4.2,
        "+ norms, rope, activation": 1.8,
        "+ products": 1.4,
        "+ head": 1.32,
        WHOLE: 1.12,
    }
)
"""Decode in ms a token on an H200, random-2b, 768 by 1,024: stock as others measured it, the rest as in the notebook on
the decode step, with what the host adds."""


def ladder(on_gpu: bool) -> dict[str, OptimizeConfig | None]:
    """Configs from stock (None) to `fast`, each with more than the one before; on a CPU those without kernels."""
    exact = PRESETS["exact"]
    if not on_gpu:
        texts = {"text": {"text": True}, "+ vision": {"text": True, "vision": True}, EXACT: exact}
        steps = {**texts, "+ packed": {**exact, "packed": True}}
        return {STOCK: None, **{name: OptimizeConfig.make(**options) for name, options in steps.items()}}
    bare = {**exact, "packed": True, "decode_graph": True}
    found = {STOCK: None, EXACT: OptimizeConfig.make(**exact), GRAPH: OptimizeConfig.make(**bare)}
    vision = ("patch_embed", "add_layer_norm", "vision_rotary", "vision_attention", "bias_gelu", "deepstack_add")
    added = {VISION: vision, PREFILL: ("prefill_attention",)}
    names: tuple[str, ...] = ()
    for rung, more in (added | dict(RUNGS)).items():
        more = tuple(name for name in more if name in KERNELS)
        if rung != REFERENCES and more:
            names += more
            found[rung] = OptimizeConfig.make(**bare, kernels=names)
    return found


def without(on_gpu: bool) -> dict[str, OptimizeConfig]:
    """`fast` (on a CPU `exact` with packed products) whole, and with one part or one kernel taken away."""
    parts = ["vision", "connector", "packed"] + ["decode_graph"] * on_gpu
    base = PRESETS["fast"] if on_gpu else {**PRESETS["exact"], "packed": True}
    found = {FULL: OptimizeConfig.make(**base)}
    found |= {f"without {part}": OptimizeConfig.make(**{**base, part: False}) for part in parts}
    for name in KERNELS if on_gpu else ():
        others = tuple(other for other in KERNELS if other != name)
        found[f"without {name}"] = OptimizeConfig.make(**{**base, "kernels": others})
    return found


def same_answers(target: Any, sample: Any, configs: Mapping[str, OptimizeConfig | None], tokens: int = 16) -> int:
    """How many of these configs give another answer than stock to one sample; for weights that can read."""
    inputs = protocol.prepare(target, sample)
    with protocol.quiet_generation():
        expected = protocol.generate(target, inputs, tokens)
        differing = 0
        for config in configs.values():
            if config is not None:
                with vlmopt.optimized(target.model, config):
                    differing += not protocol.generate(target, inputs, tokens).equal(expected)
    return differing


def measure(
    target: Any, sample: Any, configs: Mapping[str, OptimizeConfig | None], rounds: int, first_tokens: int
) -> dict[str, dict[str, list[float]]]:
    """Samples of both metrics by config, each optimised anew in the order A B … B A on one model.

    Raises:
        VlmoptError: a config handed a call to stock.
    """
    found: dict[str, dict[str, list[float]]] = {metric: {name: [] for name in configs} for metric in METRICS}
    for number in range(2):
        for name in tqdm(alternate(list(configs), number), desc=f"configs, pass {number + 1} of 2", leave=False):
            config = configs[name]
            vlmopt.revert(target.model)
            if config is not None:
                vlmopt.optimize(target.model, config)
            field = {name: end_to_end.Contender(name, target, "", {}, None)}
            speed = end_to_end.speed(field, sample, rounds, first_tokens)
            for metric in METRICS:
                found[metric][name] += speed[metric][name]
    vlmopt.revert(target.model)
    return found


def measure_ladder(
    record: Record,
    case: str,
    samples: Mapping[str, Mapping[str, Sequence[float]]],
    target: Any,
    inputs: Any,
    roof: Roof,
) -> None:
    """Adds both metrics of the ladder with their share of the roofline."""
    grid, tokens = tuple(inputs["image_grid_thw"][0].tolist()), inputs["input_ids"].shape[1]
    end_to_end.measure_speed(record, case, samples, target.model.config, grid, tokens, roof)


def measure_losses(record: Record, case: str, samples: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Adds what is lost without each thing: how much later the first token comes, and a further one."""
    for metric, name in LOSS.items():
        median = statistics.median(samples[metric][FULL])
        for config, values in samples[metric].items():
            if config != FULL:
                record.measure(case, config, name, "ms", [value - median for value in values])


def predicted(rung: str, case: str) -> str:
    """The name of a rung's prediction."""
    return f"decode, {rung}, {case}"


def settle(record: Record, case: str) -> None:
    """Puts what was measured beside the predictions."""
    decode_study.settle(record, case, "decode_ms_per_token", predicted)


def lose(record: Record, case: str) -> None:
    """Keeps what makes both parts of a call no slower when it is taken away."""
    spread = {name: record.find(name, case=case) for name in LOSS.values()}
    for row in spread["decode_lost_ms"]:
        (first,) = [other for other in spread["ttft_lost_ms"] if other["provider"] == row["provider"]]
        if row["p20"] <= 0 and first["p20"] <= 0:
            told = f"{plots.number(first['p50'])} ms to the first token, {plots.number(row['p50'])} ms a further token"
            record.lose(row["provider"].removeprefix("without "), f"taken away it costs nothing measurable: {told}")


def conclude(record: Record, case: str) -> tuple[str, str]:
    """Answer and verdict from the record."""
    n = plots.number
    first, last = ({row["provider"]: row["p50"] for row in record.find(metric, case=case)} for metric in METRICS)
    best = min(last, key=last.get)
    missed = [
        f"{row['provider'].removeprefix('without ')} for {label} ({n(row['p50'])} ms)"
        for name, label in (("ttft_lost_ms", "the first token"), ("decode_lost_ms", "a further one"))
        for row in [max(record.find(name, case=case), key=lambda row: row["p50"])]
        if row["p20"] > 0
    ]
    answer = (
        f"From stock to `{best}` a further token falls from {n(last[STOCK])} to {n(last[best])} ms and the first from "
        f"{n(first[STOCK])} to {n(min(first.values()))}; what is missed most is {' and '.join(missed) or 'nothing'}."
    )
    idle = [entry["what"] for entry in record.lost]
    return answer, f"Nothing measurable comes from {', '.join(idle)}." if idle else "Every part gives something."


def one(target: Any, sample: Any, config: OptimizeConfig) -> list[dict[str, Any]]:
    """Medians of both metrics under one config, for a panel."""
    samples = measure(target, sample, {"chosen": config}, 1, 2)
    return [{"metric": metric, "ms": statistics.median(values["chosen"])} for metric, values in samples.items()]
