"""A prompt's products over copies: both ways against the weights, and what goes into the record."""

import pytest
import torch
from torch.nn import functional as F

from vlmopt.quant.copies import in_rows, quantize
from vlmopt.quant.schemes import SCHEMES
from vlmopt.workbook import prompt_products as module
from vlmopt.workbook.kernel_study import prepare
from vlmopt.workbook.record import Record


@pytest.fixture
def args():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 256, generator=generator), torch.randn(48, 256, generator=generator)
    return (x * torch.tensor([1.0, 1e-3, 1e3, 0.0, 1.0])[:, None]).bfloat16(), weight.bfloat16()


def test_a_row_in_fp8_has_a_scale_of_its_own_and_a_row_of_zeros_stays_so(args):
    own = in_rows(args[0], SCHEMES["fp8"])
    values, scale = own.values, own.scale[:, None]
    assert values.float().abs().amax(1).tolist() == [448, 448, 448, 0, 448]
    widened = values.float() * scale
    assert torch.allclose(
        widened, args[0].float(), rtol=2**-4, atol=1e-3 * args[0].abs().max(1, keepdim=True).values.max()
    )
    assert not widened[3].any()


def test_fp8_on_both_sides_is_the_product_of_what_the_values_stand_for(args):
    x, weight = args
    copy = quantize(weight, SCHEMES["fp8"])
    expected = F.linear(in_rows(x, copy.scheme).dequantize(torch.float64), copy.dequantize(torch.float64))
    torch.testing.assert_close(module.fp8_product(x, copy).double(), expected, rtol=2**-7, atol=1e-6)


def test_every_way_is_near_the_weights_and_none_is_another(args):
    x, weight = args
    exact = F.linear(x[:1].double(), weight.double())
    off = {
        name: float((way(x[:1]).double() - exact).norm() / exact.norm()) for name, way in module.ways(weight).items()
    }
    assert off["weights"] < off["int8 widened"] < off["fp8 widened"] < off["fp8 x fp8"] < 0.06
    assert off["fp8 widened"] < off["int4 widened"] < 0.2


def test_on_a_cpu_the_record_has_errors_and_no_times():
    record = Record("40_quantization", "?", "smoke", "tiny", {"device": "cpu", "torch": "2"})
    record.check("a check comes first", "exact", 0.0, 0.0)
    module.measure(record, prepare("smoke"), 0)
    assert [row["provider"] for row in record.find(module.ERROR)] == list(module.ways(torch.zeros(16, 128).bfloat16()))
    assert not record.find(module.TIME)
