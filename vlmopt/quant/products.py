"""The entries of the table of ops that take a quantised copy where a weight stands."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from vlmopt.kernels import decode_layer, gemv_q4, gemv_q8, gemv_ring_copies, lm_head_q8
from vlmopt.kernels.case import require
from vlmopt.ops import Ops
from vlmopt.quant.copies import Head8, Quantized

REFERENCES = {"q8": gemv_q8.gemv_q8_ref, "q4": gemv_q4.gemv_q4_ref, "head": lm_head_q8.lm_head_q8_ref}
LAUNCHERS = {"head": lm_head_q8.launch}
"""Of products it is `gemv_ring_copies.few_rows`."""
CHECKED = {"q8": gemv_q8.gemv_q8, "q4": gemv_q4.gemv_q4, "head": lm_head_q8.lm_head_q8}


def over_copies(ops: Ops, kernels: Sequence[str], checked: bool = False) -> Ops:
    """The table with entries that also take copies.

    Where `kernels` names `linear` or `lm_head_argmax`, copies of products or of the head are served by kernels too,
    which with `checked` refuse what they cannot take; else by the references. So is a layer by `decode_layer`.
    """
    body, head = (
        (CHECKED if checked else LAUNCHERS) if name in kernels else REFERENCES for name in ("linear", "lm_head_argmax")
    )

    def product(x: Tensor, copy: Quantized, bias: Tensor | None, gated: bool) -> Tensor:
        if body is LAUNCHERS:
            return gemv_ring_copies.few_rows(x, *copy.parts, bias, None, gated)
        fn = body["q8" if copy.zero is None else "q4"]
        return fn(x, *copy.tensors.values(), bias, None, gated)

    def linear(x: Tensor, weight: Tensor | Quantized, bias: Tensor | None) -> Tensor:
        return product(x, weight, bias, False) if isinstance(weight, Quantized) else ops.linear(x, weight, bias)

    def linear_swiglu(x: Tensor, weight: Tensor | Quantized) -> Tensor:
        if isinstance(weight, Quantized):
            return product(x, weight, None, True)
        return ops.linear_swiglu(x, weight) if ops.linear_swiglu else ops.swiglu([ops.linear(x, weight, None)])

    def argmax(h: Tensor, norm: Tensor, eps: float, weight: Tensor | Head8) -> Tensor:
        if isinstance(weight, Head8):
            return head["head"](h, norm, eps, weight.weight, *weight.copy.tensors.values(), weight.radius)
        return ops.lm_head_argmax(h, norm, eps, weight)

    def logits(h: Tensor, norm: Tensor, eps: float, weight: Tensor | Head8) -> Tensor:
        return ops.lm_head_logits(h, norm, eps, weight.weight if isinstance(weight, Head8) else weight)

    layer = checked_layer if checked else launch_layer
    return replace(
        ops,
        linear=linear,
        linear_swiglu=linear_swiglu,
        lm_head_argmax=argmax,
        lm_head_logits=logits,
        decode_layer=layer if "decode_layer" in kernels else None,
    )


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
