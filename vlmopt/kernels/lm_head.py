"""Final norm, output projection and greedy choice.

    logits = rms_norm(h) · Wᵀ;   token = argmax(logits)

h [rows, hidden] (one row in the model), W [vocabulary, hidden], one dtype. Stock converts the logits to fp32 and takes
torch.argmax, which is what the reference does, so ties resolve as stock's do: class exact. Moves vocabulary·hidden
weights; 2·rows·vocabulary·hidden FLOPs.

The kernels round the product to the model's dtype before they compare, and of equal logits take the lowest index, as
torch.argmax does; to it a NaN is larger than any number. They sum in another order than the library: near. The greedy
form replaces product, conversion and argmax, and writes 8 bytes a block of the vocabulary in place of the logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels import gemv
from vlmopt.kernels.add_rms_norm import add_rms_norm_ref
from vlmopt.kernels.add_rms_norm import launch as launch_norm
from vlmopt.kernels.add_rms_norm import supports as supports_norm
from vlmopt.kernels.case import Case, refusal, require, row_stride
from vlmopt.kernels.dependent import wait_for_predecessor
from vlmopt.kernels.gemv import ROWS, Tiles, constants, products, tiles_of


def lm_head_logits_ref(h: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Return the logits [rows, vocabulary] in the model's dtype."""
    return F.linear(add_rms_norm_ref(h, None, norm, eps)[0], weight)


def lm_head_argmax_ref(h: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Return the most likely token id of each row [rows] (int64)."""
    return lm_head_logits_ref(h, norm, eps, weight).to(torch.float32).argmax(dim=-1)


LOWEST = tl.constexpr(-(2**63))
LAST_INDEX = tl.constexpr(2**31 - 1)
"""All bits of an index; the exclusive or with it reverses the order of indices."""
TOP_WARPS = 8


@triton.jit
def _key(logit, index):
    """An int64 that orders by logit, then by lower index; NaN comes first and the zeros of both signs are equal."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & LAST_INDEX)  # of negative numbers the larger magnitude is the smaller
    ordered = tl.where(logit != logit, LAST_INDEX, ordered)
    return (ordered.to(tl.int64) << 32) | (index ^ LAST_INDEX).to(tl.int64)


@triton.jit(do_not_specialize=["n_rows", "n_groups"])
def _top_of_blocks(
    x_ptr,
    weight_ptr,
    keys_ptr,
    x_stride_row,
    weight_stride_row,
    n_rows,
    n_groups,
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
    """The largest key of every row over one block of the vocabulary."""
    block = tl.program_id(0) // n_groups
    rows = (tl.program_id(0) % n_groups) * ROWS + tl.arange(0, ROWS)
    index = block * BLOCK_N + tl.arange(0, BLOCK_N)
    total = products(
        *(x_ptr, weight_ptr, x_stride_row, weight_stride_row, tl.minimum(index, N_OUT - 1), rows, n_rows),
        *(N_IN, BLOCK_N, BLOCK_K, SLICES, AHEAD, PARTS, HELD, USE_PDL),
    )
    logits = total.to(weight_ptr.dtype.element_ty).to(tl.float32)
    keys = tl.where(index[:, None] < N_OUT, _key(logits, index[:, None]), LOWEST)
    n_blocks: tl.constexpr = (N_OUT + BLOCK_N - 1) // BLOCK_N
    tl.store(keys_ptr + rows.to(tl.int64) * n_blocks + block, tl.max(keys, axis=0), mask=rows < n_rows)


@triton.jit
def _top(keys_ptr, token_ptr, N_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, USE_PDL: tl.constexpr):
    """One row's token from the keys of its blocks."""
    wait_for_predecessor(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_N)
    keys = tl.load(keys_ptr + row * N_BLOCKS + block, mask=block < N_BLOCKS, other=LOWEST)
    tl.store(token_ptr + row, tl.max(keys, axis=0) & LAST_INDEX ^ LAST_INDEX)


def supports(h: Tensor, norm: Tensor, eps: float, weight: Tensor) -> str | None:
    """Why the kernels cannot take these arguments, or None."""
    reason = refusal(h=h, norm=norm, weight=weight)
    if reason is not None:
        return reason
    if h.dim() != 2 or weight.dim() != 2 or h.shape[1] != weight.shape[1] or not weight.shape[0]:
        return f"h is {list(h.shape)} and weight {list(weight.shape)}; give [rows, hidden] and [vocabulary, hidden]"
    if not h.shape[0]:
        return "h has no rows; give at least one"
    return supports_norm(h, None, norm, eps)


def launch_lm_head_logits(
    h: Tensor, norm: Tensor, eps: float, weight: Tensor, *, config: Tiles | None = None
) -> Tensor:
    """`lm_head_logits` without its checks."""
    return gemv.launch(launch_norm(h, None, norm, eps)[0], weight, config=config)


def launch_lm_head_argmax(
    h: Tensor, norm: Tensor, eps: float, weight: Tensor, *, config: Tiles | None = None
) -> Tensor:
    """`lm_head_argmax` without its checks."""
    config = config or tiles_of(weight)
    x = launch_norm(h, None, norm, eps)[0]
    rows, (out, n_in) = x.shape[0], weight.shape
    *tiles, dependent = constants(weight, config)
    blocks, groups = triton.cdiv(out, config.block_n), triton.cdiv(rows, ROWS.value)
    keys = torch.empty(rows, blocks, dtype=torch.int64, device=h.device)
    token = torch.empty(rows, dtype=torch.int64, device=h.device)
    _top_of_blocks[(blocks * groups,)](
        *(x, weight, keys, row_stride(x), row_stride(weight), rows, groups, out, n_in, *tiles, dependent),
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=dependent,
    )
    _top[(rows,)](
        *(keys, token, blocks, triton.next_power_of_2(blocks), dependent), num_warps=TOP_WARPS, launch_pdl=dependent
    )
    return token


@torch.library.custom_op(
    "vlmopt::lm_head_logits",
    mutates_args=(),
    schema="(Tensor h, Tensor norm, float eps, Tensor weight) -> Tensor",
)
def lm_head_logits(h: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Return the logits [rows, vocabulary] in the model's dtype.

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(h, norm, eps, weight))
    return launch_lm_head_logits(h, norm, eps, weight)


@torch.library.custom_op(
    "vlmopt::lm_head_argmax",
    mutates_args=(),
    schema="(Tensor h, Tensor norm, float eps, Tensor weight) -> Tensor",
)
def lm_head_argmax(h: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Return the most likely token id of each row [rows] (int64).

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(h, norm, eps, weight))
    return launch_lm_head_argmax(h, norm, eps, weight)


@lm_head_logits.register_fake
def _(h: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    return h.new_empty(h.shape[0], weight.shape[0])


@lm_head_argmax.register_fake
def _(h: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    return h.new_empty(h.shape[0], dtype=torch.int64)


def cost(rows: int, width: int, vocabulary: int, itemsize: int = 2) -> tuple[int, int]:
    """Bytes moved by the greedy form (the weight, and next to nothing beside it) and FLOPs."""
    return (vocabulary * width + (rows + 1) * width) * itemsize + 8 * rows, 2 * rows * width * vocabulary


def make(
    params: dict, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, float, Tensor]:
    """Random arguments of a case; each row has one token whose logit no rounding can hide among the others."""
    rows, width, vocabulary = params["rows"], params["width"], params["vocabulary"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    h, weight = normal(rows, width), normal(vocabulary, width) / width**0.5
    tokens = torch.randperm(vocabulary, generator=generator, device=device)[:rows]
    weight[tokens] += 12 / width**0.5 * torch.sign(h[: len(tokens)])
    norm = 1 + 0.3 * normal(width)
    return h.to(dtype), norm.to(dtype), 1e-6, weight.to(dtype)


def _case(name: str, rows: int, vocabulary: int, width: int, cpu: bool = False) -> Case:
    params = {"rows": rows, "width": width, "vocabulary": vocabulary}
    return Case(f"{name} {rows} x {vocabulary}x{width}", params, cpu)


CASES = (
    _case("head", 1, 151936, 2048),
    _case("head", 8, 151936, 2048),
    _case("odd", 3, 4099, 1111),
    _case("small", 1, 1024, 256, cpu=True),
    _case("small odd", 3, 333, 77, cpu=True),
    _case("small groups", 11, 65, 128, cpu=True),
)
