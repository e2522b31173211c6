"""Between vision and text: the mRoPE positions of a prompt with images, and which feature goes where."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Grid = tuple[int, int, int]
Run = tuple[int, int]
"""Where a run of image tokens begins in the prompt, and where the text after it does."""


def image_runs(types: Sequence[int] | np.ndarray) -> list[Run]:
    """The runs of ones in a prompt's token types (0 text, 1 image)."""
    between_text = np.zeros(len(types) + 2, dtype=np.int8)
    between_text[1:-1] = types
    edges = np.flatnonzero(between_text[1:] != between_text[:-1])
    return list(map(tuple, edges.reshape(-1, 2).tolist()))


def require_fit(runs: Sequence[Run], grids: Sequence[Grid], merge_size: int) -> None:
    """Every run of image tokens must have its grid, in order, with a token for each block of `merge_size`² patches.

    Raises:
        ValueError: the number of image tokens does not fit the grids.
    """
    for (start, end), grid in zip(runs, grids, strict=False):
        frames, height, width = grid
        blocks = frames * (height // merge_size) * (width // merge_size)
        if min(grid) < 1 or height % merge_size or width % merge_size or blocks != end - start:
            raise ValueError(f"a run of {end - start} image tokens does not fit an image of {frames}×{height}×{width}")
    if len(runs) != len(grids):
        which = "more" if len(runs) > len(grids) else "fewer"
        raise ValueError(f"the prompt has {which} runs of image tokens than images")


def positions(types: Sequence[int] | np.ndarray, grids: Sequence[Grid], merge_size: int) -> tuple[Tensor, int]:
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
    runs, length = image_runs(types), len(types)
    require_fit(runs, grids, merge_size)
    places = np.empty((3, length), dtype=np.int64)
    row = place = 0
    for (start, end), (frames, height, width) in zip(runs, grids, strict=True):
        blocks = frames, height // merge_size, width // merge_size
        places[:, row:start] = np.arange(place, place + start - row)
        place += start - row
        places[:, start:end] = place + np.indices(blocks).reshape(3, -1)
        place += max(blocks[1:])
        row = end
    places[:, row:] = np.arange(place, place + length - row)
    return torch.from_numpy(places), int(places.max()) + 1 - length


def slots_of(types: Sequence[int] | np.ndarray) -> Tensor:
    """[T] int32 on the CPU: the number of every image token (`types` not 0) among them, −1 for the others."""
    visual = np.asarray(types, dtype=np.int64) != 0
    return torch.from_numpy(np.where(visual, visual.cumsum() - 1, -1).astype(np.int32))
