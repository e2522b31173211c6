"""Copies from checkpoints that other tools have quantised: compressed-tensors' and torchao's layouts.

compressed-tensors, by a product's name: `weight` int8 or float8_e4m3fn [out, in] with `weight_scale` [out, 1]; or, in
int32, `weight_packed` [out, in / 8] with `weight_scale` [out, groups] and, where asymmetric, `weight_zero_point`
[out / 8, groups] packed along the outputs, four bits each, the lowest first, 8 added. torchao's safetensors: the parts
of `weight` as `_weight_qdata` and `_weight_scale`, int8 or float8_e4m3fn by output channel. The products of a layer
that this package packs are joined along their outputs.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from vlmopt.errors import VlmoptError
from vlmopt.kernels import gemv_q4
from vlmopt.quant.copies import Quantized
from vlmopt.quant.pack import Copies, products_of
from vlmopt.quant.schemes import SCHEMES, Scheme
from vlmopt.weights import TextWeights

MEMBERS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""A layer's products and the names of their parts in a checkpoint's files."""
PREFIX = "model.language_model.layers."
NIBBLES, OFFSET = 8, 8
SYMMETRIC = Scheme("int4-symmetric", "int4", gemv_q4.GROUP)


def from_checkpoint(tensors: Mapping[str, Tensor], text: TextWeights) -> Copies:
    """Copies of all products of `text` from a checkpoint's tensors by name, on its device.

    Raises:
        VlmoptError: a product is missing, of another shape, or in a layout that is not one of those above.
    """
    body = {}
    for index in range(len(text.layers)):
        for part, members in MEMBERS.items():
            found = [_read(tensors, f"{PREFIX}{index}.{member}") for member in members]
            body[f"layers.{index}.{part}"] = _to(_joined(found), text.embed.device)
    for name, linears in products_of(text).items():
        copy, expected = body[name], (sum(len(linear.weight) for linear in linears), linears[0].weight.shape[1])
        if tuple(copy.dequantize(torch.float32).shape) != expected:
            raise VlmoptError(f"{name} of the checkpoint has another shape than this model's {expected}; take its own")
    return Copies(body)


def _read(tensors: Mapping[str, Tensor], name: str) -> Quantized:
    if (packed := tensors.get(f"{name}.weight_packed")) is not None:
        return _from_nibbles(
            name, packed, _one(tensors, [f"{name}.weight_scale"]), tensors.get(f"{name}.weight_zero_point")
        )
    values = _one(tensors, [f"{name}.weight", f"{name}._weight_qdata"])
    scale = _one(tensors, [f"{name}.weight_scale", f"{name}._weight_scale"])
    kinds = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
    if values.dtype not in kinds or scale.numel() != len(values):
        raise VlmoptError(
            f"{name} holds {values.dtype} values with a scale of shape {tuple(scale.shape)}; give int8 or float8_e4m3fn"
            " with one scale for each output"
        )
    return Quantized(SCHEMES[kinds[values.dtype]], values.contiguous(), scale.flatten().float())


def _one(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    names = list(names)
    for name in names:
        if name in tensors:
            return tensors[name]
    raise VlmoptError(
        f"the checkpoint has no {' or '.join(names)}; give one that quantises every product of the layers"
    )


def _from_nibbles(name: str, packed: Tensor, scale: Tensor, zero: Tensor | None) -> Quantized:
    values = nibbles(packed)
    if values.shape[1] != scale.shape[1] * gemv_q4.GROUP:
        raise VlmoptError(
            f"{name} has {values.shape[1]} values a row and {scale.shape[1]} scales; groups of {gemv_q4.GROUP} in four "
            "bits are read"
        )
    if zero is None:
        zeros = torch.full(scale.shape, OFFSET, dtype=torch.uint8, device=scale.device)
    else:
        zeros = nibbles(zero.t().contiguous()).t()[: len(values)]
    scheme = SYMMETRIC if zero is None else SCHEMES["int4"]
    return Quantized(scheme, gemv_q4.pack(values), scale.t().contiguous(), zeros.t().contiguous())


def nibbles(packed: Tensor) -> Tensor:
    """int32 [rows, n] as the 8·n values of four bits in each row, uint8."""
    shifts = torch.arange(NIBBLES, device=packed.device, dtype=torch.int32) * 4
    return (packed[:, :, None] >> shifts & 15).to(torch.uint8).flatten(1)


def _joined(parts: list[Quantized]) -> Quantized:
    first = parts[0]
    if any(part.scheme != first.scheme for part in parts):
        raise VlmoptError("products that are packed together have several schemes in this checkpoint; give them one")
    values = torch.cat([part.values for part in parts])
    if first.zero is None:
        return Quantized(first.scheme, values, torch.cat([part.scale for part in parts]))
    scale, zero = (torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("scale", "zero"))
    return Quantized(first.scheme, values, scale, zero)


def _to(copy: Quantized, device: torch.device) -> Quantized:
    return Quantized(copy.scheme, **{name: tensor.to(device) for name, tensor in copy.tensors.items()})
