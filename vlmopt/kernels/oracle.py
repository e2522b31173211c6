"""How a kernel's result is judged against its reference: by errors against float64, for test and notebook alike.

A *near* kernel may round elsewhere, but must not be worse: its relative RMS error against float64 is at most
`RMS_BOUND` times the reference's own in that dtype, its largest error at most `MAX_BOUND` times. Where the reference is
exact (a copy), so must the kernel be. In fp32, where a reference's own error is luck in the last bit, it must be close
to the reference.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vlmopt.kernels.case import Case

RMS_BOUND = 1.5
MAX_BOUND = 2.0
CLOSE = 1e-5
ENOUGH, MOST_DRAWS = 2048, 16
"""Values of a result, by whose largest error a kernel can be judged, and draws of arguments that are made for them."""


@dataclass(frozen=True)
class Errors:
    """A kernel's errors in units of the reference's own; 1 means as good, 0 that both are exact.

    In fp32 both are the largest distance from the reference in units of what `torch.allclose` grants at `CLOSE`, scaled
    so that the bound is the same.
    """

    rms: float
    largest: float

    @property
    def ok(self) -> bool:
        """Whether both are within their bounds (NaN is not)."""
        return self.rms <= RMS_BOUND and self.largest <= MAX_BOUND

    def __str__(self) -> str:
        return f"RMS {self.rms:.3g} (bound {RMS_BOUND}), largest {self.largest:.3g} (bound {MAX_BOUND})"


def worst(found: Sequence[Errors]) -> Errors:
    """The largest of both errors; NaN where one is NaN."""
    return Errors(_worst([errors.rms for errors in found]), _worst([errors.largest for errors in found]))


def clone(value: Any) -> Any:
    """A copy of an argument that keeps its strides; sequences are copied item by item."""
    if isinstance(value, Tensor):
        fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return fresh.copy_(value)
    return [clone(item) for item in value] if isinstance(value, list | tuple) else value


def widen(value: Any) -> Any:
    """The argument with every floating tensor in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return [widen(item) for item in value] if isinstance(value, list | tuple) else value


def flatten(value: Any) -> list[Tensor]:
    """The tensors in a result or in arguments, in order; anything else is left out."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in flatten(item)] if isinstance(value, list | tuple) else []


def outputs(module: ModuleType, fn: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    """What `fn` returns and writes: results, then the arguments that the module's `MUTATES` (indices) names.

    `args` themselves are left alone: `fn` works on copies of those that it writes.
    """
    written = getattr(module, "MUTATES", ())
    args = [clone(arg) if i in written else arg for i, arg in enumerate(args)]
    return [*flatten(fn(*args)), *flatten([args[i] for i in written])]


def compare(module: ModuleType, op: str, args: Sequence[Any], fn: Callable[..., Any] | None = None) -> Errors:
    """Errors of `fn` (the module's `op` by default) against the module's `<op>_ref` on `args`; the worst output counts.

    The float64 truth is the reference on widened arguments; a reference that works in fp32 inside stays in it there,
    which is far finer than the dtypes that are judged by it.
    """
    return _compare(module, op, [args], fn or getattr(module, op))


def compare_case(
    module: ModuleType,
    op: str,
    case: Case,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    fn: Callable[..., Any] | None = None,
) -> Errors:
    """Errors of `fn` (the module's `op` by default) on random arguments of a case.

    Draws several where one gives few values.
    """
    draws = [module.make(case.params, device, dtype, torch.Generator(device).manual_seed(seed))]
    if dtype != torch.float32:  # there each value is judged alone
        values = max(tensor.numel() for tensor in outputs(module, getattr(module, f"{op}_ref"), draws[0]))
        for more in range(1, min(MOST_DRAWS, -(-ENOUGH // values))):
            draws.append(module.make(case.params, device, dtype, torch.Generator(device).manual_seed(seed + more)))
    return _compare(module, op, draws, fn or getattr(module, op))


def _compare(module: ModuleType, op: str, draws: Sequence[Sequence[Any]], fn: Callable[..., Any]) -> Errors:
    """Over all draws as if they were one, since the largest error of a few values is luck."""
    reference = getattr(module, f"{op}_ref")
    got = _joined([outputs(module, fn, args) for args in draws])
    expected = _joined([outputs(module, reference, args) for args in draws])
    if [(x.shape, x.dtype) for x in got] != [(x.shape, x.dtype) for x in expected]:
        raise AssertionError(f"{op} returns other shapes or dtypes than its reference")
    floats = [x for x in flatten([list(args) for args in draws]) if x.dtype == torch.float32]
    if floats and expected[0].dtype == torch.float32:
        pairs = [_close(g, e) for g, e in zip(got, expected, strict=True)]
    else:
        exact = _joined([outputs(module, reference, widen(list(args))) for args in draws])
        pairs = [_ratios(g, e, x) for g, e, x in zip(got, expected, exact, strict=True)]
    return Errors(*(_worst(column) for column in zip(*pairs, strict=True)))


def _joined(results: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Every output of all draws as one tensor."""
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


def _worst(values: Sequence[float]) -> float:
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _close(got: Tensor, expected: Tensor) -> tuple[float, float]:
    excess = (got - expected).abs() / (CLOSE + CLOSE * expected.abs())
    worst = excess.max().item() if excess.numel() else 0.0
    return worst * RMS_BOUND, worst * MAX_BOUND


def _ratios(got: Tensor, expected: Tensor, exact: Tensor) -> tuple[float, float]:
    if not exact.is_floating_point():
        return (0.0, 0.0) if torch.equal(got, expected) else (math.inf, math.inf)
    error, own = got.double() - exact, expected.double() - exact
    return _ratio(error.norm().item(), own.norm().item()), _ratio(_max(error), _max(own))


def _max(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _ratio(error: float, own: float) -> float:
    if own == 0:
        return 0.0 if error == 0 else math.inf
    return error / own
