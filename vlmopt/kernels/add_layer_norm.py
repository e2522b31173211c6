"""Residual add and LayerNorm.

    h = residual + x;   y = (h - mean(h)) · rsqrt(var(h) + eps) · weight + bias

x, residual [..., n] (rows may be strided), weight, bias [n], one dtype. Replaces two eager launches and h's way back
from memory. h is rounded to the dtype before the statistics, as transformers does; mean and variance are two passes in
fp32 over the row in registers, and y is rounded once. Class near: the library sums in another order. Moves 4·n values a
row (x, residual, h, y), 2·n without a residual; 8·n FLOPs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels.case import Case, Launch, refusal, require

MAX_WIDTH = 8192
LAUNCH = tuple(Launch(block=block, warps=max(1, block // 1024)) for block in (256, 512, 1024, 2048, 4096, 8192))
"""By the row's width: the first block that holds a row; 32 elements a thread from 1024 on."""


def add_layer_norm_ref(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (y, h), both [..., n]; without a residual h is x itself."""
    h = x if residual is None else residual + x
    return F.layer_norm(h, (h.shape[-1],), weight, bias, eps), h


@triton.jit
def _add_layer_norm_rows(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    h_ptr,
    x_stride_row,
    residual_stride_row,
    n_cols,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One row a program; y and h are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    mask = column < n_cols
    h = tl.load(x_ptr + row * x_stride_row + column, mask=mask, other=0.0)
    # on their way while the statistics are made
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride_row + column, mask=mask, other=0.0)
        h = (residual.to(tl.float32) + h.to(tl.float32)).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row * n_cols + column, h, mask=mask)
    h = h.to(tl.float32)
    centred = tl.where(mask, h - tl.sum(h, 0) / n_cols, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / n_cols + eps)
    tl.store(y_ptr + row * n_cols + column, (centred * scale * weight + bias).to(y_ptr.dtype.element_ty), mask=mask)


def supports(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = refusal(x=x, residual=residual, weight=weight, bias=bias)
    if reason:
        return reason
    width = x.shape[-1]
    if not 0 < width <= MAX_WIDTH:
        return f"x has rows of {width}; the kernel takes 1 to {MAX_WIDTH}"
    if residual is not None and residual.shape != x.shape:
        return f"residual is {list(residual.shape)} but x is {list(x.shape)}; give both one shape"
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector.shape != (width,):
            return f"{name} is {list(vector.shape)}; give [{width}], the width of x"
    for name, tensor in (("x", x), ("residual", residual)):
        if tensor is not None and _stride_row(tensor) is None:
            return f"the rows of {name} are not evenly spaced; call .contiguous() first"
    return None


def _stride_row(x: Tensor) -> int | None:
    """Elements from one row to the next, the width for a single row; None if rows are unevenly spaced."""
    if x.is_contiguous():
        return x.shape[-1]
    try:
        return x.view(-1, x.shape[-1]).stride(0)
    except RuntimeError:
        return None


def config_of(width: int) -> Launch:
    """The launch data for rows of `width`."""
    return next(config for config in LAUNCH if config.block >= width)


def launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    config: Launch | None = None,
) -> tuple[Tensor, Tensor]:
    """`add_layer_norm` without its checks and the dispatcher; `config` is by default the width's own."""
    width = x.shape[-1]
    config = config or config_of(width)
    has_residual = residual is not None
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device) if has_residual else x
    _add_layer_norm_rows[(x.numel() // width,)](
        x,
        residual if has_residual else x,
        weight,
        bias,
        y,
        h,
        _stride_row(x),
        _stride_row(residual) if has_residual else width,
        width,
        eps,
        HAS_RESIDUAL=has_residual,
        BLOCK_N=config.block,
        num_warps=config.warps,
    )
    return y, h


@torch.library.custom_op(
    "vlmopt::add_layer_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor)",
)
def _registered(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return launch(x, residual, weight, bias, eps)


@_registered.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.custom_op(
    "vlmopt::layer_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor",
)
def _registered_alone(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return launch(x, None, weight, bias, eps)[0]


@_registered_alone.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (y, h), both [..., n]; without a residual h is x itself.

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(x, residual, weight, bias, eps))
    if residual is None:
        return _registered_alone(x, weight, bias, eps), x
    return _registered(x, residual, weight, bias, eps)


def cost(*, rows: int, width: int, residual: bool, itemsize: int = 2) -> tuple[int, int]:
    """Bytes moved and FLOPs."""
    return ((4 if residual else 2) * rows + 2) * width * itemsize, 8 * rows * width


def make(
    params: dict, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float]:
    """Arguments of the op for a case's parameters; rows have a mean that is not zero."""
    rows, width = params["rows"], params["width"]
    x, residual, weight, bias = (
        torch.randn(*shape, generator=generator, device=device).to(dtype)
        for shape in ((rows, width), (rows, width), (width,), (width,))
    )
    return x + 0.5, residual if params["residual"] else None, weight, bias, 1e-6


CASES = (
    Case("block 3072x1024", {"rows": 3072, "width": 1024, "residual": True}),
    Case("first 3072x1024", {"rows": 3072, "width": 1024, "residual": False}),
    Case("deepstack 768x4096", {"rows": 768, "width": 4096, "residual": False}),
    Case("wide 257x8192", {"rows": 257, "width": 8192, "residual": True}),
    Case("odd 77x1000", {"rows": 77, "width": 1000, "residual": True}),
    Case("odd 5x77", {"rows": 5, "width": 77, "residual": True}, cpu=True),
    Case("embedded 9x192", {"rows": 9, "width": 192, "residual": False}, cpu=True),
    Case("one row 1x1024", {"rows": 1, "width": 1024, "residual": True}, cpu=True),
)
