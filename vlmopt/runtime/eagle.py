"""EAGLE-3 (Li et al., 2025): one decoder layer that drafts from what the model itself made of the text so far.

The rows after a low, a middle and a high layer of the model, joined and projected, are a position's feature. With the
token that follows, it is what the head reads there, at that position's angle; what its layer gives names the token
after that, and stands for the feature that the next position has not got yet, so that the head can go on by itself.
What it has written for drafts is written again when the model has read them, from features that are known.

Everything stays on the device, and no shape depends on what holds, so steps with this drafter can be captured.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vlmopt.runtime.drafters import AT_ONCE, Drafter
from vlmopt.runtime.eagle_head import Head
from vlmopt.runtime.request import Request
from vlmopt.stages.connector import positions
from vlmopt.stages.tables import rope

if TYPE_CHECKING:
    from vlmopt.runtime.generate import Engine


class Eagle(Drafter):
    """A head that drafts for one engine's model; the embedding is the model's unless the head has its own.

    By row of the sequence, for up to as many as the engine's cache has: `_kv` [2, Hkv, rows, D] what the head's
    attention reads, `_rope` cos and sin [rows, D], and `_states` [rows, hidden] what its layer gave.
    """

    def __init__(self, engine: "Engine", head: Head):
        """`head` moves to the engine's device and dtype."""
        self._engine, self._head = engine, head.to(engine.device, engine.dtype).requires_grad_(False)
        self.taps = head.shape.taps
        self._embed = engine.weights.prompt.embed if head.embed_tokens is None else head.embed_tokens.weight

    def reserve(self, capacity: int) -> None:
        """See `Drafter`."""
        shape, new = self._head.shape, self._embed.new_zeros
        self._kv = new(2, shape.kv_heads, capacity, shape.head_dim)
        self._rope = new(capacity, shape.head_dim), new(capacity, shape.head_dim)
        self._states = new(capacity, shape.hidden)

    def begin(self, request: Request) -> None:
        """Look up the angles of the prompt's rows, images included, and of all that may follow."""
        engine, length = self._engine, len(request.id_list)
        places, delta = positions(request.types, request.grids, engine.weights.vision.merge_size)
        angles = rope(places.to(engine.device), engine.weights.text, engine.dtype)
        for own, prompt, table in zip(self._rope, angles, engine.rope_table, strict=True):
            own[:length] = prompt
            own[length:] = table[length + delta : len(own) + delta]

    def follow(self, rows: Tensor, taps: Sequence[Tensor], following: Tensor) -> None:
        """See `Drafter`."""
        self._read(rows, self._head.fuse(taps), following)

    def __call__(self, history: Tensor, row: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Drafter`."""
        before = row - 1
        state = self._states.index_select(0, before)
        draft = [self._head.choose(state)]
        for i in range(1, k):
            state = self._read(before + i, state, draft[-1])
            draft.append(self._head.choose(state))
        return torch.cat(draft), torch.ones(1, dtype=torch.bool, device=row.device)

    def _read(self, rows: Tensor, features: Tensor, following: Tensor) -> Tensor:
        """The states [R, hidden] of rows [R], which are kept, as keys and values are.

        A prompt is the first rows, and more than a step has.
        """
        live = len(rows) if len(rows) > AT_ONCE else self._kv.shape[2]
        angles = tuple(table.index_select(0, rows) for table in self._rope)
        x = self._head.mix(self._embed[following], features)
        for own, new in zip(self._kv, self._head.keys(x, angles), strict=True):
            own.index_copy_(1, rows, new)
        seen = torch.arange(live, device=rows.device) <= rows[:, None]
        states = self._head(x, features, angles, *self._kv[:, :, :live], seen)
        self._states.index_copy_(0, rows, states)
        return states
