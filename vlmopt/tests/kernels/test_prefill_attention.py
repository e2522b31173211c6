"""Prefill attention: what is written down beside the reference, which test_references holds against the formula."""

import pytest
import torch

from vlmopt.kernels import prefill_attention as module
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


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in module.CASES if not case.cpu], ids=lambda case: case.name)
def test_replays_the_same_bits(case, monkeypatch):
    monkeypatch.setattr(module, "prefill_attention", module.prefill_attention_ref, raising=False)
    checks.replays(module, "prefill_attention", checks.arguments(module, case, torch.bfloat16))
