"""Ours and the library's attentions on a GPU: which of them run and are right, what a size never seen costs them, and
how long each takes for a prompt."""

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vlmopt.bench.timing import time_call
from vlmopt.kernels import oracle, prefill_attention
from vlmopt.workbook import kernel_study, plots
from vlmopt.workbook.kernel_study import OWN, REFERENCE, Bench
from vlmopt.workbook.record import Record

FLASH, CUDNN, VARLEN = "SDPA flash", "SDPA cuDNN", "FlashAttention-2 varlen"
METRIC, FIRST, SECOND = "prefill_us", "first_call_ms", "second_call_ms"
TARGET = kernel_study.target(prefill_attention)
MAIN = TARGET.label(prefill_attention.CASES[0])
BUFFERS = 8
UNSEEN = 6

Providers = Mapping[str, Callable[..., Tensor]]


def under(backend: SDPBackend, fn: Callable[..., Tensor], *args: Any) -> Tensor:
    """`fn(*args)` with no other of torch's attentions than `backend`, which raises where that cannot take them."""
    with sdpa_kernel(backend):
        return fn(*args)


def by_backend(fn: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    """`fn` by the name of the one backend that it may use."""
    backends = {FLASH: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}
    return {name: partial(under, backend, fn) for name, backend in backends.items()}


def providers() -> dict[str, Callable[..., Tensor]]:
    """The prompt's attention by who computes it; `torch` is what it chooses itself."""
    reference = prefill_attention.prefill_attention_ref
    own = {OWN: prefill_attention.launch, VARLEN: prefill_attention.launch_library}
    return {REFERENCE: reference, **by_backend(reference), **own}


def working(
    record: Record, label: str, candidates: Providers, module: ModuleType, op: str, args: Sequence[Any]
) -> dict[str, Callable[..., Tensor]]:
    """Those that take `args` and are as good as the module's reference; the others are skipped with the reason."""
    found = {}
    for name, fn in candidates.items():
        reason = _fault(fn, module, op, args)
        if reason is None:
            found[name] = fn
        else:
            record.skip(f"{label}: {name}", reason)
    return found


def _fault(fn: Callable[..., Tensor], module: ModuleType, op: str, args: Sequence[Any]) -> str | None:
    """Why `fn` cannot stand beside the module's reference; torch tells why it lacks a backend in warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            errors = oracle.compare(module, op, args, fn)
        except Exception as error:  # a backend that is missing or too narrow raises as it likes
            texts = [str(error).strip() or type(error).__name__, *(str(warning.message) for warning in caught)]
            # of each the first sentence, without the place in torch's own sources
            sentences = [
                text.splitlines()[0].partition(" (Triggered internally")[0].partition(". ")[0] for text in texts
            ]
            return "; ".join(dict.fromkeys(sentences))
    return None if errors.ok else f"it gives another result: {errors}"


def measure_unseen(
    record: Record, label: str, candidates: Providers, draws: Sequence[Sequence[Any]], bench: Bench
) -> None:
    """Wall time of the first and of the second call at every size of `draws` but the first, which warms up."""
    for name, fn in candidates.items():
        fn(*draws[0])
        times = [[time_call(partial(fn, *args), bench.device) for _ in range(2)] for args in draws[1:]]
        for metric, values in zip((FIRST, SECOND), zip(*times, strict=True), strict=True):
            record.measure(label, name, metric, "ms", values)


def measure(record: Record, bench: Bench, seed: int) -> None:
    """Times every way to a prompt's attention as `prefill_us`, and what a length never seen costs each."""
    if not bench.on_gpu:
        record.skip("prefill attention: ours and the library's ways", "they are a GPU's, and there is none")
        return
    for number, case in enumerate(bench.cases(TARGET)):
        draws = [_draw(case.params, bench, seed + i) for i in range(BUFFERS)]
        able = working(record, TARGET.label(case), providers(), prefill_attention, TARGET.op, draws[0])
        moved, flops = bench.cost(TARGET, case)
        for name, values in kernel_study.interleaved(able, draws, bench, rounds=2, replays=5).items():
            work = {"bytes": moved, "flops": flops, "ceiling": bench.roof}
            record.measure(TARGET.label(case), name, METRIC, "us", values, **work)
        if number == 0:
            lengths = random.Random(seed).sample(range(101, 1001, 2), UNSEEN + 1)
            unseen = [_draw({**case.params, "length": length, "capacity": 1024}, bench, seed) for length in lengths]
            measure_unseen(record, "prefill_attention, a length never seen", able, unseen, bench)


def _draw(params: dict[str, Any], bench: Bench, seed: int) -> tuple[Any, ...]:
    return prefill_attention.make(params, bench.device, bench.dtype, torch.Generator(bench.device).manual_seed(seed))


def told(record: Record, case: str, metric: str) -> str:
    """The times at `case` in one line, the fastest first."""
    found = sorted(record.find(metric, case=case), key=lambda row: row["p50"])
    return ", ".join(f"{row['provider']} {plots.number(row['p50'])} {row['unit'].replace('us', 'µs')}" for row in found)
