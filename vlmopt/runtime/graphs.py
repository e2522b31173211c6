"""Whole greedy decode steps as CUDA graphs; token, row and rope delta live on the device and advance there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from vlmopt.errors import PartFailed
from vlmopt.ops import Ops
from vlmopt.runtime.arena import no_collection
from vlmopt.runtime.cache import KVCache, bucket
from vlmopt.stages.decode import attention, decode_step, whole_step
from vlmopt.weights import TextWeights

SHORT = 8192
"""Positions of the cache that a captured step is shown where they are enough, if it reads the live length itself."""


class DecodeGraphs:
    """Captured steps by capacity, by how many follow each other in one graph, and by whether they end in logits.

    Capacities are powers of two, so their number is bounded by the context's log2; a step that reads the live length on
    the device needs one alone.

    All graphs share one memory pool and these buffers: `token` [1] the last token, `row` [1] the cache row that it
    takes, `delta` [1] its mRoPE position minus its row, `history` the token of every row, `logits` [1, vocabulary].
    """

    def __init__(self, weights: TextWeights, ops: Ops, cache: KVCache):
        self._weights, self.ops, self._cache = weights, ops, cache
        device = weights.embed.device
        self.token, self.row, self.delta = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(3))
        self.history = torch.zeros(0, dtype=torch.int64, device=device)
        self.logits = torch.zeros(1, len(weights.head.weight), dtype=weights.embed.dtype, device=device)
        self._graphs: dict[tuple[int, bool, int], tuple[torch.cuda.CUDAGraph, Callable[[], None]]] = {}
        """With each graph the step that it captured, whose memory must outlive it."""
        self._pool = None

    def __len__(self) -> int:
        return len(self._graphs)

    def forget(self) -> None:
        """Drop every graph: the cache's storage has moved."""
        self._graphs.clear()
        self.history = torch.zeros(self._cache.capacity + 1, dtype=torch.int64, device=self.token.device)

    def get(
        self, capacity: int, rope_table: tuple[Tensor, Tensor], logits: bool = False, steps: int = 1
    ) -> torch.cuda.CUDAGraph:
        """The graph of `steps` steps that attend to the first `capacity` rows or more, captured at first use.

        With `logits` a step ends in these, and the caller chooses the token and hands it to `put`. Steps in one graph
        follow each other more closely than replays do: a launch can fetch its weights before the one in front is over.

        Raises:
            PartFailed: the capture failed; the stream is usable again and the reason is in the message.
        """
        if self.ops.decode_step is not None and not logits:
            capacity = self._cache.capacity  # the live length is read on the device, so one graph serves them all
        else:
            capacity = shown(capacity, self._cache, self.ops)
        key = capacity, logits, steps
        if key not in self._graphs:
            step = partial(self._step, self._cache.view(capacity), rope_table, logits)
            if self.ops.decode_step is not None and not logits:
                step = self.whole_step(rope_table)
            self._graphs[key] = self._capture(step, capacity, steps), step
        return self._graphs[key][0]

    def put(self, row: int, token: Tensor) -> None:
        """The token [1] of history's `row`, from which the next step starts."""
        self.token.copy_(token)
        self.history[row : row + 1] = token

    def whole_step(self, rope_table: tuple[Tensor, Tensor]) -> Callable[[], None]:
        """The step by the entry that covers all of it.

        Raises:
            VlmoptError: it cannot serve this model.
        """
        buffers = self.token, self.row, self.delta, self.history
        return whole_step(rope_table, self._cache.buffer, *buffers, self._weights, self.ops)

    def _step(self, cache: Tensor, rope_table: tuple[Tensor, Tensor], logits: bool) -> None:
        position = self.row + self.delta
        rope = tuple(table.index_select(0, position) for table in rope_table)
        attend = attention(self.row, cache, self.ops)
        h = decode_step(self.token, rope, cache, self.row, attend, self._weights, self.ops)
        norm, head = self._weights.norm, self._weights.head.weight
        if logits:
            self.logits.copy_(self.ops.lm_head_logits(h, norm.weight, norm.eps, head))
            self.row.add_(1)
            return
        self.token.copy_(self.ops.lm_head_argmax(h, norm.weight, norm.eps, head))
        self.row.add_(1)
        self.history.index_copy_(0, self.row, self.token)

    def _capture(self, step: Callable[[], None], capacity: int, steps: int) -> torch.cuda.CUDAGraph:
        with put_back(self.token, self.row, self.delta):
            self.delta.zero_()
            # the warm-up run writes one cache row: the last, which no prompt that is to be continued holds
            self.row.fill_(capacity - 1)
            graph = capture(step, steps, self.token.device, self._pool, "decode_graph")
        self._pool = graph.pool()
        return graph


def shown(capacity: int, cache: KVCache, ops: Ops) -> int:
    """How much of the cache a captured step is shown that shall attend to `capacity` positions.

    One that reads the live length on the device is shown all of it, but kernels may take a long cache otherwise than a
    short one.
    """
    if ops.decode_layer is None and ops.decode_attention_live is None:
        return capacity
    return SHORT if capacity <= SHORT < cache.capacity else cache.capacity


def capacities(length: int, end: int) -> list[int]:
    """What the graphs of a call from `length` to `end` positions attend to, in order.

    `SHORT` as long as that is enough, then powers of two: the beginning of a long cache takes longer than a short one.
    """
    whole = bucket(end)
    first = min(whole, max(SHORT, bucket(length)))
    return [first << k for k in range((whole // first).bit_length())]


@contextmanager
def put_back(*buffers: Tensor) -> Iterator[None]:
    """Whatever happens in here, these tensors hold afterwards what they hold now."""
    saved = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, saved, strict=True):
            buffer.copy_(value)


def capture(step: Callable[[], None], steps: int, device: torch.device, pool: Any, part: str) -> torch.cuda.CUDAGraph:
    """A graph of `steps` steps, after one as a warm-up, in the memory pool given or, for None, one of its own.

    Raises:
        PartFailed: the capture failed, and with it `part`; the stream is usable again.
    """
    graph, stream = torch.cuda.CUDAGraph(), _capture_stream(device)
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    try:
        with torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()  # libraries set themselves up outside the capture
            torch.cuda.current_stream().wait_stream(stream)
            with no_collection(), torch.cuda.graph(graph, pool=pool, stream=stream):
                for _ in range(steps):
                    step()
    except RuntimeError as error:
        _end_allocation(device, pool)
        reason = str(error).splitlines()[0]
        raise PartFailed(part, f"it could not be captured in a CUDA graph: {reason}") from error
    return graph


def _end_allocation(device: torch.device, pool: Any) -> None:
    """Tells torch's allocator that a capture into `pool` is over.

    After a failed one it goes on believing in it, refuses `empty_cache`, and ends the process where a memory pool of
    its own is freed.
    """
    with suppress(RuntimeError):  # where the capture failed before or after it allocated
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One side stream a device: the vendor's library keeps a workspace of tens of MB for every stream it has seen."""
    return torch.cuda.Stream(device)
