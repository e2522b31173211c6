"""`generate` of an optimised model: the stages where the contract allows, stock's own method for all other calls."""

import logging
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from vlmopt.config import OptimizeConfig
from vlmopt.cpp_runtime.bridge import CppRuntime
from vlmopt.errors import PartFailed, VlmoptError
from vlmopt.ops import Ops
from vlmopt.runtime import batch
from vlmopt.runtime.arena import Arena, within_memory
from vlmopt.runtime.buckets import Buckets
from vlmopt.runtime.cache import KVCache, bucket
from vlmopt.runtime.graphs import DecodeGraphs, capacities
from vlmopt.runtime.guard import Guard
from vlmopt.runtime.output import Output, to_host
from vlmopt.runtime.request import Batch, HandedToStock, Request, read
from vlmopt.runtime.sampler import Sampler
from vlmopt.runtime.speculate import SPARE, speculation
from vlmopt.runtime.stock import NEUTRAL, call_stock, merged, sampler_of, stock_connector, stock_vision
from vlmopt.stages.connector import positions, slots_of
from vlmopt.stages.decode import Taps, attention, decode_step
from vlmopt.stages.prefill import prefill
from vlmopt.stages.tables import GridTables, rope
from vlmopt.stages.vision import encode
from vlmopt.weights import Weights, require_originals

logger = logging.getLogger("vlmopt")

STEPS_AT_ONCE = 8
"""Decode steps in one graph; the host looks at their tokens while the next as many run."""


class Engine:
    """What one optimised model needs between calls; calls are serialised by a lock, since buffers are shared."""

    def __init__(self, model: nn.Module, config: OptimizeConfig, weights: Weights, ops: Ops, kernels: tuple[str, ...]):
        self.config, self.weights, self.ops, self.kernels = config, weights, ops, kernels
        self.guard = Guard(model, copied=config.has_copies or config.has_fp8_cache)
        self.device = weights.text.embed.device
        self.dtype = weights.text.embed.dtype
        self.grids = GridTables(weights.vision)
        self.cache = KVCache(weights.text, config.has_fp8_cache)
        self.arena = Arena(self.device)
        self.rope_table: tuple[Tensor, Tensor] | None = None
        self.cpp: CppRuntime | None = None
        self.buckets: Buckets | None = None
        """Either drives the layer loops of vision and prefill, once it has been started."""
        self.graphs = DecodeGraphs(weights.text, ops, self.cache) if config.decode_graph else None
        self.speculation = speculation(self)
        self.left_out: dict[str, str] = {}
        """Entries whose kernel cannot serve this model here, with the reason; those that they cover serve it."""
        self.calls: Counter[str] = Counter()
        self.stock_reasons: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._owner: int | None = None

    def generate(self, model: nn.Module, arguments: dict[str, Any]) -> Tensor:
        """Serve one call by the stages.

        Raises:
            HandedToStock: the call is not served; nothing has been given away or streamed yet.
        """
        if self._owner == threading.get_ident():
            raise HandedToStock("a call from inside a running call")
        with self._lock:
            self._owner = threading.get_ident()
            try:
                with self._context():
                    request = self._admit(model, arguments)
                    several = isinstance(request, Batch)
                    result = batch.serve(self, model, request) if several else self._run(model, request)
            finally:
                self._owner = None
            self.calls["stages"] += 1
            self.calls["kernels"] += bool(self.kernels)
            return result

    def unlock(self) -> None:
        """Forget a call that runs in a thread of the process that this one was forked from."""
        self._lock, self._owner = threading.Lock(), None

    def _admit(self, model: nn.Module, arguments: dict[str, Any]) -> Request | Batch:
        if torch.is_autocast_enabled(self.device.type):
            raise HandedToStock("autocast is on")
        request = read(merged(model, arguments), NEUTRAL, self.device, self.weights, self.config.batches)
        if self.config.vision and isinstance(request, Request) and request.grids:
            # a GPU is at work on the images while the host looks at the model; if it has changed, nobody sees them
            with self.arena.held():
                request = replace(request, seen=self._encode(model, request))
        if reason := self.guard.reason(model):
            raise HandedToStock(reason)
        return request

    def try_kernels(self, model: nn.Module, checked: Ops) -> None:
        """Serve a small prompt, so that kernels see this model's shapes and are compiled before the first call.

        Args:
            checked: the engine's table with kernels that refuse what they cannot take.

        Raises:
            PartFailed: a kernel refused this model.
        """
        run = partial(self._try, model, self._trial(2))
        try:
            run(replace(checked, decode_layer=None))
        except VlmoptError as refused:
            raise PartFailed("kernels", f"a kernel cannot serve this model: {refused}") from refused
        if self.ops.decode_layer is not None:
            self._leave_out_unless_it_runs("decode_layer", partial(run, checked))

    def start_cpp_runtime(self, model: nn.Module) -> None:
        """Build or load the C++ runtime and serve a small prompt by it.

        Raises:
            PartFailed: it cannot be built, or cannot serve this model.
        """
        try:
            if self.device.type == "cuda" and not self.kernels:
                raise VlmoptError("on a GPU it launches the kernels, which are off")
            self.cpp = CppRuntime(replace(self.weights, text=self.weights.prompt))
            self._try(model, self._trial(2), self.ops)
        except VlmoptError as refused:
            raise PartFailed("cpp_runtime", str(refused)) from refused

    def _trial(self, side: int) -> Request:
        """A prompt of two tokens, a black square of `side` by `side` image tokens, and twelve more tokens."""
        merge = self.weights.vision.merge_size
        types = np.array([0, 0, *[1] * side**2, *[0] * 12])
        ids = (types * self.weights.tokens.image).tolist()
        grid = 1, side * merge, side * merge
        pixels = torch.zeros(grid[1] * grid[2], self.weights.vision.patch.weight[0].numel(), device=self.device)
        return Request(torch.tensor([ids], device=self.device), ids, types, pixels, (grid,), 3, frozenset(), None)

    def _try(self, model: nn.Module, request: Request, ops: Ops) -> None:
        own, self.ops = self.ops, ops
        try:
            with self._context(), within_memory("kernels"):
                self._run(model, request, self._decode_eager)
        finally:
            self.ops = own

    def _leave_out_unless_it_runs(self, name: str, run: Callable[[], None]) -> None:
        """An entry that covers others is left to these where its kernel refuses the model."""
        try:
            run()
        except VlmoptError as refused:
            self.left_out[name] = str(refused)
            self.kernels = tuple(kernel for kernel in self.kernels if kernel != name)
            self.ops = replace(self.ops, **{name: None})
            if self.graphs is not None:
                self.graphs.ops = self.ops

    def _run(
        self, model: nn.Module, request: Request, decode: Callable[..., list[int] | Tensor] | None = None
    ) -> Tensor:
        length = len(request.id_list)
        sampler = sampler_of(model, request, request.ids)
        self.reserve(length + request.max_new_tokens + (SPARE if self.speculation is not None else 0))
        with self.arena.held():
            first, delta = self._first(model, request, sampler)
        decode = decode or self._decoder(length, request, sampler)
        new = decode(first, length, delta, request, sampler)
        if request.streamer is not None:
            request.streamer.end()
        return torch.cat([request.ids, torch.as_tensor(new, device=self.device)[None]], dim=-1)

    def _decoder(self, length: int, request: Request, sampler: Sampler | None) -> Callable[..., list[int] | Tensor]:
        """The loop over graphs where they can be captured; where one cannot, the eager loop from then on.

        A loop returns the new tokens, where it has them: on the host, or on the device.
        """
        if self.speculation is not None and sampler is None and self.speculation.ready(length + request.max_new_tokens):
            return self.speculation.decode
        if self.graphs is None:
            return self._decode_eager
        logits, after = sampler is not None, request.max_new_tokens - 1
        singles = after if logits else after % STEPS_AT_ONCE
        try:
            for capacity in capacities(length, length + after + 1):
                for steps, wanted in ((1, singles), (STEPS_AT_ONCE, after - singles)):
                    if wanted:
                        self.graphs.get(capacity, self.rope_table, logits, steps)
        except PartFailed as failed:
            logger.warning("vlmopt decodes without graphs from now on: %s", failed)
            self.left_out["decode_graph"], self.graphs = str(failed), None
            return self._decode_eager
        return self._decode_graph

    def _first(self, model: nn.Module, request: Request, sampler: Sampler | None) -> tuple[Tensor, int]:
        """The token [1] that follows the prompt, and the mRoPE delta; fills the cache and streams the prompt."""
        taps = None if self.speculation is None or sampler is not None else self.speculation.taps
        h, delta = self.prefill(model, request, self.cache.buffer, taps)
        return self.choose(h, request.ids, sampler), delta

    def prefill(self, model: nn.Module, request: Request, cache: Tensor, taps: Taps = None) -> tuple[Tensor, int]:
        """The last hidden row [1, hidden] of the prompt, and the mRoPE delta; fills `cache` and streams the prompt.

        With `taps` (see `stages.prefill`) or a cache of eight bits neither C++ nor a bucket's graph serves the prompt.
        """
        # the tower comes first: the host lays out the prompt while a GPU is at work on the images
        features, deepstack = request.seen or (self._encode(model, request) if request.grids else (None, []))
        position_ids, delta = positions(request.types, request.grids, self.weights.vision.merge_size)
        slots = slots_of(request.types) if request.grids else None
        ids, text = request.ids[0], self.weights.prompt
        if not taps and not self.config.has_fp8_cache and (driver := self.cpp or self.buckets):
            if request.streamer is not None:
                request.streamer.put(request.ids.cpu())
            return driver.prefill(ids, slots, features, deepstack, position_ids, self.rope_table, cache), delta
        slots = None if slots is None else slots.to(self.device)
        if self.config.connector:
            h = self.ops.merge_embeddings(ids, text.embed, slots, features)
        else:
            h, position_ids, delta = stock_connector(model, request, features)
        if request.streamer is not None:
            request.streamer.put(request.ids.cpu())
        rows = torch.arange(len(ids), device=self.device)
        angles = rope(position_ids.to(self.device), text, self.dtype)
        narrow = self.config.packed and bool(self.kernels)
        return prefill(h, angles, cache, rows, slots, deepstack, text, self.ops, narrow, taps=taps), delta

    def _encode(self, model: nn.Module, request: Request) -> tuple[Tensor, list[Tensor]]:
        if driver := self.cpp or self.buckets:
            return driver.encode(request.pixels, request.grids)
        if self.config.vision:
            return encode(request.pixels, self.grids.get(request.grids), self.weights.vision, self.ops)
        return stock_vision(model, request, self.dtype)

    def reserve(self, length: int) -> None:
        """Make room for `length` positions; captured graphs are dropped where the cache had to grow.

        Raises:
            HandedToStock: there is no memory for it; what was held has been given back.
        """
        try:
            if not self.cache.reserve(length):
                return
            every = torch.arange(self.cache.capacity, device=self.device).expand(3, -1)
            self.rope_table = rope(every, self.weights.text, self.dtype)
            self._forget_graphs()
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, its parent on a CPU
            self.cache.release()
            self._forget_graphs()
            raise HandedToStock("no memory for a cache of this length") from error

    def _forget_graphs(self) -> None:
        for captured in (self.graphs, self.speculation):
            if captured is not None:
                captured.forget()

    def warm_up(self, model: nn.Module, length: int, progress: Any) -> None:
        """Make room for a prompt of `length` positions and capture the decode graphs up to it; then no timed call does.

        Raises:
            PartFailed: a capture failed, or there is no memory for all this.
        """
        with self._context(), within_memory("decode_graph"):
            self.reserve(length)
            with self.arena.held():
                self._first(model, self._trial(math.isqrt(length - 14)), None)
            capacities = [1 << k for k in range(bucket(1).bit_length() - 1, bucket(length).bit_length())]
            for capacity, steps in progress([(rows, steps) for rows in capacities for steps in (1, STEPS_AT_ONCE)]):
                self.graphs.get(capacity, self.rope_table, steps=steps)

    def start_prompt_graphs(self, progress: Any) -> None:
        """Pad vision and prefill to buckets, and capture these (PartFailed as above)."""
        with self._context(), within_memory("prompt_graphs"):
            self.buckets = Buckets(replace(self.weights, text=self.weights.prompt), self.ops, progress=progress)

    def start_speculation(self, length: int) -> None:
        """Make ready to speculate in calls of up to `length` positions (PartFailed as above)."""
        with self._context(), within_memory("speculate"):
            self.speculation.start(length)

    @contextmanager
    def _context(self) -> Iterator[None]:
        """Buffers are made and kernels launched in here, whatever mode and device the caller is in."""
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        # a tensor made in an outer inference mode could not be written to by a later call outside it
        with torch.inference_mode(False), torch.no_grad(), on_device:
            yield

    def choose(self, h: Tensor, ids: Tensor, sampler: Sampler | None) -> Tensor:
        """The next tokens [B] after the hidden rows [B, hidden] and all ids so far."""
        norm = self.weights.text.norm
        head = h, norm.weight, norm.eps, self.weights.text.head.weight
        return self.ops.lm_head_argmax(*head) if sampler is None else sampler(ids, self.ops.lm_head_logits(*head))

    def _decode_eager(
        self, token: Tensor, length: int, delta: int, request: Request, sampler: Sampler | None
    ) -> list[int]:
        """One step after the other; the host sees every token."""
        output, ids = Output(request), request.ids
        while output.wants(int(token)):
            ids = torch.cat([ids, token[None]], dim=-1)
            row = torch.tensor([length], device=self.device)
            angles = tuple(table[length + delta : length + delta + 1] for table in self.rope_table)
            length += 1
            attend = attention(row, self.cache.buffer, self.ops, may_wait=True)
            h = decode_step(token, angles, self.cache.buffer, row, attend, self.weights.text, self.ops)
            token = self.choose(h, ids, sampler)
        return output.tokens

    def _decode_graph(
        self, token: Tensor, length: int, delta: int, request: Request, sampler: Sampler | None
    ) -> Tensor:
        """Replays queued ahead of the host, whose tokens are read a batch late; what follows the end is dropped.

        A sampler runs between replays; the generator of random numbers is put back to where the last token left it.
        """
        graphs, output = self.graphs, Output(request)
        graphs.token.copy_(token)
        graphs.row.fill_(length)
        graphs.delta.fill_(delta)
        if sampler is not None:
            graphs.history[:length] = request.ids[0]
        graphs.history[length : length + 1] = token
        reached = capacities(length, length + request.max_new_tokens)
        queued, waiting = 1, deque([to_host(graphs.history[length : length + 1])])
        states = [] if sampler is None else [torch.cuda.get_rng_state(self.device)]
        while waiting:
            # keep one batch running while the host waits for the one before it
            while queued < request.max_new_tokens and len(waiting) < 2:
                steps = min(STEPS_AT_ONCE, request.max_new_tokens - queued)
                capacity = next(rows for rows in reached if rows >= length + queued + steps)
                get = partial(graphs.get, capacity, self.rope_table, sampler is not None)
                if sampler is None and steps == STEPS_AT_ONCE:
                    get(steps=steps).replay()
                else:
                    for row in range(length + queued, length + queued + steps):
                        get().replay()
                        if sampler is not None:
                            graphs.put(row, sampler(graphs.history[None, :row], graphs.logits))
                            states.append(torch.cuda.get_rng_state(self.device))
                waiting.append(to_host(graphs.history[length + queued : length + queued + steps]))
                queued += steps
            copy, done = waiting.popleft()
            done.synchronize()
            if not all(output.wants(chosen) for chosen in copy.tolist()):
                break
        if sampler is not None:
            torch.cuda.set_rng_state(states[len(output.tokens) - 1], self.device)
        return graphs.history[length : length + len(output.tokens)]


ENGINES: WeakKeyDictionary[nn.Module, Engine] = WeakKeyDictionary()
# a fork may come while another thread is in a call, and that thread does not exist in the child
os.register_at_fork(after_in_child=lambda: [engine.unlock() for engine in ENGINES.values()])


def has_foreign_generate(model: nn.Module) -> bool:
    """Whether somebody else has replaced this instance's `generate`; a copy of an optimised model has ours."""
    own = vars(model).get("generate")
    return own is not None and getattr(own, "__func__", None) is not _generate


def install(model: nn.Module, engine: Engine) -> None:
    """Give this one instance our `generate`; a deep copy's is bound to the copy, which has no engine."""
    ENGINES[model] = engine
    model.generate = MethodType(_generate, model)


def remove(model: nn.Module) -> None:
    """Undo `install`."""
    del ENGINES[model]
    del model.generate


def _generate(self: nn.Module, inputs: Tensor | None = None, generation_config: Any = None, *args: Any, **kwargs: Any):
    """`generate` as transformers documents it; see `vlmopt.status` for who served it."""
    engine = ENGINES.get(self)
    if engine is None:
        return type(self).generate(self, inputs, generation_config, *args, **kwargs)
    try:
        if args:
            raise HandedToStock("positional arguments")
        return engine.generate(self, {"inputs": inputs, "generation_config": generation_config, **kwargs})
    except HandedToStock as handed:
        reason = str(handed)
        require_originals(self, f"only stock serves this call ({reason}), and stock cannot")
        if reason not in engine.stock_reasons:
            logger.warning("vlmopt hands calls like this one to stock: %s", reason)
        engine.stock_reasons[reason] += 1
        engine.calls["stock"] += 1
    return call_stock(self, inputs, generation_config, *args, **kwargs)
