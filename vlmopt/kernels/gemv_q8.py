"""A few rows times a weight of one byte a value, int8 or fp8 e4m3, scaled per output; the forms of `gemv`.

    y_i = s_i · Σ_j q_ij · x_j (+ b_i),   then the residual add or the gated activation

x [1 … 8, in], q [out, in] int8 or float8_e4m3fn (a view's rows may lie apart), s [out] fp32, b [out], residual
[rows, out]. Every q is exact in bf16 and fp16, so tiles are widened in registers and multiplied on the tensor cores;
fp32 accumulation, the scale once behind it, then `gemv`'s rounding points. Moves q, half of what `gemv` moves;
2·rows·out·in FLOPs. The reference multiplies by the weight that q and s stand for, rounded to x's dtype: near to it,
while the copy itself is lossy. A row has the same bits alone and among others. e4m3 needs a GPU from Ada on.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmopt.kernels import gemv
from vlmopt.kernels.case import Case, misplaced, refusal, require, row_stride
from vlmopt.kernels.gemv import ROWS, Tiles, constants, finish, gemv_ref, outputs_of, products

DTYPES = (torch.int8, torch.float8_e4m3fn)


def dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] that the copy stands for, rounded to `dtype`."""
    return (weight.to(scale.dtype) * scale[:, None]).to(dtype)


def gemv_q8_ref(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool
) -> Tensor:
    """Return [rows, out], or [rows, out / 2] where gated."""
    return gemv_ref(x, dequantize(weight, scale, x.dtype), bias, residual, gated)


LAUNCH: Mapping[tuple[int, int], Tiles] = MappingProxyType(
    {
        (4096, 2048): Tiles(16, 128, 2, 8, 2, ahead=512),
        (2048, 2048): Tiles(16, 128, 2, 8, 2, ahead=1024),
        (12288, 2048): Tiles(32, 128, 4, 6, 2, ahead=512),
        (2048, 6144): Tiles(16, 256, 4, 8, 4, ahead=1024),
        (151936, 2048): Tiles(32, 128, 4, 6, 2),
    }
)
"""By the weight's shape, as in `gemv`; a step takes twice as many values, since each has one byte."""
OTHER = Tiles(32, 128, 4, 5, 2)
"""For any other weight."""


@triton.jit(do_not_specialize=["n_rows"])
def _gemv_q8(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    x_stride_row,
    weight_stride_row,
    residual_stride_row,
    n_rows,
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
    block, rows = tl.program_id(0), tl.arange(0, ROWS)
    outputs = outputs_of(block, N_OUT, GATED, BLOCK_N)
    total = products(
        *(x_ptr, weight_ptr, x_stride_row, weight_stride_row, outputs, rows, n_rows),
        *(N_IN, BLOCK_N, BLOCK_K, SLICES, AHEAD, PARTS, HELD, USE_PDL),
    )
    total *= tl.load(scale_ptr + outputs)[:, None]
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs).to(tl.float32)[:, None]
    finish(
        *(total, residual_ptr, y_ptr, residual_stride_row, block, rows, n_rows),
        *(N_OUT, HAS_RESIDUAL, GATED, BLOCK_N),
    )


def supports(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = refusal(x=x, bias=bias, residual=residual) or misplaced(x, "x", weight=weight, scale=scale)
    if reason is not None:
        return reason
    if weight.dtype not in DTYPES:
        return f"weight is {weight.dtype}; the kernel takes int8 and float8_e4m3fn"
    if weight.dtype == torch.float8_e4m3fn and x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        return "float8_e4m3fn needs a GPU of compute capability 8.9 or more; take int8"
    if scale.dtype != torch.float32 or scale.shape != weight.shape[:1]:
        return f"scale is {scale.dtype} {list(scale.shape)}; give float32, one for each output"
    return gemv.misfit(x, weight.shape, bias, residual, gated)


def tiles_of(weight: Tensor) -> Tiles:
    """The launch data of this weight's shape."""
    return LAUNCH.get((weight.shape[0], weight.shape[1]), OTHER)


def launch(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    *,
    config: Tiles | None = None,
) -> Tensor:
    """`gemv_q8` without its checks."""
    config = config or tiles_of(weight)
    rows, (out, n_in) = x.shape[0], weight.shape
    y = torch.empty(rows, out // 2 if gated else out, dtype=x.dtype, device=x.device)
    *blocks, dependent = constants(weight, config)
    _gemv_q8[(triton.cdiv(out, config.block_n),)](
        *(x, weight, scale, scale if bias is None else bias, x if residual is None else residual, y),
        *(row_stride(x), row_stride(weight), 0 if residual is None else row_stride(residual), rows),
        *(out, n_in, bias is not None, residual is not None, gated, *blocks, dependent),
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=dependent,
    )
    return y


@torch.library.custom_op(
    "vlmopt::gemv_q8",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? residual, bool gated) -> Tensor",
)
def gemv_q8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool
) -> Tensor:
    """Return [rows, out], or [rows, out / 2] where gated.

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(x, weight, scale, bias, residual, gated))
    return launch(x, weight, scale, bias, residual, gated)


@gemv_q8.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool) -> Tensor:
    out = weight.shape[0]
    return x.new_empty(x.shape[0], out // 2 if gated else out)


def cost(rows: int, width: int, out: int, form: str, fp8: bool = False, itemsize: int = 2) -> tuple[int, int]:
    """Bytes moved (the copy, and next to nothing beside it) and FLOPs."""
    others, flops = gemv.cost(rows, width, out, form, itemsize)
    return others - out * width * (itemsize - 1) + 4 * out, flops


def make(
    params: dict, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool]:
    """Random arguments of a case: those of `gemv`, with the weight as a copy of one byte a value."""
    plain = {name: value for name, value in params.items() if name != "fp8"}
    x, weight, bias, residual, gated = gemv.make(plain, device, dtype, generator)
    scale = weight.float().abs().amax(1) / (448 if params["fp8"] else 127)
    ratio = weight.float() / scale[:, None]
    values = ratio.to(torch.float8_e4m3fn) if params["fp8"] else ratio.round().to(torch.int8)
    return x, values, scale, bias, residual, gated


def _case(case: Case, fp8: bool) -> Case:
    return Case(f"{case.name} {'fp8' if fp8 else 'int8'}", {**case.params, "fp8": fp8}, case.cpu)


CASES = tuple(_case(case, fp8) for fp8 in (False, True) for case in gemv.CASES)
