"""A few rows times a plain row-major weight, with what follows the product folded in.

    y = x · Wᵀ (+ b)            plain
    y = residual + x · Wᵀ       with the residual add
    y = silu(gate) · up         gated: W [2·n, in] holds gate's rows first, then up's

x [1 … 8, in], W [out, in] as the checkpoint holds it (a view's rows may lie apart), b [out], residual [rows, out]; one
dtype. Replaces the library's product and, in the last two forms, one or two launches behind it. fp32 accumulation; the
product is rounded to the model's dtype before the add or the activation, silu before its product, as transformers does.
Moves W, which is all of the time; 2·rows·out·in FLOPs. Class near: it sums in another order than the library.

Rows are padded with zeros to the eight columns of one matrix instruction, and the order of the sum depends on the
weight's shape alone, so a row has the same bits alone and among others. A program makes `block_n` outputs.

Launched as a dependent of the kernel before it (GPUs from Hopper on), a program asks for its first weights before it
waits for that kernel, and lets the next one start as soon as it has waited itself, so that at most two are in flight.
Weights called into the L2 cache may even be what the launch before has just written; a tile held in registers may not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels.case import Case, refusal, require, row_stride
from vlmopt.kernels.dependent import knows_dependents, wait_for_predecessor


def gemv_ref(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool) -> Tensor:
    """Return [rows, out], or [rows, out / 2] where gated."""
    y = F.linear(x, weight, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up
    return y if residual is None else residual + y


@dataclass(frozen=True)
class Tiles:
    """How a weight is cut and streamed; depends on its shape alone, never on the number of rows."""

    block_n: int
    """Rows of the weight a program takes."""
    block_k: int
    """Values of each that one step takes, of two bytes; half as many of four."""
    warps: int
    stages: int
    """Steps in flight, one of them being computed."""
    slices: int = 1
    """Into how many parts a step's values are cut; each goes to warps of its own, and they are added up at the end."""
    held: bool = False
    """Whether the first step's weights are loaded into registers before the wait, and added last."""
    ahead: int = 0
    """Values of each weight row that are called into the L2 cache before the wait."""
    dependent: bool = True
    """Whether the launch is a dependent one where the GPU knows them."""


LAUNCH: Mapping[tuple[int, int], Tiles] = MappingProxyType(
    {
        (4096, 2048): Tiles(16, 256, 2, 5, 2, ahead=256),
        (2048, 2048): Tiles(16, 256, 2, 7, 2, ahead=1024),
        (12288, 2048): Tiles(32, 256, 2, 4, 2, ahead=512),
        (2048, 6144): Tiles(16, 512, 4, 6, 4, ahead=1024),
        (151936, 2048): Tiles(32, 256, 2, 4, 2),
    }
)
"""By the weight's shape (out, in): qkv, o, gate/up, down and head of the 2B model."""
OTHER = Tiles(32, 256, 2, 4, 2)
"""For any other weight."""
ROWS = tl.constexpr(8)
"""Columns of a matrix instruction, and the rows that one program multiplies."""
MAX_ROWS = 8


@triton.jit
def call_into_l2(weights, AHEAD: tl.constexpr, PARTS: tl.constexpr):
    """Ask for `AHEAD` values from each of these row addresses on, in `PARTS` requests a row; waits for nothing."""
    part = tl.arange(0, PARTS)[None, :] * (AHEAD // PARTS)
    address = (weights + part).to(tl.int64)
    width: tl.constexpr = weights.dtype.element_ty.primitive_bitwidth // 8
    size = tl.full(address.shape, AHEAD // PARTS * width, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def weight_tile(weights, start, N_IN: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr):
    """[SLICES, BLOCK_N, BLOCK_K / SLICES] of the weight from column `start` on."""
    k = start + tl.arange(0, SLICES)[:, None, None] * (BLOCK_K // SLICES)
    k += tl.arange(0, BLOCK_K // SLICES)[None, None, :]
    if N_IN % BLOCK_K == 0:
        return tl.load(weights[None, :, :] + k)
    return tl.load(weights[None, :, :] + k, mask=k < N_IN, other=0.0)


@triton.jit
def row_tile(x_ptr, x_stride_row, rows, n_rows, start, N_IN: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr):
    """[SLICES, BLOCK_K / SLICES, ROWS] of the activations, zero beyond the last row."""
    k = start + tl.arange(0, SLICES)[:, None, None] * (BLOCK_K // SLICES)
    k += tl.arange(0, BLOCK_K // SLICES)[None, :, None]
    rows = rows[None, None, :]
    return tl.load(x_ptr + rows.to(tl.int64) * x_stride_row + k, mask=(rows < n_rows) & (k < N_IN), other=0.0)


@triton.jit
def widen(weights, like):
    """A tile of the weight in the dtype of `like`: it is already, or holds int8 or e4m3 values, all exact there."""
    if weights.dtype == tl.int8:
        # 2²³ + 128 + q as the bits of a float, since converting whole numbers is slower than the memory
        bits = weights.to(tl.int32) + 0x4B000080
        return (bits.to(tl.float32, bitcast=True) - 8388736.0).to(like.dtype)
    return weights.to(like.dtype)


@triton.jit
def products(
    x_ptr,
    weight_ptr,
    x_stride_row,
    weight_stride_row,
    outputs,
    rows,
    n_rows,
    N_IN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    AHEAD: tl.constexpr,
    PARTS: tl.constexpr,
    HELD: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """fp32 [BLOCK_N, ROWS]: the weight's rows `outputs` times the activations' `rows`, summed in a fixed order."""
    weights = weight_ptr + outputs.to(tl.int64)[:, None] * weight_stride_row
    if HELD:
        held = weight_tile(weights, 0, N_IN, BLOCK_K, SLICES)
    if AHEAD > 0:
        call_into_l2(weights, AHEAD, PARTS)
    wait_for_predecessor(USE_PDL)
    if HELD:
        first = row_tile(x_ptr, x_stride_row, rows, n_rows, 0, N_IN, BLOCK_K, SLICES)
    total = tl.zeros((SLICES, BLOCK_N, ROWS), tl.float32)
    for start in range(BLOCK_K if HELD else 0, N_IN, BLOCK_K):
        w = weight_tile(weights, start, N_IN, BLOCK_K, SLICES)
        x = row_tile(x_ptr, x_stride_row, rows, n_rows, start, N_IN, BLOCK_K, SLICES)
        total = tl.dot(widen(w, x), x, total, input_precision="ieee")
    if HELD:
        total = tl.dot(widen(held, first), first, total, input_precision="ieee")
    return tl.sum(total, axis=0)


@triton.jit
def finish(
    total,
    residual_ptr,
    y_ptr,
    residual_stride_row,
    block,
    rows,
    n_rows,
    N_OUT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Round the sums [BLOCK_N, ROWS] of one block of outputs, add or activate, and write them."""
    dtype = y_ptr.dtype.element_ty
    rounded = total.to(dtype).to(tl.float32)
    rows = rows.to(tl.int64)[None, :]
    if GATED:
        pairs = tl.permute(tl.reshape(rounded, (BLOCK_N // 2, 2, ROWS)), (0, 2, 1))
        gate, up = tl.split(pairs)
        activated = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32)
        half = (block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2))[:, None]
        mask = (half < N_OUT // 2) & (rows < n_rows)
        tl.store(y_ptr + rows * (N_OUT // 2) + half, (activated * up).to(dtype), mask=mask)
    else:
        index = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
        mask = (index < N_OUT) & (rows < n_rows)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + rows * residual_stride_row + index, mask=mask, other=0.0)
            rounded += residual.to(tl.float32)
        tl.store(y_ptr + rows * N_OUT + index, rounded.to(dtype), mask=mask)


@triton.jit
def outputs_of(block, N_OUT: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The weight's rows of one block; gate and up of one output are neighbours in it."""
    outputs = tl.minimum(block * BLOCK_N + tl.arange(0, BLOCK_N), N_OUT - 1)
    if GATED:
        outputs = outputs % 2 * (N_OUT // 2) + outputs // 2
    return outputs


@triton.jit(do_not_specialize=["n_rows", "n_groups"])
def _gemv(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    x_stride_row,
    weight_stride_row,
    residual_stride_row,
    n_rows,
    n_groups,
    N_OUT: tl.constexpr,
    N_IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    AHEAD: tl.constexpr,
    PARTS: tl.constexpr,
    HELD: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # programs of one weight tile are neighbours, so that further groups of rows find it in the L2 cache
    block = tl.program_id(0) // n_groups
    rows = (tl.program_id(0) % n_groups) * ROWS + tl.arange(0, ROWS)
    outputs = outputs_of(block, N_OUT, GATED, BLOCK_N)
    total = products(
        *(x_ptr, weight_ptr, x_stride_row, weight_stride_row, outputs, rows, n_rows),
        *(N_IN, BLOCK_N, BLOCK_K, SLICES, AHEAD, PARTS, HELD, USE_PDL),
    )
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs).to(tl.float32)[:, None]
    finish(
        *(total, residual_ptr, y_ptr, residual_stride_row, block, rows, n_rows),
        *(N_OUT, HAS_RESIDUAL, GATED, BLOCK_N),
    )


def supports(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = refusal(x=x, weight=weight, bias=bias, residual=residual)
    return reason or misfit(x, weight.shape, bias, residual, gated)


def misfit(x: Tensor, shape: Sequence[int], bias: Tensor | None, residual: Tensor | None, gated: bool) -> str | None:
    """Why these do not go together with a weight of this shape, or None."""
    if x.dim() != 2 or len(shape) != 2 or x.shape[1] != shape[1] or not x.shape[1]:
        return f"x is {list(x.shape)} and weight {list(shape)}; give [rows, in] and [out, in]"
    rows, out = x.shape[0], shape[0]
    if not 1 <= rows <= MAX_ROWS:
        return f"{rows} rows; the kernel takes 1 to {MAX_ROWS}"
    if bias is not None and tuple(bias.shape) != (out,):
        return f"bias has the shape {tuple(bias.shape)}; {out} outputs need ({out},)"
    if gated and (out % 2 or residual is not None):
        return "the gated form needs an even number of outputs and takes no residual"
    if residual is not None and tuple(residual.shape) != (rows, out):
        return f"residual has the shape {tuple(residual.shape)}; the product has {(rows, out)}"
    return None


def tiles_of(weight: Tensor) -> Tiles:
    """The launch data of this weight's shape."""
    return LAUNCH.get((weight.shape[0], weight.shape[1]), OTHER)


def constants(weight: Tensor, config: Tiles) -> tuple[int, int, int, int, int, bool, bool]:
    """A kernel's last constants, from BLOCK_N to USE_PDL."""
    n_in, width = weight.shape[1], weight.element_size()
    block_k = min(config.block_k * 2 // width, max(16, triton.next_power_of_2(n_in)))
    dependent = config.dependent and knows_dependents(weight)
    parts = max(1, 32 * config.warps // config.block_n)
    whole = (weight.data_ptr() | weight.stride(0) * width | config.ahead // parts * width) % 16 == 0
    ahead = config.ahead if dependent and whole and config.ahead <= n_in else 0
    slices = min(config.slices, block_k // 16)
    return config.block_n, block_k, slices, ahead, parts, config.held, dependent


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    *,
    config: Tiles | None = None,
) -> Tensor:
    """`gemv` without its checks, for any number of rows: every eight more read the weight once more."""
    config = config or tiles_of(weight)
    rows, (out, n_in) = x.shape[0], weight.shape
    y = torch.empty(rows, out // 2 if gated else out, dtype=x.dtype, device=x.device)
    *blocks, dependent = constants(weight, config)
    groups = triton.cdiv(rows, ROWS.value)
    _gemv[(triton.cdiv(out, config.block_n) * groups,)](
        *(x, weight, weight if bias is None else bias, x if residual is None else residual, y),
        *(row_stride(x), row_stride(weight), 0 if residual is None else row_stride(residual), rows, groups),
        *(out, n_in, bias is not None, residual is not None, gated, *blocks, dependent),
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=dependent,
    )
    return y


@torch.library.custom_op(
    "vlmopt::gemv",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, bool gated) -> Tensor",
)
def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool) -> Tensor:
    """Return [rows, out], or [rows, out / 2] where gated.

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(x, weight, bias, residual, gated))
    return launch(x, weight, bias, residual, gated)


@gemv.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool) -> Tensor:
    out = weight.shape[0]
    return x.new_empty(x.shape[0], out // 2 if gated else out)


def cost(rows: int, width: int, out: int, form: str, itemsize: int = 2) -> tuple[int, int]:
    """Bytes moved (the weight, and next to nothing beside it) and FLOPs."""
    results = out // 2 if form == "gated" else (2 if form == "residual" else 1) * out
    bias = out if form == "bias" else 0
    return (out * width + bias + rows * (width + results)) * itemsize, 2 * rows * width * out


def make(
    params: dict, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, bool]:
    """Random arguments of a case; the products are about normal, or wider where a silu follows."""
    rows, width, out, form = params["rows"], params["width"], params["out"], params["form"]
    gated = form == "gated"

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x, weight = normal(rows, width).to(dtype), ((3 if gated else 1) * normal(out, width) / width**0.5).to(dtype)
    bias = normal(out).to(dtype) if form == "bias" else None
    residual = normal(rows, out).to(dtype) if form == "residual" else None
    return x, weight, bias, residual, gated


def _case(name: str, rows: int, out: int, width: int, form: str = "plain", cpu: bool = False) -> Case:
    params = {"rows": rows, "width": width, "out": out, "form": form}
    return Case(f"{name} {rows} x {out}x{width}" + ("" if form == "plain" else f" {form}"), params, cpu)


CASES = (
    _case("qkv", 1, 4096, 2048),
    _case("o", 1, 2048, 2048),
    _case("gate_up", 1, 12288, 2048, "gated"),
    _case("down", 1, 2048, 6144),
    _case("o", 1, 2048, 2048, "residual"),
    _case("down", 8, 2048, 6144, "residual"),
    _case("gate_up", 8, 12288, 2048, "gated"),
    _case("qkv", 3, 4096, 2048, "bias"),
    _case("odd", 5, 333, 1111, "bias"),
    _case("small", 1, 64, 256, cpu=True),
    _case("small odd", 3, 70, 77, "bias", cpu=True),
    _case("small", 8, 33, 300, "residual", cpu=True),
    _case("small odd", 2, 66, 515, "gated", cpu=True),
)
