"""Decode attention over the live length: against torch's, on activations of the model, and inside a decode step."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from vlmopt.bench import models
from vlmopt.errors import VlmoptError
from vlmopt.kernels import decode_attention, decode_attention_cluster, oracle
from vlmopt.kernels.case import Case
from vlmopt.kernels.decode_attention import LAUNCH, Split
from vlmopt.ops import Ops
from vlmopt.runtime.cache import bucket
from vlmopt.workbook import kernel_study, text_study
from vlmopt.workbook.kernel_study import OWN, REFERENCE, Bench, Target
from vlmopt.workbook.record import ROOT, Record, measurement
from vlmopt.workbook.text_study import Prompt

OP = "decode_attention_live"
MASKED, KNOWN = "torch, masked", "torch, length known"
TRITON = "vlmopt, Triton"
LIMIT = (3.0, 1 / 1.3)


@dataclass(frozen=True)
class Live(Target):
    """The kernel, timed against attentions that a captured graph can hold, which its own reference is not."""

    def baselines(self, case: Case) -> dict[str, Callable[..., Any]]:
        """`torch` has the length from the host; `torch, masked` reads the whole capacity, for one query row.

        Masks are built once, since in a step all layers share one.
        """
        length, capacity = case.params["length"], case.params["capacity"]
        if case.params["rows"] > 1:
            return {REFERENCE: partial(_verified, length)}
        others = {
            REFERENCE: lambda q, k, v, row: decode_attention.decode_attention_ref(q, k, v, length),
            MASKED: partial(_masked, length, capacity),
        }
        return others | {TRITON: decode_attention.launch} if torch.cuda.is_available() else others

    @property
    def launch(self) -> Callable[..., Any]:
        """What the table of ops calls."""
        return decode_attention_cluster.launch_decode_attention_live

    def is_bounded(self, case: Case) -> bool:
        """The bound is set for one query over 800 and 4,096 keys; elsewhere it must not be slower than torch."""
        return case.name in ("length 800", "length 4,096")


TARGET = Live(decode_attention, OP, limit=LIMIT)


def _verified(length: int, q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> Tensor:
    """All query rows in one call of torch's attention."""
    k, v = k[None, :, :length], v[None, :, :length]
    mask = _triangle(q.shape[0], length, q.device)
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def _masked(length: int, capacity: int, q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> Tensor:
    """What a captured step calls without the kernel; NaN where the cache holds NaN beyond the live length."""
    return decode_attention.decode_attention_masked_ref(q, k, v, _bias(length, capacity, q.dtype, q.device))


@cache
def _triangle(rows: int, length: int, device: torch.device) -> Tensor:
    return torch.ones(rows, length, dtype=torch.bool, device=device).tril(length - rows)


@cache
def _bias(length: int, capacity: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    bias = torch.zeros(capacity, dtype=dtype, device=device)
    return bias.masked_fill(torch.arange(capacity, device=device) >= length, float("-inf"))


def candidates(base: Split = LAUNCH) -> tuple[Split, ...]:
    """`base` with one thing changed at a time, for the sweep; the last four change a result's last bits."""
    return (
        replace(base, dependent=False),
        replace(base, held=True),
        replace(base, ahead=3),
        replace(base, stages=2),
        replace(base, stages=4),
        replace(base, warps=8),
        replace(base, programs=16),
        replace(base, programs=64),
        replace(base, programs=64, block=32),
        replace(base, block=128, warps=8),
    )


def describe(config: Split) -> str:
    """Such as `32 programs, 64 keys, 4 warps, 3 stages, 3 ahead, first chunk held`."""
    extra = [f"{config.ahead} ahead"] * bool(config.ahead) + ["first chunk held"] * config.held
    extra += ["not dependent"] * (not config.dependent)
    first = f"{config.programs} programs, {config.block} keys, {config.warps} warps, {config.stages} stages"
    return ", ".join([first, *extra])


def measure_sweep(record: Record, bench: Bench, seed: int) -> None:
    """Times the package's configuration and the candidates on the first two cases as `draft_us`; the slower ones are
    kept as lost."""
    if not bench.on_gpu:
        record.skip(f"{OP}: drafts", "there is no GPU to time them on")
        return
    tried = {describe(config): partial(decode_attention.launch, config=config) for config in (LAUNCH, *candidates())}
    for case in tqdm(bench.cases(TARGET)[:2], desc="sweep", leave=False):
        samples = kernel_study.interleaved(tried, kernel_study.cold_draws(TARGET, case, bench, seed), bench, rounds=2)
        work = *bench.cost(TARGET, case), bench.roof
        kernel_study.record_drafts(record, TARGET, case, samples, describe(LAUNCH), *work)


def one(bench: Bench, name: str, programs: int, block: int, warps: int, stages: int) -> dict[str, Any]:
    """One case with one launch configuration as a measurement, for a panel; on a CPU the torch baseline."""
    case = next(case for case in bench.cases(TARGET) if case.name == name)
    config = replace(LAUNCH, programs=programs, block=block, warps=warps, stages=stages)
    arguments = kernel_study.cold_draws(TARGET, case, bench, 0)
    fn, label = TARGET.baselines(case)[REFERENCE], "reference"
    if bench.on_gpu:
        fn, label = partial(decode_attention.launch, config=config), describe(config)
    samples = kernel_study.interleaved({label: fn}, arguments, bench, rounds=1)[label]
    label = f"{TARGET.label(case)}, {label}"
    return measurement(label, bench.provider, kernel_study.METRIC, "us", samples, *bench.cost(TARGET, case), bench.roof)


def steps(subject: Prompt) -> dict[str, Callable[[], Tensor]]:
    """The decode step after the prompt over a cache of the captured step's capacity, by who attends."""
    layers, two, heads, length, width = subject.cache.shape
    cache = subject.cache.new_zeros(layers, two, heads, bucket(length), width)
    cache[:, :, :, :length] = subject.cache
    subject = replace(subject, cache=cache)
    row = torch.full((1,), length - 1, device=subject.ids.device)

    def masked(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
        return _masked(length, k.shape[1], q, k, v, row)

    def live(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
        return TARGET.launch(q, k, v, row)

    tables = {MASKED: Ops(decode_attention=masked), KNOWN: Ops(), OWN: Ops(decode_attention=live)}
    return {who: partial(subject.decode, ops) for who, ops in tables.items()}


def captured(subject: Prompt) -> list[tuple[Tensor, ...]]:
    """Arguments of the kernel in every layer of the decode step after the prompt."""
    found = []

    def note(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
        found.append((q, k, v, torch.tensor([length - 1], device=q.device)))
        return decode_attention.decode_attention_ref(q, k, v, length)

    subject.prefill(Ops())
    subject.decode(Ops(decode_attention=note))
    return found


def captured_errors(device: Any, dtype: torch.dtype, seed: int) -> oracle.Errors:
    """The kernel's worst errors on the embedded model's own activations, in units of its reference's."""
    subject = text_study.prompt(models.load(models.TINY, device, dtype), 110, 60, seed)
    return oracle.worst([oracle.compare(decode_attention, OP, args) for args in captured(subject)])


def checks(bench: Bench, seed: int) -> list[tuple[str, str, float, float]]:
    """What `Record.check` takes: errors over the cases and on the embedded model's own activations.

    On a CPU the latter are found in Triton's interpreter, in a process of its own.
    """
    if bench.on_gpu:
        errors, where = captured_errors(bench.device, bench.dtype, seed), "bf16"
    else:
        errors, where = _interpreted_errors(seed), "fp32, interpreter"
    rows = kernel_study.check_rows(f"{OP} {where}, activations of tiny", errors)
    if bench.on_gpu:
        rows += kernel_study.check_rows(f"{OP} bf16, what the table calls", _launched_errors(bench, seed))
    return [*kernel_study.checks([TARGET], bench, seed), *rows]


def _launched_errors(bench: Bench, seed: int) -> oracle.Errors:
    """Those of what the table of ops calls, over the cases; the registered op stays with Triton's kernels."""
    found = []
    for case in decode_attention.CASES:
        args = decode_attention.make(
            case.params, bench.device, bench.dtype, torch.Generator(bench.device).manual_seed(seed)
        )
        torch.cuda.synchronize(bench.device)  # a dependent launch reads the cache early
        found.append(oracle.compare(decode_attention, OP, args, TARGET.launch))
    return oracle.worst(found)


def _interpreted_errors(seed: int) -> oracle.Errors:
    command = ["env", "TRITON_INTERPRET=1", sys.executable, "-m", "vlmopt.workbook.attention_study", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise VlmoptError(f"the check in Triton's interpreter failed: {last}")
    return oracle.Errors(*json.loads(done.stdout.splitlines()[-1]))


def main(seed: str) -> None:
    """Prints the errors on the embedded model's activations as one line of JSON."""
    torch.set_num_threads(1)
    errors = captured_errors("cpu", torch.float32, int(seed))
    print(json.dumps((errors.rms, errors.largest)))


if __name__ == "__main__":
    main(*sys.argv[1:])
