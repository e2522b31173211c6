"""From logits to a token where that is more than the largest one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampler:
    """Stock's own steps in stock's order, so that the same seed gives the same tokens from the same logits.

    `shape` is stock's list of processors, (ids [B, n], scores [B, vocabulary]) → scores; `draws` says whether a token
    is drawn from the scores' distribution or the largest is taken.
    """

    shape: Callable[[Tensor, Tensor], Tensor]
    draws: bool

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The next tokens [B], given all ids so far and the last positions' logits; waits for nothing."""
        scores = self.shape(ids, logits.to(dtype=torch.float32, copy=True))
        if not self.draws:
            return scores.argmax(dim=-1)
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
