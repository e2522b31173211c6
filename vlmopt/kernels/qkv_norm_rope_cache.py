"""From q/k/v products to a rotated query and an updated KV cache.

    q = rope(rms_norm(q)),  k = rope(rms_norm(k));   cache[:, positions] = k, v

Each head of q and k is normalised over its own width D, then rotated by halves: x·cos + rotate_half(x)·sin, with cos
and sin [T, D] already in the model's dtype; every product and the sum are rounded to that dtype, as transformers does.
Products come packed as one [T, (Hq + 2·Hkv)·D] or separately as [T, Hq·D], [T, Hkv·D], [T, Hkv·D]; a q of no columns
asks for the cache alone. Caches [Hkv, capacity, D]. `positions` [T] are the cache rows to write, on the device, so that
a captured graph can advance them. The reference is of class exact. Moves the products, q, and 2·T·Hkv·D cache values;
about 10 FLOPs a value of q and k.

The kernel replaces the 28 launches of the reference by one, the same for a prompt and for a single token. It
rounds where the reference does and sums the squares in another order, so a value may differ by one unit in the last
place: near. A position outside of the cache is not written.

With `scales` [2, Hkv] the caches hold e4m3 as `kv_fp8` describes it; what is stored is the same k and v, rounded once
more.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmopt.kernels import kv_fp8
from vlmopt.kernels.add_rms_norm import add_rms_norm_ref
from vlmopt.kernels.case import Case, Launch, refusal, require, row_stride
from vlmopt.kernels.dependent import knows_dependents, wait_for_predecessor
from vlmopt.kernels.kv_fp8 import to_e4m3


def qkv_norm_rope_cache_ref(
    products: Sequence[Tensor],
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """Write k and v into the caches in place and return q [T, Hq, D]."""
    kv_heads, _, width = k_cache.shape
    kv = kv_heads * width
    if len(products) == 1:
        products = products[0].split([products[0].shape[-1] - 2 * kv, kv, kv], dim=-1)
    q, k, v = (product.unflatten(-1, (product.shape[-1] // width, width)) for product in products)
    q = rotate(add_rms_norm_ref(q, None, q_norm, eps)[0], cos, sin)
    k = rotate(add_rms_norm_ref(k, None, k_norm, eps)[0], cos, sin)
    for cache, rows, scale in zip((k_cache, v_cache), (k, v), (None, None) if scales is None else scales, strict=True):
        kv_fp8.put(cache, positions, rows.transpose(0, 1), scale)
    return q


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves of x [T, heads, D] with cos and sin [T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


LAUNCH = Launch(block=1024, warps=2)
"""`block` is the number of values a program takes: heads of one row and one kind (query, key or value)."""
MAX_WIDTH = 512
MUTATES = (6, 7)
"""The arguments that are written: both caches."""


@triton.jit
def _norm_rope(first, second, weight_ptr, cos_ptr, sin_ptr, cols, mask, eps, HALF: tl.constexpr):
    """RMSNorm and rotation of the two halves [heads, D/2] of rows; every step is rounded to the rows' dtype.

    `cols` and `mask` have the shape of a half, so that weights and angles arrive in its layout, without a barrier.
    """
    dtype = first.dtype
    weight_a, weight_b = _load_halves(weight_ptr, cols, mask, HALF)
    cos_a, cos_b = _load_halves(cos_ptr, cols, mask, HALF)
    sin_a, sin_b = _load_halves(sin_ptr, cols, mask, HALF)
    a, b = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(a * a + b * b, axis=1, keep_dims=True)
    inverse = tl.rsqrt(squares / (2 * HALF) + eps)
    a = _product(weight_a, (a * inverse).to(dtype)).to(dtype)
    b = _product(weight_b, (b * inverse).to(dtype)).to(dtype)
    rotated_a = _product(a, cos_a) - _product(b, sin_a)
    rotated_b = _product(b, cos_b) + _product(a, sin_b)
    return rotated_a.to(dtype), rotated_b.to(dtype)


@triton.jit
def _product(x, y):
    """The product rounded to the factors' dtype, as fp32 for what follows."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _load_halves(ptr, offsets, mask, HALF: tl.constexpr):
    return tl.load(ptr + offsets, mask=mask, other=0.0), tl.load(ptr + HALF + offsets, mask=mask, other=0.0)


@triton.jit
def _store_halves(ptr, offsets, mask, first, second, HALF: tl.constexpr):
    tl.store(ptr + offsets, first, mask=mask)
    tl.store(ptr + HALF + offsets, second, mask=mask)


@triton.jit
def _as_stored(first, second, scales_ptr, places, N_SCALES: tl.constexpr):
    """The halves as the cache holds them; `places` [heads, 1] are those of their heads' scales."""
    if scales_ptr is None:
        return first, second
    else:
        scale = tl.load(scales_ptr + places, mask=places < N_SCALES, other=1.0)
        return to_e4m3(first.to(tl.float32), scale), to_e4m3(second.to(tl.float32), scale)


@triton.jit(do_not_specialize=["capacity"])
def _qkv_norm_rope_cache(
    q_ptr,
    k_ptr,
    v_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_stride_row,
    k_stride_row,
    v_stride_row,
    cos_stride_row,
    sin_stride_row,
    k_cache_stride_head,
    k_cache_stride_row,
    v_cache_stride_head,
    v_cache_stride_row,
    eps,
    capacity,
    scales_ptr,
    K_OFFSET: tl.constexpr,
    V_OFFSET: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    wait_for_predecessor(USE_PDL)
    q_blocks: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    kv_blocks: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    row = (tl.program_id(0) // (q_blocks + 2 * kv_blocks)).to(tl.int64)
    block = tl.program_id(0) % (q_blocks + 2 * kv_blocks)
    cols = tl.broadcast_to(tl.arange(0, BLOCK_N)[None, :], (BLOCK_H, BLOCK_N))
    lanes = tl.arange(0, BLOCK_H)[:, None]
    cos_ptr += row * cos_stride_row
    sin_ptr += row * sin_stride_row
    if block < q_blocks:
        heads = block * BLOCK_H + lanes
        mask = (heads < Q_HEADS) & (cols < HALF)
        first, second = _load_halves(q_ptr + row * q_stride_row, heads * (2 * HALF) + cols, mask, HALF)
        first, second = _norm_rope(first, second, q_norm_ptr, cos_ptr, sin_ptr, cols, cols < HALF, eps, HALF)
        rows_out = out_ptr + row * (Q_HEADS * 2 * HALF)
        _store_halves(rows_out, heads * (2 * HALF) + cols, mask, first, second, HALF)
    else:
        position = tl.load(positions_ptr + row).to(tl.int64)
        inside = (position >= 0) & (position < capacity)
        if block < q_blocks + kv_blocks:
            heads = (block - q_blocks) * BLOCK_H + lanes
            mask = (heads < KV_HEADS) & (cols < HALF)
            first, second = _load_halves(k_ptr + row * k_stride_row + K_OFFSET, heads * (2 * HALF) + cols, mask, HALF)
            first, second = _norm_rope(first, second, k_norm_ptr, cos_ptr, sin_ptr, cols, cols < HALF, eps, HALF)
            target = k_cache_ptr + position * k_cache_stride_row
            offsets = heads.to(tl.int64) * k_cache_stride_head + cols
            stored = _as_stored(first, second, scales_ptr, heads, 2 * KV_HEADS)
            _store_halves(target, offsets, mask & inside, stored[0], stored[1], HALF)
        else:
            heads = (block - q_blocks - kv_blocks) * BLOCK_H + lanes
            mask = (heads < KV_HEADS) & (cols < HALF)
            first, second = _load_halves(v_ptr + row * v_stride_row + V_OFFSET, heads * (2 * HALF) + cols, mask, HALF)
            target = v_cache_ptr + position * v_cache_stride_row
            offsets = heads.to(tl.int64) * v_cache_stride_head + cols
            stored = _as_stored(first, second, scales_ptr, KV_HEADS + heads, 2 * KV_HEADS)
            _store_halves(target, offsets, mask & inside, stored[0], stored[1], HALF)


def supports(
    products: Sequence[Tensor],
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    scales: Tensor | None = None,
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if len(products) not in (1, 3):
        return f"{len(products)} products; give one packed [T, (Hq + 2·Hkv)·D] or three for q, k and v"
    named = {f"products[{i}]": product for i, product in enumerate(products)}
    reason = refusal(**named, q_norm=q_norm, k_norm=k_norm, cos=cos, sin=sin)
    reason = reason or kv_fp8.caches_refusal(cos, "cos", scales, k_cache=k_cache, v_cache=v_cache)
    if reason is not None:
        return reason
    if k_cache.dim() != 3 or k_cache.shape != v_cache.shape:
        return f"caches of the shapes {tuple(k_cache.shape)} and {tuple(v_cache.shape)}; give two [Hkv, capacity, D]"
    kv_heads, _, width = k_cache.shape
    if width % 2 or width > MAX_WIDTH:
        return f"heads of {width} values; the kernel takes an even number up to {MAX_WIDTH}"
    rows, columns = products[0].shape[0], sum(product.shape[-1] for product in products)
    q_columns = columns - 2 * kv_heads * width
    if any(product.shape[:-1] != (rows,) for product in products) or q_columns < 0 or q_columns % width:
        return f"products of {columns} columns in all; {kv_heads} KV heads of {width} need (Hq + 2·{kv_heads})·{width}"
    if len(products) == 3 and any(product.shape[-1] != kv_heads * width for product in products[1:]):
        return f"k and v of {products[1].shape[-1]} and {products[2].shape[-1]} columns; need {kv_heads * width}"
    if tuple(q_norm.shape) != (width,) or tuple(k_norm.shape) != (width,):
        return f"norm weights of the shapes {tuple(q_norm.shape)} and {tuple(k_norm.shape)}; need ({width},)"
    if tuple(cos.shape) != (rows, width) or tuple(sin.shape) != (rows, width):
        return f"cos and sin of the shapes {tuple(cos.shape)} and {tuple(sin.shape)}; need ({rows}, {width})"
    if positions.dtype != torch.int64 or tuple(positions.shape) != (rows,) or not positions.is_contiguous():
        return f"positions is {positions.dtype} of shape {tuple(positions.shape)}; give dense int64 ({rows},)"
    return None if positions.device == cos.device else f"positions is on {positions.device} but cos is on {cos.device}"


def launch(
    products: Sequence[Tensor],
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    scales: Tensor | None = None,
    *,
    config: Launch = LAUNCH,
) -> Tensor:
    """`qkv_norm_rope_cache` without its checks."""
    kv_heads, capacity, width = k_cache.shape
    q, k, v = products if len(products) == 3 else (products[0],) * 3
    rows = q.shape[0]
    packed = len(products) == 1
    q_heads = q.shape[1] // width - 2 * kv_heads * packed
    offsets = (q_heads * width, (q_heads + kv_heads) * width) if packed else (0, 0)
    out = torch.empty(rows, q_heads, width, dtype=q.dtype, device=q.device)
    block_n = triton.next_power_of_2(width // 2)
    block_h = max(1, config.block // (2 * block_n))
    blocks = triton.cdiv(q_heads, block_h) + 2 * triton.cdiv(kv_heads, block_h)
    dependent = knows_dependents(q)
    _qkv_norm_rope_cache[(rows * blocks,)](
        *(q, k, v, q_norm, k_norm, cos, sin, positions, out, k_cache, v_cache),
        *(row_stride(q), row_stride(k), row_stride(v), row_stride(cos), row_stride(sin)),
        *(k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1)),
        *(eps, capacity, scales),
        *(*offsets, q_heads, kv_heads, width // 2, block_h, block_n, dependent),
        num_warps=config.warps,
        launch_pdl=dependent,
    )
    return out


@torch.library.custom_op(
    "vlmopt::qkv_norm_rope_cache",
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor[] products, Tensor q_norm, Tensor k_norm, float eps, Tensor cos, Tensor sin, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor positions, Tensor? scales=None) -> Tensor",
)
def qkv_norm_rope_cache(
    products: Sequence[Tensor],
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """Write k and v into the caches in place and return q [T, Hq, D].

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(products, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, positions, scales))
    return launch(products, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, positions, scales)


@qkv_norm_rope_cache.register_fake
def _(products, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, positions, scales=None):
    kv_heads, _, width = k_cache.shape
    columns = products[0].shape[-1] - (2 * kv_heads * width if len(products) == 1 else 0)
    return cos.new_empty(cos.shape[0], columns // width, width)


def cost(rows: int, heads: int, kv_heads: int, width: int, itemsize: int = 2, **_: int | bool) -> tuple[int, int]:
    """Bytes moved and FLOPs."""
    moved = rows * width * (2 * heads + 4 * kv_heads + 2) + 2 * width
    return moved * itemsize + 8 * rows, 10 * rows * width * (heads + kv_heads)


def make(params: dict, device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple:
    """Random arguments of a case: angles as cos and sin have them, positions from an offset on."""
    rows, heads, kv_heads, width = (params[name] for name in ("rows", "heads", "kv_heads", "width"))
    columns = heads * width, kv_heads * width, kv_heads * width

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    packed = randn(rows, sum(columns)).to(dtype)
    products = [packed] if params["packed"] else [part.contiguous() for part in packed.split(columns, dim=-1)]
    q_norm, k_norm = ((1 + 0.3 * randn(width)).to(dtype) for _ in range(2))
    angles = (3 * randn(rows, width // 2)).repeat(1, 2)
    caches = randn(2, kv_heads, params["start"] + rows + 5, width).to(dtype)
    positions = torch.arange(params["start"], params["start"] + rows, device=device)
    return products, q_norm, k_norm, 1e-6, angles.cos().to(dtype), angles.sin().to(dtype), *caches, positions


def _case(
    name: str, rows: int, heads: int, kv_heads: int, width: int, start: int = 0, packed: bool = True, cpu: bool = False
) -> Case:
    params = {"rows": rows, "heads": heads, "kv_heads": kv_heads, "width": width, "start": start, "packed": packed}
    ending = "" if packed else " separate"
    return Case(f"{name} {rows}x({heads}+2x{kv_heads})x{width}{ending}", params, cpu)


CASES = (
    _case("decode", 1, 16, 8, 128, start=798),
    _case("prefill", 798, 16, 8, 128),
    _case("prefill", 798, 16, 8, 128, packed=False),
    _case("prefill", 4096, 16, 8, 128),
    _case("odd", 333, 5, 3, 96, start=7),
    _case("small decode", 1, 4, 2, 128, start=3, cpu=True),
    _case("small", 3, 4, 2, 32, start=2, packed=False, cpu=True),
    _case("small odd", 2, 5, 3, 24, start=1, cpu=True),
    _case("small wide", 2, 9, 1, 128, cpu=True),
)
