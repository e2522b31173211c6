"""What each part and group of kernels gives: the model built up from stock, and `fast` with one thing taken away."""

import itertools
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from tqdm.auto import tqdm

import vlmopt
from vlmopt.bench import protocol
from vlmopt.bench.timing import clear_cache, timed
from vlmopt.config import PRESETS, OptimizeConfig
from vlmopt.errors import VlmoptError
from vlmopt.ops import KERNELS
from vlmopt.workbook import decode_study, end_to_end, plots
from vlmopt.workbook.decode_study import LAYERS, RUNGS
from vlmopt.workbook.end_to_end import STOCK
from vlmopt.workbook.quant_bench import DECODE_MS
from vlmopt.workbook.record import Record, Roof

METRICS = ("ttft_ms", "decode_ms_per_token")
LOSS = MappingProxyType({"ttft_ms": "ttft_lost_ms", "decode_ms_per_token": "decode_lost_ms"})
EXACT, GRAPH, VISION, PREFILL = "exact", "+ packed, in a graph", "+ vision kernels", "+ attention over the prompt"
PACKED, FAST = "+ packed", "fast"
DRIVERS = ("cpp_runtime", "prompt_graphs")
"""Parts that launch kernels of their own for vision and prefill, whatever the table of ops holds."""
PREDICTED_MS = MappingProxyType(
    {
        **{STOCK: 27.5, EXACT: 18.0, GRAPH: 4.5, VISION: 4.5, PREFILL: 4.5},
        "+ attention over the live length": 4.2,
        "+ norms, rope, activation": 1.8,
        "+ products": 1.4,
        "+ head": 1.32,
        LAYERS: 1.08,
        FAST: 1.08,
        **DECODE_MS,
    }
)
"""Decode in ms a token on an H200, random-2b, 768 by 1,024: stock as others measured it, the rest as in the notebook on
the decode step, with what the host adds; the presets over quantised copies as in the notebook on them."""
_VISION = ("patch_embed", "add_layer_norm", "vision_rotary", "vision_attention", "bias_gelu", "deepstack_add")
_REACHED = {VISION: _VISION, PREFILL: ("prefill_attention",), **RUNGS}
_SERVED = {rung: tuple(name for name in names if name in KERNELS) for rung, names in _REACHED.items()}
GROUPS = MappingProxyType({rung: names for rung, names in _SERVED.items() if names})
"""The kernels that a greedy call reaches, by the rung that adds them."""
EAGER_TOKENS = 32
"""Length of a call whose steps are launched one by one from Python: each is so slow that so few tell its time."""
OTHER_IDS = 0.5
"""Share of the ids of one answer in which a lossy preset may differ: it may read a letter otherwise, but does read."""


def ladder(on_gpu: bool) -> dict[str, OptimizeConfig | None]:
    """Configs from stock (None) to `fast`, each with more than the one before; on a CPU those without kernels."""
    exact = PRESETS["exact"]
    if not on_gpu:
        texts = {"text": {"text": True}, "+ vision": {"text": True, "vision": True}, EXACT: exact}
        steps = {**texts, PACKED: {**exact, "packed": True}}
        return {STOCK: None, **{name: OptimizeConfig.make(**options) for name, options in steps.items()}}
    bare = {**exact, "packed": True, "decode_graph": True}
    found = {STOCK: None, EXACT: OptimizeConfig.make(**exact), GRAPH: OptimizeConfig.make(**bare)}
    names: tuple[str, ...] = ()
    for rung, more in GROUPS.items():
        names += more
        found[rung] = OptimizeConfig.make(**bare, kernels=names)
    return {**found, FAST: OptimizeConfig.preset(FAST)}


def lossy(target: Any, record: Record) -> dict[str, OptimizeConfig]:
    """`fast` over quantised copies, to stand above the ladder; what cannot run here is recorded as skipped."""
    found = {}
    for preset in DECODE_MS:
        missing = [part for part in vlmopt.plan(target.model, preset).parts if part.state == "skipped"]
        if missing:
            record.skip(f"preset {preset} on {target.name}", f"{missing[0].name} {missing[0].reason}")
        else:
            found[preset] = OptimizeConfig.preset(preset)
    return found


def whole(on_gpu: bool) -> str:
    """The rung from which things are taken away: on a GPU all of `fast` but what drives the kernels of a prompt."""
    return LAYERS if on_gpu else PACKED


def without(on_gpu: bool) -> dict[str, OptimizeConfig]:
    """What the rung `whole` runs, with one part or one group of kernels taken away."""
    parts = ["vision", "connector", "packed"] + ["decode_graph"] * on_gpu
    base = _driven_from_python() if on_gpu else {**PRESETS["exact"], "packed": True}
    found = {f"without {part}": OptimizeConfig.make(**{**base, part: False}) for part in parts}
    for group, entries in GROUPS.items() if on_gpu else ():
        found[f"without {group.removeprefix('+ ')}"] = _without_kernels(entries)
    return found


def kernel_by_kernel(on_gpu: bool) -> dict[str, OptimizeConfig]:
    """What the rung `whole` runs without one kernel that a greedy call reaches, for a panel."""
    entries = itertools.chain.from_iterable(GROUPS.values()) if on_gpu else ()
    return {f"without {entry}": _without_kernels((entry,)) for entry in entries}


def _without_kernels(entries: Sequence[str]) -> OptimizeConfig:
    others = tuple(name for name in KERNELS if name not in entries)
    return OptimizeConfig.make(**{**_driven_from_python(), "kernels": others})


def _driven_from_python() -> dict[str, Any]:
    return {option: value for option, value in PRESETS[FAST].items() if option not in DRIVERS}


def classes(model: Any, configs: Mapping[str, OptimizeConfig | None]) -> dict[str, dict[str, str]]:
    """The class of every config but stock, as a record's `providers` hold it."""
    return {name: {"class": vlmopt.plan(model, config).cls} for name, config in configs.items() if config is not None}


def check_answers(
    record: Record, target: Any, sample: Any, configs: Mapping[str, OptimizeConfig | None], tokens: int = 16
) -> None:
    """Holds every config to stock's answer to one sample, lossy ones to half of its ids; for weights that can read.

    Raises:
        VlmoptError: a config answers otherwise.
    """
    shares = other_ids(target, sample, configs, tokens)
    found = classes(target.model, configs)
    kept = [share for name, share in shares.items() if found[name]["class"] != "lossy"]
    what = f"sample {sample['question_id']}"
    record.check(f"configs whose answer to {what} is not stock's", "near", sum(share > 0 for share in kept), 0)
    for name, share in shares.items():
        if found[name]["class"] == "lossy":
            record.check(f"{name}: share of other ids than stock's, {what}", "lossy", share, OTHER_IDS)


def other_ids(target: Any, sample: Any, configs: Mapping[str, OptimizeConfig | None], tokens: int) -> dict[str, float]:
    """The share of the ids of stock's answer that each config gives otherwise, at most 1."""
    inputs = protocol.prepare(target, sample)
    length = inputs["input_ids"].shape[1]
    found = {}
    with protocol.quiet_generation():
        expected = protocol.generate(target, inputs, tokens)[0, length:].tolist()
        for name, config in configs.items():
            if config is not None:
                with vlmopt.optimized(target.model, config):
                    own = protocol.generate(target, inputs, tokens)[0, length:].tolist()
                pairs = itertools.zip_longest(expected, own)
                found[name] = min(1.0, sum(a != b for a, b in pairs) / len(expected))
    return found


@dataclass(frozen=True)
class Sizes:
    """How often each config is timed: first tokens alone, and calls that go on."""

    first_tokens: int
    rounds: int


def measure(
    target: Any,
    sample: Any,
    configs: Mapping[str, OptimizeConfig | None],
    base: str,
    sizes: Sizes,
    seed: int,
) -> dict[str, dict[str, list[float]]]:
    """Samples of both metrics by config, each optimised anew, on one model and the same inputs.

    They come once each in random order, but `base` at the start, in the middle and at the end, since a drift of the
    machine between it and the others would be taken for theirs.

    Raises:
        VlmoptError: a config handed a call to stock, or answered with one token.
    """
    found: dict[str, dict[str, list[float]]] = {metric: {name: [] for name in configs} for metric in METRICS}
    inputs = protocol.prepare(target, sample)
    with protocol.quiet_generation():
        for name in tqdm(_order(configs, base, seed), desc="configs", leave=False):
            vlmopt.revert(target.model)
            if configs[name] is not None:
                vlmopt.optimize(target.model, configs[name])
            firsts, steps = _times(target, inputs, configs[name], sizes)
            found["ttft_ms"][name] += firsts
            found["decode_ms_per_token"][name] += steps
            end_to_end.refuse_stock_calls({name: end_to_end.Contender(name, target, "", {}, None)})
    vlmopt.revert(target.model)
    return found


def _order(names: Iterable[str], base: str, seed: int) -> list[str]:
    others = [name for name in names if name != base]
    random.Random(seed).shuffle(others)
    half = len(others) // 2
    return [base, *others[:half], base, *others[half:], base]


def _times(target: Any, inputs: Any, config: OptimizeConfig | None, sizes: Sizes) -> tuple[list[float], list[float]]:
    """Milliseconds to the first token, and for a further one in calls that go on."""
    in_graph = config is not None and config.decode_graph
    tokens = protocol.THROUGHPUT_TOKENS if in_graph else EAGER_TOKENS
    length = inputs["input_ids"].shape[1]

    def call(tokens: int) -> tuple[Any, float]:
        clear_cache(target.device)
        return timed(lambda: protocol.generate(target, inputs, tokens), target.device)

    call(protocol.WARM_UP_TOKENS)
    firsts, steps = [call(protocol.TTFT_TOKENS)[1] for _ in range(sizes.first_tokens)], []
    for _ in range(sizes.rounds):
        firsts.append(call(protocol.TTFT_TOKENS)[1])
        ids, whole = call(tokens)
        later = ids.shape[1] - length - 1
        if not later:
            raise VlmoptError("the answer is one token long, so no further one can be timed; ask another question")
        steps.append((whole - firsts[-1]) / later)
    return firsts, steps


def measure_ladder(
    record: Record,
    case: str,
    samples: Mapping[str, Mapping[str, Sequence[float]]],
    target: Any,
    configs: Mapping[str, OptimizeConfig | None],
    inputs: Any,
    roof: Roof,
) -> None:
    """Adds both metrics of the ladder, `configs`, with their share of the roofline."""
    own = {metric: {name: values[name] for name in configs} for metric, values in samples.items()}
    grid, tokens = tuple(inputs["image_grid_thw"][0].tolist()), inputs["input_ids"].shape[1]
    end_to_end.measure_speed(record, case, own, target.model, configs, grid, tokens, roof)


def measure_losses(
    record: Record,
    case: str,
    samples: Mapping[str, Mapping[str, Sequence[float]]],
    configs: Iterable[str],
    base: str,
) -> None:
    """Adds what is lost under each of `configs` against `base`: how much later the first token comes, and a further
    one."""
    for config, (metric, name) in itertools.product(configs, LOSS.items()):
        median = statistics.median(samples[metric][base])
        record.measure(case, config, name, "ms", [value - median for value in samples[metric][config]])


def predicted(rung: str, case: str) -> str:
    """The name of a rung's prediction, with the class of those that are lossy."""
    return f"decode, {rung}{' (lossy)' * (rung in DECODE_MS)}, {case}"


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
    """Answer and verdict from the record; the best of the ladder is one that keeps the answers."""
    n, named = plots.number, partial(end_to_end.named, record)
    first, last = ({row["provider"]: row["p50"] for row in record.find(metric, case=case)} for metric in METRICS)
    kept = [name for name in last if record.class_of(name) != "lossy"]
    best = min(kept, key=last.get)
    missed = [
        f"{row['provider'].removeprefix('without ')} for {label} ({n(row['p50'])} ms)"
        for name, label in (("ttft_lost_ms", "the first token"), ("decode_lost_ms", "a further one"))
        for row in [max(record.find(name, case=case), key=lambda row: row["p50"])]
        if row["p20"] > 0
    ]
    answer = (
        f"From stock to {named(best)} a further token falls from {n(last[STOCK])} to {n(last[best])} ms and the first "
        f"from {n(first[STOCK])} to {n(min(first[name] for name in kept))}; what is missed most is "
        f"{' and '.join(missed) or 'nothing'}."
    )
    copied = [f"{named(name)} {n(ms)} ms" for name, ms in last.items() if name not in kept]
    if copied:
        answer += f" Over quantised copies a further token takes {' and '.join(copied)}."
    idle = [entry["what"] for entry in record.lost]
    return answer, f"Nothing measurable comes from {', '.join(idle)}." if idle else "Every part gives something."


def one(target: Any, sample: Any, config: OptimizeConfig) -> list[dict[str, Any]]:
    """Medians of both metrics under one config, for a panel."""
    samples = measure(target, sample, {"chosen": config}, "chosen", Sizes(1, 1), 0)
    return [{"metric": metric, "ms": statistics.median(values["chosen"])} for metric, values in samples.items()]
