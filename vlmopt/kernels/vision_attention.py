"""Full attention of every image over its own patches.

    o = softmax(q·kᵀ / √D) · v   within each segment

q, k, v [N, heads, D] (rows and heads may be strided, as v in the packed product is); `lengths` are the patches of each
segment (one frame of one image), which sum to N; result [N, heads·D]. The reference makes one library call a segment,
as stock does: class exact. `launch` is one kernel for all segments, `launch_library` one call of FlashAttention-2 for
all (Dao, 2023, as torch ships it): class near.

One program takes a tile of `LAUNCH`'s query rows of one head and one segment; a small table on the device says which,
made once for a tuple of lengths, longest segments first. In place of the lengths, `launch` and the reference also take
such a table from `padded_tiles`: segments are then data, and one captured launch serves any. It walks the segment's
keys in order: products and running sums in fp32, exponentials of base 2, weights rounded to the model's dtype for the
product with v, one rounding at the end. A row's exponents are its scores less the highest of the first keys, so that no
sum is scaled again on the way. The highest weight is then not 1, and its rounding would count in the product with v
alone; so it is the rounded weights that are added up for the denominator, by tensor cores too. Rows whose weights grow
beyond `REACH` are done once more as FlashAttention does them, with a shift that follows the highest score. Tiles begin
with their segment, so the bits of an image do not depend on those beside it. Moves 4·N·heads·D values; 4·Σ
length²·heads·D FLOPs, and Σ length²·heads exponentials, which at D = 64 take a Hopper's special units some two thirds
of the time that the products take its tensor cores.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vlmopt.errors import VlmoptError
from vlmopt.kernels.case import Case, Launch, refusal, require
from vlmopt.kernels.rounding import round_weights

MAX_WIDTH = 128
TABLES_KEPT = 64


@dataclass(frozen=True)
class Tiles(Launch):
    """`block` query rows a program, `keys` keys a step, of which `stages` are in flight; at most `registers`."""

    keys: int
    stages: int
    registers: int | None = None


LAUNCH = Tiles(block=64, warps=4, keys=64, stages=3, registers=128)
WIDE_LAUNCH = Tiles(block=64, warps=4, keys=64, stages=2)
FP32_LAUNCH = Tiles(block=16, warps=8, keys=16, stages=2)
"""For heads of up to 64 values; for wider ones; for fp32, which no matrix instruction takes without loss."""
REACH = tl.constexpr(2.0**64)
HALF_REACH = tl.constexpr(2.0**15)
"""The largest sum of a row's weights that the first keys' shift is good for; in fp16, which holds less."""


def vision_attention_ref(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | Tensor) -> Tensor:
    """Return [N, heads·D]; rows that no tile covers are zeros."""
    if isinstance(lengths, Tensor):
        bounds = sorted({(start, end) for _, start, end in lengths.tolist() if start < end})
        covered = bounds[-1][1]
        out = vision_attention_ref(*(part[:covered] for part in (q, k, v)), [end - start for start, end in bounds])
        return F.pad(out, (0, 0, 0, len(q) - covered))
    parts = [tensor.transpose(0, 1)[None].split(list(lengths), dim=2) for tensor in (q, k, v)]
    outs = [F.scaled_dot_product_attention(*segment)[0].transpose(0, 1) for segment in zip(*parts, strict=True)]
    return torch.cat(outs).flatten(1)


@triton.jit
def load_rows(block, n_rows, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PARTIAL: tl.constexpr):
    """[BLOCK_N, BLOCK_D] at these addresses; zeros beyond `WIDTH` columns and, if `PARTIAL`, beyond `n_rows` rows."""
    rows, cols = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_D)[None, :]
    if PARTIAL:
        return tl.load(block, mask=(rows < n_rows) & (cols < WIDTH), other=0.0)
    if WIDTH < BLOCK_D:
        return tl.load(block, mask=cols < WIDTH, other=0.0)
    return tl.load(block)


@triton.jit
def attend_keys(
    q,
    sums,
    total,
    highest,
    k_block,
    v_block,
    n_keys,
    limit,
    scale,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """The running sums with `BLOCK_N` keys more; if `PARTIAL`, only `n_keys` exist, and the first `limit` (one number,
    or one a row) count."""
    k = load_rows(k_block, n_keys, WIDTH, BLOCK_N, BLOCK_D, PARTIAL)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if PARTIAL:
        scores = tl.where(tl.arange(0, BLOCK_N)[None, :] < limit, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1) * scale)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * scale - shift[:, None])
    earlier = tl.exp2(highest - shift)
    total = total * earlier + tl.sum(weights, 1)
    v = load_rows(v_block, n_keys, WIDTH, BLOCK_N, BLOCK_D, PARTIAL)
    sums = tl.dot(weights.to(v.dtype), v, sums * earlier[:, None], input_precision="ieee")
    return sums, total, higher


@triton.jit
def weigh_keys(
    q,
    sums,
    total,
    shift,
    k_block,
    v_block,
    n_keys,
    scale,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """The sums [M, D] and the weights' own, `total` [M, BLOCK_N], with `n_keys` keys more (`BLOCK_N`, if not `PARTIAL`)
    under the exponents' `shift` [M]."""
    k = load_rows(k_block, n_keys, WIDTH, BLOCK_N, BLOCK_D, PARTIAL)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    weights = tl.exp2(scores * scale - shift[:, None])
    if PARTIAL:
        weights = tl.where(tl.arange(0, BLOCK_N)[None, :] < n_keys, weights, 0.0)
    v = load_rows(v_block, n_keys, WIDTH, BLOCK_N, BLOCK_D, PARTIAL)
    rounded, total = round_weights(weights, total, v.dtype)
    return tl.dot(rounded, v, sums, input_precision="ieee"), total


@triton.jit
def _attend_tile(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tiles_ptr,
    q_stride_row,
    q_stride_head,
    k_stride_row,
    k_stride_head,
    v_stride_row,
    v_stride_head,
    out_stride_row,
    scale,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of one head; `tiles_ptr` [tiles, 3] holds its first row, and its segment's first row and end.

    `scale` turns a product into an exponent of 2. Heads are the grid's fastest axis, so long segments start first.
    """
    head = tl.program_id(0).to(tl.int64)
    tile = tiles_ptr + tl.program_id(1) * 3
    row, start, end = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    n_rows = end - row
    rows, keys, cols = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_D)[None, :]
    q_block = q_ptr + row * q_stride_row + head * q_stride_head + (rows * q_stride_row + cols)
    q = load_rows(q_block, n_rows, WIDTH, BLOCK_M, BLOCK_D, True)
    k_ptr += head * k_stride_head
    v_ptr += head * v_stride_head
    k_block, v_block = keys * k_stride_row + cols, keys * v_stride_row + cols

    n_first = tl.minimum(end - start, BLOCK_N)
    k = load_rows(k_ptr + start.to(tl.int64) * k_stride_row + k_block, n_first, WIDTH, BLOCK_N, BLOCK_D, True)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    shift = tl.max(tl.where(tl.arange(0, BLOCK_N)[None, :] < n_first, scores, float("-inf")), 1) * scale

    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    parts = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    whole = start + (end - start) // BLOCK_N * BLOCK_N
    for key in range(start, whole, BLOCK_N):
        k_tile = k_ptr + tl.cast(key, tl.int64) * k_stride_row + k_block
        v_tile = v_ptr + tl.cast(key, tl.int64) * v_stride_row + v_block
        sums, parts = weigh_keys(q, sums, parts, shift, k_tile, v_tile, BLOCK_N, scale, WIDTH, BLOCK_N, BLOCK_D, False)
    if whole < end:
        k_tile = k_ptr + whole.to(tl.int64) * k_stride_row + k_block
        v_tile = v_ptr + whole.to(tl.int64) * v_stride_row + v_block
        sums, parts = weigh_keys(
            q, sums, parts, shift, k_tile, v_tile, end - whole, scale, WIDTH, BLOCK_N, BLOCK_D, True
        )
    total = tl.sum(parts, 1)
    out_block = out_ptr + row * out_stride_row + head * WIDTH + (rows * out_stride_row + cols)
    inside = (rows < n_rows) & (cols < WIDTH)
    tl.store(out_block, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)

    reach: tl.constexpr = HALF_REACH if v_ptr.dtype.element_ty == tl.float16 else REACH
    beyond = (total < reach) == 0  # or NaN
    if tl.max(beyond.to(tl.int32), 0) == 1:
        sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        for key in tl.range(start, end, BLOCK_N, num_stages=1):
            k_tile = k_ptr + tl.cast(key, tl.int64) * k_stride_row + k_block
            v_tile = v_ptr + tl.cast(key, tl.int64) * v_stride_row + v_block
            n_keys = end - key
            sums, total, highest = attend_keys(
                q, sums, total, highest, k_tile, v_tile, n_keys, n_keys, scale, WIDTH, BLOCK_N, BLOCK_D, True
            )
        tl.store(out_block, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside & beyond[:, None])


class _Tables:
    """Integers on the device by what they were made from; the least recently used are dropped beyond `TABLES_KEPT`.

    What a capture has used stays for good, since its graph knows the address only.
    """

    def __init__(self) -> None:
        self._recent: OrderedDict[tuple, Tensor] = OrderedDict()
        self._captured: dict[tuple, Tensor] = {}

    def __len__(self) -> int:
        return len(self._recent)

    def get(self, make: Callable[..., list], lengths: tuple[int, ...], device: torch.device, *rest: int) -> Tensor:
        """`make(lengths, *rest)` as an int32 tensor, without waiting for the device.

        Raises:
            VlmoptError: a capture asks for a table that does not exist yet.
        """
        key = (make, lengths, device, *rest)
        table = self._captured.get(key, self._recent.get(key))
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if table is None:
            if capturing:
                raise VlmoptError(f"a capture attends to segments of {lengths} for the first time; do so before it")
            table = _to_device(make(lengths, *rest), device)
        if capturing:
            self._captured[key] = table
        self._recent[key] = table
        self._recent.move_to_end(key)
        if len(self._recent) > TABLES_KEPT:
            self._recent.popitem(last=False)
        return table


def _to_device(values: list, device: torch.device) -> Tensor:
    pinned = device.type == "cuda"  # from other memory the copy would make the host wait
    return torch.tensor(values, dtype=torch.int32, pin_memory=pinned).to(device, non_blocking=True)


_TABLES = _Tables()
table_of = _TABLES.get


def tiles(lengths: Sequence[int], block: int) -> list[tuple[int, int, int]]:
    """Every tile's first row, and its segment's first row and end; the longest segments come first."""
    starts = accumulate(lengths, initial=0)
    segments = sorted(zip(starts, lengths, strict=False), key=lambda segment: -segment[1])
    return [(row, start, start + length) for start, length in segments for row in range(start, start + length, block)]


def padded_tiles(lengths: Sequence[int], rows: int, segments: int, width: int, dtype: torch.dtype) -> Tensor:
    """`tiles` as int32 [n, 3] on the CPU, for heads of `width`; n is the most that `rows` in so many segments can take.

    What is left over is zeros: a tile of no rows, which does nothing.
    """
    block = config_of(width, dtype).block
    table = torch.zeros(rows // block + segments, 3, dtype=torch.int32)
    found = tiles(lengths, block)
    table[: len(found)] = torch.tensor(found, dtype=torch.int32).view(-1, 3)
    return table


def bounds(lengths: Sequence[int]) -> list[int]:
    """The first row of every segment, and the end."""
    return list(accumulate(lengths, initial=0))


def supports(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = refusal(q=q, k=k, v=v)
    if reason is not None:
        return reason
    if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        return f"q, k and v of the shapes {shapes}; give three of [N, heads, D]"
    if not 1 <= q.shape[2] <= MAX_WIDTH or not q.shape[1]:
        return f"{q.shape[1]} heads of {q.shape[2]} values; the kernel takes heads of 1 to {MAX_WIDTH}"
    if not lengths or min(lengths) < 1 or sum(lengths) != q.shape[0]:
        return f"segments of {tuple(lengths)} for {q.shape[0]} rows; give lengths of at least 1 that sum to the rows"
    return None


def config_of(width: int, dtype: torch.dtype) -> Tiles:
    """The launch data for heads of `width` values."""
    if dtype == torch.float32:
        return FP32_LAUNCH
    return LAUNCH if width <= 64 else WIDE_LAUNCH


def launch(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | Tensor, *, config: Tiles | None = None) -> Tensor:
    """`vision_attention` without its checks and the dispatcher; `config` is by default the head size's own.

    Rows that no tile of a table covers are left as the memory had them.
    """
    rows, heads, width = q.shape
    config = config or config_of(width, q.dtype)
    table = lengths if isinstance(lengths, Tensor) else table_of(tiles, tuple(lengths), q.device, config.block)
    out = torch.empty(rows, heads * width, dtype=q.dtype, device=q.device)
    _attend_tile[(heads, len(table))](
        *(q, k, v, out, table),
        *(*strides(q), *strides(k), *strides(v), heads * width),
        math.log2(math.e) / math.sqrt(width),
        WIDTH=width,
        BLOCK_M=config.block,
        BLOCK_N=config.keys,
        BLOCK_D=max(16, triton.next_power_of_2(width)),
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers,
    )
    return out


def strides(x: Tensor) -> tuple[int, int]:
    """The first two strides; one of a single item can be anything, so it gets a value that compiles no new variant."""
    second = x.stride(1) if x.shape[1] > 1 else x.shape[2]
    return x.stride(0) if x.shape[0] > 1 else x.shape[1] * second, second


def launch_library(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """The same by torch's own FlashAttention-2 over all segments in one call, for CUDA tensors in half precision.

    The operator's own name, since the public `varlen_attn` of torch 2.14 hands heads without groups to cuDNN on a
    Hopper, whose plan for every new shape is what a call of any size must not wait for.
    """
    table = table_of(bounds, tuple(lengths), q.device)
    longest = max(lengths)
    out = torch.ops.aten._flash_attention_forward(q, k, v, table, table, longest, longest, 0.0, False, False)[0]
    return out.flatten(1)


@torch.library.custom_op("vlmopt::vision_attention", mutates_args=())
def _registered(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    return launch(q, k, v, lengths)


@_registered.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


def vision_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return [N, heads·D].

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(q, k, v, lengths))
    return _registered(q, k, v, list(lengths))


def cost(*, lengths: Sequence[int], heads: int, width: int, itemsize: int = 2) -> tuple[int, int]:
    """Bytes moved and FLOPs."""
    squares = sum(length * length for length in lengths)
    return 4 * sum(lengths) * heads * width * itemsize, 4 * squares * heads * width


def make(
    params: dict, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Arguments of the op for a case's parameters; v is a view of the packed product, as in the tower."""
    lengths, heads, width = params["lengths"], params["heads"], params["width"]
    qkv = torch.randn(sum(lengths), 3, heads, width, generator=generator, device=device).to(dtype)
    q, k, v = qkv.unbind(1)
    return q.contiguous(), k.contiguous(), v, tuple(lengths)


def _case(name: str, lengths: Sequence[int], heads: int = 16, width: int = 64, cpu: bool = False) -> Case:
    return Case(name, {"lengths": tuple(lengths), "heads": heads, "width": width}, cpu)


CASES = (
    _case("one image 3072x16", (3072,)),
    _case("two images 3072+1536x16", (3072, 1536)),
    _case("small image 768x16", (768,)),
    _case("eight frames 8x1024x16", (1024,) * 8),
    _case("odd 77+1+300x16", (77, 1, 300)),
    _case("embedded 24+40x3", (24, 40), heads=3, cpu=True),
    _case("odd 37+1+33x2 of 24", (37, 1, 33), heads=2, width=24, cpu=True),
    _case("wide 33x1 of 128", (33,), heads=1, width=128, cpu=True),
)
