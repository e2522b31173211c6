"""How many drafted tokens hold, and how many to draft next: pure functions, without a model.

Let p be the chance that a drafted token is the model's own, given that those before it are. A step that verifies k of
them gives 1 + p + … + p^k tokens (Leviathan et al., 2023), and costs c(k) plain steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MEMORY = 0.9
"""What a step's evidence is worth one step later."""
LOSS = 0.01
"""The share of time that may go into trying again where drafts lose."""


def count_equal(draft: Tensor, chosen: Tensor) -> Tensor:
    """How many drafted tokens [k] hold: those before the first that is not the model's choice [k + 1]; int64 []."""
    return (draft == chosen[: len(draft)]).long().cumprod(0).sum()


def accept_drawn(draft: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The same where tokens are drawn: what comes out follows the model's own distribution, whatever the drafts.

    A drafted token is kept with probability min(1, p / q); at the first that is not, a token is drawn from what p has
    above q, and after the last from p (Leviathan et al., 2023; Chen et al., 2023).

    Args:
        draft: [k] int64, drawn from q.
        q: [k, vocabulary], the drafter's distributions; a point mass for a drafter that does not draw.
        p: [k + 1, vocabulary], the model's, after whatever shapes them.

    Returns:
        how many hold (int64 []), and the token [1] that follows them.
    """
    k = len(draft)
    at = torch.arange(k, device=p.device)
    kept = torch.rand(k, device=p.device, dtype=p.dtype) * q[at, draft] < p[at, draft]
    held = kept.long().cumprod(0).sum()
    above = (p - torch.cat([q, torch.zeros_like(p[:1])])).clamp(min=0)
    return held, torch.multinomial(above.index_select(0, held[None])[0], 1)


def tokens_a_step(chance: float, k: int) -> float:
    """Tokens that a step with k drafted ones gives, where each holds with this chance once those before it do."""
    return sum(chance**i for i in range(k + 1))


def break_even(cost: float, k: int) -> float:
    """The chance at which a step with k drafted tokens that costs `cost` plain steps gains nothing; above 1: never."""
    if cost > k + 1:
        return math.inf
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_a_step(middle, k) < cost else (low, middle)
    return high


@dataclass(frozen=True)
class Pace:
    """What the last steps tell of drafts, and how many tokens to draft for that.

    `held` of `tried` drafted tokens were the model's own, and `drafts` of `steps` found something to draft; what is
    older counts less. The defaults are what is believed before the first step. `rest` plain steps are still to
    come before drafts are tried again.
    """

    held: float = 1.0
    tried: float = 2.0
    drafts: float = 1.0
    steps: float = 1.0
    rest: int = 0

    def gain(self, k: int, cost: float) -> float:
        """Tokens per plain step's time of steps with k drafted tokens."""
        found = self.drafts / self.steps
        return (1 - found + found * tokens_a_step(self.held / self.tried, k)) / cost

    def choose(self, costs: Mapping[int, float]) -> int:
        """How many tokens to draft next, of those whose steps' `costs` are known, in plain steps."""
        return 0 if self.rest else self._best(costs)

    def after(self, k: int, found: bool, held: int, costs: Mapping[int, float]) -> "Pace":
        """The pace after a step that drafted k tokens, of which `held` were the model's own."""
        if k == 0:
            return replace(self, rest=max(0, self.rest - 1))
        seen = replace(self, drafts=MEMORY * self.drafts + found, steps=MEMORY * self.steps + 1)
        if found:
            seen = replace(seen, held=MEMORY * self.held + held, tried=MEMORY * self.tried + min(held + 1, k))
        best = seen._best(costs)
        if seen.gain(best, costs[best]) > 1:
            return seen
        return replace(seen, rest=math.ceil((costs[best] - 1) / LOSS))

    def _best(self, costs: Mapping[int, float]) -> int:
        return max((k for k in costs if k), key=lambda k: self.gain(k, costs[k]))
