"""The packed gate/up product with the activation behind it: the entry that covers `linear` and `swiglu`.

    y = silu(gate) · up,   gate and up from x · Wᵀ

x [rows, in], W [2·n, in] with gate's rows first, as the checkpoint's two weights lie in packed storage; result
[rows, n]. The product is rounded to the model's dtype before silu, silu before its product, as transformers does. One
pass for up to `gemv.MAX_ROWS` rows, where reading W is all of the time; beyond, the library's product and `swiglu`.
2·rows·2·n·in FLOPs. Class near.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels import gemv, swiglu
from vlmopt.kernels.case import require
from vlmopt.kernels.linear import few_rows


def linear_swiglu_ref(x: Tensor, weight: Tensor) -> Tensor:
    """Return [rows, n]."""
    return swiglu.swiglu_ref([F.linear(x, weight)])


def supports(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernels cannot take these arguments, or None."""
    return gemv.supports(x[: gemv.MAX_ROWS], weight, None, None, True)


def launch(x: Tensor, weight: Tensor) -> Tensor:
    """`linear_swiglu` without its checks."""
    if x.shape[0] <= gemv.MAX_ROWS:
        return few_rows(x, weight, gated=True)
    return swiglu.launch([F.linear(x, weight)])


@torch.library.custom_op("vlmopt::linear_swiglu", mutates_args=())
def linear_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """Return [rows, n].

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(x, weight))
    return launch(x, weight)


@linear_swiglu.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)
