"""Causal attention of a whole prompt over itself, grouped-query.

    o = softmax(q·kᵀ / √D, causal) · v

q [T, Hq, D], k and v [Hkv, ≥ T, D] (the cache; only the first T rows are read), result [T, Hq·D]. No mask tensor.
Moves 2·T·(Hq + Hkv)·D values; 2·T²·Hq·D FLOPs (half of the square).

The reference is the library's causal attention as stock calls it: class exact. On a Hopper the library gives it to
cuDNN, which is fast at a length that it has seen and builds a plan for tens of milliseconds at every length that it has
not. `launch_library` is the library's FlashAttention-2 (Dao, 2023) by its own name, which takes strided caches and
groups as they are and any length at once. Its tiles of 128 rows are few and unequal in a short prompt: at 798 tokens
the last one decides, with 13 steps of 64 keys after each other. `launch`, class near, is one kernel whose programs take
`LAUNCH`'s query rows of one head, the longest first, and walk the keys before them as FlashAttention does; only the
tiles on the diagonal are masked. A row's bits depend on neither the rows behind it nor on the cache's capacity.
`vlmopt.workbook.prefill_attention_study` times them all.
"""

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels.case import Case, refusal, require
from vlmopt.kernels.vision_attention import FP32_LAUNCH, MAX_WIDTH, Tiles, attend_keys, load_rows, strides

LAUNCH = Tiles(block=64, warps=4, keys=64, stages=3)


def prefill_attention_ref(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return [T, Hq·D]."""
    length = q.shape[0]
    k, v = k[None, :, :length], v[None, :, :length]
    # transformers passes is_causal only to queries of several rows; one row over one key needs none
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=length > 1, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


@triton.jit(do_not_specialize=["length"])
def _attend_causal(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    q_stride_row,
    q_stride_head,
    k_stride_row,
    k_stride_head,
    v_stride_row,
    v_stride_head,
    out_stride_row,
    scale,
    length,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`BLOCK_M` rows of one head; `scale` turns a product into an exponent of 2.

    Heads are the grid's fastest axis and the last rows come first, since they have the most keys.
    """
    head = tl.program_id(0).to(tl.int64)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    rows, keys, cols = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_D)[None, :]
    q_block = q_ptr + row.to(tl.int64) * q_stride_row + head * q_stride_head + (rows * q_stride_row + cols)
    q = load_rows(q_block, length - row, WIDTH, BLOCK_M, BLOCK_D, True)
    k_ptr += head // GROUP * k_stride_head
    v_ptr += head // GROUP * v_stride_head
    k_block, v_block = keys * k_stride_row + cols, keys * v_stride_row + cols

    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    whole = row // BLOCK_N * BLOCK_N
    for key in range(0, whole, BLOCK_N):
        k_tile = k_ptr + tl.cast(key, tl.int64) * k_stride_row + k_block
        v_tile = v_ptr + tl.cast(key, tl.int64) * v_stride_row + v_block
        sums, total, highest = attend_keys(
            q, sums, total, highest, k_tile, v_tile, BLOCK_N, BLOCK_N, scale, WIDTH, BLOCK_N, BLOCK_D, False
        )
    for key in range(whole, tl.minimum(row + BLOCK_M, length), BLOCK_N):
        k_tile = k_ptr + tl.cast(key, tl.int64) * k_stride_row + k_block
        v_tile = v_ptr + tl.cast(key, tl.int64) * v_stride_row + v_block
        limit = row + rows + 1 - key
        sums, total, highest = attend_keys(
            q, sums, total, highest, k_tile, v_tile, length - key, limit, scale, WIDTH, BLOCK_N, BLOCK_D, True
        )
    out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
    out_block = out_ptr + row.to(tl.int64) * out_stride_row + head * WIDTH + (rows * out_stride_row + cols)
    tl.store(out_block, out, mask=(rows < length - row) & (cols < WIDTH))


def supports(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = refusal(q=q, k=k, v=v)
    if reason is not None:
        return reason
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        return f"q, k and v of the shapes {shapes}; give [T, Hq, D] and twice [Hkv, capacity, D]"
    if not 1 <= q.shape[2] <= MAX_WIDTH or not k.shape[0] or not q.shape[1] or q.shape[1] % k.shape[0]:
        return (
            f"{q.shape[1]} heads of {q.shape[2]} values over {k.shape[0]} key/value heads; "
            f"the kernel takes equal groups of heads of 1 to {MAX_WIDTH} values"
        )
    if not 1 <= q.shape[0] <= k.shape[1]:
        return f"{q.shape[0]} rows over a cache of {k.shape[1]}; give at least one, and no more than it holds"
    return None


def launch(q: Tensor, k: Tensor, v: Tensor, *, config: Tiles | None = None) -> Tensor:
    """`prefill_attention` without its checks and the dispatcher."""
    length, heads, width = q.shape
    config = config or (FP32_LAUNCH if q.dtype == torch.float32 else LAUNCH)
    out = torch.empty(length, heads * width, dtype=q.dtype, device=q.device)
    _attend_causal[(heads, triton.cdiv(length, config.block))](
        *(q, k, v, out),
        *(*strides(q), *strides(k.transpose(0, 1)), *strides(v.transpose(0, 1)), heads * width),
        math.log2(math.e) / math.sqrt(width),
        length,
        GROUP=heads // len(k),
        WIDTH=width,
        BLOCK_M=config.block,
        BLOCK_N=config.keys,
        BLOCK_D=max(16, triton.next_power_of_2(width)),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


@torch.library.custom_op("vlmopt::prefill_attention", mutates_args=())
def _registered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return launch(q, k, v)


@_registered.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


def prefill_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return [T, Hq·D].

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(q, k, v))
    return _registered(q, k, v)


def launch_library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by torch's own FlashAttention-2, for CUDA tensors in half precision."""
    length = len(q)
    k, v = (cache[:, :length].transpose(0, 1) for cache in (k, v))
    ends = _ends(length, q.device)
    out = torch.ops.aten._flash_attention_forward(q, k, v, ends, ends, length, length, 0.0, True, False)[0]
    return out.flatten(1)


@lru_cache(maxsize=64)
def _ends(length: int, device: torch.device) -> Tensor:
    """Where the one sequence begins and ends, as the variable-length form takes it."""
    return torch.tensor([0, length], dtype=torch.int32, device=device)


def cost(*, length: int, heads: int, kv_heads: int, width: int, itemsize: int = 2, **_: int) -> tuple[int, int]:
    """Bytes moved and FLOPs."""
    return 2 * length * (heads + kv_heads) * width * itemsize, 2 * length * length * heads * width


def make(
    params: dict, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of the op for a case's parameters; the cache is full of NaN beyond the prompt."""
    length, width = params["length"], params["width"]
    q = torch.randn(length, params["heads"], width, generator=generator, device=device).to(dtype)
    cache = q.new_full((2, params["kv_heads"], params["capacity"], width), float("nan"))
    cache[:, :, :length] = torch.randn(2, params["kv_heads"], length, width, generator=generator, device=device)
    return q, *cache.unbind(0)


def _case(length: int, capacity: int, heads: int = 16, kv_heads: int = 8, width: int = 128, cpu: bool = False) -> Case:
    shape = {"heads": heads, "kv_heads": kv_heads, "width": width}
    return Case(f"{'small ' if cpu else ''}T {length:,}", {"length": length, "capacity": capacity, **shape}, cpu)


CASES = (
    _case(798, 1024),
    _case(4095, 4096),
    _case(77, 512),
    _case(110, 256, heads=4, kv_heads=2, cpu=True),
    _case(1, 16, heads=4, kv_heads=2, cpu=True),
)
