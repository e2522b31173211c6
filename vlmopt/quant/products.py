"""The entries of the table of ops that take a quantised copy where a weight stands."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vlmopt.kernels import decode_layer, gemv, gemv_q4, gemv_q8, gemv_ring_copies, lm_head_q8
from vlmopt.kernels.case import require
from vlmopt.ops import Ops
from vlmopt.quant.copies import Head8, Quantized


def over_copies(ops: Ops, kernels: Sequence[str], checked: bool = False) -> Ops:
    """The table with entries that also take copies.

    Where `kernels` names `linear` or `lm_head_argmax`, copies of products or of the head are served by kernels too,
    which with `checked` refuse what they cannot take; else by the references. So is a layer by `decode_layer`. Rows of
    a prompt, more than those kernels take, are multiplied by the weight that the copy stands for, made for this product
    alone.
    """
    product, layer, head = gemv_ring_copies.gemv_copy_ref, None, lm_head_q8.lm_head_q8_ref
    if "linear" in kernels:
        product = checked_product if checked else gemv_ring_copies.few_rows
    if "decode_layer" in kernels:
        layer = checked_layer if checked else launch_layer
    if "lm_head_argmax" in kernels:
        head = lm_head_q8.lm_head_q8 if checked else lm_head_q8.launch

    def linear(x: Tensor, weight: Tensor | Quantized, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Quantized) and len(x) <= gemv.MAX_ROWS:
            return product(x, *weight.parts, bias, None, False)
        return ops.linear(x, _whole(weight, x.dtype), bias)

    def linear_swiglu(x: Tensor, weight: Tensor | Quantized) -> Tensor:
        if isinstance(weight, Quantized) and len(x) <= gemv.MAX_ROWS:
            return product(x, *weight.parts, None, None, True)
        weight = _whole(weight, x.dtype)
        return ops.linear_swiglu(x, weight) if ops.linear_swiglu else ops.swiglu([ops.linear(x, weight, None)])

    def argmax(h: Tensor, norm: Tensor, eps: float, weight: Tensor | Head8) -> Tensor:
        if isinstance(weight, Head8):
            return head(h, norm, eps, weight.weight, *weight.copy.tensors.values(), weight.radius)
        return ops.lm_head_argmax(h, norm, eps, weight)

    def logits(h: Tensor, norm: Tensor, eps: float, weight: Tensor | Head8) -> Tensor:
        return ops.lm_head_logits(h, norm, eps, weight.weight if isinstance(weight, Head8) else weight)

    return replace(
        ops,
        linear=linear,
        linear_swiglu=linear_swiglu,
        lm_head_argmax=argmax,
        lm_head_logits=logits,
        decode_layer=layer,
    )


def _whole(weight: Tensor | Quantized, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(dtype) if isinstance(weight, Quantized) else weight


def checked_product(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, *rest: Any) -> Tensor:
    """The product by the registered op of this kind of copy.

    Raises:
        VlmoptError: its `supports` gives a reason.
    """
    if zero is None:
        return gemv_q8.gemv_q8(x, weight, scale, *rest)
    return gemv_q4.gemv_q4(x, weight, scale, zero, *rest)


def launch_layer(h: Tensor, layer: Sequence[Tensor | Quantized], *rest: Any) -> Tensor:
    """`decode_layer.launch`, which see, over a layer whose products are weights or copies."""
    return decode_layer.launch(h, _of_parts(layer), *rest)


def checked_layer(h: Tensor, layer: Sequence[Tensor | Quantized], *rest: Any) -> Tensor:
    """`launch_layer` that looks at its arguments first.

    Raises:
        VlmoptError: `decode_layer.supports` gives a reason.
    """
    require(decode_layer.supports(h, _of_parts(layer), *rest))
    return launch_layer(h, layer, *rest)


def _of_parts(layer: Sequence[Tensor | Quantized]) -> list[decode_layer.Weight]:
    return [weight.parts if isinstance(weight, Quantized) else weight for weight in layer]
