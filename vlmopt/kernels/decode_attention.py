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

The cache is cut into chunks at absolute positions, always of the same number of keys for one dtype and head size. The
first kernel gives P = `LAUNCH.programs` programs to a KV head, however long the cache: program p walks chunks p, p + P,
p + 2P, … and carries a running maximum, sum and output (online softmax) in fp32. Scores of all query rows come from one
matrix product (16 rows, padded with zeros, so 1 to 8 queries take one path); the weights are rounded to the model's
dtype for the product with v. The second kernel adds the programs' parts up in a fixed order and rounds once. A chunk
that a query does not see leaves its bits as they are, so these depend on neither the capacity, nor what lies beyond the
live length, nor the other queries: class near. The split follows Flash-Decoding (Dao et al., 2023).
With `scales` [2, Hkv] k and v are of e4m3 (`kv_fp8`), widened exactly in registers; a key's scale is a part of the
softmax's, a value's multiplies the sums in fp32.

`launch` makes dependent launches (GPUs from Hopper on; see dependent.py), and a program reads `row` and the past of its
first chunk before it waits. So with dependent launches, `row` and the cache rows before the newest R must have been
written before the kernel in front of this one started to let dependents go. That holds in a decode step, where the
kernel in front writes nothing but q and the newest rows; the public op asks for nothing of the kind.
"""

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels import kv_fp8
from vlmopt.kernels.case import Case, require
from vlmopt.kernels.dependent import knows_dependents, wait_for_predecessor


def decode_attention_ref(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Return [1, Hq·D]; `length` counts the rows of k and v to read."""
    k, v = k[None, :, :length], v[None, :, :length]
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def decode_attention_masked_ref(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return [1, Hq·D]; `bias` [capacity] is 0 for the rows that count, else −inf."""
    # the query heads of one KV head become rows, so that no key is repeated in memory
    grouped = q.unflatten(1, (k.shape[0], -1))
    bias = bias.to(q.dtype).expand(1, 1, grouped.shape[2], -1)
    out = F.scaled_dot_product_attention(grouped, k[None], v[None], attn_mask=bias)
    return out.flatten(1)


def decode_attention_live_ref(q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> Tensor:
    """Return [R, Hq·D]; the last query sees cache rows 0 … `row` [1], each before it one less. Waits for the device."""
    shortest = int(row) + 2 - q.shape[0]
    return torch.cat([decode_attention_ref(q[i : i + 1], k, v, shortest + i) for i in range(q.shape[0])])


@dataclass(frozen=True)
class Split:
    """How the cache is split and streamed. Other `programs` or `block`: other last bits."""

    programs: int
    """Programs to a KV head."""
    block: int
    """Keys in a chunk, where a key has up to 256 bytes; fewer of longer ones."""
    warps: int
    stages: int
    """Chunks in flight after the first, one of them being computed."""
    held: bool = False
    """Whether a program loads its first chunk into registers before the wait."""
    ahead: int = 0
    """How many of a program's chunks, the held one among them, are called into the L2 cache before the wait."""
    dependent: bool = True
    """Whether the launches are dependent ones where the GPU knows them."""

    def keys(self, k: Tensor) -> int:
        """Keys in a chunk of this cache."""
        return max(16, min(self.block, self.block * 256 // (k.shape[2] * k.element_size())))


LAUNCH = Split(programs=32, block=64, warps=4, stages=3)
MAX_ROWS = 8
MAX_GROUP = 16
WIDTHS = (16, 32, 64, 128, 256)
BLOCK_M = 16
"""Query rows times heads of a group that a program takes: the fewest that a matrix instruction has."""
COMBINED_COLUMNS, COMBINING_WARPS = 16, 1
"""What a program of the second kernel takes; one warp spares the barriers between warps."""


@triton.jit
def _live_length(row_ptr, capacity):
    """What the last query sees; a row outside of the cache never leads outside of its memory."""
    return tl.minimum(tl.load(row_ptr) + 1, capacity)


@triton.jit
def _call_into_l2(addresses):
    """Ask for the lines at these addresses; waits for nothing."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [addresses.to(tl.int64)], tl.int32, is_pure=False, pack=1)


@triton.jit
def _taken(keys, past, length, wild):
    """Which keys' values enter the sums: the live ones but for `wild` rows, a bit for each from `past` on.

    Wild is a row of v with a NaN or infinity that not all queries see: a weight of zero would not keep it from them.
    """
    bit = wild >> tl.minimum(tl.maximum(keys - past, 0), 31)
    return ((keys < length) & (bit & 1 == 0))[:, None]


@triton.jit
def _take_chunk(q, k, v, keys, limit, scale, out, total, highest):
    """Output, weights' sum and largest score of all query rows, which see keys below `limit`, with one chunk more.

    A row that sees none of it keeps its values: the largest score stays, they are scaled by 1, and zeros are added.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)  # e4m3 is widened here
    visible = keys[None, :] < limit[:, None]
    scores = tl.where(visible, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - shift[:, None])
    earlier = tl.exp2(highest - shift)
    out = tl.dot(weights.to(v.dtype), v, out * earlier[:, None], input_precision="ieee")
    return out, total * earlier + tl.sum(weights, 1), higher


@triton.jit(do_not_specialize=["capacity", "n_rows"])
def _attend_chunks(
    q_ptr,
    k_ptr,
    v_ptr,
    row_ptr,
    sums_ptr,
    stats_ptr,
    scales_ptr,
    q_stride_row,
    q_stride_head,
    k_stride_head,
    k_stride_row,
    v_stride_head,
    v_stride_row,
    scale,
    capacity,
    n_rows,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HELD: tl.constexpr,
    AHEAD: tl.constexpr,
    LINES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Every PROGRAMS-th chunk of one KV head: unnormalised sums [R·Hq, PROGRAMS, D], weights' sums and largest scores.

    `scale` turns a product into an exponent of 2. KV heads are the grid's fastest axis, so live chunks start first.
    """
    kv_head = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    length = _live_length(row_ptr, capacity)
    start = program.to(tl.int64) * CHUNK
    if start >= length:
        wait_for_predecessor(USE_PDL)
        return
    past = length - n_rows
    if scales_ptr is not None:
        scale *= tl.load(scales_ptr + kv_head)
    cols = tl.arange(0, WIDTH)[None, :]
    k_head = k_ptr + kv_head * k_stride_head
    v_head = v_ptr + kv_head * v_stride_head
    keys = start + tl.arange(0, CHUNK)
    k_block = k_head + keys[:, None] * k_stride_row + cols
    v_block = v_head + keys[:, None] * v_stride_row + cols
    if HELD:
        # v first: what follows k's load waits for k to pass through shared memory
        v = tl.load(v_block, mask=keys[:, None] < past, other=0.0)
        k = tl.load(k_block, mask=keys[:, None] < past, other=0.0)
    for i in tl.static_range(HELD, AHEAD):
        begin = start + i * PROGRAMS * CHUNK
        if begin < length:
            near = tl.minimum(begin + tl.arange(0, CHUNK), length - 1)[:, None]
            parts = tl.arange(0, LINES)[None, :] * (WIDTH // LINES)
            _call_into_l2(k_head + near * k_stride_row + parts)
            _call_into_l2(v_head + near * v_stride_row + parts)
    wait_for_predecessor(USE_PDL)

    lanes = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = (lanes // GROUP).to(tl.int64)
    heads = kv_head * GROUP + lanes % GROUP
    used = rows < n_rows
    q_block = q_ptr + rows[:, None] * q_stride_row + heads[:, None] * q_stride_head + cols
    newest = past + tl.arange(0, 8)
    unshared = ((newest > past) & (newest >= 0) & (newest < length))[:, None]
    newest_v = tl.load(v_head + newest[:, None] * v_stride_row + cols, mask=unshared, other=0.0)
    if HELD:
        # q's load stands in both branches, as what follows it waits for q to pass through shared memory
        if start + CHUNK > past:
            new = ((keys >= past) & (keys < length))[:, None]
            q = tl.load(q_block, mask=used[:, None], other=0.0)
            v = tl.load(v_block, mask=new, other=v)
            k = tl.load(k_block, mask=new, other=k)
        else:
            q = tl.load(q_block, mask=used[:, None], other=0.0)
    else:
        q = tl.load(q_block, mask=used[:, None], other=0.0)
    wild = tl.full((), 0, tl.int64)
    if n_rows > 1:
        v32 = newest_v.to(tl.float32)
        wild = tl.sum(tl.max((v32 - v32 != 0.0).to(tl.int64), 1) << tl.arange(0, 8), 0)

    limit = past + 1 + rows
    out = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if HELD:
        v = tl.where(_taken(keys, past, length, wild), v, 0.0).to(v.dtype)
        out, total, highest = _take_chunk(q, k, v, keys, limit, scale, out, total, highest)
    for begin in tl.range(start + HELD * PROGRAMS * CHUNK, length, PROGRAMS * CHUNK):
        later = begin + tl.arange(0, CHUNK)
        taken = _taken(later, past, length, wild)
        later_k = tl.load(k_head + later[:, None] * k_stride_row + cols, mask=later[:, None] < length, other=0.0)
        later_v = tl.load(v_head + later[:, None] * v_stride_row + cols, mask=taken, other=0.0)
        out, total, highest = _take_chunk(q, later_k, later_v, later, limit, scale, out, total, highest)
    total = tl.where(wild & ((2 << rows) - 1) != 0, float("nan"), total)
    if scales_ptr is not None:
        out *= tl.load(scales_ptr + tl.num_programs(0) + kv_head)
    target = (rows * (tl.num_programs(0) * GROUP) + heads) * PROGRAMS + program
    tl.store(sums_ptr + target[:, None] * WIDTH + cols, out, mask=used[:, None])
    tl.store(stats_ptr + 2 * target, highest, mask=used)
    tl.store(stats_ptr + 2 * target + 1, total, mask=used)


@triton.jit(do_not_specialize=["capacity"])
def _combine(
    sums_ptr,
    stats_ptr,
    row_ptr,
    out_ptr,
    capacity,
    WIDTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Some columns of one query head: what the programs found that had live chunks, all at once."""
    lane = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    programs = tl.arange(0, BLOCK_P)
    found = (programs < PROGRAMS) & (programs * CHUNK < _live_length(row_ptr, capacity))
    wait_for_predecessor(USE_PDL)
    parts = lane * PROGRAMS + programs
    highest = tl.load(stats_ptr + 2 * parts, mask=found, other=float("-inf"))
    totals = tl.load(stats_ptr + 2 * parts + 1, mask=found, other=0.0)
    sums = tl.load(sums_ptr + parts[:, None] * WIDTH + cols[None, :], mask=found[:, None], other=0.0)
    top = tl.max(highest, 0)
    weights = tl.exp2(highest - tl.where(top == float("-inf"), 0.0, top))
    out = tl.sum(weights[:, None] * sums, 0) / tl.sum(weights * totals, 0)
    tl.store(out_ptr + lane * WIDTH + cols, out.to(out_ptr.dtype.element_ty))


def supports(q: Tensor, k: Tensor, v: Tensor, row: Tensor, scales: Tensor | None = None) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = kv_fp8.caches_refusal(q, "q", scales, k=k, v=v)
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
    return None if row.device == q.device else f"row is on {row.device} but q is on {q.device}; move it there"


def launch(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor, scales: Tensor | None = None, *, config: Split = LAUNCH
) -> Tensor:
    """`decode_attention_live` without its checks, and with the precondition above where the launches are dependent."""
    n_rows, heads, width = q.shape
    kv_heads, capacity, _ = k.shape
    group, chunk, dependent = heads // kv_heads, config.keys(k), config.dependent and knows_dependents(q)
    sums = torch.empty(n_rows * heads, config.programs, width, dtype=torch.float32, device=q.device)
    stats = torch.empty(n_rows * heads, config.programs, 2, dtype=torch.float32, device=q.device)
    out = torch.empty(n_rows, heads * width, dtype=q.dtype, device=q.device)
    _attend_chunks[(kv_heads, config.programs, triton.cdiv(n_rows * group, BLOCK_M))](
        *(q, k, v, row, sums, stats, scales),
        *(*_strides(q), *_strides(k), *_strides(v)),
        *(math.log2(math.e) / math.sqrt(width), capacity, n_rows),
        *(group, width, config.programs, chunk, BLOCK_M),
        *(config.held, config.ahead if dependent else 0, max(1, width * k.element_size() // 128), dependent),
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=dependent,
    )
    columns = min(COMBINED_COLUMNS, width)
    _combine[(n_rows * heads, width // columns)](
        *(sums, stats, row, out, capacity),
        *(width, config.programs, chunk, triton.next_power_of_2(config.programs), columns, dependent),
        num_warps=COMBINING_WARPS,
        launch_pdl=dependent,
    )
    return out


def _strides(x: Tensor) -> tuple[int, int]:
    """The first two strides; one of a single item can be anything, so it gets a value that compiles no new variant."""
    second = x.stride(1) if x.shape[1] > 1 else x.shape[2]
    return x.stride(0) if x.shape[0] > 1 else x.shape[1] * second, second


_IN_ORDER = replace(LAUNCH, dependent=False)


@torch.library.custom_op("vlmopt::decode_attention_live", mutates_args=())
def decode_attention_live(q: Tensor, k: Tensor, v: Tensor, row: Tensor, scales: Tensor | None = None) -> Tensor:
    """Return [R, Hq·D] for q [R, Hq, D] with R from 1 to 8; the last query sees cache rows 0 … `row` [1].

    `row` must lie from R − 1 to capacity − 1: a query that sees nothing gets NaN. A query that
    sees a NaN or infinity of v in a row that not all queries see gets NaN for that KV head's whole output.

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(q, k, v, row, scales))
    return launch(q, k, v, row, scales, config=_IN_ORDER)


@decode_attention_live.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, row: Tensor, scales: Tensor | None = None) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


def cost(rows: int, heads: int, kv_heads: int, width: int, length: int, itemsize: int = 2, **_: int) -> tuple[int, int]:
    """Bytes moved (the live keys and values once, q and the result) and FLOPs."""
    moved = 2 * width * (length * kv_heads + rows * heads)
    return moved * itemsize, 4 * rows * heads * width * length


def make(params: dict, device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, ...]:
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
    length: int, capacity: int, rows: int = 1, heads: int = 16, kv_heads: int = 8, width: int = 128, cpu: bool = False
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
