"""The vision tower: pixels to features and DeepStack taps."""

from torch import Tensor

from vlmopt.ops import Ops
from vlmopt.stages.tables import GridTable
from vlmopt.weights import Merger, VisionBlock, VisionWeights


def encode(pixels: Tensor, grid: GridTable, weights: VisionWeights, ops: Ops) -> tuple[Tensor, list[Tensor]]:
    """Encode the patches of all images of a prompt.

    Args:
        pixels: [N, channels·frames·height·width] as the processor gives them.
        grid: the table of the images' grids.

    Returns:
        features [N / merge², hidden of the text model], and one such tensor for each DeepStack tap.
    """
    patch = weights.patch
    h = ops.patch_embed(pixels, patch.weight, patch.bias, weights.pos_embed, grid.indices, grid.taps)
    residual, taps = None, []
    for index, block in enumerate(weights.blocks):
        h, residual = _block(h, residual, grid, block, weights.n_heads, ops)
        if index in weights.deepstack:
            h, residual = residual + h, None
            taps.append(_merge(h, weights.deepstack[index], weights.merge_size, ops))
    h = h if residual is None else residual + h
    return _merge(h, weights.merger, weights.merge_size, ops), taps


def _block(
    x: Tensor, residual: Tensor | None, grid: GridTable, block: VisionBlock, n_heads: int, ops: Ops
) -> tuple[Tensor, Tensor]:
    """The MLP's output and the residual that it is still to be added to; takes the same two of the block before."""
    x, h = ops.add_layer_norm(x, residual, block.norm1.weight, block.norm1.bias, block.norm1.eps)
    qkv = ops.linear(x, block.qkv.weight, block.qkv.bias)
    q, k, v = ops.vision_rotary(qkv, grid.cos, grid.sin, n_heads)
    x = ops.linear(ops.vision_attention(q, k, v, grid.lengths), block.proj.weight, block.proj.bias)
    x, h = ops.add_layer_norm(x, h, block.norm2.weight, block.norm2.bias, block.norm2.eps)
    x = ops.bias_gelu(x, block.fc1.weight, block.fc1.bias, "tanh")
    return ops.linear(x, block.fc2.weight, block.fc2.bias), h


def _merge(h: Tensor, merger: Merger, merge_size: int, ops: Ops) -> Tensor:
    """Patches come in the order of the merge blocks, so the 2×2 shuffle is a view: neighbouring rows, joined."""
    joined = h.shape[-1] * merge_size**2
    if merger.norm_after_shuffle:
        h = h.view(-1, joined)
    x, _ = ops.add_layer_norm(h, None, merger.norm.weight, merger.norm.bias, merger.norm.eps)
    x = ops.bias_gelu(x.view(-1, joined), merger.fc1.weight, merger.fc1.bias, "none")
    return ops.linear(x, merger.fc2.weight, merger.fc2.bias)
