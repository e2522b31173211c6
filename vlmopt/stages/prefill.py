"""The whole prompt through the language model: fills the cache and gives the hidden row of the last position."""

from collections.abc import Sequence

from torch import Tensor

from vlmopt.ops import Ops, to_fp8
from vlmopt.stages.decode import Taps, attention
from vlmopt.stages.layer import attention_block, mlp_block
from vlmopt.weights import TextLayer, TextWeights


def prefill(
    h: Tensor,
    rope: tuple[Tensor, Tensor],
    cache: Tensor,
    rows: Tensor,
    slots: Tensor | None,
    deepstack: Sequence[Tensor],
    weights: TextWeights,
    ops: Ops,
    narrow: bool = False,
    asked: Tensor | None = None,
    taps: Taps = None,
) -> Tensor:
    """Run the decoder over a prompt of T tokens.

    Args:
        h: merged embeddings [T, hidden].
        rope: cos and sin [T, D].
        cache: [layers, 2, Hkv, capacity, D], rows 0 … T − 1 are written; of e4m3, if the weights have scales for it.
            The prompt attends to its keys and values as they are before they are rounded to eight bits.
        rows: arange(T) on the device.
        slots: for each row its image token's number or −1, [T] int32 on the device; None without images.
        deepstack: one [N, hidden] for each of the first layers, added after it by `slots`.
        narrow: whether the last layer makes keys and values of all rows, and everything else of the last row alone, by
            packed weights; the same mathematics, and the library may round one row otherwise than many (near). Copies
            are not cut, so over these all rows go through it.
        asked: [1] int64 on the device, the last position where rows of padding follow it.
        taps: gets all rows [T, hidden] after each of its layers, which may be any but the last, `deepstack` added.

    Returns:
        the last position's hidden row [1, hidden], before the final norm.
    """
    x, residual, last = h, None, len(weights.layers) - 1
    whole = None if cache.dtype == h.dtype else h.new_empty(*cache.shape[1:3], len(h), cache.shape[4])
    for index, layer in enumerate(weights.layers):
        x, h = ops.add_rms_norm(x, residual, layer.input_norm.weight, layer.input_norm.eps)
        if narrow and index == last and index >= len(deepstack) and isinstance(layer.qkv[0].weight, Tensor):
            return _last_layer(x, _row(h, asked), layer, rope, cache[index], whole, rows, asked, ops)
        x = attention_block(x, layer, rope, cache[index] if whole is None else whole, rows, ops.prefill_attention, ops)
        _keep(whole, cache[index], layer)
        x, residual = ops.add_rms_norm(x, h, layer.post_norm.weight, layer.post_norm.eps)
        x = mlp_block(x, layer, ops)
        if slots is not None and index < len(deepstack):
            x, residual = ops.deepstack_add(residual + x, slots, deepstack[index]), None
        if taps and index in taps:
            taps[index] = x if residual is None else residual + x
    return _row(x, asked) if residual is None else _row(residual, asked) + _row(x, asked)


def _row(x: Tensor, asked: Tensor | None) -> Tensor:
    return x[-1:] if asked is None else x.index_select(0, asked)


def _keep(whole: Tensor | None, kv: Tensor, layer: TextLayer) -> None:
    """Store a layer's keys and values [2, Hkv, T, D], if there are any besides those of its cache, in eight bits."""
    if whole is not None:
        kv[:, :, : whole.shape[2]].copy_(to_fp8(whole, layer.kv_scales[:, :, None, None]))


def _last_layer(
    x: Tensor,
    h: Tensor,
    layer: TextLayer,
    rope: tuple[Tensor, Tensor],
    cache: Tensor,
    whole: Tensor | None,
    rows: Tensor,
    asked: Tensor | None,
    ops: Ops,
) -> Tensor:
    """The last row [1, hidden] after a layer of whose other rows only the keys and values are asked for.

    x [T, hidden] are all normalised rows, h [1, hidden] the last one's residual.
    """
    kv = cache if whole is None else whole
    weight, (_, heads, _, width) = layer.qkv[0].weight, kv.shape
    queries = len(weight) - 2 * heads * width
    norms = layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
    k, v = ops.linear(x, weight[queries:], None).chunk(2, dim=-1)
    ops.qkv_norm_rope_cache([k[:, :0], k, v], *norms, *rope, kv[0], kv[1], rows)
    q = ops.linear(_row(x, asked), weight[:queries], None)
    k, v, cos, sin = (_row(part, asked) for part in (k, v, *rope))
    # Triton compiles another variant for an address that is no multiple of 16 bytes, as every other row's number is at:
    # so the last row's number at an address of its own
    row = rows[-1:].clone() if asked is None else asked
    q = ops.qkv_norm_rope_cache([q, k, v], *norms, cos, sin, kv[0], kv[1], row)
    _keep(whole, cache, layer)
    if asked is None and ops.decode_attention_live is None:
        attended = ops.decode_attention(q, kv[0], kv[1], length=len(x))
    else:
        attended = attention(row, kv[None], ops)(q, kv[0], kv[1])
    x = ops.linear(attended, layer.o.weight, layer.o.bias)
    x, h = ops.add_rms_norm(x, h, layer.post_norm.weight, layer.post_norm.eps)
    return h + mlp_block(x, layer, ops)
