"""Causal attention of a whole prompt over itself, grouped-query.

    o = softmax(q·kᵀ / √D, causal) · v

q [T, Hq, D], k and v [Hkv, ≥ T, D] (the cache; only the first T rows are read), result [T, Hq·D]. No mask tensor: the
library's causal kernel, which is the one stock uses. Class exact. 2·T²·Hq·D FLOPs (half of the square).
"""

from torch import Tensor
from torch.nn import functional as F


def prefill_attention_ref(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return [T, Hq·D]."""
    length = q.shape[0]
    k, v = k[None, :, :length], v[None, :, :length]
    # transformers passes is_causal only to queries of several rows; one row over one key needs none
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=length > 1, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)
