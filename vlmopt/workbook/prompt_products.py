"""A prompt's products over copies: widened for the library's product, or multiplied in fp8 as they are.

Decode steps read copies because they read every weight for one row; a prompt has rows enough to keep the tensor cores
busy, so fewer bytes are not less time there. Two ways could still serve prompts where the originals are gone: a copy is
widened to the model's dtype before each product, or both sides are fp8, the rows of x by a scale each.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from vlmopt.bench.timing import graph_time
from vlmopt.quant.copies import Quantized, in_rows, quantize
from vlmopt.quant.schemes import SCHEMES
from vlmopt.workbook.kernel_study import Bench
from vlmopt.workbook.record import Record

WEIGHTS, BOTH = "weights", "fp8 x fp8"
ROWS = {"smoke": 37, "full": 798}
"""Of a prompt."""
SHAPES = {"qkv": (4096, 2048), "o": (2048, 2048), "gate_up": (12288, 2048), "down": (2048, 6144)}
"""(out, in) of the 2B model's products."""
ERROR, TIME = "prompt_error", "prompt_us"


def fp8_product(x: Tensor, copy: Quantized) -> Tensor:
    """x [rows, in] times an fp8 copy [out, in], both sides in fp8, summed in fp32: [rows, out] in bf16.

    The product is torch's own: `in` and `out` must be multiples of 16, a GPU one from Ada on.
    """
    own, by_row = in_rows(x, copy.scheme), F.ScalingType.RowWise
    scales = own.scale[:, None], by_row, copy.scale[None], by_row
    return F.scaled_mm(own.values, copy.values.t(), *scales, output_dtype=torch.bfloat16)


def ways(weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """How x times a weight can be had, by provider: from the weight, from widened copies, from fp8 on both sides."""
    copies = {name: quantize(weight, scheme) for name, scheme in SCHEMES.items()}
    widened = {
        f"{name} widened": lambda x, copy=copy: F.linear(x, copy.dequantize(x.dtype)) for name, copy in copies.items()
    }
    return {WEIGHTS: lambda x: F.linear(x, weight), **widened, BOTH: lambda x: fp8_product(x, copies["fp8"])}


def measure(record: Record, bench: Bench, seed: int) -> None:
    """Adds each way's relative error to the weights' own product in float64, and on a GPU its time, by product.

    The weights are bf16, as fp8's product gives no other dtype on every device.
    """
    generator = torch.Generator(bench.device).manual_seed(seed)
    chosen = SHAPES if bench.on_gpu else {"small": (64, 256)}
    for name, (out, width) in chosen.items():
        x, weight = (
            torch.randn(n, width, generator=generator, device=bench.device) for n in (ROWS[bench.profile], out)
        )
        x, weight = x.bfloat16(), (0.02 * weight).bfloat16()
        exact, case = F.linear(x.double(), weight.double()), f"{name} {len(x)} x {out}x{width}"
        for provider, product in ways(weight).items():
            off = (product(x).double() - exact).norm() / exact.norm()
            record.measure(case, provider, ERROR, "share", [off.item()])
            if bench.on_gpu:
                times = graph_time([partial(product, x)])
                record.measure(case, provider, TIME, "us", [1e3 * ms for ms in times])
