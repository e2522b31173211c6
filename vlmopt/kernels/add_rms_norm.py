"""Residual add and RMSNorm.

    h = residual + x;   y = weight · round(h · rsqrt(mean(h²) + eps))

x, residual [..., n], weight [n], one dtype. Statistics in fp32; the normalised value is rounded to the model's dtype
*before* the weight multiply, and the sum is rounded to the model's dtype, as transformers does. Class exact.
Moves 4·n values a row (x, residual, h, y); 5·n FLOPs.
"""

import torch
from torch import Tensor


def add_rms_norm_ref(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (y, h), both [..., n]; without a residual h is x itself."""
    h = x if residual is None else residual + x
    h32 = h.to(torch.float32)
    y = h32 * torch.rsqrt(h32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(h.dtype), h
