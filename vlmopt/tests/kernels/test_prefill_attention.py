"""Prefill attention: the launcher against the reference, which test_references holds against the formula."""

from functools import partial

import pytest
import torch

from vlmopt.bench.timing import time_call
from vlmopt.kernels import oracle
from vlmopt.kernels import prefill_attention as module
from vlmopt.kernels.case import Case
from vlmopt.tests.kernels import checks


@pytest.mark.parametrize("case", [case for case in module.CASES if case.cpu], ids=lambda case: case.name)
def test_nothing_beyond_the_prompt_is_read(case):
    q, k, v = checks.arguments(module, case)
    length = case.params["length"]
    assert k[:, :length].isfinite().all() and (k[:, length:].isnan().all() and v[:, length:].isnan().all())
    out = module.prefill_attention_ref(q, k, v)
    assert out.shape == (length, q.shape[1] * q.shape[2]) and out.isfinite().all()


def test_the_cost_counts_half_of_the_square():
    shape = {"heads": 16, "kv_heads": 8, "width": 128}
    moved, flops = module.cost(length=798, **shape)
    assert moved == 2 * 798 * 24 * 128 * 2 and flops == 2 * 798**2 * 16 * 128
    assert module.cost(length=798, **shape, capacity=1024) == (moved, flops)


@pytest.mark.parametrize("case", [case for case in module.CASES if case.cpu], ids=lambda case: case.name)
def test_on_a_cpu_the_launcher_is_the_reference(case):
    args = checks.arguments(module, case)
    checks.same_bits([module.prefill_attention_ref(*args)], [module.launch(*args)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", module.CASES, ids=lambda case: case.name)
def test_the_launcher_agrees(case, dtype):
    args = checks.arguments(module, case, dtype)
    assert oracle.compare(module, "prefill_attention", args, module.launch).ok


@pytest.mark.gpu
def test_a_length_never_seen_needs_no_plan():
    calls = []
    for length in (300, 301, 307, 411, 613, 977):
        params = {**module.CASES[0].params, "length": length}
        calls.append(partial(module.launch, *checks.arguments(module, Case("", params), torch.bfloat16)))
    calls[0]()
    assert max(time_call(call, "cuda") for call in calls[1:]) < 5


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in module.CASES if not case.cpu], ids=lambda case: case.name)
def test_replays_the_same_bits(case, monkeypatch):
    monkeypatch.setattr(module, "prefill_attention", module.prefill_attention_ref, raising=False)
    checks.replays(module, "prefill_attention", checks.arguments(module, case, torch.bfloat16))
