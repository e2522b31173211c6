"""Token embeddings and visual features in one sequence.

    x[t] = features[slots[t]]   where slots[t] ≥ 0,   else E[ids[t]]

ids [T] int64, E [vocabulary, hidden], slots [T] int32 (see `deepstack_add`), features [N, hidden]. Class exact,
reference and kernel (copies only; features of another dtype are rounded to E's). Moves T·hidden values twice.

The kernel replaces a gather, a copy and a scatter by one pass, and reads no embedding where a feature goes. An id
outside of the vocabulary gives a row of NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels.case import FLOATS, Case, Launch, refusal, require, row_stride
from vlmopt.kernels.deepstack_add import image_slots, slots_refusal


def merge_embeddings_ref(ids: Tensor, embed: Tensor, slots: Tensor | None, features: Tensor | None) -> Tensor:
    """Return [T, hidden]; `slots` None means a prompt without images."""
    x = F.embedding(ids, embed)
    if slots is None:
        return x
    return torch.where((slots >= 0)[:, None], features.to(x.dtype).index_select(0, slots.clamp(min=0)), x)


LAUNCH = Launch(block=2048, warps=8)


@triton.jit(do_not_specialize=["vocabulary", "n_features"])
def _merge_embeddings(
    ids_ptr,
    embed_ptr,
    slots_ptr,
    features_ptr,
    out_ptr,
    embed_stride_row,
    features_stride_row,
    vocabulary,
    n_features,
    N_COLS: tl.constexpr,
    HAS_FEATURES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    blocks: tl.constexpr = (N_COLS + BLOCK_N - 1) // BLOCK_N
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N_COLS
    dtype = out_ptr.dtype.element_ty
    token = tl.load(ids_ptr + row)
    known = (token >= 0) & (token < vocabulary)
    if HAS_FEATURES:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        visual = (slot >= 0) & (slot < n_features)
        feature = tl.load(features_ptr + slot * features_stride_row + cols, mask=mask & visual, other=0.0).to(dtype)
        value = tl.load(
            embed_ptr + token * embed_stride_row + cols, mask=mask & known & (visual == 0), other=float("nan")
        )
        value = tl.where(visual, feature, value)
    else:
        value = tl.load(embed_ptr + token * embed_stride_row + cols, mask=mask & known, other=float("nan"))
    tl.store(out_ptr + row * N_COLS + cols, value, mask=mask)


def supports(ids: Tensor, embed: Tensor, slots: Tensor | None, features: Tensor | None) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = refusal(embed=embed)
    if reason is not None:
        return reason
    if ids.dtype != torch.int64 or ids.dim() != 1 or not ids.is_contiguous() or ids.device != embed.device:
        return f"ids is {ids.dtype} of shape {tuple(ids.shape)} on {ids.device}; give int64 [T] on embed's device"
    if (slots is None) != (features is None):
        return "slots and features come together; give both or neither"
    if slots is None:
        return None
    if features.dtype not in FLOATS or features.dim() != 2 or features.shape[1] != embed.shape[1]:
        return (
            f"features is {features.dtype} of shape {tuple(features.shape)}; rows need {embed.shape[1]} floating values"
        )
    if features.device != embed.device:
        return f"features is on {features.device} but embed is on {embed.device}; move them to one device"
    if features.stride(1) != 1:
        return "the rows of features are not contiguous; call .contiguous() first"
    return slots_refusal(slots, len(ids), features)


def launch(
    ids: Tensor, embed: Tensor, slots: Tensor | None, features: Tensor | None, *, config: Launch = LAUNCH
) -> Tensor:
    """`merge_embeddings` without its checks."""
    n_rows, (vocabulary, n) = ids.shape[0], embed.shape
    out = torch.empty(n_rows, n, dtype=embed.dtype, device=embed.device)
    block_n = min(config.block, triton.next_power_of_2(n))
    if slots is None:
        pointers, stride, n_features = (ids, embed), 0, 0
    else:
        pointers, stride, n_features = (slots, features), row_stride(features), len(features)
    _merge_embeddings[(n_rows * triton.cdiv(n, block_n),)](
        *(ids, embed, *pointers, out, embed.stride(0), stride, vocabulary, n_features),
        *(n, slots is not None, block_n),
        num_warps=config.warps,
    )
    return out


@torch.library.custom_op(
    "vlmopt::merge_embeddings",
    mutates_args=(),
    schema="(Tensor ids, Tensor embed, Tensor? slots, Tensor? features) -> Tensor",
)
def merge_embeddings(ids: Tensor, embed: Tensor, slots: Tensor | None, features: Tensor | None) -> Tensor:
    """Return [T, hidden]; `rows` None means a prompt without images.

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(ids, embed, slots, features))
    return launch(ids, embed, slots, features)


@merge_embeddings.register_fake
def _(ids: Tensor, embed: Tensor, slots: Tensor | None, features: Tensor | None) -> Tensor:
    return embed.new_empty(ids.shape[0], embed.shape[1])


def cost(rows: int, features: int, width: int, vocabulary: int, itemsize: int = 2) -> tuple[int, int]:
    """Bytes moved and FLOPs."""
    return 2 * rows * width * itemsize + 8 * rows + 4 * rows * bool(features), 0


def make(
    params: dict, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Random arguments of a case."""
    n_rows, n_features, width, vocabulary = (params[name] for name in ("rows", "features", "width", "vocabulary"))
    ids = torch.randint(vocabulary, (n_rows,), generator=generator, device=device)
    embed = torch.randn(vocabulary, width, generator=generator, device=device).to(dtype)
    if not n_features:
        return ids, embed, None, None
    features = torch.randn(n_features, width, generator=generator, device=device).to(dtype)
    return ids, embed, image_slots(n_rows, n_features).to(device), features


def _case(name: str, rows: int, features: int, width: int, vocabulary: int, cpu: bool = False) -> Case:
    params = {"rows": rows, "features": features, "width": width, "vocabulary": vocabulary}
    return Case(f"{name} {rows}x{width}, {features} visual", params, cpu)


CASES = (
    _case("decode", 1, 0, 2048, 151936),
    _case("prefill", 798, 768, 2048, 151936),
    _case("prefill", 4096, 3072, 2048, 151936),
    _case("text", 1024, 0, 2048, 151936),
    _case("odd", 333, 127, 1111, 1000),
    _case("small", 1, 0, 256, 50, cpu=True),
    _case("small", 9, 4, 256, 50, cpu=True),
    _case("small odd", 12, 7, 77, 50, cpu=True),
    _case("small wide", 4, 3, 2049, 20, cpu=True),
)
