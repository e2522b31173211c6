"""Attention of one query row over the live part of the cache, grouped-query.

    o = softmax(q·kᵀ / √D) · v   over the first `length` cache rows

q [1, Hq, D], k and v [Hkv, capacity, D], result [1, Hq·D]. Two references: over the live rows with the length known on
the host (stock's own call: class exact), and over the whole capacity under a mask on the device, which a captured graph
can replay (class near; masked keys contribute exact zeros, so the capacity does not change the bits of a library kernel
that walks the keys in order). Moves 2·length·Hkv·D values.
"""

from torch import Tensor
from torch.nn import functional as F


def decode_attention_ref(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Return [1, Hq·D]; `length` counts the rows of k and v to read."""
    k, v = k[None, :, :length], v[None, :, :length]
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def decode_attention_masked_ref(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return [1, Hq·D]; `bias` [capacity] in the model's dtype is 0 for the rows that count, else −inf."""
    # the query heads of one KV head become rows, so that no key is repeated in memory
    grouped = q.unflatten(1, (k.shape[0], -1))
    out = F.scaled_dot_product_attention(grouped, k[None], v[None], attn_mask=bias.expand(1, 1, grouped.shape[2], -1))
    return out.flatten(1)
