"""The vision kernels' study: what it captures, what it predicts, and its path on a GPU with the clock replaced."""

from dataclasses import dataclass, replace

import pytest
import torch

from vlmopt.bench import models
from vlmopt.errors import VlmoptError
from vlmopt.kernels import oracle
from vlmopt.ops import Ops
from vlmopt.workbook import figures, kernel_study, vision_study
from vlmopt.workbook.record import Record, Roof

ENVIRONMENT = {"device": "cpu", "torch": "2"}


@pytest.fixture(scope="module")
def inside():
    return vision_study.tower(models.load(models.TINY, "cpu", torch.float32), (1, 4, 6), 0)


@dataclass(frozen=True)
class PretendedGPU(kernel_study.Bench):
    @property
    def on_gpu(self) -> bool:
        return True

    def cases(self, chosen):
        return [case for case in chosen.module.CASES if case.cpu]


@pytest.fixture
def bench(monkeypatch):
    """A bench that takes the paths of a GPU: references in the kernels' place, and a clock that counts calls."""
    for module in vision_study.MODULES.values():
        name = module.__name__.rpartition(".")[2]
        reference = getattr(module, f"{name}_ref")
        monkeypatch.setattr(module, "launch", lambda *args, config=None, call=reference: call(*args))
    monkeypatch.setattr(kernel_study, "graph_time", lambda launches, **_: [(launches[0](), 0.5)[1]] * 3)
    monkeypatch.setattr(kernel_study.torch.cuda, "get_device_properties", lambda _: type("P", (), {"L2_cache_size": 1}))
    monkeypatch.setattr(kernel_study.torch.cuda, "mem_get_info", lambda _: (10**9, 10**9))
    return PretendedGPU(torch.device("cpu"), torch.float32, "full", Roof(1e12, 1e12), (1.0,))


@pytest.fixture
def record():
    made = Record("26_vision_kernels", "?", "full", "tiny", ENVIRONMENT)
    made.check("a check", "near", 0, 1)
    return made


def test_every_kind_of_call_is_captured_once(inside):
    calls = vision_study.captured(inside)
    assert {name: len(found) for name, found in calls.items()} == {
        "patch_embed": 1,
        "vision_rotary": 1,
        "add_layer_norm": 3,  # without a residual, with one, and the mergers' wide rows
        "bias_gelu": 2,
    }
    for name, found in calls.items():
        assert all(oracle.compare(vision_study.MODULES[name], name, args, reference(name)).ok for args in found)


def reference(name):
    return getattr(vision_study.MODULES[name], f"{name}_ref")


def test_the_table_holds_the_kernels_asked_for():
    table = vision_study.table(["bias_gelu"])
    assert table.bias_gelu is vision_study.bias_gelu.launch
    assert table.patch_embed is Ops().patch_embed


def test_the_truth_is_in_float64_and_near_the_tower(inside):
    weights = vision_study.widened(inside.weights)
    assert weights.blocks[0].qkv.weight.dtype == weights.deepstack[1].fc1.bias.dtype == torch.float64
    assert weights.n_heads == inside.weights.n_heads
    exact = replace(inside, weights=weights).run(Ops())
    assert exact.dtype == torch.float64
    torch.testing.assert_close(inside.run(Ops()).double(), exact, rtol=1e-3, atol=1e-3)


def test_the_whole_tower_shows_a_wrong_kernel(inside, bench, monkeypatch):
    assert vision_study.tower_error(inside) == 1
    right = vision_study.vision_rotary.vision_rotary_ref
    monkeypatch.setattr(vision_study.vision_rotary, "launch", lambda qkv, cos, sin, n: right(qkv, cos, -sin, n))
    assert vision_study.tower_error(inside) > 1000


def test_the_interpreter_finds_all_kernels_right(inside):
    cpu = kernel_study.Bench(torch.device("cpu"), torch.float32, "smoke", Roof(1e10), (1.0,))
    rows = vision_study.checks(inside, cpu, seed=1)
    assert len(rows) == 2 * len(vision_study.MODULES) + 1
    assert all(measured <= bound for _, _, measured, bound in rows)


def test_kernels_behind_a_product_are_predicted_to_take_longer_than_the_floor(bench):
    for chosen in vision_study.TARGETS:
        usual, own = kernel_study.predictions(chosen, bench), vision_study.predictions(chosen, bench)
        longer = [mine[1] > other[1] for mine, other in zip(own, usual, strict=True)]
        assert all(longer) if chosen.op in ("bias_gelu", "patch_embed") else not any(longer)


def test_an_epilogue_of_another_form_is_refused(record, bench, monkeypatch):
    """On a CPU the library falls back to the erf form, which the tanh form's check must see."""
    with pytest.raises(VlmoptError, match="epilogue"):
        vision_study.measure_epilogue(record, bench, 0)
    assert not record.measurements


@pytest.mark.parametrize(("own", "other", "lost"), [(0.5, 0.7, 1), (0.7, 0.5, 0)])
def test_the_slower_way_to_gelu_is_told(record, inside, bench, monkeypatch, own, other, lost):
    gelu = vision_study.bias_gelu
    monkeypatch.setattr(gelu, "epilogue", lambda *args: gelu.bias_gelu_ref(*args))
    monkeypatch.setattr(
        kernel_study, "interleaved", lambda fns, *_, **__: dict(zip(fns, ([own], [other]), strict=True))
    )
    vision_study.measure_epilogue(record, bench, 0)
    assert len(record.lost) == lost


def test_the_path_of_a_gpu_ends_in_an_answer(record, inside, bench, monkeypatch):
    monkeypatch.setattr(vision_study.bias_gelu, "epilogue", lambda *args: vision_study.bias_gelu.bias_gelu_ref(*args))
    for prediction in vision_study.all_predictions(bench):
        record.predict(*prediction)
    vision_study.measure_epilogue(record, bench, 0)
    for chosen in vision_study.TARGETS:
        kernel_study.measure_kernel(record, chosen, bench, 0, rounds=2, compiled=0)
    vision_study.measure_tower(record, inside, bench)
    vision_study.settle(record, inside, bench)
    record.answer, record.verdict = vision_study.conclude(record, inside, bench)
    assert "0.5 ms in a graph" in record.answer and "wins" in record.verdict
    assert all(entry["measured"] for entry in record.predictions)
    assert len(figures.of(record)) == 5


def test_a_cpu_says_what_it_did_not_measure(record, inside):
    cpu = kernel_study.Bench(torch.device("cpu"), torch.float32, "smoke", Roof(1e10), (1.0,))
    vision_study.measure_epilogue(record, cpu, 0)
    vision_study.measure_tower(record, inside, cpu)
    assert len(record.skipped) == 2 and not record.measurements
