"""One decoder layer over the newest tokens of one sequence in five launches: the entry that covers all of its others.

    h += o(attention(rope(norm(qkv(norm(h)))))),   the newest keys and values written to the cache
    h += down(silu(gate) · up),                    gate and up from norm(h)

h [R, hidden], R = 1 for a decode step and up to 8 for tokens that are verified together; heads of 128; weights packed
as the checkpoint's rows: qkv [(Hq + 2·Hkv)·128, hidden], gate_up [2·mlp, hidden] with gate's rows first; cos and sin
[R, 128]; both caches [Hkv, capacity, 128], of which rows `row` − R + 1 … `row` ([1] int64 on the device) are written,
and a query attends all up to its own. bf16 or fp16. The two norms are prologues of `gemv_ring`; norm, rope, cache write
and attention are one launch of `decode_attention_cluster`; residuals and activation are epilogues. Moves every weight
and the live keys and values once; 2 FLOPs a weight and row. Class near: the references' rounding points in other orders
of summation. A row's bits depend on neither the others nor the capacity.

A product's weight may also be a quantised copy: a sequence of its parts (q, s, z) as `gemv_ring_copies` takes them.

Preconditions of its launches: weights, `row`, cos and sin were written before the kernel in front let its dependents
go.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels import decode_attention_cluster, gemv_ring, gemv_ring_copies
from vlmopt.kernels.add_rms_norm import add_rms_norm_ref
from vlmopt.kernels.case import Case, require
from vlmopt.kernels.decode_attention import decode_attention_live_ref
from vlmopt.kernels.qkv_norm_rope_cache import qkv_norm_rope_cache_ref
from vlmopt.kernels.swiglu import swiglu_ref

WIDTH, GROUP = 128, 2
MUTATES = (6, 7)


Copy = Sequence[Tensor | None]
"""The parts of a quantised weight; the last is None for eight bits."""
Weight = Tensor | Copy


class Layer(NamedTuple):
    """One decoder layer's tensors, in the order in which kernels take them."""

    input_norm: Tensor
    qkv: Weight
    q_norm: Tensor
    k_norm: Tensor
    o: Weight
    post_norm: Tensor
    gate_up: Weight
    down: Weight


class Trace(NamedTuple):
    """What a layer makes, a row each: the stream after it, and the rows between its products."""

    h: Tensor
    qkv: Tensor
    attended: Tensor
    activated: Tensor


def trace_ref(
    h: Tensor,
    layer: Sequence[Weight],
    eps: float,
    head_eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
) -> Trace:
    """The layer in the references' own operations; writes both caches. Waits for the device."""
    layer = Layer(*(_plain(weight, h.dtype) for weight in layer))
    rows = row - torch.arange(h.shape[0], device=row.device).flip(0)
    qkv = F.linear(add_rms_norm_ref(h, None, layer.input_norm, eps)[0], layer.qkv)
    norms = layer.q_norm, layer.k_norm, head_eps
    q = qkv_norm_rope_cache_ref([qkv], *norms, cos, sin, k_cache, v_cache, rows)
    attended = decode_attention_live_ref(q, k_cache, v_cache, row)
    x, h = add_rms_norm_ref(F.linear(attended, layer.o), h, layer.post_norm, eps)
    activated = swiglu_ref([F.linear(x, layer.gate_up)])
    return Trace(h + F.linear(activated, layer.down), qkv, attended, activated)


def _plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else gemv_ring_copies.dequantize(weight, dtype)


def decode_layer_ref(
    h: Tensor,
    layer: Sequence[Weight],
    eps: float,
    head_eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
) -> Tensor:
    """Return the stream after the layer [R, hidden]; `layer` holds a `Layer`'s tensors. Waits for the device."""
    return trace_ref(h, layer, eps, head_eps, cos, sin, k_cache, v_cache, row).h


def _shape(weight: Weight) -> tuple[int, ...]:
    return tuple(weight.shape) if isinstance(weight, Tensor) else gemv_ring_copies.shape_of(weight[0], weight[2])


def _ring(weight: Weight) -> tuple[ModuleType, tuple[Tensor | None, ...]]:
    """The kernel that streams this weight, and the weight as it takes it."""
    return (gemv_ring, (weight,)) if isinstance(weight, Tensor) else (gemv_ring_copies, tuple(weight))


def _refuses(x: Tensor, weight: Weight, residual: Tensor) -> str | None:
    ring, parts = _ring(weight)
    return ring.supports(x, *parts, None, residual, False)


def _refuses_normed(h: Tensor, norm: Tensor, eps: float, weight: Weight, gated: bool) -> str | None:
    ring, parts = _ring(weight)
    return ring.supports_normed(h, norm, eps, *parts, gated)


def _added(x: Tensor, weight: Weight, residual: Tensor) -> Tensor:
    ring, parts = _ring(weight)
    return ring.launch(x, *parts, None, residual)


def _normed(h: Tensor, norm: Tensor, eps: float, weight: Weight, gated: bool) -> Tensor:
    ring, parts = _ring(weight)
    return ring.launch_normed(h, norm, eps, *parts, gated)


def supports(
    h: Tensor,
    layer: Sequence[Weight],
    eps: float,
    head_eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
) -> str | None:
    """Why the kernels cannot take these arguments, or None."""
    if len(layer) != len(Layer._fields):
        return f"a layer of {len(layer)} tensors; give {', '.join(Layer._fields)}"
    layer = Layer(*layer)
    if h.dim() != 2 or not 0 < h.shape[0] <= gemv_ring.ROWS:
        return f"h is {list(h.shape)}; give [1 … {gemv_ring.ROWS}, hidden]"
    product, attended, activated = (
        h.new_empty(h.shape[0], width) for width in (_shape(layer.qkv)[0], _shape(layer.o)[-1], _shape(layer.down)[-1])
    )
    norms = layer.q_norm, layer.k_norm, head_eps
    parts = {
        "qkv": _refuses_normed(h, layer.input_norm, eps, layer.qkv, False),
        "attention": decode_attention_cluster.supports_qkv([product], *norms, cos, sin, k_cache, v_cache, row),
        "o": _refuses(attended, layer.o, h),
        "gate_up": _refuses_normed(h, layer.post_norm, eps, layer.gate_up, True),
        "down": _refuses(activated, layer.down, h),
    }
    return next((f"{name}: {reason}" for name, reason in parts.items() if reason is not None), None)


def launch(
    h: Tensor,
    layer: Sequence[Weight],
    eps: float,
    head_eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
) -> Tensor:
    """`decode_layer` without its checks.

    Raises:
        VlmoptError: a kernel cannot be compiled or launched.
    """
    layer = Layer(*layer)
    norms = layer.q_norm, layer.k_norm, head_eps
    product = _normed(h, layer.input_norm, eps, layer.qkv, False)
    attended = decode_attention_cluster.launch_qkv([product], *norms, cos, sin, k_cache, v_cache, row)
    h = _added(attended, layer.o, h)
    activated = _normed(h, layer.post_norm, eps, layer.gate_up, True)
    return _added(activated, layer.down, h)


@torch.library.custom_op(
    "vlmopt::decode_layer",
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor h, Tensor[] layer, float eps, float head_eps, Tensor cos, Tensor sin, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor row) -> Tensor",
)
def decode_layer(
    h: Tensor,
    layer: Sequence[Tensor],
    eps: float,
    head_eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
) -> Tensor:
    """Return the stream after the layer [R, hidden].

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(h, layer, eps, head_eps, cos, sin, k_cache, v_cache, row))
    return launch(h, layer, eps, head_eps, cos, sin, k_cache, v_cache, row)


@decode_layer.register_fake
def _(
    h: Tensor,
    layer: Sequence[Tensor],
    eps: float,
    head_eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
) -> Tensor:
    return torch.empty_like(h)


def cost(rows: int, hidden: int, mlp: int, kv_heads: int, length: int, itemsize: int = 2, **_: int) -> tuple[int, int]:
    """Bytes moved (weights and live keys and values; the rest is next to nothing) and FLOPs."""
    heads = GROUP * kv_heads
    weights = hidden * ((2 * heads + 2 * kv_heads) * WIDTH + 3 * mlp)
    live = 2 * length * kv_heads * WIDTH
    return (weights + live) * itemsize, rows * (2 * weights + 2 * GROUP * live)


def random_layer(
    hidden: int, mlp: int, kv_heads: int, device: str, dtype: torch.dtype, generator: torch.Generator
) -> Layer:
    """A layer's tensors, as large as a trained model's."""
    heads = GROUP * kv_heads

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).mul_(0.02).to(dtype)

    def norm(width: int) -> Tensor:
        return (1 + 0.3 * torch.randn(width, generator=generator, device=device)).to(dtype)

    return Layer(
        *(norm(hidden), weight((heads + 2 * kv_heads) * WIDTH, hidden), norm(WIDTH), norm(WIDTH)),
        *(weight(hidden, heads * WIDTH), norm(hidden), weight(2 * mlp, hidden), weight(hidden, mlp)),
    )


def make(params: dict, device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple:
    """Random arguments of a case; what the caches hold from the newest rows on is large, and does not count."""
    rows, hidden, kv_heads, length = (params[name] for name in ("rows", "hidden", "kv_heads", "length"))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    layer = random_layer(hidden, params["mlp"], kv_heads, device, dtype, generator)
    caches = 50 * randn(2, kv_heads, params["capacity"], WIDTH)
    caches[:, :, : length - rows] /= 50
    angle = torch.arange(length - rows, length, device=device)[:, None] * 5e6 ** -(
        torch.arange(WIDTH, device=device) % 64 / 64
    )
    row = torch.tensor([length - 1], device=device)
    return randn(rows, hidden), list(layer), 1e-6, 1e-6, angle.cos().to(dtype), angle.sin().to(dtype), *caches, row


def _case(rows: int, length: int, capacity: int, small: bool = False) -> Case:
    sizes = dict(zip(("hidden", "mlp", "kv_heads"), (256, 768, 2) if small else (2048, 6144, 8), strict=True))
    name = f"{'small' if small else 'decode'} {rows} at {length:,}"
    return Case(name, {"rows": rows, **sizes, "length": length, "capacity": capacity}, small)


CASES = (
    *(_case(1, length, 32768) for length in (800, 4096, 16384)),
    *(_case(rows, 800, 1024) for rows in (2, 4, 8)),
    *(_case(rows, length, 128, small=True) for rows, length in ((1, 1), (1, 65), (4, 66), (8, 128))),
)
