"""The greedy choice of `lm_head` from an int8 copy of the head, exact by a second look at the few that can win.

    token = argmax(rms_norm(h) · Wᵀ)

h [1 … 8, hidden], W [vocabulary, hidden] of one dtype; the copy q [vocabulary, hidden] int8 contiguous, s [vocabulary]
fp32 its scales, r [vocabulary] fp32 its radii (`radii`). Moves q, half of W, and the candidates' rows of W; 2·rows·
vocabulary·hidden FLOPs. Class of the choice: that of `lm_head`, since it is the same choice. The proof:

Let x be a normed row, t_i the sum that the plain head makes in fp32 of w_i · x, and a_i = s_i · (q_i · x) as made here.
In exact arithmetic w_i · x − s_i q_i · x = (w_i − s_i q_i) · x, at most ‖w_i − s_i q_i‖ ‖x‖ in magnitude. A sum of n
products in fp32, in whatever order, is off by at most n·u·‖w_i‖ ‖x‖, where u = 2⁻²² allows each addition to lose four
times what rounding to nearest does (tensor cores cut off); likewise a_i. r_i adds up the three in float64, rounded up.
So |t_i − a_i| ≤ b_i = r_i ‖x‖ + 2⁻¹⁰⁰. For numbers too small for fp32 stand the last term and a floor for ‖x‖; where a
sum could overflow, a norm being beyond 2⁶⁰ or not finite, b_i is infinite. Rounding to the model's dtype, ρ, is
monotone: with L = max_j (a_j − b_j), the largest logit is at least ρ(L), and a row whose logit is the largest has
ρ(a_i + b_i) ≥ ρ(t_i) ≥ ρ(L). The candidates are all rows with ρ(a_i + b_i) ≥ ρ(L), or where this cannot be said (NaN):
every row that attains the maximum is among them, ties included, and so is every row whose logit is NaN. Their logits
are made again from W by the plain head's own reduction, bit for bit, and ordered by its own key: the result is its
result. The list of candidates is made and counted on the device and has room for all.

The bounds, nearly all of the time, are made by `gemv_ring_copies` where that serves, else in Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels import gemv, gemv_q8, gemv_ring_copies, lm_head
from vlmopt.kernels.add_rms_norm import add_rms_norm_ref
from vlmopt.kernels.add_rms_norm import launch as launch_norm
from vlmopt.kernels.case import Case, misplaced, require, row_stride
from vlmopt.kernels.dependent import knows_dependents, wait_for_predecessor
from vlmopt.kernels.gemv import MAX_ROWS, ROWS, constants, products
from vlmopt.kernels.lm_head import LOWEST, TOP_WARPS, _key, _top

LOSS = 2.0**-22
"""What one addition in fp32 may lose of the sum of magnitudes."""
SLACK = tl.constexpr(2.0**-100)
ROUND_UP = tl.constexpr(1.001)
"""Covers the roundings of radius, norm and bounds themselves."""
LEAST, MOST = tl.constexpr(2.0**-100), tl.constexpr(2.0**60)
"""A smaller norm of x counts as this, since tiny numbers may be flushed; beyond the other a bound is infinite."""


def radii(weight: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """r [rows] fp32 of these rows of the head and of its copy; infinite for a row that bounds nothing."""
    wide, copy = weight.double(), values.double() * scale.double()[:, None]
    norm, loss = wide.norm(dim=1), LOSS * (weight.shape[1] + 8)
    radius = ROUND_UP.value * ((wide - copy).norm(dim=1) + loss * (norm + copy.norm(dim=1)))
    return torch.where(norm <= MOST.value, radius, float("inf")).float()


def candidates_ref(x: Tensor, values: Tensor, scale: Tensor, radius: Tensor) -> Tensor:
    """Which rows of the head can win for each normed row x [rows, hidden]: bool [rows, vocabulary]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    approximate = F.linear(x.to(wide), values.to(wide)) * scale.to(wide)
    bound = radius.to(wide) * _norms_ref(x.to(wide)) + SLACK.value
    lower = approximate - bound
    largest = torch.where(lower.isnan(), float("-inf"), lower).amax(dim=1, keepdim=True)
    return ~((approximate + bound).to(x.dtype) < largest.to(x.dtype))


def _norms_ref(x: Tensor) -> Tensor:
    """Norms [rows, 1], rounded up, without overflow or underflow of the squares."""
    largest = x.abs().amax(dim=1, keepdim=True)
    norm = ROUND_UP.value * largest * torch.where(largest > 0, x / largest, 0).norm(dim=1, keepdim=True)
    return torch.where(norm <= MOST.value, norm.clamp(min=LEAST.value), float("inf"))


def lm_head_q8_ref(
    h: Tensor, norm: Tensor, eps: float, weight: Tensor, values: Tensor, scale: Tensor, radius: Tensor
) -> Tensor:
    """Return the most likely token id of each row [rows] (int64), looking for it among the candidates alone."""
    x = add_rms_norm_ref(h, None, norm, eps)[0]
    logits = F.linear(x, weight).to(torch.float32)
    return logits.masked_fill(~candidates_ref(x, values, scale, radius), float("-inf")).argmax(dim=-1)


PROGRAMS = 264
"""Programs that share the candidates; two a multiprocessor of an H200."""
SCAN, SCAN_WARPS = 1024, 4
"""Rows of the head a program compares with the best lower bound."""


@triton.jit(do_not_specialize=["n_rows"])
def _norms(x_ptr, norms_ptr, x_stride_row, n_rows, N_IN: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """One row's norm as `_norms_ref` gives it."""
    wait_for_predecessor(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride_row + k, mask=k < N_IN, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(x != x, float("inf"), tl.abs(x)), axis=0)
    ratio = tl.where(largest > 0, x / largest, 0.0)
    norm = ROUND_UP * largest * tl.sqrt_rn(tl.sum(ratio * ratio, axis=0))
    tl.store(norms_ptr + row, tl.where(norm <= MOST, tl.maximum(norm, LEAST), float("inf")))


@triton.jit(do_not_specialize=["n_rows"])
def _bounds(
    x_ptr,
    values_ptr,
    scale_ptr,
    radius_ptr,
    norms_ptr,
    upper_ptr,
    lowest_ptr,
    count_ptr,
    x_stride_row,
    n_rows,
    N_OUT: tl.constexpr,
    N_IN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    AHEAD: tl.constexpr,
    PARTS: tl.constexpr,
    HELD: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Upper bounds of a block of logits, and the best of their lower bounds; the first program empties the list."""
    block, rows = tl.program_id(0), tl.arange(0, ROWS)
    index = block * BLOCK_N + tl.arange(0, BLOCK_N)
    outputs = tl.minimum(index, N_OUT - 1)
    total = products(
        *(x_ptr, values_ptr, x_stride_row, N_IN, outputs, rows, n_rows),
        *(N_IN, BLOCK_N, BLOCK_K, SLICES, AHEAD, PARTS, HELD, USE_PDL),
    )
    total *= tl.load(scale_ptr + outputs)[:, None]
    norm = tl.load(norms_ptr + rows, mask=rows < n_rows, other=0.0)
    bound = tl.load(radius_ptr + outputs)[:, None] * norm[None, :] + SLACK
    place = rows.to(tl.int64)[None, :] * N_OUT + index[:, None]
    tl.store(upper_ptr + place, total + bound, mask=(index[:, None] < N_OUT) & (rows[None, :] < n_rows))
    lower = total - bound
    lower = tl.where((index[:, None] < N_OUT) & (lower == lower), lower, float("-inf"))
    n_blocks: tl.constexpr = (N_OUT + BLOCK_N - 1) // BLOCK_N
    tl.store(lowest_ptr + rows * n_blocks + block, tl.max(lower, axis=0), mask=rows < n_rows)
    if block == 0:
        tl.store(count_ptr, 0)


@triton.jit(do_not_specialize=["n_rows"])
def _list(
    upper_ptr,
    lowest_ptr,
    count_ptr,
    list_ptr,
    n_rows,
    N_OUT: tl.constexpr,
    N_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Append the rows of the head that can win for one of the rows of hidden states at least; in no certain order."""
    wait_for_predecessor(USE_PDL)
    rows = tl.arange(0, ROWS)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    for start in range(0, N_BLOCKS, BLOCK):
        block = start + tl.arange(0, BLOCK)
        mask = (rows[:, None] < n_rows) & (block[None, :] < N_BLOCKS)
        lower = tl.load(lowest_ptr + rows[:, None] * N_BLOCKS + block[None, :], mask=mask, other=float("-inf"))
        best = tl.maximum(best, tl.max(lower, axis=1))
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows[:, None] < n_rows) & (index[None, :] < N_OUT)
    upper = tl.load(upper_ptr + rows.to(tl.int64)[:, None] * N_OUT + index[None, :], mask=mask, other=0.0)
    cannot = upper.to(DTYPE).to(tl.float32) < best.to(DTYPE).to(tl.float32)[:, None]
    can = tl.max((mask & (cannot == 0)).to(tl.int32), axis=0)
    first = tl.atomic_add(count_ptr, tl.sum(can, axis=0))
    tl.store(list_ptr + first + tl.cumsum(can, axis=0) - can, index, mask=can != 0)


@triton.jit(do_not_specialize=["n_rows"])
def _look_again(
    x_ptr,
    weight_ptr,
    list_ptr,
    count_ptr,
    keys_ptr,
    x_stride_row,
    weight_stride_row,
    n_rows,
    N_PROGRAMS: tl.constexpr,
    N_IN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """The largest key of every row over the candidates that fall to this program, by the plain head's reduction."""
    wait_for_predecessor(USE_PDL)
    rows = tl.arange(0, ROWS)
    best = tl.full((ROWS,), LOWEST, tl.int64)
    count = tl.load(count_ptr)
    for start in range(tl.program_id(0) * BLOCK_N, count, N_PROGRAMS * BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        index = tl.load(list_ptr + tl.minimum(place, count - 1))
        total = products(
            *(x_ptr, weight_ptr, x_stride_row, weight_stride_row, index, rows, n_rows),
            *(N_IN, BLOCK_N, BLOCK_K, SLICES, 0, 1, False, False),
        )
        logits = total.to(weight_ptr.dtype.element_ty).to(tl.float32)
        keys = tl.where(place[:, None] < count, _key(logits, index[:, None]), LOWEST)
        best = tl.maximum(best, tl.max(keys, axis=0))
    tl.store(keys_ptr + rows * N_PROGRAMS + tl.program_id(0), best, mask=rows < n_rows)


def supports(
    h: Tensor, norm: Tensor, eps: float, weight: Tensor, values: Tensor, scale: Tensor, radius: Tensor
) -> str | None:
    """Why the kernels cannot take these arguments, or None."""
    reason = lm_head.supports(h, norm, eps, weight) or misplaced(h, "h", values=values, scale=scale, radius=radius)
    if reason is not None:
        return reason
    if h.shape[0] > MAX_ROWS:
        return f"{h.shape[0]} rows; the kernels take 1 to {MAX_ROWS}"
    if values.dtype != torch.int8 or values.shape != weight.shape or not values.is_contiguous():
        return f"values are {values.dtype} {list(values.shape)}; give contiguous int8 {list(weight.shape)}"
    for name, tensor in (("scale", scale), ("radius", radius)):
        if tensor.dtype != torch.float32 or tensor.shape != weight.shape[:1]:
            return f"{name} is {tensor.dtype} {list(tensor.shape)}; give float32, one for each token"
    return None


def launch(
    h: Tensor, norm: Tensor, eps: float, weight: Tensor, values: Tensor, scale: Tensor, radius: Tensor
) -> Tensor:
    """`lm_head_q8` without its checks."""
    return launch_counted(h, norm, eps, weight, values, scale, radius)[0]


def launch_counted(
    h: Tensor, norm: Tensor, eps: float, weight: Tensor, values: Tensor, scale: Tensor, radius: Tensor
) -> tuple[Tensor, Tensor]:
    """`launch`, and how many rows of the head were looked at again [1] (int32)."""
    x = launch_norm(h, None, norm, eps)[0]
    rows, (out, n_in) = x.shape[0], weight.shape
    dependent = knows_dependents(weight)
    own = gemv.tiles_of(weight)
    programs = min(PROGRAMS, triton.cdiv(out, own.block_n))
    norms = h.new_empty(rows, 1, dtype=torch.float32)
    listed = torch.empty(out, dtype=torch.int32, device=h.device)
    keys = torch.empty(rows, programs, dtype=torch.int64, device=h.device)
    token = torch.empty(rows, dtype=torch.int64, device=h.device)
    _norms[(rows,)](
        *(x, norms, row_stride(x), rows, n_in, triton.next_power_of_2(n_in), dependent),
        num_warps=TOP_WARPS,
        launch_pdl=dependent,
    )
    bounds = gemv_ring_copies.launch_bounds if gemv_ring_copies.serves_bounds(x, values) else launch_bounds
    upper, lowest, count = bounds(x, values, scale, radius, norms)
    _list[(triton.cdiv(out, SCAN),)](
        *(upper, lowest, count, listed, rows, out, lowest.shape[1], SCAN, _DTYPES[h.dtype], dependent),
        num_warps=SCAN_WARPS,
        launch_pdl=dependent,
    )
    block_n, block_k, slices, *_ = constants(weight, own)
    _look_again[(programs,)](
        *(x, weight, listed, count, keys, row_stride(x), row_stride(weight), rows),
        *(programs, n_in, block_n, block_k, slices, dependent),
        num_warps=own.warps,
        num_stages=own.stages,
        launch_pdl=dependent,
    )
    _top[(rows,)](
        *(keys, token, programs, triton.next_power_of_2(programs), dependent),
        num_warps=TOP_WARPS,
        launch_pdl=dependent,
    )
    return token, count


def launch_bounds(
    x: Tensor, values: Tensor, scale: Tensor, radius: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`gemv_ring_copies.launch_bounds` in Triton."""
    rows, (out, n_in), config = x.shape[0], values.shape, gemv_q8.tiles_of(values)
    blocks = triton.cdiv(out, config.block_n)
    upper, lowest = (torch.empty(rows, n, dtype=torch.float32, device=x.device) for n in (out, blocks))
    count = torch.empty(1, dtype=torch.int32, device=x.device)
    _bounds[(blocks,)](
        *(x, values, scale, radius, norms, upper, lowest, count, row_stride(x), rows, out, n_in),
        *constants(values, config),
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=knows_dependents(values),
    )
    return upper, lowest, count


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@torch.library.custom_op(
    "vlmopt::lm_head_q8",
    mutates_args=(),
    schema="(Tensor h, Tensor norm, float eps, Tensor weight, Tensor values, Tensor scale, Tensor radius) -> Tensor",
)
def lm_head_q8(
    h: Tensor, norm: Tensor, eps: float, weight: Tensor, values: Tensor, scale: Tensor, radius: Tensor
) -> Tensor:
    """Return the most likely token id of each row [rows] (int64).

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(h, norm, eps, weight, values, scale, radius))
    return launch(h, norm, eps, weight, values, scale, radius)


@lm_head_q8.register_fake
def _(h: Tensor, norm: Tensor, eps: float, weight: Tensor, values: Tensor, scale: Tensor, radius: Tensor) -> Tensor:
    return h.new_empty(h.shape[0], dtype=torch.int64)


def cost(rows: int, width: int, vocabulary: int, itemsize: int = 2) -> tuple[int, int]:
    """Bytes moved (the copy, its scales and radii; the candidates are next to nothing) and FLOPs."""
    return vocabulary * (width + 8 + 8 * rows) + rows * width * itemsize, 2 * rows * width * vocabulary


def make(
    params: dict, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, float, Tensor, Tensor, Tensor, Tensor]:
    """Random arguments of a case: those of `lm_head`, with a copy of the head."""
    h, norm, eps, weight = lm_head.make(params, device, dtype, generator)
    scale = weight.float().abs().amax(1) / 127
    values = (weight.float() / scale[:, None]).round().to(torch.int8)
    parts = zip(*(tensor.split(16384) for tensor in (weight, values, scale)), strict=True)
    return h, norm, eps, weight, values, scale, torch.cat([radii(*part) for part in parts])


CASES = tuple(
    case if case.params["rows"] <= MAX_ROWS else Case("small eight 8 x 65x128", {**case.params, "rows": 8}, case.cpu)
    for case in lm_head.CASES
)
