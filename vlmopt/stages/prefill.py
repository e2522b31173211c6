"""The whole prompt through the language model: fills the cache and gives the hidden row of the last position."""

from collections.abc import Sequence

from torch import Tensor

from vlmopt.ops import Ops
from vlmopt.stages.layer import attention_block, mlp_block
from vlmopt.weights import TextLayer, TextWeights


def prefill(
    h: Tensor,
    rope: tuple[Tensor, Tensor],
    cache: Tensor,
    rows: Tensor,
    visual_rows: Tensor | None,
    deepstack: Sequence[Tensor],
    weights: TextWeights,
    ops: Ops,
    narrow: bool = False,
) -> Tensor:
    """Run the decoder over a prompt of T tokens.

    Args:
        h: merged embeddings [T, hidden].
        rope: cos and sin [T, D].
        cache: [layers, 2, Hkv, capacity, D], rows 0 … T − 1 are written.
        rows: arange(T) on the device.
        visual_rows: rows of the image tokens, or None.
        deepstack: one [N, hidden] for each of the first layers, added after it at `visual_rows`.
        narrow: whether the last layer makes keys and values of all rows, and everything else of the last row alone, by
            packed weights; the same mathematics, and the library may round one row otherwise than many (near).

    Returns:
        the last position's hidden row [1, hidden], before the final norm.
    """
    x, residual, last = h, None, len(weights.layers) - 1
    for index, layer in enumerate(weights.layers):
        x, h = ops.add_rms_norm(x, residual, layer.input_norm.weight, layer.input_norm.eps)
        if narrow and index == last and index >= len(deepstack):
            return _last_layer(x, h[-1:], layer, rope, cache[index], rows, ops)
        x = attention_block(x, layer, rope, cache[index], rows, ops.prefill_attention, ops)
        x, residual = ops.add_rms_norm(x, h, layer.post_norm.weight, layer.post_norm.eps)
        x = mlp_block(x, layer, ops)
        if visual_rows is not None and index < len(deepstack):
            x, residual = ops.deepstack_add(residual + x, visual_rows, deepstack[index]), None
    return x[-1:] if residual is None else residual[-1:] + x[-1:]


def _last_layer(
    x: Tensor, h: Tensor, layer: TextLayer, rope: tuple[Tensor, Tensor], kv: Tensor, rows: Tensor, ops: Ops
) -> Tensor:
    """The last row [1, hidden] after a layer of whose other rows only the keys and values are asked for.

    x [T, hidden] are all normalised rows, h [1, hidden] the last one's residual.
    """
    weight, (_, heads, _, width), last = layer.qkv[0].weight, kv.shape, len(x) - 1
    queries = len(weight) - 2 * heads * width
    norms = layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
    k, v = ops.linear(x, weight[queries:], None).chunk(2, dim=-1)
    ops.qkv_norm_rope_cache([k[:, :0], k, v], *norms, *rope, kv[0], kv[1], rows)
    q, angles = ops.linear(x[last:], weight[:queries], None), (part[last:] for part in rope)
    # Triton compiles another variant for an address that is no multiple of 16 bytes, as every other row's number is at:
    # so row 0 of a cache that begins at the last row, and the last row's number at an address of its own
    own_kv, row = kv[:, :, last:], rows[last:].clone()
    q = ops.qkv_norm_rope_cache([q, k[last:], v[last:]], *norms, *angles, own_kv[0], own_kv[1], rows[:1])
    if ops.decode_attention_live is not None:
        attended = ops.decode_attention_live(q, kv[0], kv[1], row=row)
    else:
        attended = ops.decode_attention(q, kv[0], kv[1], length=len(x))
    x = ops.linear(attended, layer.o.weight, layer.o.bias)
    x, h = ops.add_rms_norm(x, h, layer.post_norm.weight, layer.post_norm.eps)
    return h + mlp_block(x, layer, ops)
