"""The study of decode attention: what the kernel is timed against computes the same."""

import pytest
import torch

from vlmopt.bench import models
from vlmopt.kernels import decode_attention
from vlmopt.kernels.case import Case
from vlmopt.tests.kernels import checks
from vlmopt.tests.kernels.checks import DEVICE
from vlmopt.workbook import attention_study, text_study


@pytest.fixture(scope="module")
def subject() -> text_study.Prompt:
    prompt = text_study.prompt(models.load(models.TINY, DEVICE, torch.float32), 24, 12, seed=0)
    prompt.prefill(attention_study.Ops())
    return prompt


@pytest.mark.parametrize("rows", [1, 4])
def test_baselines_compute_what_the_kernel_does(rows):
    shape = {"rows": rows, "heads": 4, "kv_heads": 2, "width": 16, "length": 40, "capacity": 64}
    case = Case("", shape)
    q, k, v, row = checks.arguments(decode_attention, case)
    k, v = k.nan_to_num(), v.nan_to_num()
    expected = decode_attention.decode_attention_live_ref(q, k, v, row)
    baselines = attention_study.TARGET.baselines(case)
    assert set(baselines) == ({"torch", "torch, masked"} if rows == 1 else {"torch"})
    for name, fn in baselines.items():
        torch.testing.assert_close(fn(q, k, v, row), expected, rtol=1e-5, atol=1e-5, msg=name)


def test_candidates_differ_and_are_told_apart():
    configs = (decode_attention.LAUNCH, *attention_study.candidates())
    assert len({attention_study.describe(config) for config in configs}) == len(set(configs)) == len(configs)


def test_every_layers_arguments_are_captured(subject):
    found = attention_study.captured(subject)
    assert len(found) == len(subject.weights.layers)
    for q, k, v, row in found:
        assert decode_attention.supports(q, k, v, row) is None and int(row) == 24


def test_steps_agree_whoever_attends(subject):
    steps = {who: run() for who, run in attention_study.steps(subject).items()}
    assert list(steps) == ["torch, masked", "torch, length known", "vlmopt"]
    assert subject.cache[:, :, :, :24].any(dim=-1).all(), "the prompt is not in the cache"
    for result in steps.values():
        torch.testing.assert_close(result, steps["torch, masked"], rtol=1e-3, atol=1e-3)


def test_the_kernel_is_right_on_activations():
    assert attention_study.captured_errors(DEVICE, torch.float32, seed=0).ok
