"""Dense products of rows with plain row-major weights.

    y = x · Wᵀ (+ b)

x [rows, in], W [out, in] as the checkpoint holds it, b [out] or None; one dtype, fp32 accumulation inside the library.
Class exact for the library's own product of one weight; *near* for a packed weight, whose width may choose another
kernel. Moves out·in weights a call, which is all of the time at one row.
"""

from torch import Tensor
from torch.nn import functional as F


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [rows, out]."""
    return F.linear(x, weight, bias)
