"""The entries for dense products: the kernel for a few rows, the library for a prompt's."""

import pytest
import torch

from vlmopt.kernels import gemv, linear, linear_swiglu
from vlmopt.tests.kernels import checks


def operands(rows: int, out: int = 64, width: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, width, generator=generator), torch.randn(out, width, generator=generator)


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_linear_agrees(rows):
    x, weight = operands(rows)
    bias = weight[:, 0].clone()
    torch.testing.assert_close(linear.linear(x, weight, bias), linear.linear_ref(x, weight, bias))


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_linear_swiglu_agrees(rows):
    x, weight = operands(rows)
    expected = linear_swiglu.linear_swiglu_ref(x, weight)
    torch.testing.assert_close(linear_swiglu.linear_swiglu(x, weight), expected, rtol=1e-5, atol=1e-4)


def test_a_prompt_s_rows_stay_with_the_library(monkeypatch):
    monkeypatch.setattr(gemv, "launch", lambda *args, **options: "kernel")
    x, weight = operands(9)
    assert linear.launch(x[:8], weight, None) == "kernel"
    assert torch.equal(linear.launch(x, weight, None), linear.linear_ref(x, weight, None))
    assert linear_swiglu.launch(x[:8], weight) == "kernel"
    assert linear_swiglu.launch(x, weight).shape == (9, 32)


def test_what_the_kernels_cannot_take_is_refused():
    x, weight = operands(9)
    checks.refuses(linear, "linear", (x, weight.double(), None), "float64")
    checks.refuses(linear_swiglu, "linear_swiglu", (x, weight[:63]), "even number of outputs")


def test_registered():
    x, weight = operands(3)
    checks.is_registered(linear.linear, (x, weight, None))
    checks.is_registered(linear_swiglu.linear_swiglu, (x, weight))
