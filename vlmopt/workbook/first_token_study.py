"""The first token: what stands between the call and it at one size, and at image sizes never seen before."""

import random
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from vlmopt.bench import models, protocol, roofline
from vlmopt.bench.compilations import compiled
from vlmopt.bench.timing import alternate, clear_cache, timed
from vlmopt.config import PRESETS, OptimizeConfig
from vlmopt.ops import Ops
from vlmopt.stages.tables import grid_table
from vlmopt.stages.vision import encode
from vlmopt.weights import collect
from vlmopt.workbook import answers, end_to_end, plots
from vlmopt.workbook.end_to_end import STOCK, Contender
from vlmopt.workbook.profiling import profile_call
from vlmopt.workbook.record import Record, Roof

Size = tuple[int, int]
PYTHON, BUCKETS, CPP = "from Python", "by buckets", "from C++"
MAIN: Size = (768, 1024)
SIZES: Mapping[str, tuple[Size, ...]] = {"smoke": ((192, 256),), "full": ((512, 512), MAIN, (1536, 2048))}
"""Heights and widths in pixels that are looked at one by one, by profile."""
LIMITS = {"p50": 1.08, "p95": 1.25, "largest": 2.0}
"""What a size's first call may take, in units of the same size repeated."""
GROWTH_MB = 64.0
"""What may be held more after the second half of the sizes: memory that grows with every size passes it at once."""
REPEATS = 2


def drivers(on_gpu: bool) -> dict[str, OptimizeConfig]:
    """The configs that differ in who drives the layer loops: `fast`, or on a CPU the stages with packed products."""
    base = PRESETS["fast"] if on_gpu else {**PRESETS["exact"], "packed": True}
    return {
        name: OptimizeConfig.make(**{**base, "cpp_runtime": name == CPP, "prompt_graphs": name == BUCKETS})
        for name in (PYTHON, BUCKETS, CPP)
    }


def driver_checks(field: Mapping[str, Contender], samples: Any, seed: int) -> list[tuple[str, str, float, float]]:
    """What `Record.check` takes: how many of six samples each driver here answers otherwise than stock."""
    chosen = random.Random(seed).sample(range(len(samples)), 6)
    given = {name: [answers.new_ids(field[name].target, samples[i], 24) for i in chosen] for name in field}
    return [
        (f"of {len(chosen)} samples answered otherwise than stock, {name}", "near", _differing(given, name), 0)
        for name in field
        if name != STOCK
    ]


def _differing(given: Mapping[str, Sequence[Any]], name: str) -> int:
    return sum(a != b for a, b in zip(given[STOCK], given[name], strict=True))


def unseen_sizes(profile: str, seed: int) -> list[Size]:
    """200 random sizes of 448 to 1,344 pixels a side; six of 64 to 256 in `smoke`."""
    drawn = random.Random(seed)
    count, low, high = (200, 448, 1344) if profile == "full" else (6, 64, 256)
    return [(drawn.randint(low, high), drawn.randint(low, high)) for _ in range(count)]


def inputs_of(target: Any, size: Size, seed: int) -> Any:
    """The processor's output for a random image of a size and the usual question, on the target's device."""
    return protocol.prepare(target, end_to_end.synthetic_sample(*size, seed))


def first_token_ms(target: Any, inputs: Any) -> float:
    """One first token as the harness times it, its cache emptied before."""
    clear_cache(target.device)
    return timed(lambda: protocol.generate(target, inputs, protocol.TTFT_TOKENS), target.device)[1]


def case_of(name: str, size: Size) -> str:
    """A case's name."""
    return f"{name} {size[0]}x{size[1]}"


def tower_check(seed: int) -> list[tuple[str, str, float, float]]:
    """What `Record.check` takes: features and DeepStack taps of the embedded model against stock's on the CPU in fp32,
    for grids of one, two and three images; values that differ."""
    model = models.load(models.TINY, "cpu", torch.float32).model
    weights = collect(model, packed=False).vision
    rows = []
    for grids in (((1, 4, 6),), ((1, 2, 58), (1, 14, 2)), ((1, 10, 10), (1, 4, 4), (1, 6, 22))):
        patches = sum(t * h * w for t, h, w in grids)
        width = weights.patch.weight[0].numel()
        pixels = torch.randn(patches, width, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = model.model.visual(pixels, grid_thw=torch.tensor(grids), return_dict=True)
            features, taps = encode(pixels, grid_table(grids, weights), weights, Ops())
        pairs = zip((features, *taps), (expected.pooler_output, *expected.deepstack_features), strict=True)
        differing = sum((ours != theirs).sum().item() for ours, theirs in pairs)
        rows.append((f"vision tower, {len(grids)} images: values that differ from stock's", "exact", differing, 0))
    return rows


def measure_sizes(
    record: Record, field: Mapping[str, Contender], sizes: Sequence[Size], roof: Roof, seed: int, rounds: int
) -> None:
    """Adds `ttft_ms` of every provider at each size, interleaved, with its floor; and what the profiler sees of one
    call: `ttft_busy_ms`, `ttft_launches`."""
    for size in tqdm(sizes, desc="sizes", leave=False):
        target = field[STOCK].target
        inputs = inputs_of(target, size, seed)
        grid, tokens = tuple(inputs["image_grid_thw"][0].tolist()), inputs["input_ids"].shape[1]
        flops = roofline.prefill_flops(target.model.config, tokens, grid)
        case, samples = case_of(target.name, size), {name: [] for name in field}
        with protocol.quiet_generation():
            for name in field:
                first_token_ms(field[name].target, inputs)
            for number in range(rounds):
                for name in alternate(list(field), number):
                    samples[name].append(first_token_ms(field[name].target, inputs))
            for name, values in samples.items():
                record.measure(case, name, "ttft_ms", "ms", values, flops=flops, ceiling=roof)
            record.measure(case, plots.FLOOR, "ttft_ms", "ms", [1e3 * roof.floor_s(flops=flops)])
            for name, contender in field.items():
                call = partial(protocol.generate, contender.target, inputs, protocol.TTFT_TOKENS)
                seen = profile_call(call, target.device)
                record.measure(case, name, "ttft_busy_ms", "ms", [seen.busy_ms])
                record.measure(case, name, "ttft_launches", "launches", [seen.launches])


def measure_unseen(record: Record, field: Mapping[str, Contender], sizes: Sequence[Size], seed: int) -> None:
    """Times every size's first call, then, for all but stock, the same size again, each provider in turn.

    Adds `unseen_ms`, `repeated_ms` (the median of a size's repetitions) and `unseen_ratio` of the two; `compilations`
    that Triton made meanwhile; and on a GPU `resident_mb` of every provider at rest, and `memory_growth_mb`, what
    PyTorch holds more after the second half of the sizes than after the first, an emptied cache each time.
    """
    case = f"{len(sizes)} sizes never seen"
    first, again = ({name: [] for name in field} for _ in range(2))
    made: dict[str, int] = dict.fromkeys(field, 0)
    held: list[int] = []
    with protocol.quiet_generation():
        for number, size in enumerate(tqdm(sizes, desc="unseen sizes", leave=False)):
            # by a driver's processor, which prepares pixels on the GPU where there is one
            inputs = inputs_of(list(field.values())[-1].target, size, seed + number)
            for name in alternate(list(field), number):
                once = partial(first_token_ms, field[name].target, inputs)
                made[name] += len(compiled([lambda name=name, once=once: first[name].append(once())]))
                if name != STOCK:
                    again[name].append(statistics.median(once() for _ in range(REPEATS)))
            held.append(_held(field[STOCK].target.device))
    for name, contender in field.items():
        record.measure(case, name, "unseen_ms", "ms", first[name])
        record.measure(case, name, "compilations", "kernels", [made[name]])
        if again[name]:
            ratios = [a / b for a, b in zip(first[name], again[name], strict=True)]
            record.measure(case, name, "repeated_ms", "ms", again[name])
            record.measure(case, name, "unseen_ratio", "×", ratios)
        if contender.resident is not None:
            record.measure(case, name, "resident_mb", "MB", [contender.resident / 1e6])
    if held[-1]:
        half = len(held) // 2
        record.measure(case, "all", "memory_growth_mb", "MB", [(max(held[half:]) - max(held[:half])) / 1e6])


def _held(device: Any) -> int:
    clear_cache(device)
    return torch.cuda.memory_reserved(device) if torch.device(device).type == "cuda" else 0


def standing(record: Record) -> list[dict[str, Any]]:
    """Each driver's ratios of the first call to the repeated one beside what they may be."""
    table = []
    for row in record.find("unseen_ratio"):
        found = {"p50": row["p50"], "p95": row["p95"], "largest": max(row["samples"])}
        (made,) = record.find("compilations", row["provider"], row["case"])
        faults = [f"{name} above {LIMITS[name]}" for name, value in found.items() if value > LIMITS[name]]
        faults += [f"{made['p50']:.0f} kernels compiled"] * bool(made["p50"])
        table.append({"provider": row["provider"], **found, "stands": ", ".join(faults) or "good"})
    return table


def chosen(record: Record, names: Sequence[str]) -> str:
    """Of these providers the one with the least median over the sizes never seen, if its 95th percentile is the least
    too; else the one with the least sum of both."""
    rows = {name: record.find("unseen_ms", name)[0] for name in names}
    return min(rows, key=lambda name: rows[name]["p50"] + rows[name]["p95"])


def conclude(record: Record, name: str, sizes: Sequence[Size]) -> tuple[str, str]:
    """Answer and verdict about the sizes looked at one by one."""
    n = plots.number
    told, faults = [], []
    for size in sizes:
        case = case_of(name, size)
        rows = {row["provider"]: row for row in record.find("ttft_ms", case=case) if row["provider"] != plots.FLOOR}
        best = min(rows, key=lambda provider: rows[provider]["p50"])
        busy, launches = (record.value(metric, best, case) for metric in ("ttft_busy_ms", "ttft_launches"))
        told.append(
            f"{size[0]}x{size[1]} in {n(rows[best]['p50'])} ms (`{best}`, stock {n(rows[STOCK]['p50'])}, floor "
            f"{n(record.value('ttft_ms', plots.FLOOR, case))})"
        )
        if rows[best]["p50"] > 1.3 * busy:
            faults.append(f"{case}: the device works {n(busy)} ms in {launches:.0f} launches, the rest is the host's")
    answer = f"The first token comes at {'; '.join(told)}."
    return answer, "; ".join(faults) + "." if faults else "The device is busy nearly all of the time."


def conclude_unseen(record: Record, names: Sequence[str]) -> tuple[str, str]:
    """Answer and verdict about sizes never seen: which of `names` is to drive the layer loops."""
    n = plots.number
    best = chosen(record, names)
    told = [
        f"`{name}` {n(row['p50'])} ms, 95 % within {n(row['p95'])}"
        for name in dict.fromkeys([best, *names, STOCK])
        for row in record.find("unseen_ms", name)
    ]
    answer = f"Over {record.find('unseen_ms', best)[0]['case']}: {'; '.join(told)}."
    (stands,) = (line["stands"] for line in standing(record) if line["provider"] == best)
    faults = [stands] * (stands != "good")
    growth = [row["p50"] for row in record.find("memory_growth_mb") if row["p50"] > GROWTH_MB]
    faults += [f"memory grows by {n(mb)} MB" for mb in growth]
    good = f"`{best}` is chosen; a size never seen costs what a repeated one does, and compiles nothing."
    return answer, f"`{best}` is chosen, and does not hold its bars: {'; '.join(faults)}." if faults else good


def one(field: Mapping[str, Contender], provider: str, height: int, width: int) -> list[dict[str, Any]]:
    """Three first tokens at one size, for a panel."""
    target = field[provider].target
    inputs = inputs_of(target, (height, width), 0)
    with protocol.quiet_generation():
        return [{"call": number + 1, "ms": first_token_ms(target, inputs)} for number in range(3)]
