"""Timing that can be trusted: synchronised calls, interleaved comparisons, CUDA-graph replay over cold buffers.

Times are milliseconds. Everything imports and runs without CUDA; only `graph_time` needs a GPU.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

Measured = TypeVar("Measured")
QUANTILES = {"p50": 0.50, "p20": 0.20, "p80": 0.80, "p95": 0.95}


def quantiles(samples: Sequence[float]) -> dict[str, float | int]:
    """`p50`, `p20`, `p80`, `p95` (linear between neighbours) and `n` of the samples.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("quantiles of no samples")
    ordered = sorted(samples)
    return {name: _quantile(ordered, share) for name, share in QUANTILES.items()} | {"n": len(ordered)}


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low, high = math.floor(position), math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def synchronize(device: torch.device | str) -> None:
    """Wait for everything queued on a CUDA device; nothing to wait for on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def clear_cache(device: torch.device | str) -> None:
    """What the contest's harness does before every measurement: empty the CUDA allocator's cache, then synchronise."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    synchronize(device)


def timed(fn: Callable[[], Any], device: torch.device | str) -> tuple[Any, float]:
    """`fn()` and its wall time in ms, with a synchronisation on both sides inside the timer's reach."""
    synchronize(device)
    start = time.perf_counter()
    result = fn()
    synchronize(device)
    return result, (time.perf_counter() - start) * 1e3


def time_call(fn: Callable[[], Any], device: torch.device | str) -> float:
    """Wall time of one call in ms, synchronised on both sides."""
    return timed(fn, device)[1]


def interleave(fns: Mapping[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """Measure every entry once a round, in the order A B, B A, A B, …, so that a drift of the chip's clocks and
    temperature falls on all alike.

    `fns` maps a provider's name to a function that measures once and returns the value.
    """
    samples: dict[str, list[Measured]] = {name: [] for name in fns}
    for number in range(rounds):
        for name in alternate(list(fns), number):
            samples[name].append(fns[name]())
    return samples


def interleave_series(fns: Mapping[str, Callable[[], Sequence[float]]], rounds: int) -> dict[str, list[float]]:
    """As `interleave`, for functions that return several values each time; the series of one name are joined."""
    return {name: list(itertools.chain(*series)) for name, series in interleave(fns, rounds).items()}


def alternate(names: Sequence[str], number: int) -> list[str]:
    """The names in order on even rounds, reversed on odd ones."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def warm_chip(device: torch.device | str, seconds: float = 1.0) -> None:
    """Keep the chip busy for a while, so that clocks are up before the first measurement."""
    size = 4096 if torch.device(device).type == "cuda" else 256
    a = torch.randn(size, size, device=device)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(10):
            torch.mm(a, a)
        synchronize(device)


def copies_for_cold_reads(n_bytes: int, cold_bytes: int) -> int:
    """How many copies of a buffer of `n_bytes` it takes so that a cycle through all reads more than `cold_bytes`."""
    return cold_bytes // n_bytes + 1


def graph_time(
    launches: Sequence[Callable[[], Any]],
    *,
    min_nodes: int = 200,
    replays: int = 50,
    device: torch.device | str = "cuda",
) -> list[float]:
    """GPU time of one launch in ms, one value per replay of a CUDA graph that holds all the launches.

    Launch cost is out of the measurement: the launches are captured one after the other, over and over until the graph
    holds at least `min_nodes` of them. For cold weights give one launch per copy of the weights, the copies together
    well larger than the L2 cache (`copies_for_cold_reads`); results stay allocated in the graph's own pool.
    """
    device = torch.device(device)
    with torch.cuda.device(device):
        graph, nodes = _capture(launches, min_nodes)
        graph.replay()
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        for start, end in marks:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / nodes for start, end in marks]


def _capture(launches: Sequence[Callable[[], Any]], min_nodes: int) -> tuple["torch.cuda.CUDAGraph", int]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries make their handles and workspaces before the capture
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    nodes = len(launches) * math.ceil(min_nodes / len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in itertools.islice(itertools.cycle(launches), nodes):
            launch()
    return graph, nodes


def loop_time(launches: Sequence[Callable[[], Any]], *, rounds: int, device: torch.device | str) -> list[float]:
    """Wall time of one launch in ms, one value per round through all the launches, after one round to warm up."""

    def once() -> None:
        for launch in launches:
            launch()

    once()
    return [time_call(once, device) / len(launches) for _ in range(rounds)]


def launch_time(
    launches: Sequence[Callable[[], Any]], *, device: torch.device | str, replays: int = 50, min_nodes: int = 200
) -> list[float]:
    """Time of one launch in ms on any device: graph replay on CUDA, a plain loop elsewhere."""
    if torch.device(device).type == "cuda":
        return graph_time(launches, min_nodes=min_nodes, replays=replays, device=device)
    return loop_time(launches, rounds=replays, device=device)
