"""How long answers become: learned from those that ended, since nobody knows beforehand."""

import math
from bisect import bisect_right, insort
from collections import deque

from vlmopt.errors import VlmoptError

QUANTILE = 0.7  # found by tuning (notebook 51)
SETTLED = 32  # answers of a kind; the first to end are the short ones among those that run


class OutputLengths:
    """A running quantile of output lengths (tokens) for each kind of request.

    Args:
        quantile: of the observed lengths, above 0 and at most 1; 1 is the longest observed.
        window: how many of the newest answers of a kind count.
        default: tokens assumed before anything was observed, and the least until SETTLED answers have ended.
        growth: an answer longer than all observed ones is expected to become this many times as long as it is.

    Raises:
        VlmoptError: a value that means nothing.
    """

    def __init__(self, quantile: float = QUANTILE, window: int = 256, default: float = 256.0, growth: float = 1.5):
        if not (0 < quantile <= 1 and window >= 1 and default >= 1 and growth > 1):
            raise VlmoptError(
                f"quantile={quantile}, window={window}, default={default}, growth={growth}: "
                "needed are 0 < quantile <= 1, window >= 1, default >= 1 and growth > 1"
            )
        self.quantile, self.window, self.default, self.growth = quantile, window, default, growth
        self._in_order: dict[str, deque[int]] = {}
        self._sorted: dict[str, list[int]] = {}

    def observe(self, kind: str, tokens: int) -> None:
        """An answer of this kind ended after `tokens` tokens."""
        newest = self._in_order.setdefault(kind, deque())
        lengths = self._sorted.setdefault(kind, [])
        newest.append(tokens)
        insort(lengths, tokens)
        if len(newest) > self.window:
            del lengths[bisect_right(lengths, newest.popleft()) - 1]

    def expected(self, kind: str, output_so_far: int = 0) -> float:
        """Tokens of the whole answer, of which `output_so_far` exist: at least one more than these.

        The quantile is taken of those observed answers that became longer than this one is. Between two observations
        it never falls as an answer grows.
        """
        lengths = self._sorted.get(kind, [])
        shorter = bisect_right(lengths, output_so_far)
        longer = len(lengths) - shorter
        if longer:
            found = float(lengths[shorter + math.ceil(self.quantile * longer) - 1])
        else:
            found = max(output_so_far * self.growth, output_so_far + 1.0)
        is_settled = len(lengths) >= min(SETTLED, self.window) or output_so_far >= self.default
        return found if is_settled else max(found, self.default)
