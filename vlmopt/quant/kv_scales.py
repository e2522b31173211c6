"""Scales of keys and values in eight bits, from the weights alone: under these nothing saturates.

A key is a normalised row times the norm's weight, then rotated; so none of its values is beyond √D · max|w|. A value is
a product with a normalised row of `hidden` values of mean square 1 at most; so none of a head's is beyond
√hidden · max_j ‖W_j ∘ w‖, w the weight of the norm before it (Cauchy and Schwarz). e4m3 spans 15 powers of two at full
precision: a bound far above what is common costs next to nothing. So no prompt is looked at, nothing waits for the
device, and a row is stored alike in every prompt, batch and step.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from vlmopt.kernels.kv_fp8 import LARGEST
from vlmopt.quant.copies import LEAST_SCALE
from vlmopt.weights import TextLayer, TextWeights


def with_kv_scales(text: TextWeights) -> TextWeights:
    """The weights, none of them a copy, with every layer's `kv_scales`, which are powers of two."""
    layers = (replace(layer, kv_scales=_scales(layer, text)) for layer in text.layers)
    return replace(text, layers=tuple(layers))


def bounds(layer: TextLayer, n_kv_heads: int, head_dim: int) -> Tensor:
    """What keys and values of each KV head cannot exceed but for rounding, fp32 [2, Hkv]."""
    weight = layer.qkv[-1].weight[-n_kv_heads * head_dim :].float()
    rows = (weight * layer.input_norm.weight.float()).norm(dim=1).unflatten(0, (n_kv_heads, head_dim))
    keys = math.sqrt(head_dim) * layer.k_norm.weight.float().abs().max()
    return torch.stack([keys.expand(n_kv_heads), math.sqrt(weight.shape[1]) * rows.amax(1)])


def _scales(layer: TextLayer, text: TextWeights) -> Tensor:
    found = bounds(layer, text.n_kv_heads, text.head_dim)
    powers = [[_power_of_two(bound / LARGEST) for bound in row] for row in found.tolist()]
    return torch.tensor(powers, device=found.device)


def _power_of_two(least: float) -> float:
    """The smallest that is not below `least`."""
    mantissa, exponent = math.frexp(max(least, LEAST_SCALE))
    return math.ldexp(1.0, exponent - (mantissa == 0.5))
