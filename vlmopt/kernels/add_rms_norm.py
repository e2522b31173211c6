"""Residual add and RMSNorm.

    h = residual + x;   y = weight · round(h · rsqrt(mean(h²) + eps))

x, residual [..., n], weight [n], one dtype. Statistics in fp32; the normalised value is rounded to the model's dtype
*before* the weight multiply, and the sum is rounded to the model's dtype, as transformers does. The reference is of
class exact. Moves 4·n values a row (x, residual, h, y); 5·n FLOPs.

The kernel replaces the nine launches of the reference by one that reads and writes each value once. It rounds where
the reference does and sums the squares in another order, so a value may differ by one unit in the last place: near.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmopt.kernels.case import Case, Launch, refusal, require, row_stride
from vlmopt.kernels.dependent import knows_dependents, wait_for_predecessor


def add_rms_norm_ref(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (y, h), both [..., n]; without a residual h is x itself."""
    h = x if residual is None else residual + x
    h32 = h.to(torch.float32)
    y = h32 * torch.rsqrt(h32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(h.dtype), h


LAUNCH = Launch(block=2048, warps=8)
"""`block` is the least number of elements a program takes: rows narrower than it share a program."""
MAX_WIDTH = 8192


@triton.jit(do_not_specialize=["n_rows"])
def _add_rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    h_ptr,
    x_stride_row,
    residual_stride_row,
    eps,
    n_rows,
    N_COLS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    wait_for_predecessor(USE_PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < n_rows) & (cols < N_COLS)
    weight = tl.load(weight_ptr + cols, mask=cols < N_COLS, other=0.0).to(tl.float32)
    h = tl.load(x_ptr + rows * x_stride_row + cols, mask=mask, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows * residual_stride_row + cols, mask=mask, other=0.0)
        rounded = (residual.to(tl.float32) + h).to(dtype)
        tl.store(h_ptr + rows * N_COLS + cols, rounded, mask=mask)
        h = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(h * h, axis=1, keep_dims=True) / N_COLS + eps)
    normalised = (h * inverse).to(dtype).to(tl.float32)
    tl.store(y_ptr + rows * N_COLS + cols, (weight * normalised).to(dtype), mask=mask)


def supports(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = refusal(x=x, residual=residual, weight=weight)
    if reason is not None:
        return reason
    width = x.shape[-1]
    if not 1 <= width <= MAX_WIDTH:
        return f"rows of {width} values; the kernel takes 1 to {MAX_WIDTH}"
    if tuple(weight.shape) != (width,):
        return f"weight has the shape {tuple(weight.shape)}; rows of {width} values need ({width},)"
    if residual is not None and residual.shape != x.shape:
        return f"residual has the shape {tuple(residual.shape)} and x {tuple(x.shape)}; give both one shape"
    for name, tensor in (("x", x), ("residual", residual)):
        if tensor is not None and tensor.dim() != 2 and not tensor.is_contiguous():
            return f"{name} has {tensor.dim()} dimensions and is not contiguous; call .contiguous() first"
    return None


def launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, config: Launch = LAUNCH
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` without its checks."""
    n = x.shape[-1]
    rows_of_x = x if x.dim() == 2 else x.view(-1, n)
    n_rows = rows_of_x.shape[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_n = triton.next_power_of_2(n)
    block_m = max(1, config.block // block_n)
    grid = (triton.cdiv(n_rows, block_m),)
    if residual is None:
        h, summand, strides = x, rows_of_x, (row_stride(rows_of_x), 0)
    else:
        h = torch.empty_like(y)
        summand = residual if residual.dim() == 2 else residual.view(-1, n)
        strides = row_stride(rows_of_x), row_stride(summand)
    dependent = knows_dependents(x)
    _add_rms_norm[grid](
        *(rows_of_x, summand, weight, y, h, *strides, eps, n_rows),
        *(n, residual is not None, block_m, block_n, dependent),
        num_warps=config.warps,
        launch_pdl=dependent,
    )
    return y, h


@torch.library.custom_op(
    "vlmopt::add_rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
)
def registered(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The form with a residual; returns (y, h)."""
    require(supports(x, residual, weight, eps))
    return launch(x, residual, weight, eps)


@torch.library.custom_op("vlmopt::rms_norm", mutates_args=(), schema="(Tensor x, Tensor weight, float eps) -> Tensor")
def registered_alone(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The form without a residual; a registered op may not return its argument, so it returns y alone."""
    require(supports(x, None, weight, eps))
    return launch(x, None, weight, eps)[0]


@registered.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@registered_alone.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (y, h), both [..., n]; without a residual h is x itself.

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    if residual is None:
        return registered_alone(x, weight, eps), x
    return registered(x, residual, weight, eps)


def cost(rows: int, width: int, residual: bool, itemsize: int = 2) -> tuple[int, int]:
    """Bytes moved and FLOPs."""
    moved = (4 if residual else 2) * rows * width + width
    return moved * itemsize, (5 if residual else 4) * rows * width


def make(
    params: dict, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor | None, Tensor, float]:
    """Random arguments of a case."""
    shape = params["rows"], params["width"]
    x, residual = (torch.randn(*shape, generator=generator, device=device).to(dtype) for _ in range(2))
    weight = (1 + 0.3 * torch.randn(shape[1], generator=generator, device=device)).to(dtype)
    return x, residual if params["residual"] else None, weight, 1e-6


def _case(name: str, rows: int, width: int, residual: bool = True, cpu: bool = False) -> Case:
    ending = "" if residual else " norm only"
    return Case(f"{name} {rows}x{width}{ending}", {"rows": rows, "width": width, "residual": residual}, cpu)


CASES = (
    _case("decode", 1, 2048),
    _case("prefill", 798, 2048),
    _case("prefill", 798, 2048, residual=False),
    _case("heads", 16 * 798, 128, residual=False),
    _case("prefill", 4096, 2048),
    _case("wide", 64, 8192),
    _case("odd", 333, 1111),
    _case("small", 1, 256, cpu=True),
    _case("small", 5, 128, residual=False, cpu=True),
    _case("small odd", 19, 129, cpu=True),
    _case("small wide", 2, 2049, cpu=True),
)
