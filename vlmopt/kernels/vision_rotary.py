"""Rotary embedding of the vision tower on the packed product.

    q, k = q·cos + rotate_half(q)·sin,  k·cos + rotate_half(k)·sin

qkv [N, 3·heads·D] (q, k, v in this order), cos and sin [N, D] in fp32. The rotation runs in fp32 and is rounded once,
as transformers does. Class exact. Moves 5·N·heads·D values (v is passed through).
"""

from torch import Tensor

from vlmopt.kernels.qkv_norm_rope_cache import rotate


def vision_rotary_ref(qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v [N, heads, D]."""
    q, k, v = qkv.unflatten(-1, (3, n_heads, -1)).unbind(1)
    return rotate(q.float(), cos, sin).to(q.dtype), rotate(k.float(), cos, sin).to(k.dtype), v
