"""Who proposes the tokens that a step verifies."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from vlmopt.runtime.request import Request
from vlmopt.stages.decode import attention, decode_step

if TYPE_CHECKING:
    from vlmopt.runtime.generate import Engine

NOT_TEXT = -1
"""In a history, what stands for an image token."""
NOWHERE = -2
"""In no history."""
AT_ONCE = 8
"""Tokens that a draft model takes in one step when it catches up."""


class Drafter(Protocol):
    """Proposes tokens; a wrong one costs time and changes no answer.

    One that reads the model's own rows names in `taps` the layers after which, and is told of these by `follow`.
    """

    taps: tuple[int, ...] = ()

    def reserve(self, capacity: int) -> None:
        """From now on a sequence has up to `capacity` rows; what is kept of an earlier one may go."""

    def begin(self, request: Request) -> None:
        """A new prompt."""

    def follow(self, rows: Tensor, taps: Sequence[Tensor], following: Tensor) -> None:
        """What the model made of a prompt, then of every step: of drafts that do not hold as well, and then again.

        Args:
            rows: [R] int64, where the tokens that were read stand.
            taps: for each layer of `self.taps` the rows [R, hidden] after it.
            following: [R] int64, the token after each.
        """

    def __call__(self, history: Tensor, row: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Propose what follows history[: row + 1].

        Args:
            history: [3 or more] int64, `NOT_TEXT` where an image token stands; anything beyond `row` [1].
            k: at least 1.

        Returns:
            tokens [k] int64, and whether they are a proposal at all (bool [1]), all on the device.
        """


class Lookup(Drafter):
    """Prompt lookup (Saxena, 2023): what followed the last 3 tokens, else the last 2, when they last occurred.

    In prompt and answer alike, never over an image; waits for nothing, so it can be captured. Where the occurrence is
    so recent that its continuation is not known to the end, it goes on as it began.
    """

    def __call__(self, history: Tensor, row: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Drafter`; without an occurrence the tokens are zeros."""
        size, device = len(history), history.device
        last = history[(row + torch.arange(-2, 1, device=device)).clamp(min=0)]
        same = history.unfold(0, 3, 1) == last.masked_fill(last == NOT_TEXT, NOWHERE)
        matched = same.flip(1).cumprod(1)[:, 1:].sum(1)  # 1 where the last two tokens end, 2 where all three do
        ends = torch.arange(2, size, device=device)
        best = torch.where(ends < row, matched * size + ends, 0).max(0, keepdim=True).values  # longest, then latest
        found, end = best >= size, torch.minimum(best % size, row - 1)
        places = end + 1 + torch.arange(k, device=device) % (row - end)
        return (history[places] * found).clamp(min=0), found


class DraftModel(Drafter):
    """Another model of the family, which continues greedily over its own cache; it must share the tokenizer.

    The host reads `row` at every draft, so this one is for the loop without graphs.
    """

    def __init__(self, engine: "Engine", model: nn.Module):
        """`engine` is that of the optimised `model`."""
        self._engine, self._model, self._delta, self._done = engine, model, 0, 0

    def begin(self, request: Request) -> None:
        """Prefill the prompt, images included."""
        engine, self._done = self._engine, len(request.id_list)
        engine.reserve(self._done + request.max_new_tokens + AT_ONCE)
        with engine.arena.held():
            quiet = replace(request, streamer=None)
            self._delta = engine.prefill(self._model, quiet, engine.cache.buffer)[1]

    def __call__(self, history: Tensor, row: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Drafter`; first takes what has been said since the last draft."""
        last = int(row)
        for start in range(self._done, last + 1, AT_ONCE):
            h = self._run(history[start : min(start + AT_ONCE, last + 1)], start)
        self._done = last + 1
        draft = [self._engine.choose(h[-1:], history, None)]
        for i in range(1, k):
            draft.append(self._engine.choose(self._run(draft[-1], last + i), history, None))
        return torch.cat(draft), torch.ones(1, dtype=torch.bool, device=row.device)

    def _run(self, tokens: Tensor, start: int) -> Tensor:
        engine = self._engine
        rows = torch.arange(start, start + len(tokens), device=tokens.device)
        angles = tuple(table.index_select(0, rows + self._delta) for table in engine.rope_table)
        attend = attention(rows, engine.cache.buffer, engine.ops, may_wait=True)
        return decode_step(tokens, angles, engine.cache.buffer, rows, attend, engine.weights.text, engine.ops)
