"""Dense products of rows with plain row-major weights.

    y = x · Wᵀ (+ b)

x [rows, in], W [out, in] as the checkpoint holds it, b [out] or None; one dtype, fp32 accumulation. The reference is
the library's product: class exact for one weight of the checkpoint; *near* for a packed weight, whose width may choose
another kernel. Up to `gemv.MAX_ROWS` rows the weight's bytes are all of the time and a kernel takes the library's place
(near): `gemv_ring` for the weights that it serves, else `gemv`. A prompt's rows stay with the library.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels import gemv, gemv_ring
from vlmopt.kernels.case import require


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [rows, out]."""
    return F.linear(x, weight, bias)


def supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    return gemv.supports(x[: gemv.MAX_ROWS], weight, bias, None, False)


def few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, gated: bool = False
) -> Tensor:
    """`gemv.launch`, or `gemv_ring.launch` where that serves."""
    kernel = gemv_ring if gemv_ring.serves(weight) else gemv
    return kernel.launch(x, weight, bias, residual, gated)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` without its checks."""
    return few_rows(x, weight, bias) if x.shape[0] <= gemv.MAX_ROWS else F.linear(x, weight, bias)


@torch.library.custom_op("vlmopt::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [rows, out].

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(x, weight, bias))
    return launch(x, weight, bias)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
