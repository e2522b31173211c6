"""The study of a kernel: what it says on a CPU, and its whole course as on a GPU with the clock replaced."""

from dataclasses import replace

import pytest
import torch

from vlmopt.errors import VlmoptError
from vlmopt.kernels import add_rms_norm, bias_gelu, deepstack_add, merge_embeddings, qkv_norm_rope_cache, swiglu
from vlmopt.kernels.case import Launch
from vlmopt.tests.kernels.checks import DEVICE
from vlmopt.workbook import interpreted, kernel_study, text_study
from vlmopt.workbook.record import Record, Roof
from vlmopt.workbook.schema import validate

MODULES = (add_rms_norm, qkv_norm_rope_cache, swiglu, deepstack_add, merge_embeddings)
TARGET = kernel_study.target(swiglu)
LABEL = "swiglu small 1x768"


@pytest.fixture
def record() -> Record:
    environment = {"device": "cpu", "torch": "2", "transformers": "5", "commit": "0", "dirty": False}
    return Record("24_swiglu", "How fast?", "smoke", "tiny", environment)


@pytest.fixture
def on_cpu() -> kernel_study.Bench:
    return kernel_study.Bench(torch.device("cpu"), torch.float32, "smoke", Roof(1e9), (1.0,))


class AsOnGpu(kernel_study.Bench):
    """Takes the branches of a GPU wherever it is, on two small cases."""

    on_gpu = True

    def cases(self, chosen):
        return [case for case in chosen.module.CASES if case.cpu][:2]


@pytest.fixture
def as_on_gpu(monkeypatch) -> AsOnGpu:
    """A bench whose clock gives fixed times: 9 µs for a reference, 3 for what was compiled, 2 for a kernel, 4 else."""

    def graph_time(launches, *, min_nodes=200, replays, device):
        assert all(launch() is None for launch in launches)
        return [clock["us"] / 1e3] * replays

    clock = {"us": 0.0}
    times = {TARGET.reference: 9.0, TARGET.launch: 2.0, add_rms_norm.add_rms_norm_ref: 1.0}
    measured = kernel_study._times_us

    def timed(fn, *args):
        clock["us"] = 3.0 if getattr(fn, "compiled", False) else times.get(fn, 4.0)
        return measured(fn, *args)

    def compiled(fn, dynamic):
        def run(*args):
            return fn(*args)

        run.compiled = True
        return run

    properties = type("Properties", (), {"L2_cache_size": 100_000})
    monkeypatch.setattr(kernel_study, "graph_time", graph_time)
    monkeypatch.setattr(kernel_study, "_times_us", timed)
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**31))
    return AsOnGpu(torch.device(DEVICE), torch.float32, "smoke", Roof(1e12), (1.0,))


def through(record: Record, bench: kernel_study.Bench, target: kernel_study.Target = TARGET) -> None:
    """A notebook's course without its checks."""
    for prediction in kernel_study.predictions(target, bench):
        record.predict(*prediction)
    record.check("something", "near", 0.5, 1.5)
    kernel_study.measure_kernel(record, target, bench, seed=0, rounds=2)
    kernel_study.settle(record, [target], bench)
    record.answer, record.verdict = kernel_study.conclude(record, [target], bench)
    validate(record.to_dict())


@pytest.mark.parametrize("module", MODULES, ids=lambda module: kernel_study.target(module).op)
def test_a_case_s_parameters_are_what_make_and_cost_take(module, on_cpu):
    target = kernel_study.target(module)
    assert kernel_study.Target(module, target.op).launch is module.launch
    names = [case.name for case in module.CASES]
    assert len(set(names)) == len(names)
    for case in module.CASES:
        moved, flops = on_cpu.cost(target, case)
        assert 0 < module.cost(**case.params)[0] < moved and flops >= 0
    case = on_cpu.cases(target)[-1]
    generator = torch.Generator(DEVICE).manual_seed(0)
    args = module.make(case.params, DEVICE, torch.float32, generator)
    assert module.supports(*args) is None


def test_on_a_cpu_the_reference_is_timed_and_nothing_is_claimed(record, on_cpu):
    through(record, on_cpu)
    assert {row["provider"] for row in record.find("us")} == {"torch"}
    assert all("x6144" not in row["case"] for row in record.find("us"))
    assert record.skipped[0]["what"].startswith("swiglu: time of the kernel")
    assert "no speed is claimed" in record.verdict
    kernel_study.measure_drafts(record, TARGET, on_cpu, [Launch(512, 4)], seed=0)
    kernel_study.measure_effect(record, "tiny decode", "model_ms", {"references": None, "with swiglu": None}, on_cpu)
    assert not record.find("draft_us") and not record.find("model_ms") and len(record.skipped) == 3


def test_the_whole_course_as_on_a_gpu(record, as_on_gpu):
    through(record, as_on_gpu)
    assert {row["provider"]: row["p50"] for row in record.find("us", case=LABEL)} == {
        "torch": 9.0,
        "compile": 3.0,
        "vlmopt": 2.0,
    }
    moved = 3 * 768 * 4
    assert record.find("us", "vlmopt", LABEL)[0]["roofline_share"] == pytest.approx(moved / 1e12 / 2e-6)
    assert record.predictions[0]["predicted"] == pytest.approx(1.0 + 1.0 + moved / 0.8e6)
    assert record.predictions[0]["measured"] == 2.0
    assert record.config["buffers"][LABEL] == {"copies": 44, "cold": True}
    assert "2 µs against 9 of torch and 3 of torch.compile" in record.answer
    assert record.verdict == "Every case is as fast as its bytes allow and faster than torch."


def test_a_kernel_that_does_not_reach_what_it_has_to_is_named(record, as_on_gpu):
    row = {"vlmopt": 2.0, "torch": 9.0, "compile": 3.0, "allowed": 2.5}
    assert kernel_study._standing(row) == "good"
    assert kernel_study._standing(row | {"torch": 2.0}) == "not faster than torch"
    assert kernel_study._standing(row | {"compile": 1.9}) == "behind torch.compile"
    assert kernel_study._standing(row | {"allowed": 1.9}) == "above what its bytes allow"
    through(record, replace(as_on_gpu, roof=Roof(1e15)), kernel_study.target(add_rms_norm))
    assert "add_rms_norm small 1x256: not faster than torch, behind torch.compile" in record.verdict


def test_what_is_left_to_stock_is_said_and_is_no_fault(record, as_on_gpu, monkeypatch):
    erf = next(case for case in bias_gelu.CASES if case.name.startswith("merger"))
    tanh = next(case for case in bias_gelu.CASES if case.name.startswith("block"))
    chosen = kernel_study.target(bias_gelu)
    assert chosen.is_stock(erf) and not chosen.is_stock(tanh) and not TARGET.is_stock(swiglu.CASES[0])
    monkeypatch.setattr(AsOnGpu, "cases", lambda self, chosen: [tanh, erf])
    record.check("right", "exact", 0, 0)
    for case in (tanh, erf):
        for provider in ("torch", "vlmopt"):
            record.measure(chosen.label(case), provider, "us", "us", [1.0], bytes=1000, ceiling=as_on_gpu.roof)
    stands = [row["stands"] for row in kernel_study.rows(record, [chosen], as_on_gpu)]
    assert "not faster than torch" in stands[0] and stands[1] == "stock's own launches"


def test_a_reference_that_does_not_compile_is_skipped_with_its_reason(record, as_on_gpu, monkeypatch):
    def broken(fn, dynamic):
        def run(*args):
            raise ValueError("no compiler\nat all")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    through(record, as_on_gpu)
    assert {"what": f"{LABEL}: torch.compile", "reason": "no compiler"} in record.skipped
    assert not record.find("us", "compile")


def test_drafts_that_are_slower_are_kept_as_lost(record, as_on_gpu):
    record.check("something", "near", 0.5, 1.5)
    kernel_study.measure_drafts(record, TARGET, as_on_gpu, [Launch(512, 4)], seed=0)
    assert record.value("draft_us", "block 512, 4 warps", LABEL) == 4.0
    assert record.lost[0] == {"what": "swiglu, block 512, 4 warps", "lesson": "4 µs against 2 at small 1x768"}


def test_results_are_kept_for_a_whole_rotation(as_on_gpu):
    seen = []

    def fn(x):
        seen.append(torch.empty(1000, device=DEVICE))
        return seen[-1]

    kernel_study.interleaved({"one": fn}, [(i,) for i in range(4)], as_on_gpu, rounds=1)
    assert len({tensor.data_ptr() for tensor in seen}) == 4


def test_the_panel_times_one_configuration(as_on_gpu, on_cpu):
    row = kernel_study.one(TARGET, as_on_gpu, "small 1x768", 512, 4)
    assert (row["case"], row["p50"]) == (f"{LABEL}, block 512, 4 warps", 4.0)
    assert kernel_study.one(TARGET, on_cpu, "small 1x768", 512, 4)["provider"] == "torch"


@pytest.mark.parametrize("name", text_study.MODULES)
def test_kernels_are_right_on_the_embedded_model_s_activations(name, tiny):
    prompt = text_study.prompt(replace(tiny, model=tiny.model.to(DEVICE), device=DEVICE), 24, 12, seed=0)
    errors = text_study.captured_errors(prompt, name)
    assert errors.ok, errors
    for run in (prompt.prefill, prompt.decode):
        plain, ours = (run(text_study.table(names)) for names in ([], [name]))
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-3)


def test_a_wrong_kernel_is_seen_on_the_embedded_model_s_activations(tiny, monkeypatch):
    prompt = text_study.prompt(replace(tiny, model=tiny.model.to(DEVICE), device=DEVICE), 24, 12, seed=0)
    monkeypatch.setattr(swiglu, "swiglu", lambda products: 1.001 * swiglu.swiglu_ref(products))
    assert not text_study.captured_errors(prompt, "swiglu").ok


def test_the_interpreter_s_process_says_what_failed():
    with pytest.raises(VlmoptError, match=r"interpreter failed: .*no_such_kernel"):
        interpreted.run(["vlmopt.kernels.no_such_kernel:nothing"], 0)
