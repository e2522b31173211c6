"""From q/k/v products to a rotated query and an updated KV cache.

    q = rope(rms_norm(q)),  k = rope(rms_norm(k));   cache[:, start:start+T] = k, v

Each head of q and k is normalised over its own width D, then rotated by halves: x·cos + rotate_half(x)·sin, with cos
and sin [T, D] already in the model's dtype; every product and the sum are rounded to that dtype, as transformers does.
Products come packed as one [T, (Hq + 2·Hkv)·D] or separately as [T, Hq·D], [T, Hkv·D], [T, Hkv·D]. Caches
[Hkv, capacity, D]. `positions` [T] are the cache rows to write, on the device, so that a captured graph can advance
them. Class exact. Moves the products, q, and 2·T·Hkv·D cache values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmopt.kernels.add_rms_norm import add_rms_norm_ref


def qkv_norm_rope_cache_ref(
    products: Sequence[Tensor],
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
) -> Tensor:
    """Write k and v into the caches in place and return q [T, Hq, D]."""
    kv_heads, _, width = k_cache.shape
    kv = kv_heads * width
    if len(products) == 1:
        products = products[0].split([products[0].shape[-1] - 2 * kv, kv, kv], dim=-1)
    q, k, v = (product.unflatten(-1, (-1, width)) for product in products)
    q = rotate(add_rms_norm_ref(q, None, q_norm, eps)[0], cos, sin)
    k = rotate(add_rms_norm_ref(k, None, k_norm, eps)[0], cos, sin)
    k_cache.index_copy_(1, positions, k.transpose(0, 1))
    v_cache.index_copy_(1, positions, v.transpose(0, 1))
    return q


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves of x [T, heads, D] with cos and sin [T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
