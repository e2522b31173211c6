"""One decoder layer, shared by prefill and decode, which differ only in their attention."""

from collections.abc import Callable

from torch import Tensor

from vlmopt.ops import Ops
from vlmopt.weights import Linear, TextLayer


def attention_block(
    x: Tensor,
    layer: TextLayer,
    rope: tuple[Tensor, Tensor],
    kv: Tensor,
    rows: Tensor,
    attend: Callable[..., Tensor],
    ops: Ops,
) -> Tensor:
    """Normalised rows x [T, hidden] to the attention's output, before the residual add.

    `kv` [2, Hkv, capacity, D] is the layer's cache, `rows` [T] where this call's keys and values go; with a cache of
    eight bits `attend` also gets the layer's `scales` by name.
    """
    products = _products(x, layer.qkv, ops)
    norms = layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
    scales = {} if kv.dtype == x.dtype else {"scales": layer.kv_scales}
    q = ops.qkv_norm_rope_cache(products, *norms, *rope, kv[0], kv[1], rows, **scales)
    return ops.linear(attend(q, kv[0], kv[1], **scales), layer.o.weight, layer.o.bias)


def mlp_block(x: Tensor, layer: TextLayer, ops: Ops) -> Tensor:
    """Normalised rows x [T, hidden] to the MLP's output, before the residual add."""
    if ops.linear_swiglu is not None and len(layer.gate_up) == 1:
        x = ops.linear_swiglu(x, layer.gate_up[0].weight)
    else:
        x = ops.swiglu(_products(x, layer.gate_up, ops))
    return ops.linear(x, layer.down.weight, layer.down.bias)


def _products(x: Tensor, weights: tuple[Linear, ...], ops: Ops) -> list[Tensor]:
    return [ops.linear(x, linear.weight, linear.bias) for linear in weights]
