"""One preallocated KV buffer for all layers."""

import torch
from torch import Tensor

from vlmopt.weights import TextWeights

SMALLEST = 512


def bucket(length: int) -> int:
    """The capacity that serves `length` positions: the next power of two, at least `SMALLEST`."""
    return max(SMALLEST, 1 << (length - 1).bit_length())


class KVCache:
    """Keys and values [layers, 2, Hkv, capacity, D] in the model's dtype or, with `fp8`, in e4m3.

    Grows to a power of two, never shrinks. Rows beyond the live length may hold anything from an earlier call: no stage
    reads them.
    """

    def __init__(self, weights: TextWeights, fp8: bool = False):
        self._shape = (len(weights.layers), 2, weights.n_kv_heads, 0, weights.head_dim)
        self.buffer = torch.empty(self._shape, dtype=_dtype(weights, fp8), device=weights.embed.device)

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.buffer.shape[3]

    def reserve(self, length: int) -> bool:
        """Make room for `length` positions, keeping what is there; says whether the storage moved."""
        if length <= self.capacity:
            return False
        layers, two, heads, _, width = self._shape
        # zeros, since the product of a masked zero and a NaN of fresh memory would still be NaN
        grown = self.buffer.new_zeros(layers, two, heads, bucket(length), width)
        grown[:, :, :, : self.capacity] = self.buffer
        self.buffer = grown
        return True

    def release(self) -> None:
        """Give all memory back."""
        self.buffer = self.buffer.new_empty(self._shape)

    def view(self, capacity: int) -> Tensor:
        """The first `capacity` positions of every layer."""
        return self.buffer[:, :, :, :capacity]

    @staticmethod
    def bytes(weights: TextWeights, length: int, fp8: bool = False) -> int:
        """Memory of a cache for `length` positions."""
        values = len(weights.layers) * 2 * weights.n_kv_heads * bucket(length) * weights.head_dim
        return values * _dtype(weights, fp8).itemsize


def _dtype(weights: TextWeights, fp8: bool) -> torch.dtype:
    return torch.float8_e4m3fn if fp8 else weights.embed.dtype
