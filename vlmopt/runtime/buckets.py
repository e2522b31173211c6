"""Vision and prefill at a bounded ladder of sizes, each size one CUDA graph: the rival of the C++ runtime.

A replay costs the host next to nothing, but a graph has one shape. So patches and tokens are padded to the next rung of
a ladder, every rung is captured when the model is optimised, and what depends on the prompt is data on the device:
positions, rows, the tiles of attention, and the index of the last token.

Padding never reaches a real row. In the tower rows meet in attention alone, whose tiles cover real patches; in the
prompt attention is causal and padding comes last. There a hidden key is multiplied by zero, so padding must be finite,
whatever an earlier call has left behind: it is token 0 at position 0, and no feature belongs to it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from vlmopt.ops import Ops, padded_tiles
from vlmopt.runtime.cache import KVCache
from vlmopt.runtime.graphs import capture
from vlmopt.stages.connector import Grid
from vlmopt.stages.prefill import prefill
from vlmopt.stages.tables import GridTable, GridTables, grid_table, rope
from vlmopt.stages.vision import encode
from vlmopt.weights import Weights

SEGMENTS = 32
"""Images, or frames of these, that a rung of the tower has tiles for."""


def ladder(smallest: int, largest: int) -> tuple[int, ...]:
    """Four sizes an octave, so that padding adds a quarter at most; `smallest` is a multiple of four."""
    octaves = [smallest << octave for octave in range((largest // smallest).bit_length())]
    sizes = [octave * quarters // 4 for octave in octaves for quarters in range(4, 8)]
    return tuple(size for size in sizes if size <= largest)


PATCHES, TOKENS = ladder(128, 8192), ladder(128, 2048)
"""Up to about 2 million pixels, and a prompt of the tokens of these."""


class Buckets:
    """One model's vision and prefill by bucket; what fits no rung takes the stages as they are.

    On a CPU nothing is captured, and the padded stages run as they are. Serves one call at a time, as the engine does.
    Holds buffers for the largest rung, among them keys and values: a graph knows its own alone, so a call's cache may
    lie and grow as it likes.

    Args:
        weights: packed.
        patches, tokens: the ladders; patches are multiples of a merge block.
        progress: wraps the sizes while they are captured.

    Raises:
        PartFailed: a size could not be captured.
    """

    def __init__(
        self,
        weights: Weights,
        ops: Ops,
        patches: Sequence[int] = PATCHES,
        tokens: Sequence[int] = TOKENS,
        progress: Callable[[list], Iterable] = iter,
    ):
        self._weights, self._ops, self._grids = weights, ops, GridTables(weights.vision)
        vision, text = weights.vision, weights.text
        self._block = vision.merge_size**2
        most_patches, most_tokens = max(patches), max(tokens)
        embed = text.embed

        self._pixels = embed.new_zeros(most_patches, vision.patch.weight[0].numel())
        shapes = _by_patch(grid_table(((1, vision.merge_size, vision.merge_size),), vision))
        self._by_patch = [part.new_zeros(most_patches, part.shape[1]) for part in shapes]
        self._tiles = self._tile_table((), most_patches).to(embed.device)
        most_features = max(most_tokens, most_patches // self._block)
        self._features = embed.new_zeros(1 + len(vision.deepstack), most_features, embed.shape[1])

        self._ids = torch.zeros(most_tokens, dtype=torch.int64, device=embed.device)
        self._slots, self._places = self._ids.int(), self._ids.new_zeros(most_tokens, 3)
        self._asked = self._ids.new_zeros(1)
        self._cache = KVCache(text)
        self._cache.reserve(most_tokens)
        self._last = embed.new_zeros(1, embed.shape[1])

        self._pool = torch.cuda.graph_pool_handle() if embed.is_cuda else None
        self._towers = self._runs(self._run_tower, patches, progress)
        self._prompts = self._runs(self._run_prompt, tokens, progress)

    def _runs(
        self, step: Callable[[int], None], sizes: Sequence[int], progress: Callable[[list], Iterable]
    ) -> dict[int, Callable[[], None]]:
        """What runs the step at each size; the largest is captured first, and the others find room in its memory."""
        steps = {size: partial(step, size) for size in sorted(sizes, reverse=True)}
        if self._pool is None:
            return steps
        device = self._last.device
        return {
            size: capture(steps[size], 1, device, self._pool, "prompt_graphs").replay for size in progress(list(steps))
        }

    def encode(self, pixels: Tensor, grids: tuple[Grid, ...]) -> tuple[Tensor, list[Tensor]]:
        """`stages.vision.encode` of the grids' table; views that hold until the next call."""
        count, table = len(pixels), self._grids.get(grids)
        rung = _next(self._towers, count)
        if rung is None or len(table.lengths) > SEGMENTS:
            return encode(pixels, table, self._weights.vision, self._ops)
        self._pixels[:count].copy_(pixels)
        for buffer, values in zip(self._by_patch, _by_patch(table), strict=True):
            buffer[:count].copy_(values)
        tiles = self._tile_table(table.lengths, rung)
        _send(tiles, self._tiles[: len(tiles)])
        self._towers[rung]()
        features, *taps = self._features[:, : count // self._block]
        return features, taps

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

        The arguments are `CppRuntime.prefill`'s; `rope_table` is not looked at, since a graph makes a prompt's angles.
        """
        length = len(ids)
        rung = _next(self._prompts, length)
        if rung is None:
            slots, positions = (None if part is None else part.to(ids.device) for part in (slots, positions))
            return self._prompt(ids, slots, features, deepstack, positions, cache, None)
        own_slots, places = torch.full((rung,), -1, dtype=torch.int32), torch.zeros(rung, 3, dtype=torch.int64)
        places[:length] = positions.T
        if slots is not None:
            own_slots[:length] = slots
            for buffer, values in zip(self._features, (features, *deepstack), strict=True):
                buffer[: len(values)].copy_(values)  # torch leaves out a copy onto itself: most often `encode`'s own
        _send(own_slots, self._slots[:rung])
        _send(places, self._places[:rung])
        self._ids[:length].copy_(ids)
        self._ids[length:rung].zero_()
        self._asked.fill_(length - 1)
        self._prompts[rung]()
        cache[:, :, :, :length].copy_(self._cache.view(length))
        return self._last.clone()

    def _tile_table(self, lengths: Sequence[int], rung: int) -> Tensor:
        vision = self._weights.vision
        weight = vision.blocks[0].qkv.weight
        return padded_tiles(lengths, rung, SEGMENTS, len(weight) // (3 * vision.n_heads), weight.dtype)

    def _run_tower(self, rung: int) -> None:
        tiles = self._tiles[: len(self._tile_table((), rung))]
        grid = GridTable(*(part[:rung] for part in self._by_patch), tiles)
        features, taps = encode(self._pixels[:rung], grid, self._weights.vision, self._ops)
        for buffer, values in zip(self._features, (features, *taps), strict=True):
            buffer[: len(values)].copy_(values)

    def _run_prompt(self, rung: int) -> None:
        features, *taps = self._features[:, :rung]
        slots, places = self._slots[:rung], self._places[:rung].T
        cache = self._cache.view(rung)
        self._last.copy_(self._prompt(self._ids[:rung], slots, features, taps, places, cache, self._asked))

    def _prompt(
        self,
        ids: Tensor,
        slots: Tensor | None,
        features: Tensor | None,
        deepstack: Sequence[Tensor],
        positions: Tensor,
        cache: Tensor,
        asked: Tensor | None,
    ) -> Tensor:
        text, ops = self._weights.text, self._ops
        h = ops.merge_embeddings(ids, text.embed, slots, features)
        rows, angles = torch.arange(len(ids), device=ids.device), rope(positions, text, h.dtype)
        return prefill(h, angles, cache, rows, slots, deepstack, text, ops, narrow=True, asked=asked)


def _by_patch(table: GridTable) -> tuple[Tensor, ...]:
    return table.indices, table.taps, table.cos, table.sin


def _next(runs: dict[int, Callable[[], None]], size: int) -> int | None:
    """The smallest rung that holds `size`."""
    return min((rung for rung in runs if rung >= size), default=None)


def _send(values: Tensor, buffer: Tensor) -> None:
    """Copy what the host has made, without waiting for the device."""
    buffer.copy_(values.pin_memory() if buffer.is_cuda else values, non_blocking=True)
