"""The newest tokens of a sequence, most often one, through the language model over the cache."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vlmopt.errors import VlmoptError
from vlmopt.ops import Ops
from vlmopt.stages.layer import attention_block, mlp_block
from vlmopt.weights import TextLayer, TextWeights

Taps = dict[int, Tensor | None] | None
"""The rows after some layers, by the layer's number: who wants to know them gives the keys, a stage the values."""


def decode_step(
    token: Tensor,
    rope: tuple[Tensor, Tensor],
    cache: Tensor,
    row: Tensor,
    attend: Callable[..., Tensor],
    weights: TextWeights,
    ops: Ops,
    taps: Taps = None,
) -> Tensor:
    """Run the decoder over R tokens: one, or up to 8 that follow each other in one sequence.

    Args:
        token: [R] int64.
        rope: cos and sin [R, D] of their positions.
        cache: [layers, 2, Hkv, capacity, D].
        row: [R] int64, the cache rows that these tokens take.
        attend: (q, k, v) → output, each query's over its live rows, its own included (see `attention`); not called
            where an entry covers a layer. With a cache of eight bits it also gets `scales` by name.
        taps: gets the rows [R, hidden] after each of its layers, which may be any but the last.

    Returns:
        the hidden rows [R, hidden], before the final norm.
    """
    h = ops.merge_embeddings(token, weights.embed, None, None)
    if ops.decode_layer is not None and packed(weights):
        for index, layer in enumerate(weights.layers):
            eps = layer.input_norm.eps, layer.q_norm.eps
            h = ops.decode_layer(h, layer_tensors(layer), *eps, *rope, *cache[index], row[-1:])
            _tap(taps, index, h)
        return h
    x, h = ops.add_rms_norm(h, None, weights.layers[0].input_norm.weight, weights.layers[0].input_norm.eps)
    for index, layer in enumerate(weights.layers):
        x = attention_block(x, layer, rope, cache[index], row, attend, ops)
        x, h = ops.add_rms_norm(x, h, layer.post_norm.weight, layer.post_norm.eps)
        x = mlp_block(x, layer, ops)
        if index + 1 < len(weights.layers):
            following = weights.layers[index + 1].input_norm
            x, h = ops.add_rms_norm(x, h, following.weight, following.eps)
            _tap(taps, index, h)
    return h + x


def _tap(taps: Taps, layer: int, rows: Tensor) -> None:
    if taps and layer in taps:
        taps[layer] = rows


def attention(row: Tensor, cache: Tensor, ops: Ops, may_wait: bool = False) -> Callable[..., Tensor]:
    """The `attend` of `decode_step` for tokens of one sequence: the query of row[i] sees cache rows 0 … row[i].

    Without an entry that reads the live length on the device, a mask over the whole capacity does; or, where the host
    `may_wait` for `row`, exactly the live rows are read.
    """
    if ops.decode_attention_live is not None:
        return partial(ops.decode_attention_live, row=row[-1:])
    if may_wait:
        each = [partial(ops.decode_attention, length=last + 1) for last in row.tolist()]
    else:
        later = torch.arange(cache.shape[3], device=cache.device) > row[:, None]
        dtype = torch.float32 if cache.dtype.itemsize == 1 else cache.dtype
        bias = torch.zeros(later.shape, dtype=dtype, device=cache.device).masked_fill(later, float("-inf"))
        each = [partial(ops.decode_attention_masked, bias=one) for one in bias]

    def attend(q: Tensor, k: Tensor, v: Tensor, **scales: Tensor) -> Tensor:
        parts = [one(q[i : i + 1], k, v, **scales) for i, one in enumerate(each)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return attend


def whole_step(
    rope: tuple[Tensor, Tensor],
    cache: Tensor,
    token: Tensor,
    row: Tensor,
    delta: Tensor,
    history: Tensor,
    weights: TextWeights,
    ops: Ops,
) -> Callable[[], None]:
    """One greedy step, head and bookkeeping included, by the entry that covers all of it.

    Args:
        rope: cos and sin [positions, D], looked up at row + delta.
        cache: [layers, 2, Hkv, capacity, D].
        token, row, delta: [1] int64; `history` [> capacity] gets the chosen token at its row.

    Returns:
        a function of nothing that launches the step.

    Raises:
        VlmoptError: the entry cannot serve this model.
    """
    if not packed(weights):
        raise VlmoptError("a whole step takes packed products without biases")
    layers = [layer_tensors(layer) for layer in weights.layers]
    first = weights.layers[0]
    return ops.decode_step(
        *(layers, weights.embed, weights.norm.weight, weights.head.weight, rope),
        *(first.input_norm.eps, first.q_norm.eps, cache, token, row, delta, history),
    )


def packed(weights: TextWeights) -> bool:
    """Whether entries that cover a whole layer can take it: every product is one weight without a bias."""
    found = [products for layer in weights.layers for products in (layer.qkv, (layer.o,), layer.gate_up, (layer.down,))]
    return all(len(products) == 1 and products[0].bias is None for products in [*found, (weights.head,)])


def layer_tensors(layer: TextLayer) -> list[Tensor]:
    """A layer's tensors in the order in which entries that cover it take them."""
    return [
        *(layer.input_norm.weight, layer.qkv[0].weight, layer.q_norm.weight, layer.k_norm.weight),
        *(layer.o.weight, layer.post_norm.weight, layer.gate_up[0].weight, layer.down.weight),
    ]
