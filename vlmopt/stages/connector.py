"""Between vision and text: the mRoPE positions of a prompt with images, and which feature goes where."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

Grid = tuple[int, int, int]


def positions(types: Sequence[int], grids: Sequence[Grid], merge_size: int) -> tuple[Tensor, int]:
    """mRoPE positions of one prompt.

    Args:
        types: the processor's `mm_token_type_ids` of the prompt (0 text, 1 image).
        grids: (frames, rows, columns) in patches, one for each run of image tokens, in order.

    Returns:
        positions [3, T] int64 on the CPU (time, height, width) and the delta: the position that follows the prompt
        minus the prompt's length.

    Raises:
        ValueError: the number of image tokens does not fit the grids.
    """
    parts, start, remaining = [], 0, list(grids)
    for kind, group in groupby(types):
        length = len(list(group))
        if kind == 0:
            parts.append(torch.arange(start, start + length).expand(3, -1))
            start += length
            continue
        if not remaining:
            raise ValueError("the prompt has more runs of image tokens than images")
        frames, height, width = remaining.pop(0)
        height, width = height // merge_size, width // merge_size
        if frames * height * width != length:
            raise ValueError(f"a run of {length} image tokens does not fit an image of {frames}×{height}×{width}")
        axes = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
        parts.append(torch.stack([axis.flatten() for axis in axes]) + start)
        start += max(height, width)
    if remaining:
        raise ValueError("the prompt has fewer runs of image tokens than images")
    joined = torch.cat(parts, dim=1)
    return joined, int(joined.max()) + 1 - len(types)


def slots_of(types: Sequence[int]) -> Tensor:
    """[T] int32 on the CPU: the number of every image token (`types` not 0) among them, −1 for the others."""
    visual = np.asarray(types, dtype=np.int64) != 0
    return torch.from_numpy(np.where(visual, visual.cumsum() - 1, -1).astype(np.int32))
