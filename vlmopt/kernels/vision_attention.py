"""Full attention of every image over its own patches.

    o = softmax(q·kᵀ / √D) · v   within each segment

q, k, v [N, heads, D]; `lengths` are the patches of each segment (one frame of one image), which sum to N. One library
call a segment, as stock does. Class exact. 4·Σ length²·heads·D FLOPs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def vision_attention_ref(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return [N, heads·D]."""
    parts = [tensor.transpose(0, 1)[None].split(list(lengths), dim=2) for tensor in (q, k, v)]
    outs = [F.scaled_dot_product_attention(*segment)[0].transpose(0, 1) for segment in zip(*parts, strict=True)]
    return torch.cat(outs).flatten(1)
