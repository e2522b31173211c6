"""Greedy decoding with drafts: several tokens proposed, verified in one step, and those that hold kept.

A step runs the last token and k drafted ones through the model as one sequence, of which every row's choice says what
follows it. The drafted tokens that equal the choice before them hold, and one choice more comes for free. What the
cache holds beyond them is behind the live row, where the next step writes: rolling back is not moving the row on. All
of it happens on the device, which the host follows a step or two behind; it drops what comes after the end.

Ids are plain decode's, whatever is drafted, since a row's bits do not depend on the rows beside it with the kernels;
the references' products of several rows may round otherwise than those of one, so the class is near.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vlmopt.errors import PartFailed, VlmoptError
from vlmopt.runtime.acceptance import Pace, count_equal
from vlmopt.runtime.cache import bucket
from vlmopt.runtime.drafters import NOT_TEXT, Drafter, Lookup
from vlmopt.runtime.eagle import Eagle
from vlmopt.runtime.eagle_head import load
from vlmopt.runtime.graphs import capture, put_back, shown
from vlmopt.runtime.output import Output, to_host
from vlmopt.runtime.request import Request
from vlmopt.runtime.sampler import Sampler
from vlmopt.stages.decode import Taps, attention, decode_step

if TYPE_CHECKING:
    from vlmopt.runtime.generate import Engine

logger = logging.getLogger("vlmopt")

LADDER = (0, 2, 4, 7)
"""How many tokens a step may draft; the kernels take 8 rows."""
SPARE = LADDER[-1] + 1
"""Cache rows beyond the last token wanted, which drafts may take."""
IN_FLIGHT = 2
"""Steps that the device is given before the host waits for the first of them."""
TIMED = 4
"""Steps of a kind that are timed together, twice, to know its cost."""


class Speculation:
    """Drafts, verifies and keeps count for one engine.

    Buffers on the device: `history` the token of every row up to `row` [1], that of the last token, which never passes
    `limit` [1]; `delta` [1] a token's mRoPE position minus its row; `report` what the host is told of a step: the row
    after it, whether there was a draft, and every row's choice.
    """

    def __init__(self, engine: "Engine", drafter: Drafter):
        self._engine, self._drafter = engine, drafter
        self.taps: Taps = dict.fromkeys(drafter.taps)
        """What `prefill` is to tell of a prompt that is decoded with drafts."""
        self.row, self.delta, self.limit = (torch.zeros(1, dtype=torch.int64, device=engine.device) for _ in range(3))
        self.report = self.row.new_zeros(2 + SPARE)
        self.costs: Mapping[int, float] = dict.fromkeys(LADDER, 1.0)
        """What a step costs for every number of drafted tokens, in plain steps; `start` measures it."""
        self.counts: Counter[str] = Counter()
        """Over all calls: "calls"; "steps", of which "drafts" had something to draft; and of the drafted tokens "tried"
        (those up to the first that fails) those that "held"."""
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.forget()

    def forget(self) -> None:
        """Drop every graph: the cache's storage has moved."""
        self._graphs.clear()
        self.history = self.row.new_zeros(self._engine.cache.capacity + 1)
        self._drafter.reserve(self._engine.cache.capacity)

    def start(self, length: int) -> None:
        """Make room for `length` positions, capture what there is to capture, and measure `costs`.

        Raises:
            PartFailed: a capture failed.
            HandedToStock: there is no memory for the cache.
        """
        self._engine.reserve(length)
        self._capture(length - SPARE)
        with put_back(self.row, self.limit):
            seconds = {k: self._time(self._run(k, length - SPARE), length // 4) for k in LADDER}
        self.costs = {k: taken / seconds[0] for k, taken in seconds.items()}

    def ready(self, length: int) -> bool:
        """Whether a call that ends at `length` positions can be served; captures for it what is not yet."""
        try:
            self._capture(length)
        except PartFailed as failed:
            logger.warning("vlmopt decodes without drafts from now on: %s", failed)
            self._engine.left_out["speculate"], self._engine.speculation = str(failed), None
            return False
        return True

    def _capture(self, length: int) -> None:
        if self._engine.graphs is None:
            return
        capacity = self._capacity(length)
        pool = next((graph.pool() for graph in self._graphs.values()), None)
        for k in LADDER:
            if (k, capacity) not in self._graphs:
                with put_back(self.row, self.delta, self.limit):
                    self.delta.zero_()
                    # the warm-up run writes the last cache rows, which no prompt that is to be continued holds
                    self.row.fill_(capacity - SPARE)
                    self.limit.fill_(capacity - SPARE)
                    graph = capture(partial(self.step, k, capacity), 1, self.row.device, pool, "speculate")
                self._graphs[k, capacity], pool = graph, graph.pool()

    def _capacity(self, length: int) -> int:
        return shown(bucket(length + SPARE), self._engine.cache, self._engine.ops)

    def _run(self, k: int, length: int) -> Callable[[], None]:
        """The step with k drafted tokens, for a call that ends at `length` positions."""
        if self._engine.graphs is None:
            return partial(self.step, k, self._engine.cache.capacity)
        return self._graphs[k, self._capacity(length)].replay

    def _time(self, run: Callable[[], None], row: int) -> float:
        """Seconds of one step from `row` on, the better of two rounds."""
        rounds = []
        run()
        for _ in range(2):
            self.row.fill_(row)
            self.limit.fill_(row + TIMED * SPARE)
            self._synchronize()
            before = time.perf_counter()
            for _ in range(TIMED):
                run()
            self._synchronize()
            rounds.append(time.perf_counter() - before)
        return min(rounds) / TIMED

    def _synchronize(self) -> None:
        if self.row.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self, k: int, capacity: int) -> None:
        """Draft k tokens, verify them, move `row` over those that hold and the one after, and fill `report`."""
        engine, row = self._engine, self.row
        draft, found = self._drafter(self.history, row, k) if k else (row[:0], torch.zeros_like(row))
        rows = row + torch.arange(k + 1, device=row.device)
        tokens = torch.cat([self.history.index_select(0, row), draft])
        angles = tuple(table.index_select(0, rows + self.delta) for table in engine.rope_table)
        cache = engine.cache.view(capacity)
        attend = attention(rows, cache, engine.ops, may_wait=engine.graphs is None)
        taps: Taps = dict.fromkeys(self._drafter.taps)
        h = decode_step(tokens, angles, cache, rows, attend, engine.weights.text, engine.ops, taps)
        chosen = engine.choose(h, tokens[None], None)
        if taps:
            self._drafter.follow(rows, list(taps.values()), chosen)
        self.history.index_copy_(0, rows + 1, chosen)
        row.copy_(torch.minimum(row + 1 + count_equal(draft, chosen), self.limit))
        self.report[: k + 3] = torch.cat([row, found.long(), chosen])

    def decode(self, token: Tensor, length: int, delta: int, request: Request, sampler: Sampler | None) -> list[int]:
        """The new tokens, of which `token` [1] is the first, after a prompt of `length` tokens in the cache.

        `sampler` is None: a call that draws its tokens, or shapes their scores, goes the plain way.
        """
        self._begin(token, length, delta, request)
        self.counts["calls"] += 1
        output, pace = Output(request), Pace()
        known, end = length - 1, length + request.max_new_tokens
        ahead = 1 if self._engine.graphs is None else IN_FLIGHT
        waiting = deque([(None, _read_back(self.report))])
        while True:
            # every step on its way gives one token at least
            while len(waiting) < ahead and known + 1 + len(waiting) < end:
                waiting.append(self._send(pace.choose(self.costs), end))
            k, read = waiting.popleft()
            row, found, *chosen = read()
            if k is not None:
                self._count(k, bool(found), row - known - 1)
                pace = pace.after(k, bool(found), row - known - 1, self.costs)
            if not all(output.wants(each) for each in chosen[: row - known]):
                return output.tokens
            known = row

    def _begin(self, token: Tensor, length: int, delta: int, request: Request) -> None:
        self._drafter.begin(request)
        if self.taps:
            following = torch.cat([request.ids[0, 1:], token])
            self._drafter.follow(torch.arange(length, device=token.device), list(self.taps.values()), following)
            self.taps = dict.fromkeys(self.taps)
        image = request.ids[0] == self._engine.weights.tokens.image
        self.history[:length] = request.ids[0].masked_fill(image, NOT_TEXT)
        self.history[length : length + 1] = token
        self.row.fill_(length)
        self.delta.fill_(delta)
        self.limit.fill_(length + request.max_new_tokens - 1)
        self.report[:3] = torch.cat([self.row, torch.zeros_like(token), token])

    def _send(self, k: int, end: int) -> tuple[int, Callable[[], list[int]]]:
        """A step with k drafted tokens on its way, and how to read its report."""
        self._run(k, end)()
        return k, _read_back(self.report)

    def _count(self, k: int, found: bool, held: int) -> None:
        self.counts["steps"] += 1
        if k and found:
            self.counts.update(drafts=1, tried=min(held + 1, k), held=held)


def speculation(engine: "Engine") -> Speculation | None:
    """What the engine's config asks for.

    Raises:
        PartFailed: there is no such head, or it is another model's.
    """
    if engine.config.speculate == "none":
        return None
    if engine.config.speculate == "lookup":
        return Speculation(engine, Lookup())
    try:
        return Speculation(engine, Eagle(engine, load(engine.config.draft_head, engine.weights.prompt)))
    except VlmoptError as refused:
        raise PartFailed("speculate", str(refused)) from refused


def _read_back(report: Tensor) -> Callable[[], list[int]]:
    """Starts copying what the report holds now; the function waits for it and gives its values."""
    if report.device.type == "cpu":
        values = report.tolist()
        return lambda: values
    copy, done = to_host(report)

    def read() -> list[int]:
        done.synchronize()
        return copy.tolist()

    return read
