"""Stage timers and the profiler: what they see, and that they leave the model as it was."""

import pytest
import torch
from torch import nn

from vlmopt.errors import VlmoptError
from vlmopt.workbook import profiling
from vlmopt.workbook.profiling import busy_time, group, short_name

ADD = "vectorized_elementwise add"


@pytest.fixture
def inputs(prompt):
    return prompt((64, 96), "what does the sign say?")


def test_stage_timers_see_every_call_and_go_away(reference, inputs):
    with profiling.stage_timers(reference.model, "cpu") as times:
        ids = profiling.generate(reference.model, inputs, 3)
    made = ids.shape[1] - inputs["input_ids"].shape[1]
    assert {stage: len(values) for stage, values in times.items()} == {"vision": 1, "text": made, "head": made}
    assert all(value > 0 for values in times.values() for value in values)
    assert profiling.timer_disturbance(reference, inputs, 2) == 0


def test_timers_that_stay_or_change_an_id_are_noticed(tiny, inputs, monkeypatch):
    handle = profiling.stage_modules(tiny.model)["text"].register_forward_hook(lambda *_: None)
    assert profiling.timer_disturbance(tiny, inputs, 2) == 1
    handle.remove()
    calls = iter([torch.tensor([[1, 2]]), torch.tensor([[1, 3]])])
    monkeypatch.setattr(profiling, "generate", lambda *_: next(calls))
    assert profiling.timer_disturbance(tiny, inputs, 2) == 1


def test_timers_go_away_after_an_error_too(tiny):
    with pytest.raises(RuntimeError, match="stop"), profiling.stage_timers(tiny.model, "cpu"):
        raise RuntimeError("stop")
    assert not any(module._forward_hooks for module in tiny.model.modules())


def test_a_model_without_the_stages_is_refused():
    class Plain(nn.Module):
        def get_output_embeddings(self):
            return None

    with pytest.raises(VlmoptError, match="has no vision tower"):
        profiling.stage_modules(Plain())


def test_stages_and_rest_add_up_to_the_total(reference, inputs):
    times = profiling.stage_times(reference.model, inputs, "cpu", rounds=2, new_tokens=4)
    for stages in (times.first_token, times.decode):
        assert {len(samples) for samples in stages.values()} == {2}
        for i in range(2):
            parts = sum(samples[i] for stage, samples in stages.items() if stage != "total")
            assert parts >= stages["total"][i] * 0.999


def test_the_profiler_sees_the_operators_of_a_call():
    a = torch.randn(64, 64)
    profile = profiling.profile_call(lambda: a @ a, "cpu")
    assert [kernel.launches for kernel in profile.kernels if kernel.name == "mm"] == [1]
    assert 0 < profile.busy_ms <= profile.wall_ms
    assert profile.launches == sum(kernel.launches for kernel in profile.kernels)


def test_measuring_adds_stages_and_kernels_to_the_record(make_record, reference, inputs):
    record = make_record()
    profiling.measure_stages(record, "tiny", reference, inputs, rounds=2, tokens=3)
    profiling.measure_kernels(record, "tiny", reference, inputs, steps=2, top=3)
    metrics = {row["metric"] for row in record.measurements if row["case"] == "tiny"}
    assert {"ttft_ms", "ttft_vision_ms", "ttft_text_ms", "ttft_head_ms", "ttft_rest_ms", "ttft_busy_ms"} <= metrics
    assert {"decode_ms_per_token", "decode_text_ms", "decode_head_ms", "decode_rest_ms", "decode_launches"} <= metrics
    assert len(record.find("kernel_ms", case="tiny first token")) == 3
    assert record.value("ttft_launches", "stock") > record.value("decode_launches", "stock") > 50


def test_a_profiler_that_sees_nothing_is_an_error(make_record, reference, inputs, monkeypatch):
    monkeypatch.setattr(profiling, "profile_call", lambda *_: profiling.Profile([], 0.0, 1.0))
    with pytest.raises(VlmoptError, match="saw no kernel"):
        profiling.measure_kernels(make_record(), "tiny", reference, inputs, steps=2)


def test_busy_time_counts_overlaps_once():
    assert busy_time([("a", 0, 10), ("b", 5, 12), ("c", 20, 21), ("d", 6, 7)]) == 13
    assert busy_time([]) == 0


def test_launches_are_gathered_by_name_longest_first():
    spans = [
        ("void ns::gemm<float, 1>(int)", 0, 1000),
        ("copy", 1000, 4000),
        ("void ns::gemm<half, 2>(int)", 5000, 6000),
    ]
    kernels = group(spans)
    assert [(k.name, k.launches, k.ms) for k in kernels] == [("copy", 1, 3.0), ("gemm", 2, 2.0)]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, x>(int)", ADD),
        (
            "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
            "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>(x)>(int, x)",
            "elementwise direct_copy",
        ),
        (
            "void at::native::elementwise_kernel<128, 2, at::native::BinaryFunctor<float, float, float, at::native::"
            "binary_internal::MulFunctor<float> > >(int)",
            "elementwise Mul",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float> > >(x)",
            "reduce Mean",
        ),
        ("void (anonymous namespace)::softmax_warp_forward<float>(float*)", "softmax_warp_forward"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNN", "nvjet_tst_64x8_64x16_4x1_v_bz_TNN"),
        ("k" * 60, "k" * 43 + "…"),
    ],
)
def test_short_names(name, short):
    assert short_name(name) == short
