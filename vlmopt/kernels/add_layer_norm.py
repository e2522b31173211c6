"""Residual add and LayerNorm.

    h = residual + x;   y = layer_norm(h) · weight + bias

x, residual [..., n]; weight, bias [n]; one dtype, statistics in fp32 inside the library. Class exact. Moves
4·n values a row.
"""

from torch import Tensor
from torch.nn import functional as F


def add_layer_norm_ref(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (y, h), both [..., n]; without a residual h is x itself."""
    h = x if residual is None else residual + x
    return F.layer_norm(h, (h.shape[-1],), weight, bias, eps), h
