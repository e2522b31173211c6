"""Patches to hidden rows, with the interpolated position embedding.

    y = conv3d(pixels) + Σ taps · P[indices]

pixels [N, channels·frames·height·width], weight [hidden, channels, frames, height, width], P [side², hidden], indices
and taps [N, 4] (bilinear, fp32). The interpolation runs in fp32 and is rounded once before the add, as transformers
does. Class exact. 2·N·hidden·(pixels a patch) FLOPs.
"""

from torch import Tensor
from torch.nn import functional as F


def patch_embed_ref(
    pixels: Tensor, weight: Tensor, bias: Tensor, pos_embed: Tensor, indices: Tensor, taps: Tensor
) -> Tensor:
    """Return [N, hidden]."""
    hidden, *patch = weight.shape
    y = F.conv3d(pixels.to(weight.dtype).view(-1, *patch), weight, bias, stride=patch[1:]).view(-1, hidden)
    positions = (F.embedding(indices, pos_embed) * taps[:, :, None]).sum(1)
    return y + positions.to(y.dtype)
