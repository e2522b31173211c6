"""A few rows times a plain row-major weight, as `gemv`, but in CUDA C++ for Hopper and fed by its copy engine.

    y = x · Wᵀ (+ b)            plain
    y = residual + x · Wᵀ       with the residual add
    y = silu(gate) · up         gated: W [2·n, in] holds gate's rows first, then up's

and, by `launch_normed`, plain or gated with x = rms_norm(h) folded in, in place of a launch of its own.

x [1 … 8, in], W [out, in], b [out], residual [rows, out]; bf16 or fp16, `in` a multiple of 64. Formula, rounding
points, bytes and FLOPs are `gemv`'s, whose reference and cases are this one's too. Class near.

One or two blocks for each multiprocessor share the weight's rows, 16 at a time. In each, one thread keeps a ring of
pieces of the weight in shared memory full, by two requests a piece to the copy engine, and never waits for the kernel
ahead; eight or four warps multiply, each its own columns in a fixed order, by matrix instructions whose eight columns
are the rows of x (zeros beyond the last), so a row has the same bits alone and among others. The next launch of a chain
may start as soon as all blocks of this one have: it fills its ring where there is room, and waits until this one is
over, which cannot be before the kernel ahead is. So more than two launches of a chain can be in flight, and what a
kernel reads early must be older than all of them.

A norm is made by every block for itself, from h [rows, in] as soon as the kernel ahead is over, with the rounding
points of `add_rms_norm_ref`: statistics in fp32, h · rsqrt(mean(h²) + eps) rounded, then times the norm's weight.

Weights, the norm's too, are read before the kernel ahead is over: what that one has just written may not be a weight.
"""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from vlmopt.kernels import add_rms_norm, gemv, native
from vlmopt.kernels.case import row_stride

ROWS = 8
UNIT = 16
"""Rows of the weight that are multiplied together; where gated, eight of gate and eight of up."""
LINE = 64
"""Columns that one warp multiplies at a time."""
MOST_OUTPUTS = 32768
"""Of a weight that this kernel multiplies faster than `gemv`; measured up to 12288, and slower at 151936."""


def gemv_normed_ref(h: Tensor, norm: Tensor, eps: float, weight: Tensor, gated: bool) -> Tensor:
    """`gemv` of rms_norm(h): [rows, out], or [rows, out / 2] where gated."""
    return gemv.gemv_ref(add_rms_norm.add_rms_norm_ref(h, None, norm, eps)[0], weight, None, None, gated)


@dataclass(frozen=True)
class Ring:
    """How a weight is streamed; depends on its shape alone, never on the number of rows."""

    stages: int = 4
    """Of the ring; one holds 512 columns of 16 rows, 16 KB."""
    warps: int = 8
    """Warps that multiply: 8 or 4."""
    early: bool = True
    """Whether dependents may start with this launch, and not once the kernel ahead of it is over."""
    dependent: bool = True
    """Whether the launch is a dependent one."""
    blocks: int = 2
    """At most, for each multiprocessor: 2, or 1, which then asks for so much shared memory that no second one fits."""

    @property
    def alone(self) -> bool:
        """Whether a block gets a multiprocessor that has no other of the launch."""
        return self.blocks == 1


LAUNCH: Mapping[tuple[int, int], Ring] = MappingProxyType(
    {
        (4096, 2048): Ring(2),
        (2048, 2048): Ring(2),
        (12288, 2048): Ring(2, early=False),
        (2048, 6144): Ring(5, early=False, blocks=1),
    }
)
"""By the weight's shape (out, in): qkv, o, gate_up and down of the 2B model, found in a chain of its layers.

Shorter rings leave room for the launches behind, and what those ask for early stands before what a chain waits for.
"""
OTHER = Ring()
"""For any other weight."""


@cache
def _function():
    pointer, whole, number = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int
    arguments = (*[pointer] * 6, *[whole] * 3, ctypes.c_float, *[number] * 11, pointer)
    return native.function("gemv_ring", "gemv_ring", *arguments)


@cache
def processors(index: int) -> int:
    """Multiprocessors of the GPU `index`."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def blocks_of(units: int, at_most: int) -> int:
    """How many blocks share the units evenly; none has more than it must."""
    return math.ceil(units / math.ceil(units / at_most))


def supports(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = native.refusal(x.device) or gemv.supports(x, weight, bias, residual, gated)
    if reason is not None:
        return reason
    if weight.data_ptr() % 16:
        return "the weight does not begin at a multiple of 16 bytes"
    return _refusal(weight.dtype, weight.shape[1], row_stride(weight))


def supports_normed(h: Tensor, norm: Tensor, eps: float, weight: Tensor, gated: bool) -> str | None:
    """Why the kernel cannot take these arguments of `launch_normed`, or None."""
    reason = supports(h, weight, None, None, gated) or add_rms_norm.supports(h, None, norm, eps)
    if reason is not None:
        return reason
    return "the norm does not begin at a multiple of 16 bytes" if norm.data_ptr() % 16 else None


def _refusal(dtype: torch.dtype, n_in: int, stride: int) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the weight is {dtype}; the kernel takes bfloat16 and float16"
    if n_in % LINE:
        return f"rows have {n_in} values; the kernel takes multiples of {LINE}"
    return "a row of the weight does not begin at a multiple of 16 bytes" if stride % 8 else None


def serves(weight: Tensor) -> bool:
    """Whether this kernel is the one to multiply `weight` by up to `ROWS` rows on its device; cheap on every call.

    The first call on a Hopper GPU compiles the kernel where that has not been done yet; where it cannot be compiled,
    the answer is no.
    """
    own = weight.get_device(), weight.dtype, weight.shape, weight.stride()
    return weight.data_ptr() % 16 == 0 and _serves(*own)


@cache
def _serves(index: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> bool:
    if index < 0 or len(shape) != 2 or shape[0] > MOST_OUTPUTS or stride[1] != 1:
        return False
    return _refusal(dtype, shape[1], stride[0]) is None and native.works("gemv_ring", index, "gemv")


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    *,
    config: Ring | None = None,
) -> Tensor:
    """`gemv` without checks, for any number of rows: every eight more read the weight once more.

    Raises:
        VlmoptError: the kernel cannot be compiled or launched.
    """
    return _launch(x, None, 0.0, weight, bias, residual, gated, config)


def launch_normed(
    h: Tensor, norm: Tensor, eps: float, weight: Tensor, gated: bool = False, *, config: Ring | None = None
) -> Tensor:
    """`gemv_normed_ref` without checks, for any number of rows, as `launch`.

    Raises:
        VlmoptError: the kernel cannot be compiled or launched.
    """
    return _launch(h, norm, eps, weight, None, None, gated, config)


def _launch(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    config: Ring | None,
) -> Tensor:
    config = config or LAUNCH.get(tuple(weight.shape), OTHER)
    return stream(_function(), x, norm, eps, (weight,), weight.shape[1], bias, residual, gated, config)


def stream(
    function: Callable[..., None],
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    parts: Sequence[Tensor | None],
    n_in: int,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    config: Ring,
) -> Tensor:
    """One launch for every eight rows of x, or of h where there is a norm; `parts` begin with the weight [out, …]."""
    rows, out = x.shape[0], parts[0].shape[0]
    width, size = out // 2 if gated else out, x.element_size()
    if (x.data_ptr() | row_stride(x) * size) % 16:  # the kernel reads no less than 16 bytes of x at once
        x = x.clone(memory_format=torch.contiguous_format)
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    units = math.ceil(width / (UNIT // 2 if gated else UNIT))
    numbers = (
        *(out, n_in, gated, x.dtype == torch.float16, config.warps, config.stages, config.early),
        *(blocks_of(units, config.blocks * processors(x.get_device())), config.alone),
        *(config.dependent, native.stream(x.device)),
    )
    x_stride, residual_stride = row_stride(x), 0 if residual is None else row_stride(residual)
    weight = [native.address(part) for part in parts]
    for first in range(0, rows, ROWS):
        added = None if residual is None else residual.data_ptr() + first * residual_stride * size
        function(
            *(x.data_ptr() + first * x_stride * size, *weight, native.address(bias), added),
            *(native.address(norm), y.data_ptr() + first * width * size),
            *(x_stride, row_stride(parts[0]), residual_stride, eps, min(ROWS, rows - first), *numbers),
        )
    return y
