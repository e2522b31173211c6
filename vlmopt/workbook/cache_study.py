"""The static KV cache: that an answer depends on nothing but its prompt, and what capacity and growth cost."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlmopt.bench import protocol
from vlmopt.bench.timing import time_call
from vlmopt.runtime.cache import SMALLEST, KVCache, bucket
from vlmopt.runtime.generate import ENGINES
from vlmopt.weights import TextWeights, collect
from vlmopt.workbook import plots
from vlmopt.workbook.end_to_end import STOCK, Contender, gain
from vlmopt.workbook.fresh import LOAD_LIMITS
from vlmopt.workbook.record import Record, Roof

MB = 1e6
HOST_LIMIT = 0.5
"""Milliseconds from the call of `generate` to its first launch."""


def new_ids(target: Any, inputs: Mapping[str, Tensor], tokens: int) -> list[int]:
    """The greedy answer's ids, without the prompt."""
    return protocol.generate(target, inputs, tokens)[0, inputs["input_ids"].shape[1] :].tolist()


def differing(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids differ on the common prefix of two answers."""
    return sum(a != b for a, b in zip(one, other, strict=False))


def noise(contender: Contender, sample: Any, tokens: int, rounds: int = 4) -> int:
    """The most ids of an answer that differ when the same call is made again."""
    inputs = protocol.prepare(contender.target, sample)
    with protocol.quiet_generation():
        first, *others = (new_ids(contender.target, inputs, tokens) for _ in range(rounds + 1))
    return max(differing(first, other) for other in others)


def checks(name: str, contender: Contender, sample: Any, limits: Sequence[int]) -> list[tuple[str, str, float, float]]:
    """What `Record.check` takes: ids of the sample's answer that change where nothing but the cache has changed.

    `limits` are numbers of new tokens, the largest last. The cache's storage must stay where it is between calls.
    """
    target, engine = contender.target, ENGINES[contender.target.model]
    inputs = protocol.prepare(target, sample)
    prompt, longest = inputs["input_ids"].shape[1], limits[-1]
    with protocol.quiet_generation():
        answers = {limit: new_ids(target, inputs, limit) for limit in limits}
        place = engine.cache.buffer.data_ptr()
        short = new_ids(target, inputs, limits[1])
        moved = engine.cache.buffer.data_ptr() != place
        engine.cache.buffer[:, :, :, prompt + longest :] = float("nan")
        poisoned = new_ids(target, inputs, longest)
        with torch.inference_mode(False), torch.no_grad():
            engine.reserve(2 * engine.cache.capacity)
        grown = new_ids(target, inputs, longest)
    found = {
        f"limits of {', '.join(map(str, limits))} new tokens": sum(
            differing(answers[limit], answers[longest]) for limit in limits
        ),
        f"{limits[1]} tokens after {longest}": differing(short, answers[limits[1]]),
        "NaN behind the live rows": differing(poisoned, answers[longest]),
        "twice the capacity": differing(grown, answers[longest]),
        "storage moved between calls": int(moved),
    }
    return [(f"{name}, {what}: differing ids", "exact", value, 0) for what, value in found.items()]


def lengths(profile: str) -> list[int]:
    """The numbers of positions for which memory and growth are shown."""
    return [SMALLEST << k for k in range(6 if profile == "full" else 4)]


def predict_growth(record: Record, weights: TextWeights, profile: str, roof: Roof) -> None:
    """Growing clears the new cache and copies the old one: three times the old bytes read or written, two cleared."""
    for length in lengths(profile)[1:]:
        moved = 2 * KVCache.bytes(weights, length)
        record.predict(growth(length), 1e3 * roof.floor_s(moved), "ms")


def growth(length: int) -> str:
    """The name of a growth's prediction."""
    return f"growth to {length}"


def measure_memory(record: Record, weights: TextWeights, profile: str) -> None:
    """Adds MB of keys and values by live positions: as many rows as live (what stock's cache holds) and the capacity
    that serves them."""
    largest = lengths(profile)[-1]
    per_row = KVCache.bytes(weights, largest) / largest
    for live in range(largest // 16, largest + 1, largest // 16):
        record.measure(f"positions {live}", STOCK, "live_mb", "MB", [per_row * live / MB])
        record.measure(f"positions {live}", "static", "capacity_mb", "MB", [KVCache.bytes(weights, live) / MB])


def measure_growth(record: Record, weights: TextWeights, profile: str, roof: Roof, rounds: int = 5) -> None:
    """Adds `grow_ms`: the time to double the capacity, contents kept, and settles its prediction."""
    for before, after in itertools.pairwise(lengths(profile)):
        times = []
        for _ in range(rounds + 1):
            cache = KVCache(weights)
            cache.reserve(before)
            times.append(time_call(partial(cache.reserve, after), weights.embed.device))
        moved = 2 * KVCache.bytes(weights, after)
        record.measure(f"capacity {after}", "static", "grow_ms", "ms", times[1:], bytes=moved, ceiling=roof)
        record.settle(growth(after), record.value("grow_ms", "static", f"capacity {after}"))


def text_weights(target: Any) -> TextWeights:
    """Shapes and dtype of the target's language model; leaves its parameters as they are."""
    return collect(target.model, packed=False).text


def one(weights: TextWeights, positions: int) -> list[dict[str, Any]]:
    """The capacity that serves `positions`, and its memory, for a panel."""
    return [{"capacity": bucket(positions), "MB": KVCache.bytes(weights, positions) / MB}]


def peaks(record: Record, case: str, cache_bytes: int) -> list[dict[str, Any]]:
    """Each provider's peak memory beside what it may be: stock's, a tenth of it more, and the cache."""
    rows = {row["provider"]: row["p50"] for row in record.find("peak_memory_gb", case=case)}
    if STOCK not in rows:
        return []
    allowed = 1.1 * rows[STOCK] + cache_bytes / 1e9
    return [
        {"provider": name, "GB": gb, "allowed": allowed, "stands": "good" if gb <= allowed else "above it"}
        for name, gb in rows.items()
        if name != STOCK
    ]


def conclude(record: Record, case: str, table: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Answer and verdict from the record and from what `peaks` found."""
    n = plots.number
    names = [m["provider"] for m in record.find("decode_ms_per_token", case=case) if m["provider"] != STOCK]
    told = ", ".join(f"`{name}` {gain(record, case, name, 'decode_ms_per_token'):.2f} ×" for name in names)
    grown = record.find("grow_ms")[-1]
    answer = (
        f"An answer's ids depend on neither capacity, earlier calls, nor what lies behind the live rows; decode is "
        f"{told} as fast as stock's, and growth to {grown['case'].removeprefix('capacity ')} positions takes "
        f"{n(grown['p50'])} ms."
    )
    slower = [name for name in names if gain(record, case, name, "decode_ms_per_token") < 1]
    faults = [f"{', '.join(slower)} is slower than stock's growing cache here"] * bool(slower)
    faults += [
        f"{row['provider']} peaks at {n(row['GB'])} GB where {n(row['allowed'])} are allowed"
        for row in table
        if row["stands"] != "good"
    ]
    faults += [
        f"`optimize` takes {n(row['p50'])} s with {row['case']} where {LOAD_LIMITS[row['case']]} are allowed"
        for row in record.find("optimize_s")
        if row["p50"] > LOAD_LIMITS[row["case"]]
    ]
    faults += [
        f"{row['provider']} takes {n(row['p50'])} ms to the first launch where {HOST_LIMIT} are allowed"
        for row in record.find("host_before_launch_ms", "fast")
        if row["p50"] > HOST_LIMIT
    ]
    return answer, "; ".join(faults) + "." if faults else "Kept."
