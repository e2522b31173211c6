"""From an output row to the visual feature that belongs there, made on the device without a host synchronisation.

`slots[rows[i]] = i` is written into fresh memory, and nothing else is: what a row that holds no feature finds there is
whatever the memory held. A reader therefore believes a slot only if it points back, `rows[slots[row]] == row` (the
sparse set of Briggs and Torczon, 1993). That saves the pass that would clear the map, and works for rows in any order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_N = 256


@triton.jit(do_not_specialize=["n_rows", "n_features"])
def _fill(rows_ptr, slots_ptr, n_rows, n_features, BLOCK_N: tl.constexpr):
    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = index < n_features
    row = tl.load(rows_ptr + index, mask=mask, other=-1)
    tl.store(slots_ptr + row, index, mask=mask & (row >= 0) & (row < n_rows))


@triton.jit
def feature_of(row, rows_ptr, slots_ptr, n_features):
    """The index of the feature that belongs to `row`, or −1."""
    slot = tl.load(slots_ptr + row)
    plausible = (slot >= 0) & (slot < n_features)
    points_to = tl.load(rows_ptr + tl.where(plausible, slot, 0), mask=plausible, other=-1)
    return tl.where(points_to == row, slot, -1)


def row_slots(rows: Tensor, n_rows: int) -> Tensor:
    """The map for `rows` [N] int64 (each in 0 … n_rows − 1, at most once) as [n_rows] int32, for `feature_of`."""
    slots = torch.empty(n_rows, dtype=torch.int32, device=rows.device)
    n_features = rows.shape[0]
    _fill[(triton.cdiv(n_features, BLOCK_N),)](rows, slots, n_rows, n_features, BLOCK_N=BLOCK_N, num_warps=4)
    return slots


def rows_refusal(rows: Tensor, features: Tensor) -> str | None:
    """Why `rows` cannot say where `features` [N, hidden] go, or None."""
    if rows.dtype != torch.int64 or rows.dim() != 1 or not rows.is_contiguous():
        return f"rows is {rows.dtype} of shape {tuple(rows.shape)}; give a contiguous int64 vector"
    if rows.device != features.device:
        return f"rows is on {rows.device} but features is on {features.device}; move them to one device"
    if rows.shape[0] != features.shape[0]:
        return f"{rows.shape[0]} rows for {features.shape[0]} features; give one row a feature"
    return None
