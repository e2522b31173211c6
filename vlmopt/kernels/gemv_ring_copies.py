"""A few rows times a quantised copy of a weight, for Hopper and fed by its copy engine: `gemv_ring` over copies.

The forms, rounding points, bytes and references are those of `gemv_q8` (int8 alone) and of `gemv_q4`; by
`launch_normed`, plain or gated, with x = rms_norm(h) folded in. x bf16 or fp16; a row of the weight is a multiple of
128 bytes. A copy is given by its parts (q, s, z); z is None for int8. Near to the reference, while the copy itself is
lossy. A row has the same bits alone and among others.

The copy engine brings the copy's bytes as `gemv_ring` says. Scales and zeros are on their way to shared memory before x
is there, those of int4 for eight rows at a time, so that it takes weights of 16, 32, … rows. Widening converts nothing:
q's bits are put behind the exponent of a half-precision number whose last places are whole, and a subtraction leaves q
(int8: less 128 where the sign is set) or q − z, exactly; three instructions for two values, while a conversion of whole
numbers alone would take as long as the memory. int8 sums a whole row in fp32 and scales it once; int4 sums each group
by itself, and adds the groups' sums times their scales in a fixed order.

By `launch_bounds`, of int8 alone, the products are not written but where they lie at most and at least, for the head's
greedy choice (`lm_head_q8`).

All parts of a copy are read before the kernel ahead is over, as weights are by `gemv_ring`.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from vlmopt.kernels import add_rms_norm, gemv, gemv_q4, gemv_q8, native
from vlmopt.kernels.case import row_stride
from vlmopt.kernels.gemv_ring import MOST_OUTPUTS, UNIT, Ring, blocks_of, processors, stream
from vlmopt.kernels.gemv_ring import gemv_normed_ref as normed_ref

LINE = 128
"""Bytes of a row that one warp multiplies at a time."""
ROUND = 2048
MOST_BESIDE = 40 * 1024
"""Bytes of shared memory that scales and zeros of a block's units may take, with two blocks a multiprocessor."""
LAUNCH = Ring(2)
"""For copies: a ring of two stages leaves room for the launch behind it, and more bytes on their way give less."""
LONG_ROWS = Ring(2, blocks=1)
"""Where each multiprocessor gets one unit of long rows, as of down: two on one would come in last."""
BOUNDS = Ring(6)
"""For bounds: a long weight, of which there is one."""


def dequantize(copy: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    """The weight [out, in] that the copy stands for, rounded to `dtype`."""
    weight, scale, zero = copy
    if zero is None:
        return gemv_q8.dequantize(weight, scale, dtype)
    return gemv_q4.dequantize(weight, scale, zero, dtype)


def gemv_copy_ref(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    """`gemv_q8_ref` where zero is None, else `gemv_q4_ref`: [rows, out], or [rows, out / 2] where gated."""
    return gemv.gemv_ref(x, dequantize((weight, scale, zero), x.dtype), bias, residual, gated)


def gemv_copy_normed_ref(
    h: Tensor, norm: Tensor, eps: float, weight: Tensor, scale: Tensor, zero: Tensor | None, gated: bool
) -> Tensor:
    """The product of rms_norm(h): [rows, out], or [rows, out / 2] where gated."""
    return normed_ref(h, norm, eps, dequantize((weight, scale, zero), h.dtype), gated)


@cache
def _function():
    pointer, whole, number = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int
    arguments = (*[pointer] * 8, *[whole] * 3, ctypes.c_float, *[number] * 11, pointer)
    return native.function("gemv_ring_copies", "gemv_ring_copies", *arguments)


@cache
def _bounds_function():
    pointer, number = ctypes.c_void_p, ctypes.c_int
    arguments = *[pointer] * 8, ctypes.c_longlong, *[number] * 9, pointer
    return native.function("gemv_ring_copies", "gemv_ring_bounds", *arguments)


def shape_of(weight: Tensor, zero: Tensor | None) -> tuple[int, int]:
    """(out, in) of the weight that a copy stands for."""
    return weight.shape[0], weight.shape[1] * (1 if zero is None else 2)


def supports(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    rest = bias, residual, gated
    reason = native.refusal(x.device)
    if reason is None and zero is None:
        reason = gemv_q8.supports(x, weight, scale, *rest)
    elif reason is None:
        reason = gemv_q4.supports(x, weight, scale, zero, *rest)
    if reason is not None:
        return reason
    reason = _unaligned(weight, scale, zero)
    if reason is not None:
        return reason
    if not scale.is_contiguous():
        return "the scales are not neighbours; call .contiguous() first"
    return _refusal(x.get_device(), x.dtype, weight.dtype, tuple(weight.shape), row_stride(weight))


def supports_normed(
    h: Tensor, norm: Tensor, eps: float, weight: Tensor, scale: Tensor, zero: Tensor | None, gated: bool
) -> str | None:
    """Why the kernel cannot take these arguments of `launch_normed`, or None."""
    reason = supports(h, weight, scale, zero, None, None, gated) or add_rms_norm.supports(h, None, norm, eps)
    if reason is not None:
        return reason
    return "the norm does not begin at a multiple of 16 bytes" if norm.data_ptr() % 16 else None


def _unaligned(weight: Tensor, scale: Tensor, zero: Tensor | None) -> str | None:
    if weight.data_ptr() % 16:
        return "the weight does not begin at a multiple of 16 bytes"
    if zero is not None and (scale.data_ptr() % 16 or zero.data_ptr() % 8):
        return "scales do not begin at a multiple of 16 bytes, or zeros at one of 8"
    return None


def _refusal(index: int, dtype: torch.dtype, kind: torch.dtype, shape: tuple[int, int], stride: int) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16):
        return f"x is {dtype}; the kernel takes bfloat16 and float16"
    if kind not in (torch.int8, torch.uint8):
        return f"the copy is {kind}; the kernel takes int8, and int4 as uint8"
    if shape[1] % LINE:
        return f"a row has {shape[1]} bytes; the kernel takes multiples of {LINE}"
    if stride % 16:
        return "a row of the weight does not begin at a multiple of 16 bytes"
    if kind == torch.uint8 and shape[0] % UNIT:
        return f"the weight has {shape[0]} rows; of int4 the kernel takes multiples of {UNIT}"
    if beside_bytes(shape[0], shape[1], kind == torch.uint8, LAUNCH.blocks * processors(index)) > MOST_BESIDE:
        return "scales and zeros of so large a weight do not fit beside the ring"
    return None


def beside_bytes(out: int, row_bytes: int, four: bool, at_most: int) -> int:
    """Bytes that scales and zeros of a block's units take where there are `at_most` blocks."""
    units = math.ceil(out / UNIT)
    each = math.ceil(2 * row_bytes / ROUND) * (ROUND // gemv_q4.GROUP) * 3 if four else 4
    return math.ceil(units / blocks_of(units, at_most)) * each * UNIT


def serves(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None) -> bool:
    """Whether this kernel is the one to multiply rows like `x` by this copy on its device; cheap on every call.

    The first call on a Hopper GPU compiles the kernel where that has not been done yet; where it cannot be compiled,
    the answer is no.
    """
    own = weight.get_device(), x.dtype, weight.dtype, weight.shape, weight.stride()
    return _unaligned(weight, scale, zero) is None and _serves(*own)


def serves_bounds(x: Tensor, weight: Tensor) -> bool:
    """The same of `launch_bounds`, for any number of outputs."""
    own = weight.get_device(), x.dtype, weight.dtype, weight.shape, weight.stride()
    return weight.dtype == torch.int8 and weight.data_ptr() % 16 == 0 and _serves(*own, math.inf)


@cache
def _serves(
    index: int,
    dtype: torch.dtype,
    kind: torch.dtype,
    shape: torch.Size,
    stride: tuple[int, ...],
    most: float = MOST_OUTPUTS,
) -> bool:
    if index < 0 or len(shape) != 2 or shape[0] > most or stride[1] != 1:
        return False
    if _refusal(index, dtype, kind, tuple(shape), stride[0]) is not None:
        return False
    return native.works("gemv_ring_copies", index, "gemv_q8 or gemv_q4")


def launch(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    *,
    config: Ring | None = None,
) -> Tensor:
    """`gemv_q8` (zero None) or `gemv_q4` without checks, for any number of rows, as `gemv_ring.launch`.

    Raises:
        VlmoptError: the kernel cannot be compiled or launched.
    """
    return _launch(x, None, 0.0, (weight, scale, zero), bias, residual, gated, config)


def launch_normed(
    h: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    gated: bool = False,
    *,
    config: Ring | None = None,
) -> Tensor:
    """`gemv_copy_normed_ref` without checks, for any number of rows, as `launch`.

    Raises:
        VlmoptError: the kernel cannot be compiled or launched.
    """
    return _launch(h, norm, eps, (weight, scale, zero), None, None, gated, config)


def _launch(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    copy: Sequence[Tensor | None],
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    config: Ring | None,
) -> Tensor:
    weight, _, zero = copy
    out, n_in = shape_of(weight, zero)
    if config is None:
        config = LONG_ROWS if n_in > ROUND and out <= UNIT * processors(weight.get_device()) else LAUNCH
    return stream(_function(), x, norm, eps, copy, n_in, bias, residual, gated, config)


def few_rows(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """`launch` where this kernel serves, else that of `gemv_q8` or of `gemv_q4`; all without checks."""
    rest = bias, residual, gated
    if serves(x, weight, scale, zero):
        return launch(x, weight, scale, zero, *rest)
    return gemv_q8.launch(x, weight, scale, *rest) if zero is None else gemv_q4.launch(x, weight, scale, zero, *rest)


def launch_bounds(
    x: Tensor, weight: Tensor, scale: Tensor, radius: Tensor, norms: Tensor, *, config: Ring = BOUNDS
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the products of x [1 … 8, in] and a contiguous int8 weight [out, in] can lie, without checks.

    With b = radius · norm of the row of x + 2⁻¹⁰⁰, radius [out] and norms [rows, 1] of fp32: the products + b
    [rows, out]; the largest product − b of each block's outputs [rows, blocks]; and a 0 [1] int32, for a list to come.

    Raises:
        VlmoptError: the kernel cannot be compiled or launched.
    """
    rows, (out, n_in) = x.shape[0], weight.shape
    blocks = blocks_of(math.ceil(out / UNIT), config.blocks * processors(x.get_device()))
    upper, lowest = (torch.empty(rows, n, dtype=torch.float32, device=x.device) for n in (out, blocks))
    count = torch.empty(1, dtype=torch.int32, device=x.device)
    tensors = x, weight, scale, radius, norms, upper, lowest, count
    numbers = rows, out, n_in, x.dtype == torch.float16, config.stages, config.early, blocks, config.alone
    ends = config.dependent, native.stream(x.device)
    _bounds_function()(*map(native.address, tensors), row_stride(x), *numbers, *ends)
    return upper, lowest, count
