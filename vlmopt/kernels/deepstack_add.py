"""DeepStack: visual features added to the hidden rows of their image tokens.

    h[rows] = h[rows] + features

h [T, hidden], rows [N] int64 (each at most once), features [N, hidden], one dtype; rows may lie anywhere, in any number
of runs. Class exact, reference and kernel (one rounded sum a value). The result is a new tensor: moves
(2·T + N)·hidden values.

The kernel replaces a gather, a sum, a copy and a scatter by one pass, after a launch that says which row holds which
feature. A row outside of h is left out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmopt.kernels.case import Case, Launch, refusal, require, row_stride
from vlmopt.kernels.row_map import feature_of, row_slots, rows_refusal


def deepstack_add_ref(h: Tensor, rows: Tensor, features: Tensor) -> Tensor:
    """Return h with the rows added; h itself is left alone."""
    return h.index_copy(0, rows, h[rows] + features)


LAUNCH = Launch(block=2048, warps=8)


@triton.jit(do_not_specialize=["n_features"])
def _deepstack_add(
    h_ptr,
    rows_ptr,
    slots_ptr,
    features_ptr,
    out_ptr,
    h_stride_row,
    features_stride_row,
    n_features,
    N_COLS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    blocks: tl.constexpr = (N_COLS + BLOCK_N - 1) // BLOCK_N
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N_COLS
    value = tl.load(h_ptr + row * h_stride_row + cols, mask=mask)
    slot = feature_of(row, rows_ptr, slots_ptr, n_features).to(tl.int64)
    if slot >= 0:
        feature = tl.load(features_ptr + slot * features_stride_row + cols, mask=mask)
        value = (value.to(tl.float32) + feature.to(tl.float32)).to(value.dtype)
    tl.store(out_ptr + row * N_COLS + cols, value, mask=mask)


def supports(h: Tensor, rows: Tensor, features: Tensor) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = refusal(h=h, features=features) or rows_refusal(rows, features)
    if reason is not None:
        return reason
    if h.dim() != 2 or features.dim() != 2 or h.shape[1] != features.shape[1]:
        return f"h of shape {tuple(h.shape)} and features of {tuple(features.shape)}; give rows of one width"
    return None


def launch(h: Tensor, rows: Tensor, features: Tensor, *, config: Launch = LAUNCH) -> Tensor:
    """`deepstack_add` without its checks."""
    n_rows, n = h.shape
    out = torch.empty(n_rows, n, dtype=h.dtype, device=h.device)
    slots = row_slots(rows, n_rows)
    block_n = min(config.block, triton.next_power_of_2(n))
    _deepstack_add[(n_rows * triton.cdiv(n, block_n),)](
        *(h, rows, slots, features, out, row_stride(h), row_stride(features), rows.shape[0]),
        *(n, block_n),
        num_warps=config.warps,
    )
    return out


@torch.library.custom_op(
    "vlmopt::deepstack_add", mutates_args=(), schema="(Tensor h, Tensor rows, Tensor features) -> Tensor"
)
def deepstack_add(h: Tensor, rows: Tensor, features: Tensor) -> Tensor:
    """Return h with the rows added; h itself is left alone.

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(h, rows, features))
    return launch(h, rows, features)


@deepstack_add.register_fake
def _(h: Tensor, rows: Tensor, features: Tensor) -> Tensor:
    return h.new_empty(h.shape)


def cost(rows: int, features: int, width: int, itemsize: int = 2) -> tuple[int, int]:
    """Bytes moved and FLOPs."""
    return (2 * rows + features) * width * itemsize + 8 * features, features * width


def make(params: dict, device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random arguments of a case: two runs of image tokens with text before, between and after."""
    h, features = (
        torch.randn(params[name], params["width"], generator=generator, device=device).to(dtype)
        for name in ("rows", "features")
    )
    return h, image_rows(params["rows"], params["features"]).to(device), features


def image_rows(n_rows: int, n_features: int) -> Tensor:
    """Where the tokens of two images stand in a prompt, [n_features] int64: a quarter in the first, the rest later."""
    first = n_features // 4
    text = n_rows - n_features
    starts = text // 3, text // 3 + first + text // 4
    return torch.cat([torch.arange(first) + starts[0], torch.arange(n_features - first) + starts[1]])


def _case(name: str, rows: int, features: int, width: int, cpu: bool = False) -> Case:
    params = {"rows": rows, "features": features, "width": width}
    return Case(f"{name} {rows}x{width}, {features} visual", params, cpu)


CASES = (
    _case("prefill", 798, 768, 2048),
    _case("prefill", 4096, 3072, 2048),
    _case("prefill", 1024, 64, 2048),
    _case("odd", 333, 127, 1111),
    _case("small", 9, 4, 256, cpu=True),
    _case("small odd", 12, 7, 77, cpu=True),
    _case("small wide", 4, 3, 2049, cpu=True),
    _case("small, all visual", 5, 5, 64, cpu=True),
)
