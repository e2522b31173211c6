"""Where a `generate` call spends its time: by stage with timers around modules, by kernel with PyTorch's profiler."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from vlmopt.bench.timing import synchronize, time_call, timed
from vlmopt.errors import VlmoptError
from vlmopt.workbook.record import Record

STAGES = ("vision", "text", "head")


def stage_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The stock modules whose time is one stage: vision tower, text model, output head.

    Raises:
        VlmoptError: the model has no such modules.
    """
    found = {"head": model.get_output_embeddings()}
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("VisionModel"):
            found["vision"] = module
        elif name.endswith("TextModel"):
            found["text"] = module
    if set(found) != set(STAGES):
        raise VlmoptError(f"a {type(model).__name__} has no vision tower, text model and head to time")
    return {stage: found[stage] for stage in STAGES}


@contextmanager
def stage_timers(model: nn.Module, device: Any) -> Iterator[dict[str, list[float]]]:
    """Times in ms of every call of every stage's module while the context is open, synchronised on both sides.

    The synchronisation keeps host and GPU from overlapping across stages, so the stages add up to a little more than an
    undisturbed call.
    """
    times: dict[str, list[float]] = {stage: [] for stage in STAGES}
    started: dict[str, float] = {}
    handles = []

    def start(stage: str) -> None:
        synchronize(device)
        started[stage] = time.perf_counter()

    def stop(stage: str) -> None:
        synchronize(device)
        times[stage].append((time.perf_counter() - started[stage]) * 1e3)

    for stage, module in stage_modules(model).items():
        handles.append(module.register_forward_pre_hook(lambda *_, s=stage: start(s)))
        handles.append(module.register_forward_hook(lambda *_, s=stage: stop(s)))
    try:
        yield times
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class StageTimes:
    """Samples in ms of the whole first token and of one decode step, each with its stages and the rest."""

    first_token: dict[str, list[float]]
    decode: dict[str, list[float]]


def stage_times(model: nn.Module, inputs: dict[str, Any], device: Any, rounds: int, new_tokens: int) -> StageTimes:
    """`rounds` first tokens, then `rounds` answers of up to `new_tokens`, by stage.

    Keys of `first_token`: vision, text, head, rest, total. Keys of `decode`: text, head, rest, total, a step each.
    """
    first: dict[str, list[float]] = {name: [] for name in (*STAGES, "rest", "total")}
    decode: dict[str, list[float]] = {name: [] for name in ("text", "head", "rest", "total")}
    for _ in range(rounds):
        total, times, _ = _watched(model, inputs, device, 1)
        _add(first, total, {stage: sum(values) for stage, values in times.items()})
    for _ in range(rounds):
        whole, times, steps = _watched(model, inputs, device, new_tokens)
        if steps:
            step_total = (whole - _median(first["total"])) / steps
            _add(decode, step_total, {stage: sum(times[stage][1:]) / steps for stage in ("text", "head")})
    return StageTimes(first, decode)


def _watched(model: nn.Module, inputs: dict[str, Any], device: Any, tokens: int) -> tuple[float, dict, int]:
    with stage_timers(model, device) as times:
        output, total = timed(lambda: generate(model, inputs, tokens), device)
    return total, times, output.shape[1] - inputs["input_ids"].shape[1] - 1


def _add(samples: dict[str, list[float]], total: float, stages: dict[str, float]) -> None:
    for stage, value in stages.items():
        samples[stage].append(value)
    samples["rest"].append(max(0.0, total - sum(stages.values())))
    samples["total"].append(total)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def generate(model: nn.Module, inputs: dict[str, Any], tokens: int) -> torch.Tensor:
    """Greedy ids, prompt included, as the contest's harness asks for them."""
    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=tokens, do_sample=False, use_cache=True)


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel (on a CPU: calls of one operator) in a profiled call."""

    name: str
    launches: int
    ms: float


@dataclass(frozen=True)
class Profile:
    """One profiled call.

    Attributes:
        kernels: by time, the longest first.
        busy_ms: time during which the device worked (on a CPU: inside operators).
        wall_ms: the call's own time, without the profiler on a GPU, under it on a CPU.
    """

    kernels: list[Kernel]
    busy_ms: float
    wall_ms: float

    @property
    def launches(self) -> int:
        """Kernels launched, or operators called."""
        return sum(kernel.launches for kernel in self.kernels)


def profile_call(fn: Callable[[], Any], device: torch.device | str) -> Profile:
    """Profiles one call of `fn` after one to warm up."""
    on_cuda = torch.device(device).type == "cuda"
    wall = time_call(fn, device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        profiled = time_call(fn, device)
    if on_cuda:
        events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
        spans = [(event.name, event.time_range.start, event.time_range.end) for event in events]
        return Profile(group(spans), busy_time(spans) / 1e3, wall)
    rows = [row for row in profiler.key_averages() if row.key.startswith("aten::") and row.self_cpu_time_total > 0]
    kernels = [Kernel(row.key.removeprefix("aten::"), row.count, row.self_cpu_time_total / 1e3) for row in rows]
    kernels.sort(key=lambda kernel: -kernel.ms)
    return Profile(kernels, sum(kernel.ms for kernel in kernels), profiled)


def group(spans: list[tuple[str, float, float]]) -> list[Kernel]:
    """Launches gathered by short name; spans are (name, start, end) in microseconds."""
    totals: dict[str, tuple[int, float]] = {}
    for name, start, end in spans:
        launches, us = totals.get(short_name(name), (0, 0.0))
        totals[short_name(name)] = launches + 1, us + end - start
    kernels = [Kernel(name, launches, us / 1e3) for name, (launches, us) in totals.items()]
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def busy_time(spans: list[tuple[str, float, float]]) -> float:
    """Length in microseconds of the union of all spans, so that kernels side by side count once."""
    busy, reached = 0.0, float("-inf")
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy


_WHAT = re.compile(
    r"CUDAFunctor_(\w+)|(\w+?)_kernel(?:_cuda|_impl)?\(|\b(?!Binary|AUnary|BUnary)(\w+?)Functor<|\b(\w+)Ops<"
)


def short_name(name: str, limit: int = 44) -> str:
    """A kernel's name without return type, namespaces, template arguments and signature.

    PyTorch's elementwise and reduction kernels all have the same name; what they compute stands in their template
    arguments and is put behind it.
    """
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    base = re.split(r"[<(]", name, maxsplit=1)[0].split("::")[-1].strip()
    what = _WHAT.search(name.partition("<")[2]) if "elementwise" in base or "reduce" in base else None
    text = f"{base.removesuffix('_kernel')} {next(filter(None, what.groups()))}" if what else base
    return text if len(text) <= limit else text[: limit - 1] + "…"


def timer_disturbance(target: Any, inputs: dict[str, Any], tokens: int) -> float:
    """How many of the first `tokens` ids differ with the stage timers on, plus the hooks that they leave behind."""
    plain = generate(target.model, inputs, tokens)
    with stage_timers(target.model, target.device):
        watched = generate(target.model, inputs, tokens)
    left = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in stage_modules(target.model).values()
    )
    different = plain.shape != watched.shape or bool((plain != watched).any())
    return float(different) + left


def measure_stages(record: Record, case: str, target: Any, inputs: dict[str, Any], rounds: int, tokens: int) -> None:
    """Adds stock's undisturbed times (`ttft_ms`, `decode_ms_per_token`) and its stages (`ttft_*_ms`, `decode_*_ms`)."""
    model, device = target.model, target.device
    first = [time_call(lambda: generate(model, inputs, 1), device) for _ in range(rounds)]
    record.measure(case, "stock", "ttft_ms", "ms", first)
    steps = []
    for _ in range(rounds):
        output, whole = timed(lambda: generate(model, inputs, tokens), device)
        made = output.shape[1] - inputs["input_ids"].shape[1]
        steps.append((whole - _median(first)) / max(1, made - 1))
    record.measure(case, "stock", "decode_ms_per_token", "ms", steps)
    times = stage_times(model, inputs, device, rounds, tokens)
    for prefix, stages in (("ttft", times.first_token), ("decode", times.decode)):
        for stage, samples in stages.items():
            if stage != "total":
                record.measure(case, "stock", f"{prefix}_{stage}_ms", "ms", samples)


def measure_kernels(record: Record, case: str, target: Any, inputs: dict[str, Any], steps: int, top: int = 14) -> None:
    """Adds what the profiler sees: launches and busy time of the first token and of a decode step, and the kernels.

    Metrics: `ttft_busy_ms`, `ttft_launches`, `decode_busy_ms`, `decode_launches`, and `kernel_ms` with the kernel as
    provider. A decode step is a long call less a first token, over `steps`.

    Raises:
        VlmoptError: the profiler saw nothing.
    """
    model, device = target.model, target.device
    first = profile_call(lambda: generate(model, inputs, 1), device)
    longer = profile_call(lambda: generate(model, inputs, 1 + steps), device)
    if not first.launches:
        raise VlmoptError("PyTorch's profiler saw no kernel on this device; its access to the driver is missing")
    launched = {kernel.name: kernel for kernel in first.kernels}
    nothing = Kernel("", 0, 0.0)
    decode = [
        Kernel(k.name, k.launches - launched.get(k.name, nothing).launches, k.ms - launched.get(k.name, nothing).ms)
        for k in longer.kernels
    ]
    record.measure(case, "stock", "ttft_busy_ms", "ms", [first.busy_ms])
    record.measure(case, "stock", "ttft_launches", "launches", [first.launches])
    record.measure(case, "stock", "decode_busy_ms", "ms", [max(0.0, longer.busy_ms - first.busy_ms) / steps])
    record.measure(case, "stock", "decode_launches", "launches", [(longer.launches - first.launches) / steps])
    for kernel in first.kernels[:top]:
        record.measure(f"{case} first token", kernel.name, "kernel_ms", "ms", [kernel.ms])
    for kernel in sorted(decode, key=lambda kernel: -kernel.ms)[:top]:
        record.measure(f"{case} decode step", kernel.name, "kernel_ms", "ms", [max(0.0, kernel.ms) / steps])


def stage_rows(target: Any, inputs: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Medians of the first token's stages over `rounds`, for display."""
    times = stage_times(target.model, inputs, target.device, rounds, 2).first_token
    return [{"stage": stage, "ms": _median(samples)} for stage, samples in times.items()]
