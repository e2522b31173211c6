"""DeepStack: visual features added to the hidden rows of their image tokens.

    h[t] = h[t] + features[slots[t]]   where slots[t] ≥ 0

h [T, hidden], slots [T] int32, the feature that belongs to each row or −1, features [N, hidden], one
dtype. Class exact, reference and kernel (one rounded sum a value). The result is a new tensor: moves (2·T + N)·hidden
values.

The kernel replaces a gather, a sum, a copy and a scatter by one pass. The map from rows to features is made by the host
with the positions, since a map from features to rows would cost every launch another one that turns it around. A slot
that no feature has counts as −1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmopt.kernels.case import Case, Launch, refusal, require, row_stride


def deepstack_add_ref(h: Tensor, slots: Tensor, features: Tensor) -> Tensor:
    """Return h with the features added; h itself is left alone."""
    return torch.where((slots >= 0)[:, None], h + features.index_select(0, slots.clamp(min=0)), h)


LAUNCH = Launch(block=2048, warps=8)


@triton.jit(do_not_specialize=["n_features"])
def _deepstack_add(
    h_ptr,
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
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (slot >= 0) & (slot < n_features):
        feature = tl.load(features_ptr + slot * features_stride_row + cols, mask=mask)
        value = (value.to(tl.float32) + feature.to(tl.float32)).to(value.dtype)
    tl.store(out_ptr + row * N_COLS + cols, value, mask=mask)


def slots_refusal(slots: Tensor, rows: int, features: Tensor) -> str | None:
    """Why `slots` cannot say which of `features` belongs to each of so many rows, or None."""
    if slots.dtype != torch.int32 or slots.shape != (rows,) or not slots.is_contiguous():
        return f"slots is {slots.dtype} of shape {tuple(slots.shape)} for {rows} rows; give a contiguous int32 vector"
    if slots.device != features.device:
        return f"slots is on {slots.device} but features is on {features.device}; move them to one device"
    return None


def supports(h: Tensor, slots: Tensor, features: Tensor) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = refusal(h=h, features=features) or slots_refusal(slots, len(h), features)
    if reason is not None:
        return reason
    if h.dim() != 2 or features.dim() != 2 or h.shape[1] != features.shape[1]:
        return f"h of shape {tuple(h.shape)} and features of {tuple(features.shape)}; give rows of one width"
    return None


def launch(h: Tensor, slots: Tensor, features: Tensor, *, config: Launch = LAUNCH) -> Tensor:
    """`deepstack_add` without its checks."""
    n_rows, n = h.shape
    out = torch.empty(n_rows, n, dtype=h.dtype, device=h.device)
    block_n = min(config.block, triton.next_power_of_2(n))
    _deepstack_add[(n_rows * triton.cdiv(n, block_n),)](
        *(h, slots, features, out, row_stride(h), row_stride(features), len(features)),
        *(n, block_n),
        num_warps=config.warps,
    )
    return out


@torch.library.custom_op(
    "vlmopt::deepstack_add", mutates_args=(), schema="(Tensor h, Tensor slots, Tensor features) -> Tensor"
)
def deepstack_add(h: Tensor, slots: Tensor, features: Tensor) -> Tensor:
    """Return h with the features added; h itself is left alone.

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(h, slots, features))
    return launch(h, slots, features)


@deepstack_add.register_fake
def _(h: Tensor, slots: Tensor, features: Tensor) -> Tensor:
    return h.new_empty(h.shape)


def cost(rows: int, features: int, width: int, itemsize: int = 2) -> tuple[int, int]:
    """Bytes moved and FLOPs."""
    return (2 * rows + features) * width * itemsize + 4 * rows, features * width


def make(params: dict, device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random arguments of a case: two runs of image tokens with text before, between and after."""
    h, features = (
        torch.randn(params[name], params["width"], generator=generator, device=device).to(dtype)
        for name in ("rows", "features")
    )
    return h, image_slots(params["rows"], params["features"]).to(device), features


def image_slots(n_rows: int, n_features: int) -> Tensor:
    """The slots of a prompt with two images, a quarter of the image tokens in the first, the rest later."""
    first, text = n_features // 4, n_rows - n_features
    before, between = text // 3, text // 4
    slots = torch.full((n_rows,), -1, dtype=torch.int32)
    slots[before : before + first] = torch.arange(first, dtype=torch.int32)
    second = before + first + between
    slots[second : second + n_features - first] = torch.arange(first, n_features, dtype=torch.int32)
    return slots


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
