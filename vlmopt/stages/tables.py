"""Tables that depend on positions and grid shapes alone, never on an image or a prompt."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmopt.weights import TextWeights, VisionWeights

GRIDS_KEPT = 64


@dataclass(frozen=True)
class GridTable:
    """What the vision tower needs to know of one tuple of grids with N patches in all.

    `indices`, `taps` [N, 4] interpolate the position embedding; `cos`, `sin` [N, D] fp32 rotate; `lengths` are the
    patches of each attention segment (one frame of one image).
    """

    indices: Tensor
    taps: Tensor
    cos: Tensor
    sin: Tensor
    lengths: tuple[int, ...]


class GridTables:
    """Grid tables by grid shape, the least recently used dropped beyond `GRIDS_KEPT`."""

    def __init__(self, weights: VisionWeights):
        self._weights = weights
        self._kept: OrderedDict[tuple, GridTable] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, grids: tuple[tuple[int, int, int], ...]) -> GridTable:
        """The table of `grids`, each (frames, rows, columns) in patches."""
        if grids not in self._kept:
            self._kept[grids] = grid_table(grids, self._weights)
            if len(self._kept) > GRIDS_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grids)
        return self._kept[grids]


def grid_table(grids: tuple[tuple[int, int, int], ...], weights: VisionWeights) -> GridTable:
    """Compute the table of `grids` on the weights' device; patches come in merge-block order, as the processor's do."""
    device = weights.inv_freq.device
    rows, columns, row_taps, column_taps = [], [], [], []
    for frames, height, width in grids:
        row, column = _block_order(height, width, weights.merge_size)
        rows.append(row.repeat(frames))
        columns.append(column.repeat(frames))
        row_taps.append([part.repeat(frames, 1) for part in _taps(row, height, weights.side)])
        column_taps.append([part.repeat(frames, 1) for part in _taps(column, width, weights.side)])
    row_index, row_weight = (torch.cat(parts) for parts in zip(*row_taps, strict=True))
    column_index, column_weight = (torch.cat(parts) for parts in zip(*column_taps, strict=True))
    indices = (row_index[:, :, None] * weights.side + column_index[:, None, :]).flatten(1)
    taps = (row_weight[:, :, None] * column_weight[:, None, :]).flatten(1)
    positions = torch.stack([torch.cat(rows), torch.cat(columns)], dim=-1).to(device)
    angles = (positions[..., None].float() * weights.inv_freq.float()).flatten(1)
    cos, sin = angles.cos(), angles.sin()
    lengths = tuple(height * width for frames, height, width in grids for _ in range(frames))
    return GridTable(
        indices.to(device), taps.to(device), torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1), lengths
    )


def _block_order(height: int, width: int, merge: int) -> tuple[Tensor, Tensor]:
    """Row and column of every patch of one frame, merge block by merge block."""
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    shape = (height // merge, merge, width // merge, merge)
    return tuple(axis.reshape(shape).transpose(1, 2).flatten() for axis in (row, column))


def _taps(index: Tensor, size: int, side: int) -> tuple[Tensor, Tensor]:
    """Two source positions and their weights on an axis of `size` stretched over `side` (corners aligned)."""
    source = index.float() * (side - 1) / max(size - 1, 1)
    floor = source.floor()
    offsets = torch.arange(2)
    distance = (source[:, None] - floor[:, None] - offsets).abs()
    return (floor.long()[:, None] + offsets).clamp(0, side - 1), (1 - distance).clamp(min=0)


def rope(positions: Tensor, weights: TextWeights, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Interleaved mRoPE: cos and sin [T, D] in `dtype` for positions [3, T] (time, height, width).

    Angles are taken in fp32. Frequencies i with i % 3 == 1 follow the height and i % 3 == 2 the width, each up to three
    times its section; all others follow the time.
    """
    angles = positions[..., None].float() * weights.inv_freq.float()
    cos, sin = angles.cos() * weights.rope_scale, angles.sin() * weights.rope_scale
    return tuple(_interleave(part, weights.mrope_section).to(dtype) for part in (cos, sin))


def _interleave(parts: Tensor, section: tuple[int, int, int]) -> Tensor:
    """[3, T, D/2] → [T, D]."""
    joined = parts[0].clone()
    for axis in (1, 2):
        chosen = slice(axis, section[axis] * 3, 3)
        joined[:, chosen] = parts[axis][:, chosen]
    return torch.cat([joined, joined], dim=-1)
