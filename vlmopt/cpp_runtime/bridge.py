"""Calling the C++ runtime: one named struct a call, tensors of one workspace back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmopt.cpp_runtime import build, kernels
from vlmopt.kernels import native
from vlmopt.stages.connector import Grid
from vlmopt.weights import Weights


@dataclass(frozen=True, slots=True)
class VisionCall:
    """The patches of a prompt's images and their grids; `bridge.cpp` reads them by these names."""

    pixels: Tensor
    grids: tuple[Grid, ...]
    stream: int


@dataclass(frozen=True, slots=True)
class PrefillCall:
    """The arguments of `stages.prefill.prefill` and of the merge before it; `bridge.cpp` reads them by these names."""

    ids: Tensor
    slots: Tensor | None
    features: Tensor | None
    deepstack: Sequence[Tensor]
    positions: Tensor
    """[3, T]; this and `slots` on the CPU."""
    cos: Tensor
    sin: Tensor
    """Tables of all positions."""
    cache: Tensor
    stream: int


class CppRuntime:
    """One model's vision and prefill by the C++ library. Like the engine, it serves one call at a time.

    Raises:
        VlmoptError: the library cannot be built or loaded, or cannot serve these weights.
    """

    def __init__(self, weights: Weights):
        self._device = weights.text.embed.device
        library = build.load()
        if self._device.type == "cpu":
            self._runtime = library.Runtime(weights, None)
            return
        with torch.cuda.device(self._device):
            self._runtime = library.Runtime(weights, kernels.describe(weights))

    def encode(self, pixels: Tensor, grids: tuple[Grid, ...]) -> tuple[Tensor, list[Tensor]]:
        """`stages.vision.encode` of the grids' table, which C++ makes, by the references or, on a GPU, the kernels."""
        return self._runtime.encode(VisionCall(pixels, grids, self._stream()))

    def prefill(
        self,
        ids: Tensor,
        slots: Tensor | None,
        features: Tensor | None,
        deepstack: Sequence[Tensor],
        positions: Tensor,
        rope_table: tuple[Tensor, Tensor],
        cache: Tensor,
    ) -> Tensor:
        """Merge ids [T] with the features and run `stages.prefill.prefill` with `narrow`; returns [1, hidden].

        `positions` [3, T] and `slots` are on the CPU, where they are made; `rope_table` is cos and sin of all
        positions, which have the bits that `stages.tables.rope` gives to one alone.
        """
        call = PrefillCall(ids, slots, features, deepstack, positions, *rope_table, cache, self._stream())
        return self._runtime.prefill(call)

    @property
    def launches(self) -> int:
        """Launches issued so far; on a CPU the steps made."""
        return self._runtime.launches

    def _stream(self) -> int:
        return native.stream(self._device) if self._device.type == "cuda" else 0
