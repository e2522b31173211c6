"""A few rows times a weight of four bits a value with a scale for every 128 of a row; the forms of `gemv`.

    y_i = Σ_g s_ig · Σ_{j in group g} (q_ij − z_ig) · x_j (+ b_i),   then the residual add or the gated activation

x [1 … 8, in], in a multiple of 128; q two to a byte in `weight` [out, in / 2] uint8, contiguous: byte j of a group's 64
holds the group's value j in its low half and value 64 + j in its high half, so that both halves of a tile multiply
neighbours of x. `scale` [in / 128, out] in x's dtype and `zero` [in / 128, out] uint8, 8 everywhere for a symmetric
copy. q − z is exact in bf16 and fp16: tiles are widened in registers and multiplied on the tensor cores, a group's sum
scaled in fp32; then `gemv`'s rounding points. Moves a little more than a quarter of what `gemv` moves; 2·rows·out·in
FLOPs. The reference multiplies by the weight that the copy stands for, rounded to x's dtype: near to it, while the copy
itself is lossy. A row has the same bits alone and among others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmopt.kernels import gemv
from vlmopt.kernels.case import Case, misplaced, refusal, require, row_stride
from vlmopt.kernels.dependent import knows_dependents, wait_for_predecessor
from vlmopt.kernels.gemv import ROWS, call_into_l2, finish, gemv_ref, outputs_of

GROUP = 128
HALF = tl.constexpr(64)


def pack(values: Tensor) -> Tensor:
    """Values 0 … 15 [out, in] uint8 as bytes [out, in / 2] in the kernel's order."""
    low, high = values.unflatten(1, (-1, 2, GROUP // 2)).unbind(2)
    return (low | high << 4).flatten(1).contiguous()


def unpack(weight: Tensor) -> Tensor:
    """What `pack` packed."""
    groups = weight.unflatten(1, (-1, 1, GROUP // 2))
    return torch.cat([groups & 15, groups >> 4], dim=2).flatten(1)


def dequantize(weight: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] that the copy stands for, rounded to `dtype`."""
    wide = torch.promote_types(scale.dtype, torch.float32)
    steps = unpack(weight).to(wide).unflatten(1, (-1, GROUP)) - zero.to(wide).t()[:, :, None]
    return (steps * scale.to(wide).t()[:, :, None]).flatten(1).to(dtype)


def gemv_q4_ref(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool
) -> Tensor:
    """Return [rows, out], or [rows, out / 2] where gated."""
    return gemv_ref(x, dequantize(weight, scale, zero, x.dtype), bias, residual, gated)


@dataclass(frozen=True)
class Tiles:
    """How a weight is cut and streamed; depends on its shape alone, never on the number of rows."""

    block_n: int
    """Rows of the weight a program takes."""
    groups: int
    """Groups of each that one step takes; each is summed by warps of its own."""
    warps: int
    stages: int
    """Steps in flight, one of them being computed."""
    ahead: int = 0
    """Bytes of each weight row that are called into the L2 cache before the wait."""


LAUNCH: Mapping[tuple[int, int], Tiles] = MappingProxyType(
    {
        (4096, 2048): Tiles(16, 4, 4, 4, ahead=512),
        (2048, 2048): Tiles(16, 4, 4, 4, ahead=1024),
        (12288, 2048): Tiles(32, 4, 4, 4, ahead=512),
        (2048, 6144): Tiles(16, 4, 4, 6, ahead=1024),
    }
)
"""By the weight's shape (out, in): qkv, o, gate/up and down of the 2B model."""
OTHER = Tiles(32, 2, 4, 4)
"""For any other weight."""


@triton.jit
def steps_of(nibbles, zero, like):
    """q − z of values 0 … 15 in the activations' dtype; of the half dtypes by their bits, where q is the last place."""
    if like.dtype == tl.bfloat16:
        return (nibbles.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (zero + 128).to(tl.bfloat16)
    elif like.dtype == tl.float16:
        return (nibbles.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (zero + 1024).to(tl.float16)
    else:
        return nibbles.to(tl.float32) - zero.to(tl.float32)


@triton.jit
def half_rows(x_ptr, x_stride_row, rows, n_rows, group, offset, N_IN: tl.constexpr):
    """[groups, HALF, ROWS] of the activations, zero beyond the last row and the last group."""
    k = group[:, None, None] * (2 * HALF) + offset + tl.arange(0, HALF)[None, :, None]
    rows = rows[None, None, :]
    return tl.load(x_ptr + rows.to(tl.int64) * x_stride_row + k, mask=(rows < n_rows) & (k < N_IN), other=0.0)


@triton.jit(do_not_specialize=["n_rows"])
def _gemv_q4(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    x_stride_row,
    residual_stride_row,
    n_rows,
    N_OUT: tl.constexpr,
    N_IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    AHEAD: tl.constexpr,
    PARTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    block, rows = tl.program_id(0), tl.arange(0, ROWS)
    outputs = outputs_of(block, N_OUT, GATED, BLOCK_N)
    n_groups: tl.constexpr = N_IN // (2 * HALF)
    starts = weight_ptr + outputs.to(tl.int64) * (N_IN // 2)
    if AHEAD > 0:
        call_into_l2(starts[:, None], AHEAD, PARTS)
    weights = starts[None, :, None] + tl.arange(0, HALF)[None, None, :]
    wait_for_predecessor(USE_PDL)
    total = tl.zeros((GROUPS, BLOCK_N, ROWS), tl.float32)
    for first in range(0, n_groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        packed = tl.load(weights + group[:, None, None] * HALF, mask=(group < n_groups)[:, None, None], other=0)
        place = group.to(tl.int64)[:, None] * N_OUT + outputs[None, :]
        live = (group < n_groups)[:, None]
        zero = tl.load(zero_ptr + place, mask=live, other=0).to(tl.int16)[:, :, None]
        scale = tl.load(scale_ptr + place, mask=live, other=0.0).to(tl.float32)[:, :, None]
        low_rows = half_rows(x_ptr, x_stride_row, rows, n_rows, group, 0, N_IN)
        high_rows = half_rows(x_ptr, x_stride_row, rows, n_rows, group, HALF, N_IN)
        low, high = steps_of(packed & 15, zero, low_rows), steps_of(packed >> 4, zero, high_rows)
        part = tl.dot(low, low_rows, input_precision="ieee")
        part = tl.dot(high, high_rows, part, input_precision="ieee")
        total += part * scale
    summed = tl.sum(total, axis=0)
    if HAS_BIAS:
        summed += tl.load(bias_ptr + outputs).to(tl.float32)[:, None]
    finish(
        *(summed, residual_ptr, y_ptr, residual_stride_row, block, rows, n_rows),
        *(N_OUT, HAS_RESIDUAL, GATED, BLOCK_N),
    )


def supports(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = refusal(x=x, scale=scale, bias=bias, residual=residual) or misplaced(x, "x", weight=weight, zero=zero)
    if reason is not None:
        return reason
    if weight.dtype != torch.uint8 or weight.dim() != 2 or not weight.is_contiguous():
        return f"weight is {weight.dtype} {list(weight.shape)}; give contiguous uint8 [out, in / 2]"
    if 2 * weight.shape[1] % GROUP:
        return f"rows of {2 * weight.shape[1]} values; the kernel takes multiples of {GROUP}"
    expected = (2 * weight.shape[1] // GROUP, weight.shape[0])
    for name, tensor in (("scale", scale), ("zero", zero)):
        if tuple(tensor.shape) != expected or not tensor.is_contiguous():
            return f"{name} has the shape {tuple(tensor.shape)}; give {expected}, contiguous"
    if zero.dtype != torch.uint8:
        return f"zero is {zero.dtype}; give uint8"
    return gemv.misfit(x, (weight.shape[0], 2 * weight.shape[1]), bias, residual, gated)


def tiles_of(weight: Tensor) -> Tiles:
    """The launch data of this weight's shape."""
    return LAUNCH.get((weight.shape[0], 2 * weight.shape[1]), OTHER)


def launch(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    *,
    config: Tiles | None = None,
) -> Tensor:
    """`gemv_q4` without its checks."""
    config = config or tiles_of(weight)
    rows, (out, n_in) = x.shape[0], (weight.shape[0], 2 * weight.shape[1])
    y = torch.empty(rows, out // 2 if gated else out, dtype=x.dtype, device=x.device)
    dependent = knows_dependents(weight)
    parts = max(1, 32 * config.warps // config.block_n)
    whole = (weight.data_ptr() | config.ahead // parts) % 16 == 0
    ahead = config.ahead if dependent and whole and config.ahead <= n_in // 2 else 0
    _gemv_q4[(triton.cdiv(out, config.block_n),)](
        *(x, weight, scale, zero, scale if bias is None else bias, x if residual is None else residual, y),
        *(row_stride(x), 0 if residual is None else row_stride(residual), rows),
        *(out, n_in, bias is not None, residual is not None, gated),
        *(config.block_n, config.groups, ahead, parts, dependent),
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=dependent,
    )
    return y


@torch.library.custom_op(
    "vlmopt::gemv_q4",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor scale, Tensor zero, Tensor? bias, Tensor? residual, bool gated) -> Tensor",
)
def gemv_q4(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool
) -> Tensor:
    """Return [rows, out], or [rows, out / 2] where gated.

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(x, weight, scale, zero, bias, residual, gated))
    return launch(x, weight, scale, zero, bias, residual, gated)


@gemv_q4.register_fake
def _(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool
) -> Tensor:
    out = weight.shape[0]
    return x.new_empty(x.shape[0], out // 2 if gated else out)


def cost(rows: int, width: int, out: int, form: str, itemsize: int = 2) -> tuple[int, int]:
    """Bytes moved (the copy, and next to nothing beside it) and FLOPs."""
    others, flops = gemv.cost(rows, width, out, form, itemsize)
    return others - out * width * itemsize + out * (width // 2 + width // GROUP * (itemsize + 1)), flops


def make(
    params: dict, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool]:
    """Random arguments of a case: those of `gemv`, with a random copy of about the weight's size in its place."""
    x, weight, bias, residual, gated = gemv.make(params, device, dtype, generator)
    out, width = weight.shape
    values = torch.randint(16, (out, width), generator=generator, device=device, dtype=torch.uint8)
    zero = torch.randint(5, 12, (width // GROUP, out), generator=generator, device=device, dtype=torch.uint8)
    drawn = torch.rand(width // GROUP, out, generator=generator, device=device)
    scale = ((0.5 + drawn) * weight.float().std() / 4.8).to(dtype)
    return x, pack(values), scale, zero, bias, residual, gated


def _case(name: str, rows: int, out: int, width: int, form: str = "plain") -> Case:
    params = {"rows": rows, "width": width, "out": out, "form": form}
    return Case(f"{name} {rows} x {out}x{width}" + ("" if form == "plain" else f" {form}"), params, True)


CASES = (
    *(case for case in gemv.CASES if not case.cpu and case.params["width"] % GROUP == 0),
    _case("small", 1, 64, 256),
    _case("small odd", 3, 70, 384, "bias"),
    _case("small", 8, 33, 640, "residual"),
    _case("small odd", 2, 66, 128, "gated"),
)
