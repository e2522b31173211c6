"""Calling the C++ runtime: one named struct a call, tensors of one workspace back."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vlmopt.cpp_runtime import build, kernels
from vlmopt.kernels import native
from vlmopt.stages.tables import GridTable
from vlmopt.weights import Weights


@dataclass(frozen=True, slots=True)
class VisionCall:
    """The arguments of `stages.vision.encode`; `bridge.cpp` reads them by these names."""

    pixels: Tensor
    indices: Tensor
    taps: Tensor
    cos: Tensor
    sin: Tensor
    lengths: tuple[int, ...]
    tiles: Tensor | None
    """The attention kernel's table; a CPU needs none."""
    stream: int


@dataclass(frozen=True, slots=True)
class PrefillCall:
    """The arguments of `stages.prefill.prefill` and of the merge before it; `bridge.cpp` reads them by these names."""

    ids: Tensor
    visual_rows: Tensor | None
    features: Tensor | None
    deepstack: Sequence[Tensor]
    cos: Tensor
    sin: Tensor
    rows: Tensor
    cache: Tensor
    stream: int


class CppRuntime:
    """One model's vision and prefill by the C++ library. Like the engine, it serves one call at a time.

    Raises:
        VlmoptError: the library cannot be built or loaded, or cannot serve these weights.
    """

    def __init__(self, weights: Weights):
        self._device, self._dtype = weights.text.embed.device, weights.text.embed.dtype
        self._head_width = weights.vision.pos_embed.shape[1] // weights.vision.n_heads
        library = build.load()
        gpu = kernels.describe(weights) if self._device.type == "cuda" else None
        self._runtime = library.Runtime(weights, gpu)

    def encode(self, pixels: Tensor, grid: GridTable) -> tuple[Tensor, list[Tensor]]:
        """`stages.vision.encode` with a table of references, or of kernels on a GPU."""
        tiles = None
        if self._device.type == "cuda":
            tiles = kernels.attention_tiles(grid.lengths, self._head_width, self._dtype, self._device)
        call = VisionCall(pixels, grid.indices, grid.taps, grid.cos, grid.sin, grid.lengths, tiles, self._stream())
        return self._runtime.encode(call)

    def prefill(
        self,
        ids: Tensor,
        visual_rows: Tensor | None,
        features: Tensor | None,
        deepstack: Sequence[Tensor],
        angles: tuple[Tensor, Tensor],
        rows: Tensor,
        cache: Tensor,
    ) -> Tensor:
        """Merge ids [T] with the features and run `stages.prefill.prefill` with `narrow`; returns [1, hidden]."""
        call = PrefillCall(ids, visual_rows, features, deepstack, *angles, rows, cache, self._stream())
        return self._runtime.prefill(call)

    @property
    def launches(self) -> int:
        """Launches issued so far; on a CPU the steps made."""
        return self._runtime.launches

    def _stream(self) -> int:
        return native.stream(self._device) if self._device.type == "cuda" else 0
