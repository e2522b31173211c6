"""The blocks that running requests will hold, step by step, if each takes a token a step until its expected end."""

from bisect import bisect_left
from collections.abc import Iterable


class Forecast:
    """Predicted block use of some requests over the coming steps, and which more fit under it.

    A request is (tokens, steps): in the first step it holds the blocks of `tokens` tokens, in each further one of a
    token more, and it gives all of them back after its step number `steps`. Between two ends the use only grows, so the
    use in the steps of the ends holds every peak. Building takes O(n (log n + block size)), each question O(n).

    Args:
        blocks: that there are for these requests.
        block_size: in tokens.
        requests: both numbers at least 1.
    """

    def __init__(self, blocks: int, block_size: int, requests: Iterable[tuple[int, int]] = ()):
        self._blocks, self._size = blocks, block_size
        self._requests = sorted(requests, key=lambda request: request[1])
        self._ends = [steps for _, steps in self._requests]
        self._use = self._use_at_ends()  # by all that have not ended before, in the step of each end
        self._note_peak()

    @property
    def peak(self) -> int:
        """The most blocks that will be held in any step."""
        return self._peak

    def fits(self, tokens: int, steps: int, left: int = 0) -> bool:
        """Whether all blocks but `left` suffice in each step until one more request has ended."""
        blocks, most = self._blocks - left, self._of(tokens + steps - 1)
        if self._peak + most <= blocks:
            return True
        own = tokens - 1
        if self._peak_end <= steps and self._peak - (own + self._peak_end) // -self._size > blocks:
            return False
        before = bisect_left(self._ends, steps)
        if self._use_in(steps, before) + most > blocks:
            return False
        return all(
            use - (own + end) // -self._size <= blocks
            for end, use in zip(self._ends[:before], self._use[:before], strict=True)
        )

    def add(self, tokens: int, steps: int) -> None:
        """Count one more request."""
        place = bisect_left(self._ends, steps)
        use = self._use_in(steps, place)
        self._requests.insert(place, (tokens, steps))
        self._ends.insert(place, steps)
        self._use.insert(place, use)
        for i, end in enumerate(self._ends):
            if end > steps:
                break
            self._use[i] += self._of(tokens + end - 1)
        self._note_peak()

    def _note_peak(self) -> None:
        self._peak = max(self._use, default=0)
        self._peak_end = self._ends[self._use.index(self._peak)] if self._use else 0

    def _of(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _use_in(self, step: int, first: int) -> int:
        """Blocks in `step` of the requests from number `first` on."""
        return sum(self._of(tokens + step - 1) for tokens, _ in self._requests[first:])

    def _use_at_ends(self) -> list[int]:
        """From the last end to the first, counting remainders: ceil((tokens + step - 1) / size) is the quotient of
        tokens + size - 2 and that of `step`, and one more where their remainders reach a block together."""
        size, use = self._size, []
        quotients, count, remainders = 0, 0, [0] * size
        waiting = self._requests[:]
        for step in reversed(self._ends):
            while waiting and waiting[-1][1] >= step:
                quotient, remainder = divmod(waiting.pop()[0] + size - 2, size)
                quotients, count = quotients + quotient, count + 1
                remainders[remainder] += 1
            quotient, remainder = divmod(step, size)
            use.append(quotients + count * quotient + sum(remainders[size - remainder :]))
        return use[::-1]
