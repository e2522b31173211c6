"""Attention of one query row, or a few, over the live part of the cache, grouped-query.

    o = softmax(q·kᵀ / √D) · v   over the first `length` cache rows

q [R, Hq, D], k and v [Hkv, capacity, D], result [R, Hq·D]. Three references: over the live rows with the length known
on the host (stock's own call: class exact); over the whole capacity under a mask on the device, which a captured graph
can replay (class near; masked keys contribute exact zeros, so the capacity does not change the bits of a library kernel
that walks the keys in order); and over the live rows with the length on the device, for 1 to 8 query rows, which is
what the kernel computes. The first two take R = 1. Moves 2·length·Hkv·D values; 4·R·Hq·D·length FLOPs.

`decode_attention_live` takes `row` [1] int64 on the device, the cache row of the last query: that one sees rows
0 … row, and every query before it one row less, as tokens that are verified together do. There is no mask tensor, and a
captured graph advances `row` in place. A stage calls it as its `attend`, after `qkv_norm_rope_cache` has written the
queries' own keys and values:

    attend = partial(decode_attention.launch, row=row)    # (q, k, v) → [R, Hq·D], for `decode_step`

The cache is cut into chunks at absolute positions, always of `LAUNCH.block` keys. The first kernel gives one program to
a chunk and KV head: scores of all its query rows by one matrix product (16 rows, padded with zeros, so 1 to 8 queries
take one path), softmax within the chunk in fp32, the weights rounded to the model's dtype for the product with v, sums
kept in fp32. Programs beyond the live length return at once. The second kernel adds the chunks up in the order of
their positions, in fp32, and rounds once. So a query's bits depend on neither the capacity, nor what lies beyond the
live length, nor the other queries: class near. The split into chunks follows Flash-Decoding (Dao et al., 2023).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels.case import Case, Launch, refusal, require


def decode_attention_ref(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Return [1, Hq·D]; `length` counts the rows of k and v to read."""
    k, v = k[None, :, :length], v[None, :, :length]
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def decode_attention_masked_ref(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return [1, Hq·D]; `bias` [capacity] in the model's dtype is 0 for the rows that count, else −inf."""
    # the query heads of one KV head become rows, so that no key is repeated in memory
    grouped = q.unflatten(1, (k.shape[0], -1))
    out = F.scaled_dot_product_attention(grouped, k[None], v[None], attn_mask=bias.expand(1, 1, grouped.shape[2], -1))
    return out.flatten(1)


def decode_attention_live_ref(q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> Tensor:
    """Return [R, Hq·D]; the last query sees cache rows 0 … `row` [1], each before it one less. Waits for the device."""
    shortest = int(row) + 2 - q.shape[0]
    return torch.cat([decode_attention_ref(q[i : i + 1], k, v, shortest + i) for i in range(q.shape[0])])


LAUNCH = Launch(block=64, warps=4)
"""`block` is the number of keys in a chunk; results with other chunks differ in the last bits."""
MAX_ROWS = 8
MAX_GROUP = 16
WIDTHS = (16, 32, 64, 128, 256)
BLOCK_M = 16
"""Query rows times heads of a group that a program takes: the fewest that a matrix instruction has."""
COMBINED_CHUNKS, COMBINED_COLUMNS, COMBINING_WARPS = 64, 16, 1
"""What a program of the second kernel takes; one warp spares the barriers between warps."""


@triton.jit
def _live_length(row_ptr, capacity):
    """What the last query sees; a row outside of the cache never leads outside of its memory."""
    return tl.minimum(tl.load(row_ptr) + 1, capacity)


@triton.jit(do_not_specialize=["capacity", "n_rows", "n_chunks"])
def _attend_chunk(
    q_ptr,
    k_ptr,
    v_ptr,
    row_ptr,
    sums_ptr,
    stats_ptr,
    q_stride_row,
    q_stride_head,
    k_stride_head,
    k_stride_row,
    v_stride_head,
    v_stride_row,
    scale,
    capacity,
    n_rows,
    n_chunks,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One chunk of one KV head: unnormalised sums [R·Hq, n_chunks, D], and the largest score and the weights' sum.

    `scale` turns a product into an exponent of 2. KV heads are the grid's fastest axis, so live chunks start first.
    """
    kv_head = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    start = chunk * CHUNK
    length = _live_length(row_ptr, capacity)
    if start >= length:
        return
    keys = start + tl.arange(0, CHUNK)
    cols = tl.arange(0, WIDTH)
    live = (keys < length)[:, None]
    k_block = k_ptr + kv_head * k_stride_head + keys[:, None] * k_stride_row + cols[None, :]
    v_block = v_ptr + kv_head * v_stride_head + keys[:, None] * v_stride_row + cols[None, :]

    lanes = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = (lanes // GROUP).to(tl.int64)
    heads = kv_head * GROUP + lanes % GROUP
    used = rows < n_rows
    q_block = q_ptr + rows[:, None] * q_stride_row + heads[:, None] * q_stride_head + cols[None, :]
    q = tl.load(q_block, mask=used[:, None], other=0.0)
    # in this order all loads are on their way together; what follows k's waits for it to pass through shared memory
    v = tl.load(v_block, mask=live, other=0.0)
    k = tl.load(k_block, mask=live, other=0.0)

    shortest = length - n_rows + 1
    visible = keys[None, :] < shortest + rows[:, None]
    scores = tl.where(visible, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
    top = tl.max(scores, 1)
    weights = tl.exp2(scores - tl.where(top == float("-inf"), 0.0, top)[:, None])
    sums = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    if (n_rows > 1) & (start + CHUNK > shortest):
        # a weight of zero does not keep a NaN or infinity of v from the queries that do not see it
        v32 = v.to(tl.float32)
        wild = (keys[:, None] >= shortest) & (v32 - v32 != 0.0)
        reached = tl.dot(visible.to(v.dtype), wild.to(v.dtype), input_precision="ieee")
        sums = tl.where(reached > 0.0, float("nan"), sums)
        v = tl.where(wild, 0.0, v).to(v.dtype)
    sums = tl.dot(weights.to(v.dtype), v, sums, input_precision="ieee")

    target = (rows * (tl.num_programs(0) * GROUP) + heads) * n_chunks + chunk
    tl.store(sums_ptr + target[:, None] * WIDTH + cols[None, :], sums, mask=used[:, None])
    tl.store(stats_ptr + 2 * target, top, mask=used)
    tl.store(stats_ptr + 2 * target + 1, tl.sum(weights, 1), mask=used)


@triton.jit
def _add_chunks(
    first,
    live,
    out,
    total,
    highest,
    sums_ptr,
    stats_ptr,
    n_chunks,
    cols,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Some columns of one query head with `BLOCK_C` chunks more from `first` on, of which the `live` ones count.

    Loads go by the capacity, so that they need not wait for the live length.
    """
    chunks = first + tl.arange(0, BLOCK_C)
    inside = chunks < n_chunks
    tops = tl.load(stats_ptr + 2 * chunks, mask=inside, other=0.0)
    totals = tl.load(stats_ptr + 2 * chunks + 1, mask=inside, other=0.0)
    sums = tl.load(sums_ptr + chunks[:, None] * WIDTH + cols[None, :], mask=inside[:, None], other=0.0)
    counted = chunks < live
    tops = tl.where(counted, tops, float("-inf"))
    higher = tl.maximum(highest, tl.max(tops, 0))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(tops - shift)
    earlier = tl.exp2(highest - shift)
    out = out * earlier + tl.sum(tl.where(counted[:, None], weights[:, None] * sums, 0.0), 0)
    total = total * earlier + tl.sum(tl.where(counted, weights * totals, 0.0), 0)
    return out, total, higher


@triton.jit(do_not_specialize=["capacity", "n_chunks"])
def _combine_chunks(
    sums_ptr,
    stats_ptr,
    row_ptr,
    out_ptr,
    capacity,
    n_chunks,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Some columns of one query head: its live chunks in order."""
    lane = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums_ptr += lane * n_chunks * WIDTH
    stats_ptr += lane * n_chunks * 2
    live = ((_live_length(row_ptr, capacity) + CHUNK - 1) // CHUNK).to(tl.int32)
    out = tl.zeros((BLOCK_N,), tl.float32)
    out, total, highest = _add_chunks(
        0, live, out, 0.0, float("-inf"), sums_ptr, stats_ptr, n_chunks, cols, WIDTH, BLOCK_C
    )
    for first in range(BLOCK_C, live, BLOCK_C):
        out, total, highest = _add_chunks(
            first, live, out, total, highest, sums_ptr, stats_ptr, n_chunks, cols, WIDTH, BLOCK_C
        )
    tl.store(out_ptr + lane * WIDTH + cols, (out / total).to(out_ptr.dtype.element_ty))


def supports(q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = refusal(q=q, k=k, v=v)
    if reason is not None:
        return reason
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or k.shape[2] != q.shape[2] or not k.numel():
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        return f"q, k and v of the shapes {shapes}; give [R, Hq, D] and two caches [Hkv, capacity, D]"
    n_rows, heads, width = q.shape
    if not 1 <= n_rows <= MAX_ROWS:
        return f"{n_rows} query rows; the kernel takes 1 to {MAX_ROWS}"
    if heads % k.shape[0] or not 1 <= heads // k.shape[0] <= MAX_GROUP:
        return f"{heads} query heads over {k.shape[0]} KV heads; the kernel takes 1 to {MAX_GROUP} for each"
    if width not in WIDTHS:
        return f"heads of {width} values; the kernel takes {', '.join(map(str, WIDTHS))}"
    if row.dtype != torch.int64 or tuple(row.shape) != (1,):
        return f"row is {row.dtype} of shape {tuple(row.shape)}; give one int64"
    if row.device != q.device:
        return f"row is on {row.device} but q is on {q.device}; move it there"
    return None


def launch(q: Tensor, k: Tensor, v: Tensor, row: Tensor, *, config: Launch = LAUNCH) -> Tensor:
    """`decode_attention_live` without its checks."""
    n_rows, heads, width = q.shape
    kv_heads, capacity, _ = k.shape
    group, n_chunks = heads // kv_heads, triton.cdiv(capacity, config.block)
    sums = torch.empty(n_rows * heads, n_chunks, width, dtype=torch.float32, device=q.device)
    stats = torch.empty(n_rows * heads, n_chunks, 2, dtype=torch.float32, device=q.device)
    out = torch.empty(n_rows, heads * width, dtype=q.dtype, device=q.device)
    _attend_chunk[(kv_heads, n_chunks, triton.cdiv(n_rows * group, BLOCK_M))](
        *(q, k, v, row, sums, stats),
        *(*_strides(q), *_strides(k), *_strides(v)),
        *(math.log2(math.e) / math.sqrt(width), capacity, n_rows, n_chunks),
        *(group, width, config.block, BLOCK_M),
        num_warps=config.warps,
    )
    columns = min(COMBINED_COLUMNS, width)
    _combine_chunks[(n_rows * heads, width // columns)](
        *(sums, stats, row, out, capacity, n_chunks),
        *(width, config.block, COMBINED_CHUNKS, columns),
        num_warps=COMBINING_WARPS,
    )
    return out


def _strides(x: Tensor) -> tuple[int, int]:
    """The first two strides; one of a single item can be anything, so it gets a value that compiles no new variant."""
    second = x.stride(1) if x.shape[1] > 1 else x.shape[2]
    return x.stride(0) if x.shape[0] > 1 else x.shape[1] * second, second


@torch.library.custom_op("vlmopt::decode_attention_live", mutates_args=())
def decode_attention_live(q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> Tensor:
    """Return [R, Hq·D] for q [R, Hq, D] with R from 1 to 8; the last query sees cache rows 0 … `row` [1].

    `row` must lie from R − 1 to capacity − 1: a query that sees nothing gets NaN. An infinity of v in a row that not
    all queries see comes out as NaN.

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(q, k, v, row))
    return launch(q, k, v, row)


@decode_attention_live.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


def cost(rows: int, heads: int, kv_heads: int, width: int, length: int, itemsize: int = 2, **_: int) -> tuple[int, int]:
    """Bytes moved (the live keys and values once, q and the result) and FLOPs."""
    moved = 2 * width * (length * kv_heads + rows * heads)
    return moved * itemsize, 4 * rows * heads * width * length


def make(
    params: dict, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random arguments of a case; the cache is full of NaN beyond the live length."""
    width, length = params["width"], params["length"]

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    q = randn(params["rows"], params["heads"], width)
    k, v = (q.new_full((params["kv_heads"], params["capacity"], width), float("nan")) for _ in range(2))
    for cache in (k, v):
        cache[:, :length] = randn(params["kv_heads"], length, width)
    return q, k, v, torch.tensor([length - 1], device=device)


def _case(
    length: int,
    capacity: int,
    rows: int = 1,
    heads: int = 16,
    kv_heads: int = 8,
    width: int = 128,
    cpu: bool = False,
) -> Case:
    params = {"rows": rows, "heads": heads, "kv_heads": kv_heads, "width": width}
    name = f"{'small ' if cpu else ''}length {length:,}{f', {rows} rows' if rows > 1 else ''}"
    return Case(name, {**params, "length": length, "capacity": capacity}, cpu)


CASES = (
    _case(800, 1024),
    _case(4096, 4096),
    _case(16384, 16384),
    _case(32768, 32768),
    _case(800, 1024, rows=4),
    _case(4097, 8192, rows=8),
    _case(1, 512),
    _case(65, 1000),
    _case(2999, 3001, rows=3, heads=12, kv_heads=3, width=64),
    _case(200, 256, cpu=True),
    _case(70, 100, rows=4, heads=4, kv_heads=2, width=32, cpu=True),
    _case(9, 9, rows=8, heads=6, kv_heads=2, width=16, cpu=True),
    _case(129, 130, heads=3, kv_heads=1, width=64, cpu=True),
)
