"""The matrix-vector kernels' study: its arithmetic, its tables, and its path on a GPU with the clock replaced."""

from dataclasses import dataclass

import pytest
import torch

from vlmopt.bench import models
from vlmopt.kernels import gemv, lm_head, oracle
from vlmopt.kernels.gemv import LAUNCH
from vlmopt.ops import Ops
from vlmopt.workbook import figures, gemv_study, kernel_study, text_study
from vlmopt.workbook.record import Record, Roof

SHARED_BYTES = 227 * 1024  # of a multiprocessor of compute capability 9.0
CPU = kernel_study.Bench(torch.device("cpu"), torch.float32, "smoke", Roof(1e10), (1.0,))


@dataclass(frozen=True)
class PretendedGPU(kernel_study.Bench):
    @property
    def on_gpu(self) -> bool:
        return True

    def cases(self, chosen):
        return [gemv._case(name, 1, 16 * n, 32) for n, name in enumerate(gemv_study.GOALS_US, 1)]


@pytest.fixture
def bench(monkeypatch):
    """A bench that takes the paths of a GPU: references in the kernels' place, and a clock that stands still."""
    monkeypatch.setattr(gemv, "launch", lambda *args, config=None: gemv.gemv_ref(*args))
    monkeypatch.setattr(kernel_study, "graph_time", lambda launches, **_: [(launches[0](), 5e-3)[1]] * 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"L2_cache_size": 1}))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**9, 10**9))
    return PretendedGPU(torch.device("cpu"), torch.float32, "full", Roof(1e12, 1e12), (1.0,))


@pytest.fixture
def record():
    made = Record("23_gemv", "?", "full", "tiny", {"device": "cpu", "torch": "2"})
    made.check("a check", "near", 0, 1)
    return made


@pytest.fixture(scope="module")
def subject():
    return text_study.prompt(models.load(models.TINY, "cpu", torch.float32), 12, 4, 0)


def test_little_s_law_at_the_memory_s_rate():
    assert gemv_study.in_flight_kib(4.6e12) == pytest.approx(34, abs=0.1)


def test_the_tiles_keep_enough_in_flight_and_fit():
    """The programs resident on one multiprocessor together, whose shared memory lets so many in."""
    for (out, n_in), tiles in LAUNCH.items():
        shared = gemv_study.shared_bytes(tiles)
        weights = shared * tiles.block_n / (tiles.block_n + gemv.ROWS.value)
        resident = min(SHARED_BYTES // shared, -(-out // tiles.block_n // gemv_study.PROCESSORS))
        assert resident * weights / 1024 >= gemv_study.in_flight_kib(4.6e12), (out, n_in)
    assert len(gemv_study.arithmetic()) == len(LAUNCH)


@pytest.mark.parametrize("base", LAUNCH.values(), ids=gemv_study.describe)
def test_candidates_are_distinct_and_fit_the_gpu(base):
    tried = [base, *gemv_study.candidates(base)]
    assert len(set(map(gemv_study.describe, tried))) == len(tried)
    assert all(gemv_study.shared_bytes(tiles) <= SHARED_BYTES for tiles in tried)
    assert all(tiles.block_n >= 16 and tiles.block_k >= 16 for tiles in tried)


def test_every_call_of_a_step_is_captured(subject):
    calls = gemv_study.captured(subject)
    layer = subject.weights.layers[0]
    assert len(calls["gemv"]) == len({tuple(w.weight.shape) for w in (*layer.qkv, layer.o, *layer.gate_up, layer.down)})
    assert len(calls["lm_head_logits"]) == 1
    assert oracle.compare(gemv, "gemv", calls["gemv"][0], gemv.gemv_ref).ok


def test_a_step_gives_the_token_of_the_model(subject):
    weights = subject.weights
    token = gemv_study.steps(subject, ["references"])["references"]()
    h = subject.decode(Ops())
    expected = lm_head.lm_head_argmax_ref(h, weights.norm.weight, weights.norm.eps, weights.head.weight)
    assert torch.equal(token, expected)


def test_the_path_of_a_gpu_ends_in_an_answer(record, bench):
    chosen = gemv_study.TARGET
    for prediction in kernel_study.predictions(chosen, bench):
        record.predict(*prediction)
    gemv_study.measure_sweep(record, chosen, bench, 0)
    kernel_study.measure_kernel(record, chosen, bench, 0, rounds=2, compiled=0)
    gemv_study.measure_alone(record, chosen, bench, 0)
    kernel_study.settle(record, [chosen], bench)
    answer, verdict = gemv_study.conclude(record, chosen, bench)
    assert "qkv 5 µs (5)" in answer and "0.56 ms a token" in answer
    assert verdict == "o is above its goal of 4.5 µs."
    assert len(gemv_study.sweep_rows(record, chosen, bench)) == len(gemv_study.GOALS_US)
    assert record.find("us", gemv_study.ALONE) and list(figures.of(record)) == ["23_gemv"]
    assert gemv_study.one(chosen, bench, bench.cases(chosen)[0].name, 16, 128, 2, 3)["p50"] == 5


def test_a_faster_draft_is_told(record, bench, monkeypatch):
    chosen = gemv_study.TARGET
    kernel_study.measure_kernel(record, chosen, bench, 0, rounds=2, compiled=0)
    times = iter([5.0, *[6.0] * 7, 3.0] * len(gemv_study.GOALS_US))
    monkeypatch.setattr(kernel_study, "interleaved", lambda fns, *_, **__: {name: [next(times)] for name in fns})
    gemv_study.measure_sweep(record, chosen, bench, 0)
    _, verdict = gemv_study.conclude(record, chosen, bench)
    assert verdict.count("is faster than the package's choice") == len(gemv_study.GOALS_US)
    assert len(record.lost) == 7 * len(gemv_study.GOALS_US)


def test_a_cpu_says_what_it_did_not_measure(record):
    chosen = gemv_study.TARGET
    gemv_study.measure_sweep(record, chosen, CPU, 0)
    gemv_study.measure_alone(record, chosen, CPU, 0)
    assert gemv_study.captured_checks(record, "gemv", CPU, 0) == []
    assert len(record.skipped) == 3 and gemv_study.goals(record) == []
    row = gemv_study.one(chosen, CPU, CPU.cases(chosen)[0].name, 16, 128, 2, 3)
    assert row["provider"] == kernel_study.REFERENCE and "reference" in row["case"]
