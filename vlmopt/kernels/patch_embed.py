"""Patches to hidden rows, with the interpolated position embedding.

    y = conv3d(pixels) + Σ taps · P[indices]

pixels [N, channels·frames·height·width], weight [hidden, channels, frames, height, width], P [side², hidden], indices
and taps [N, 4] (bilinear, fp32). A convolution whose stride is its window is a matrix product: the library's, with the
bias, on the weight seen as [hidden, pixels a patch]. One pass in place then adds the positions, which are interpolated
in fp32 in the reference's order (no fused multiply-add), rounded once, and added in the dtype, as transformers does.
Replaces the convolution, a gather and its [N, 4, hidden] in fp32, a product, a sum, a cast and an add. Class near: a
convolution sums in another order. 2·N·hidden·(pixels a patch) FLOPs; must move pixels, weight, P and y once. Cast and
second pass move the cast pixels and y twice more, at the memory's speed or the L2's.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels.case import FLOATS, Case, Launch, refusal, require

TAPS = 4
LAUNCH = Launch(block=1024, warps=4)


def patch_embed_ref(
    pixels: Tensor, weight: Tensor, bias: Tensor, pos_embed: Tensor, indices: Tensor, taps: Tensor
) -> Tensor:
    """Return [N, hidden]."""
    hidden, *patch = weight.shape
    y = F.conv3d(pixels.to(weight.dtype).view(-1, *patch), weight, bias, stride=patch[1:]).view(-1, hidden)
    positions = (F.embedding(indices, pos_embed) * taps[:, :, None]).sum(1)
    return y + positions.to(y.dtype)


@triton.jit
def _add_positions_rows(y_ptr, pos_ptr, indices_ptr, taps_ptr, n_cols, TAPS: tl.constexpr, BLOCK_N: tl.constexpr):
    """One block of one row a program, in place; everything is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = column < n_cols
    block = y_ptr + row * n_cols + column
    y = tl.load(block, mask=mask, other=0.0)
    position = tl.zeros((BLOCK_N,), tl.float32)
    for tap in tl.static_range(TAPS):
        index = tl.load(indices_ptr + row * TAPS + tap)
        share = tl.load(taps_ptr + row * TAPS + tap)
        position += tl.load(pos_ptr + index * n_cols + column, mask=mask, other=0.0).to(tl.float32) * share
    position = position.to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(block, (y.to(tl.float32) + position).to(y_ptr.dtype.element_ty), mask=mask)


def supports(
    pixels: Tensor, weight: Tensor, bias: Tensor, pos_embed: Tensor, indices: Tensor, taps: Tensor
) -> str | None:
    """Why the kernel cannot take these arguments, or None. Indices are not read: those beyond P are the caller's."""
    reason = refusal(weight=weight, bias=bias, pos_embed=pos_embed)
    if reason:
        return reason
    values = weight[0].numel()
    if pixels.ndim != 2 or pixels.shape[1] != values or pixels.dtype not in FLOATS:
        return f"pixels are {pixels.dtype} {list(pixels.shape)}; give floating [rows, {values}], the weight's patch"
    if bias.shape != weight.shape[:1] or pos_embed.ndim != 2 or pos_embed.shape[1] != len(weight):
        return f"bias {list(bias.shape)} and pos_embed {list(pos_embed.shape)} do not fit a width of {len(weight)}"
    for name, table, dtype in (("indices", indices, torch.int64), ("taps", taps, torch.float32)):
        if table.dtype != dtype or table.shape != (len(pixels), TAPS):
            return f"{name} are {table.dtype} {list(table.shape)}; give {dtype} [{len(pixels)}, {TAPS}]"
    tensors = {"weight": weight, "pixels": pixels, "pos_embed": pos_embed, "indices": indices, "taps": taps}
    for name, tensor in tensors.items():
        if tensor.device != weight.device:
            return f"{name} is on {tensor.device} but weight is on {weight.device}; move them to one device"
        if name != "pixels" and not tensor.is_contiguous():
            return f"{name} is not contiguous; call .contiguous() first"
    return None


def add_positions_(y: Tensor, pos_embed: Tensor, indices: Tensor, taps: Tensor, *, config: Launch = LAUNCH) -> Tensor:
    """Add the interpolated positions to contiguous rows [N, hidden] in place, without any check."""
    rows, width = y.shape
    _add_positions_rows[(rows, triton.cdiv(width, config.block))](
        y,
        pos_embed,
        indices,
        taps,
        width,
        TAPS=TAPS,
        BLOCK_N=config.block,
        num_warps=config.warps,
        enable_fp_fusion=False,
    )
    return y


def launch(
    pixels: Tensor,
    weight: Tensor,
    bias: Tensor,
    pos_embed: Tensor,
    indices: Tensor,
    taps: Tensor,
    *,
    config: Launch = LAUNCH,
) -> Tensor:
    """`patch_embed` without its checks and the dispatcher."""
    y = F.linear(pixels.to(weight.dtype), weight.view(len(weight), -1), bias)
    return add_positions_(y, pos_embed, indices, taps, config=config)


@torch.library.custom_op(
    "vlmopt::patch_embed",
    mutates_args=(),
    schema="(Tensor pixels, Tensor weight, Tensor bias, Tensor pos_embed, Tensor indices, Tensor taps) -> Tensor",
)
def _registered(
    pixels: Tensor, weight: Tensor, bias: Tensor, pos_embed: Tensor, indices: Tensor, taps: Tensor
) -> Tensor:
    return launch(pixels, weight, bias, pos_embed, indices, taps)


@_registered.register_fake
def _(pixels: Tensor, weight: Tensor, bias: Tensor, pos_embed: Tensor, indices: Tensor, taps: Tensor) -> Tensor:
    return weight.new_empty(pixels.shape[0], weight.shape[0])


def patch_embed(
    pixels: Tensor, weight: Tensor, bias: Tensor, pos_embed: Tensor, indices: Tensor, taps: Tensor
) -> Tensor:
    """Return [N, hidden].

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(pixels, weight, bias, pos_embed, indices, taps))
    return _registered(pixels, weight, bias, pos_embed, indices, taps)


def cost(*, rows: int, hidden: int, patch: tuple[int, ...], side: int, itemsize: int = 2) -> tuple[int, int]:
    """Bytes that the step must move (each input and the result once, pixels in fp32) and FLOPs of the product."""
    values = math.prod(patch)
    tables = side**2 * hidden * itemsize + rows * TAPS * (8 + 4)
    return rows * values * 4 + (
        hidden * values + hidden + rows * hidden
    ) * itemsize + tables, 2 * rows * hidden * values


def make(
    params: dict, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments of the op for a case's parameters: fp32 pixels as the processor gives them, taps that sum to 1."""
    rows, hidden, patch, side = (params[name] for name in ("rows", "hidden", "patch", "side"))
    values = math.prod(patch)
    pixels, weight, bias, pos_embed, corner = (
        torch.randn(*shape, generator=generator, device=device)
        for shape in ((rows, values), (hidden, *patch), (hidden,), (side**2, hidden), (rows, TAPS))
    )
    indices = torch.randint(side**2, (rows, TAPS), generator=generator, device=device)
    model = ((weight / values**0.5).to(dtype), bias.to(dtype), pos_embed.to(dtype))
    return pixels, *model, indices, corner.softmax(-1)


PATCH = (3, 2, 16, 16)
CASES = (
    Case("vision 3072x1024", {"rows": 3072, "hidden": 1024, "patch": PATCH, "side": 48}),
    Case("vision 1024x1024", {"rows": 1024, "hidden": 1024, "patch": PATCH, "side": 48}),
    Case("odd 77x1001", {"rows": 77, "hidden": 1001, "patch": PATCH, "side": 5}),
    Case("odd 5x77", {"rows": 5, "hidden": 77, "patch": (3, 2, 4, 4), "side": 3}, cpu=True),
    Case("embedded 12x192", {"rows": 12, "hidden": 192, "patch": PATCH, "side": 20}, cpu=True),
    Case("one row 1x1024", {"rows": 1, "hidden": 1024, "patch": (3, 2, 4, 4), "side": 4}, cpu=True),
)
