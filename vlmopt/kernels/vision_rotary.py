"""Rotary embedding of the vision tower on the packed product.

    q, k = q·cos + rotate_half(q)·sin,  k·cos + rotate_half(k)·sin

qkv [N, 3·heads·D] (q, k, v in this order, rows may be strided), cos and sin [N, D] in fp32; D is 64 for the kernel.
Replaces some ten eager launches a block. The rotation runs in fp32 and is rounded once, as transformers does; the
kernel keeps the reference's three roundings in fp32 too (no fused multiply-add). Class exact. Moves 4·N·heads·D values
and 2·N·D of fp32 (v is passed through); 6·N·heads·D FLOPs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmopt.kernels.case import Case, Launch, refusal, require, row_stride
from vlmopt.kernels.qkv_norm_rope_cache import rotate

HEAD_SIZE = 64
LAUNCH = Launch(block=2048, warps=4)
"""A block is heads of q and k that one program rotates, in elements: all 32 of a row of the 2B model."""


def vision_rotary_ref(qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v [N, heads, D]."""
    q, k, v = qkv.unflatten(-1, (3, n_heads, -1)).unbind(1)
    return rotate(q.float(), cos, sin).to(q.dtype), rotate(k.float(), cos, sin).to(k.dtype), v


@triton.jit(do_not_specialize=["n_rows"])
def _rotate_rows(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    n_rows,
    qkv_stride_row,
    N_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Some heads of one row a program, q's before k's, each as two halves; out is [2, n_rows, N_HEADS, D]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, D // 2)[None, :]
    mask = head < 2 * N_HEADS
    source = qkv_ptr + row * qkv_stride_row + head * D + column
    first = tl.load(source, mask=mask).to(tl.float32)
    second = tl.load(source + D // 2, mask=mask).to(tl.float32)
    table = row * D + column
    first_cos, second_cos = tl.load(cos_ptr + table), tl.load(cos_ptr + table + D // 2)
    first_sin, second_sin = tl.load(sin_ptr + table), tl.load(sin_ptr + table + D // 2)
    is_k = (head >= N_HEADS).to(tl.int64)
    target = out_ptr + ((is_k * n_rows + row) * N_HEADS + head - is_k * N_HEADS) * D + column
    tl.store(target, (first * first_cos - second * first_sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + D // 2, (second * second_cos + first * second_sin).to(out_ptr.dtype.element_ty), mask=mask)


def supports(qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = refusal(qkv=qkv) or refusal(cos=cos, sin=sin)
    if reason:
        return reason
    width = 3 * n_heads * HEAD_SIZE
    if qkv.ndim != 2 or n_heads < 1 or qkv.shape[1] != width:
        return f"qkv is {list(qkv.shape)}; the kernel takes [rows, {width}], three times {n_heads} heads of {HEAD_SIZE}"
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype != torch.float32 or table.shape != (len(qkv), HEAD_SIZE) or not table.is_contiguous():
            return f"{name} is {table.dtype} {list(table.shape)}; give contiguous float32 [{len(qkv)}, {HEAD_SIZE}]"
        if table.device != qkv.device:
            return f"{name} is on {table.device} but qkv is on {qkv.device}; move them to one device"
    return None


def rotate_qk(qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int, *, config: Launch = LAUNCH) -> Tensor:
    """Launch the kernel without any check; return q and k as one [2, N, heads, 64]."""
    rows, heads = len(qkv), config.block // HEAD_SIZE
    out = torch.empty((2, rows, n_heads, HEAD_SIZE), dtype=qkv.dtype, device=qkv.device)
    _rotate_rows[(rows, triton.cdiv(2 * n_heads, heads))](
        qkv,
        cos,
        sin,
        out,
        rows,
        row_stride(qkv),
        N_HEADS=n_heads,
        D=HEAD_SIZE,
        BLOCK_HEADS=heads,
        num_warps=config.warps,
        enable_fp_fusion=False,
    )
    return out


def launch(
    qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int, *, config: Launch = LAUNCH
) -> tuple[Tensor, Tensor, Tensor]:
    """`vision_rotary` without its checks and the dispatcher."""
    q, k = rotate_qk(qkv, cos, sin, n_heads, config=config).unbind(0)
    return q, k, _values(qkv, n_heads)


def _values(qkv: Tensor, n_heads: int) -> Tensor:
    return qkv.unflatten(-1, (3, n_heads, HEAD_SIZE)).select(1, 2)


@torch.library.custom_op(
    "vlmopt::vision_rotary",
    mutates_args=(),
    schema="(Tensor qkv, Tensor cos, Tensor sin, int n_heads) -> Tensor",
)
def _registered(qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int) -> Tensor:
    return rotate_qk(qkv, cos, sin, n_heads)


@_registered.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int) -> Tensor:
    return qkv.new_empty(2, qkv.shape[0], n_heads, HEAD_SIZE)


def vision_rotary(qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v [N, heads, 64]: q and k new and contiguous, v a view of qkv.

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(qkv, cos, sin, n_heads))
    q, k = _registered(qkv, cos, sin, n_heads).unbind(0)
    return q, k, _values(qkv, n_heads)


def cost(*, rows: int, heads: int, itemsize: int = 2) -> tuple[int, int]:
    """Bytes moved and FLOPs."""
    values = 2 * rows * heads * HEAD_SIZE
    return 2 * values * itemsize + 2 * rows * HEAD_SIZE * 4, 3 * values


def make(
    params: dict, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Arguments of the op for a case's parameters."""
    rows, heads = params["rows"], params["heads"]
    qkv = torch.randn(rows, 3 * heads * HEAD_SIZE, generator=generator, device=device)
    angles = 50 * torch.rand(rows, HEAD_SIZE // 2, generator=generator, device=device)
    angles = torch.cat([angles, angles], dim=-1)
    return qkv.to(dtype), angles.cos(), angles.sin(), heads


CASES = (
    Case("vision 3072x16", {"rows": 3072, "heads": 16}),
    Case("vision 12288x16", {"rows": 12288, "heads": 16}),
    Case("odd 77x16", {"rows": 77, "heads": 16}),
    Case("odd 5x3", {"rows": 5, "heads": 3}, cpu=True),
    Case("one row 1x16", {"rows": 1, "heads": 16}, cpu=True),
)
