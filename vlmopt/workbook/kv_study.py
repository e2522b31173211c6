"""What a cache of eight bits saves of a decode step over a long context, on the 2B shapes."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from tqdm.auto import tqdm

from vlmopt.bench import models, roofline
from vlmopt.bench.timing import interleave_series
from vlmopt.config import OptimizeConfig
from vlmopt.ops import table
from vlmopt.quant.costs import KV
from vlmopt.quant.kv_scales import with_kv_scales
from vlmopt.runtime.cache import KVCache
from vlmopt.runtime.graphs import DecodeGraphs
from vlmopt.stages.tables import rope
from vlmopt.weights import collect
from vlmopt.workbook import plots
from vlmopt.workbook.decode_study import METRIC, ROWS_FREE, Stairs, at
from vlmopt.workbook.kernel_study import Bench
from vlmopt.workbook.record import Record, Roof

PLAIN = "fast"
EIGHT = f"{PLAIN}, {KV}"
DTYPES = MappingProxyType({PLAIN: "auto", EIGHT: "fp8"})
POSITIONS = (1024, 16384, 31000)
PREDICTED_MS = MappingProxyType(dict(zip(POSITIONS, (1.32, 1.52, 1.72), strict=True)))
"""A step over eight bits: a step whose layers are not one entry, and half of the keys' and values' bytes."""


def predictions(bench: Bench) -> list[tuple[str, float, str]]:
    """What `Record.predict` takes: on a GPU in `full`, a step over a cache of eight bits."""
    if not bench.on_gpu or bench.profile != "full":
        return []
    return [(_named(row), ms, "ms") for row, ms in PREDICTED_MS.items()]


def _named(row: int) -> str:
    return f"{EIGHT} (lossy): a step at {row:,}"


def contenders(loaded: models.Loaded, longest: int) -> dict[str, Stairs]:
    """The steps of `fast` with both caches, each full of random rows for `longest` positions; a GPU is needed."""
    weights = with_kv_scales(collect(loaded.model, packed=True).text)
    found = {}
    for name, dtype in DTYPES.items():
        config = OptimizeConfig.preset(PLAIN, kv_cache_dtype=dtype)
        cache = KVCache(weights, config.has_fp8_cache)
        with torch.no_grad():
            cache.reserve(longest + ROWS_FREE)
            for layer in cache.buffer:
                layer.copy_(torch.randn(layer.shape, dtype=weights.embed.dtype, device=layer.device))
            positions = torch.arange(cache.capacity, device=weights.embed.device).expand(3, -1)
            angles = rope(positions, weights, weights.embed.dtype)
        graphs = DecodeGraphs(weights, table(config), cache)
        graphs.forget()
        found[name] = Stairs(loaded.name, weights, loaded.model.config, {name: graphs}, cache, angles)
    return found


def measure(record: Record, loaded: models.Loaded, bench: Bench, positions: Sequence[int] = POSITIONS) -> None:
    """Adds `step_ms` of both, and the memory of both caches as `cache_gb`; on a CPU what is skipped."""
    if not bench.on_gpu:
        record.skip("decode steps over a cache of eight bits", "there is no GPU to time them on")
        return
    field = contenders(loaded, max(positions))
    for name, subject in field.items():
        buffer = subject.cache.buffer
        record.measure(f"{subject.cache.capacity:,} positions", name, "cache_gb", "GB", [buffer.nbytes / 1e9])
    for row in tqdm(positions, desc="decode steps over long contexts", leave=False):
        measure_at(record, field, row, bench.roof)


def measure_at(record: Record, field: Mapping[str, Stairs], row: int, roof: Roof, rounds: int = 4) -> None:
    """Adds `step_ms` of all at this number of live positions, in the order A B B A."""
    runs = {name: partial(subject.series, name, row, 8) for name, subject in field.items()}
    with torch.no_grad():
        for name, values in interleave_series(runs, rounds).items():
            moved = roofline.decode_bytes(field[name].config, row, cache_bytes=field[name].cache.buffer.element_size())
            record.measure(at(field[name].name, row), name, METRIC, "ms", values, bytes=moved, ceiling=roof)


def settle(record: Record) -> None:
    """Puts what was measured beside the predictions, and a step that does not gain among what lost."""
    for plain, found in _pairs(record):
        row = next(row for row in POSITIONS if found["case"].endswith(f" at {row:,}"))
        record.settle(_named(row), found["p50"])
        if found["p50"] >= plain["p50"]:
            n = plots.number
            lesson = f"{n(found['p50'])} ms against {n(plain['p50'])}; they save memory"
            record.lose(f"keys and values in e4m3, for a faster step ({found['case']})", lesson)


def told(record: Record) -> str:
    """What the record says of the steps, in a sentence; empty where none was timed."""
    n = plots.number
    steps = [f"{n(own['p50'])} ms ({plain['case']}, `fast` {n(plain['p50'])})" for plain, own in _pairs(record)]
    return f" A step over keys and values in e4m3: {', '.join(steps)}." if steps else ""


def _pairs(record: Record) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """The steps at each number of positions, over a plain cache and over eight bits."""
    return zip(record.find(METRIC, PLAIN), record.find(METRIC, EIGHT), strict=True)
