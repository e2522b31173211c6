import subprocess
import sys
import time

import pytest
import torch

from vlmopt.bench import timing


def test_quantiles_are_linear_between_neighbours_and_ignore_order():
    assert timing.quantiles([5, 1, 3, 2, 4]) == {"p50": 3, "p20": 1.8, "p80": 4.2, "p95": 4.8, "n": 5}


def test_quantiles_of_one_sample_and_of_none():
    assert timing.quantiles([7.0]) == {"p50": 7.0, "p20": 7.0, "p80": 7.0, "p95": 7.0, "n": 1}
    with pytest.raises(ValueError, match="no samples"):
        timing.quantiles([])


def test_timed_returns_the_result_and_milliseconds():
    result, ms = timing.timed(lambda: time.sleep(0.02) or "done", "cpu")
    assert result == "done"
    assert ms >= 20


def test_both_sides_of_a_timed_call_are_synchronised(monkeypatch):
    order = []
    monkeypatch.setattr(timing, "synchronize", lambda device: order.append(f"sync {device}"))
    timing.time_call(lambda: order.append("call"), "cuda:1")
    assert order == ["sync cuda:1", "call", "sync cuda:1"]


def test_cuda_cache_is_emptied_before_the_synchronisation(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("empty"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(f"sync {device}"))
    timing.clear_cache("cuda:0")
    timing.clear_cache("cpu")
    assert order == ["empty", "sync cuda:0"]


def test_interleave_goes_a_b_b_a():
    order = []
    fns = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}
    samples = timing.interleave(fns, rounds=3)
    assert "".join(order) == "abbaab"
    assert samples == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_enough_copies_to_exceed_the_cold_size():
    assert timing.copies_for_cold_reads(16_777_216, 400_000_000) == 24
    assert timing.copies_for_cold_reads(100, 400) == 5  # more than the cold size, not just as much
    assert timing.copies_for_cold_reads(622_000_000, 400_000_000) == 1


def test_launch_time_on_a_cpu_is_per_launch(monkeypatch):
    runs = []

    def ten_milliseconds(fn, device):
        fn()
        return 10.0

    monkeypatch.setattr(timing, "time_call", ten_milliseconds)
    times = timing.launch_time([lambda name=name: runs.append(name) for name in "abcde"], device="cpu", replays=3)
    assert times == [2.0, 2.0, 2.0]
    assert "".join(runs) == "abcde" * 4  # one round to warm up


def test_warm_chip_keeps_busy_for_the_time_asked():
    assert timing.time_call(lambda: timing.warm_chip("cpu", 0.05), "cpu") >= 50


def test_import_initialises_no_device():
    code = "import vlmopt.bench.timing, vlmopt.bench.roofline, torch; print(torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a CUDA device")
def test_graph_time_replays_every_launch_and_counts_them():
    counter = torch.zeros(2, device="cuda")
    launches = [lambda: counter[0].add_(1), lambda: counter[1].add_(1)]
    times = timing.graph_time(launches, min_nodes=7, replays=5)
    assert len(times) == 5 and all(ms > 0 for ms in times)
    # one warm-up each, then 8 nodes (4 of each launch) in 1 + 5 replays; capturing itself runs nothing
    assert counter.tolist() == [25.0, 25.0]
