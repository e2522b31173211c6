"""One token through the language model over the cache."""

from collections.abc import Callable

from torch import Tensor

from vlmopt.ops import Ops
from vlmopt.stages.layer import attention_block, mlp_block
from vlmopt.weights import TextWeights


def decode_step(
    token: Tensor,
    rope: tuple[Tensor, Tensor],
    cache: Tensor,
    row: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    weights: TextWeights,
    ops: Ops,
) -> Tensor:
    """Run the decoder over one token.

    Args:
        token: [1] int64.
        rope: cos and sin [1, D] of its position.
        cache: [layers, 2, Hkv, capacity, D].
        row: [1] int64, the cache row that this token takes.
        attend: (q, k, v) → output over the live rows, this token's included.

    Returns:
        the hidden row [1, hidden], before the final norm.
    """
    h = ops.merge_embeddings(token, weights.embed, None, None)
    x, h = ops.add_rms_norm(h, None, weights.layers[0].input_norm.weight, weights.layers[0].input_norm.eps)
    for index, layer in enumerate(weights.layers):
        x = attention_block(x, layer, rope, cache[index], row, attend, ops)
        x, h = ops.add_rms_norm(x, h, layer.post_norm.weight, layer.post_norm.eps)
        x = mlp_block(x, layer, ops)
        if index + 1 < len(weights.layers):
            following = weights.layers[index + 1].input_norm
            x, h = ops.add_rms_norm(x, h, following.weight, following.eps)
    return h + x
