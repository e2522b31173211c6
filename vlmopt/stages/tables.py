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
    patches of each attention segment (one frame of one image), or `ops.padded_tiles` of them on the device.
    """

    indices: Tensor
    taps: Tensor
    cos: Tensor
    sin: Tensor
    lengths: tuple[int, ...] | Tensor


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
    device, merge = weights.inv_freq.device, weights.merge_size
    parts = []
    for frames, height, width in grids:
        row_index, row_weight = _taps(height, weights.side)
        column_index, column_weight = _taps(width, weights.side)
        indices = (row_index * weights.side)[:, None, :, None] + column_index[None, :, None, :]
        taps = row_weight[:, None, :, None] * column_weight[None, :, None, :]
        places = torch.empty(2, 2, height, width)
        places[:, 0], places[:, 1] = torch.arange(height)[:, None], torch.arange(width)
        parts.append([_block_order(part, merge).repeat(frames, 1) for part in (indices, taps, places)])
    indices, taps, places = (_to_device(torch.cat(each), device) for each in zip(*parts, strict=True))
    # the two axes' angles stand twice in a row, for the two halves of a head
    angles = (places[..., None] * weights.inv_freq.float()).flatten(1)
    lengths = tuple(height * width for frames, height, width in grids for _ in range(frames))
    return GridTable(indices, taps, angles.cos(), angles.sin(), lengths)


def _block_order(grid: Tensor, merge: int) -> Tensor:
    """[2, 2, height, width], four values of every patch of one frame, as [patches, 4] merge block by merge block."""
    *_, height, width = grid.shape
    blocks = grid.view(4, height // merge, merge, width // merge, merge)
    return blocks.permute(1, 3, 2, 4, 0).reshape(-1, 4)


def _taps(size: int, side: int) -> tuple[Tensor, Tensor]:
    """Two source positions and their weights, [2, size] each; an axis of `side` is stretched over `size`.

    The corners of both are aligned.
    """
    source = torch.arange(size).float() * (side - 1) / max(size - 1, 1)
    floor = source.floor()
    offsets = torch.arange(2)[:, None]
    distance = (source - floor - offsets).abs()
    return (floor.long() + offsets).clamp(max=side - 1), (1 - distance).clamp(min=0)


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    # from other memory the copy would make the host wait
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


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
