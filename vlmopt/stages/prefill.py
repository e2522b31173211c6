"""The whole prompt through the language model: fills the cache and gives the hidden row of the last position."""

from collections.abc import Sequence

from torch import Tensor

from vlmopt.ops import Ops
from vlmopt.stages.layer import attention_block, mlp_block
from vlmopt.weights import TextWeights


def prefill(
    h: Tensor,
    rope: tuple[Tensor, Tensor],
    cache: Tensor,
    rows: Tensor,
    visual_rows: Tensor | None,
    deepstack: Sequence[Tensor],
    weights: TextWeights,
    ops: Ops,
) -> Tensor:
    """Run the decoder over a prompt of T tokens.

    Args:
        h: merged embeddings [T, hidden].
        rope: cos and sin [T, D].
        cache: [layers, 2, Hkv, capacity, D], rows 0 … T − 1 are written.
        rows: arange(T) on the device.
        visual_rows: rows of the image tokens, or None.
        deepstack: one [N, hidden] for each of the first layers, added after it at `visual_rows`.

    Returns:
        the last position's hidden row [1, hidden], before the final norm.
    """
    x, residual = h, None
    for index, layer in enumerate(weights.layers):
        x, h = ops.add_rms_norm(x, residual, layer.input_norm.weight, layer.input_norm.eps)
        x = attention_block(x, layer, rope, cache[index], rows, ops.prefill_attention, ops)
        x, residual = ops.add_rms_norm(x, h, layer.post_norm.weight, layer.post_norm.eps)
        x = mlp_block(x, layer, ops)
        if visual_rows is not None and index < len(deepstack):
            x, residual = ops.deepstack_add(residual + x, visual_rows, deepstack[index]), None
    return x[-1:] if residual is None else residual[-1:] + x[-1:]
