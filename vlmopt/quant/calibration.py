"""Four-bit copies that are fitted to a model's activations: GPTQ (Frantar et al., 2023), over groups of 128.

text = vlmopt.weights.collect(model, packed=False).text
copies = calibrated(text, hessians(model, batches))
vlmopt.optimize(model, "fast4", copies)

A weight's columns are rounded one after the other, and what a column is off by is made up for by those that follow, by
as much as the activations say that they can: with H = Σ xᵀx over the rows x of calibration samples, the rows w of the
copy come close to the least of (ŵ − w) H (ŵ − w)ᵀ. The samples are the caller's, and never those by which the copies
are judged. Copies are as those by rounding to nearest for every kernel and file.

Why not a library: torchao's GPTQ (0.18) runs on CUDA alone and knows no whole zeros, llm-compressor (0.14) wants older
releases of torch and transformers, and GPTQModel (7.7) brings ten further packages. What llm-compressor writes,
`checkpoints` reads. AWQ's scaling is left out: it puts factors of a product's inputs into the norm before it, and
copies stand for products alone.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vlmopt.errors import VlmoptError
from vlmopt.quant.copies import Quantized, grid, of_groups, require_fit, steps
from vlmopt.quant.pack import Copies, joint, pack, products_of
from vlmopt.quant.schemes import SCHEMES, Scheme
from vlmopt.weights import TextWeights, product_inputs

GPTQ = replace(SCHEMES["int4"], name="int4-gptq")
"""The scheme by which calibrated copies are told from those by rounding to nearest."""
DAMPING = 0.01
"""Of the mean of H's diagonal, added to it: few samples and dependent inputs leave H without an inverse."""


@torch.no_grad()
def hessians(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Σ xᵀx [in, in] fp32 of every product of the text layers by name, over all rows x of all calls.

    Args:
        model: a transformers `Qwen3VLForConditionalGeneration` with its own weights.
        batches: the keyword arguments of the calls `model(**batch)`, prompts and answers in one.
    """
    found: dict[str, Tensor] = {}

    def add(name: str, module: nn.Module, inputs: tuple[Tensor]) -> None:
        x = inputs[0].flatten(0, -2).float()
        found[name] = found.get(name, 0) + x.t() @ x

    hooks = [module.register_forward_pre_hook(partial(add, name)) for name, module in product_inputs(model).items()]
    try:
        for batch in batches:
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def calibrated(
    text: TextWeights,
    found: Mapping[str, Tensor],
    with_head: bool = True,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Copies:
    """Copies of all products by `gptq` with the Hessians of `hessians`, and with `with_head` of the head in int8.

    Raises:
        VlmoptError: a product has no Hessian, or see `gptq`.
    """
    products = products_of(text)
    if missing := products.keys() - found.keys():
        raise VlmoptError(f"{min(missing)} was not called while Hessians were taken; give at least one batch")
    body = {name: gptq(joint(linears), found[name]) for name, linears in progress(products.items())}
    return Copies(body, pack(text, None, with_head).head)


def gptq(weight: Tensor, hessian: Tensor, scheme: Scheme = GPTQ) -> Quantized:
    """The int4 copy of a weight [out, in] that keeps its products with the activations behind `hessian` [in, in].

    Columns are taken in their order, and a group's scales and zeros fitted when it is reached. An input that was never
    anything but 0 says nothing of its column, which is rounded to nearest.

    Raises:
        VlmoptError: `hessian` holds an infinity or NaN, has another shape or is no sum of squares; or see
            `copies.require_fit`.
    """
    require_fit(weight, scheme)
    if not hessian.isfinite().all():
        raise VlmoptError("a Hessian holds an infinity or NaN; take it in fp32, over samples that the model can read")
    if hessian.shape != (weight.shape[1], weight.shape[1]):
        raise VlmoptError(f"a Hessian of shape {tuple(hessian.shape)} is not of a weight {tuple(weight.shape)}")
    factor = _factor(hessian).to(torch.float32)
    left, size = weight.float().clone(), scheme.group
    values, scales, zeros = torch.empty_like(left), [], []
    for start in range(0, left.shape[1], size):
        end = start + size
        scale, zero = grid(left[:, start:end], scheme, weight.dtype)
        off = torch.empty_like(left[:, start:end])
        for column in range(start, end):
            values[:, column] = steps(left[:, column], scale, zero)
            stands_for = (values[:, column] - zero) * scale
            off[:, column - start] = (left[:, column] - stands_for) / factor[column, column]
            left[:, column:end] -= off[:, column - start, None] * factor[column, column:end]
        left[:, end:] -= off @ factor[start:end, end:]
        scales.append(scale)
        zeros.append(zero)
    return of_groups(values, torch.stack(scales, 1), torch.stack(zeros, 1), scheme, weight.dtype)


def _factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse, float64."""
    damped = hessian.double().clone()
    diagonal = damped.diagonal()
    diagonal += DAMPING * diagonal.mean() or 1  # without any activations columns are as good as one another
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        raise VlmoptError("a Hessian is no sum of squares; take it from hessians")
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
