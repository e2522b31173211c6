"""The vision kernels' study: what it captures, what it predicts, and its path on a GPU with the clock replaced."""

from dataclasses import dataclass, replace

import pytest
import torch

from vlmopt.bench import models
from vlmopt.errors import VlmoptError
from vlmopt.kernels import oracle
from vlmopt.kernels.case import Case
from vlmopt.ops import Ops
from vlmopt.workbook import figures, kernel_study, prefill_attention_study, vision_study
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
    attention = vision_study.vision_attention
    monkeypatch.setattr(attention, "launch_library", attention.vision_attention_ref)
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
        "vision_attention": 1,
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
        computes = chosen.op in ("bias_gelu", "patch_embed", "vision_attention")
        assert all(longer) if computes else not any(longer)


def test_a_second_pass_of_another_form_is_refused(record, bench, monkeypatch):
    gelu = vision_study.bias_gelu
    monkeypatch.setattr(gelu, "second_pass", lambda x, weight, bias, _: gelu.bias_gelu_ref(x, weight, bias, "none"))
    with pytest.raises(VlmoptError, match="second pass"):
        vision_study.measure_second_pass(record, bench, 0)
    assert not record.measurements


@pytest.mark.parametrize(("own", "other", "lost"), [(0.5, 0.7, 1), (0.7, 0.5, 0)])
def test_the_slower_way_to_gelu_is_told(record, inside, bench, monkeypatch, own, other, lost):
    gelu = vision_study.bias_gelu
    monkeypatch.setattr(gelu, "second_pass", lambda *args: gelu.bias_gelu_ref(*args))
    monkeypatch.setattr(
        kernel_study, "interleaved", lambda fns, *_, **__: dict(zip(fns, ([own], [other]), strict=True))
    )
    vision_study.measure_second_pass(record, bench, 0)
    assert len(record.lost) == lost


def test_the_library_s_ways_that_work_stand_beside_the_kernel(record, bench):
    *_, attention = vision_study.beside_library(record, bench, 0)
    case = bench.cases(attention)[0]
    found = attention.baselines(case)
    assert next(iter(found)) == kernel_study.REFERENCE and vision_study.ONE_CALL in found
    missing = {entry["what"].rpartition(": ")[2]: entry["reason"] for entry in record.skipped}
    assert {*found, *missing} == {kernel_study.REFERENCE, *vision_study.ways()}
    assert vision_study.PUBLIC in missing and all(missing.values())  # it has no kernel for a CPU
    args = vision_study._draw(case.params, bench, 0)
    for fn in found.values():
        torch.testing.assert_close(fn(*args), vision_study.vision_attention.vision_attention_ref(*args))


def test_a_way_that_computes_something_else_is_not_timed(record, bench, monkeypatch):
    attention = vision_study.vision_attention
    monkeypatch.setattr(attention, "launch_library", lambda q, k, v, n: attention.vision_attention_ref(q, q, v, n))
    *_, target = vision_study.beside_library(record, bench, 0)
    assert not any(vision_study.ONE_CALL in found for found in target.ways.values())
    assert any("another result" in entry["reason"] for entry in record.skipped)


@pytest.mark.parametrize(("own", "others", "lost"), [(0.5, 0.7, len(vision_study.TILES)), (0.7, 0.5, 0)])
def test_slower_tiles_are_kept_as_lost(record, bench, monkeypatch, own, others, lost):
    def times(fns, *_, **__):
        return {name: [own if name == kernel_study.OWN else others] for name in fns}

    monkeypatch.setattr(kernel_study, "interleaved", times)
    vision_study.measure_tiles(record, bench, 0)
    assert len(record.find("draft_us")) == len(vision_study.TILES) + 1
    assert len(record.lost) == lost


def test_a_first_call_is_told_from_a_second(record, bench, monkeypatch):
    seen = set()

    def timed(fn, device):
        size = fn.args[3]
        return 1.0 if size in seen else seen.add(size) or 5.0

    small = {**vision_study.vision_attention.CASES[0].params, "heads": 1}
    monkeypatch.setattr(vision_study.vision_attention, "CASES", (Case("", small),))
    monkeypatch.setattr(vision_study, "ways", dict)
    monkeypatch.setattr(prefill_attention_study, "time_call", timed)
    vision_study.measure_unseen(record, bench, 0)
    first, second = (
        record.value(metric, kernel_study.OWN, vision_study.UNSEEN_CASE)
        for metric in (prefill_attention_study.FIRST, prefill_attention_study.SECOND)
    )
    assert (first, second) == (5.0, 1.0) and len(seen) == prefill_attention_study.UNSEEN


def test_every_way_to_a_prompt_s_attention_that_works_is_timed(record, bench):
    prefill_attention_study.measure(record, bench, 0)
    label = prefill_attention_study.TARGET.label(bench.cases(prefill_attention_study.TARGET)[0])
    timed = {row["provider"] for row in record.find(prefill_attention_study.METRIC, case=label)}
    missing = {entry["what"].rpartition(": ")[2] for entry in record.skipped}
    assert kernel_study.REFERENCE in timed and prefill_attention_study.CUDNN in missing
    assert timed | missing == set(prefill_attention_study.providers())
    assert record.find(prefill_attention_study.FIRST, kernel_study.REFERENCE)
    assert prefill_attention_study.told(record, label, prefill_attention_study.METRIC).count("µs") == len(timed)


def test_the_path_of_a_gpu_ends_in_an_answer(record, inside, bench, monkeypatch):
    monkeypatch.setattr(
        vision_study.bias_gelu, "second_pass", lambda *args: vision_study.bias_gelu.bias_gelu_ref(*args)
    )
    cases = [case for case in vision_study.vision_attention.CASES if case.cpu]
    monkeypatch.setattr(vision_study.vision_attention, "CASES", cases)  # whose first is the one that is told
    for prediction in vision_study.all_predictions(bench):
        record.predict(*prediction)
    vision_study.measure_second_pass(record, bench, 0)
    for chosen in vision_study.beside_library(record, bench, 0):
        kernel_study.measure_kernel(record, chosen, bench, 0, rounds=2, compiled=0)
    vision_study.measure_tower(record, inside, bench)
    vision_study.settle(record, inside, bench)
    record.answer, record.verdict = vision_study.conclude(record, inside, bench)
    assert "0.5 ms in a graph" in record.answer and "wins" in record.verdict
    assert f"Attention of one image: torch 500 µs, {vision_study.library.FLASH} 500 µs" in record.verdict
    assert all(entry["measured"] for entry in record.predictions)
    assert len(figures.of(record)) == 6


def test_a_cpu_says_what_it_did_not_measure(record, inside):
    cpu = kernel_study.Bench(torch.device("cpu"), torch.float32, "smoke", Roof(1e10), (1.0,))
    vision_study.measure_second_pass(record, cpu, 0)
    vision_study.measure_tower(record, inside, cpu)
    vision_study.measure_tiles(record, cpu, 0)
    vision_study.measure_unseen(record, cpu, 0)
    prefill_attention_study.measure(record, cpu, 0)
    assert vision_study.beside_library(record, cpu, 0) is vision_study.TARGETS
    assert len(record.skipped) == 6 and not record.measurements
