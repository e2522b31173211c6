"""Copies of a text model's products and head: made, saved, loaded, and put in the weights' place for decode steps.

text = vlmopt.weights.collect(model, packed=False).text
save("copies.safetensors", pack(text, SCHEMES["int8"], with_head=True), text)
vlmopt.optimize(model, "fast8", load("copies.safetensors", text))
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vlmopt.errors import VlmoptError
from vlmopt.files import require_writable
from vlmopt.quant.copies import Head8, Quantized, head8, quantize
from vlmopt.quant.schemes import SCHEMES, Scheme
from vlmopt.weights import Linear, TextLayer, TextWeights

ATTENTION, MLP = ("qkv", "o"), ("gate_up", "down")
HEAD = "head"
FORMAT = "1"


@dataclass(frozen=True)
class Copies:
    """Copies by product (`layers.0.qkv`, …), and the head's; either may be missing."""

    body: dict[str, Quantized]
    head: Head8 | None = None

    @property
    def bytes(self) -> int:
        """Device memory of the copies, beside the weights that they stand beside."""
        own = 0 if self.head is None else self.head.copy.bytes + self.head.radius.numel() * 4
        return sum(copy.bytes for copy in self.body.values()) + own


def products_of(text: TextWeights, parts: Sequence[str] = (*ATTENTION, *MLP)) -> dict[str, tuple[Linear, ...]]:
    """The layers' products by name: one weight where they are packed, else the separate ones in order."""
    found = {}
    for index, layer in enumerate(text.layers):
        for part in parts:
            linear = getattr(layer, part)
            found[f"layers.{index}.{part}"] = linear if isinstance(linear, tuple) else (linear,)
    return found


def pack(
    text: TextWeights,
    scheme: Scheme | None,
    with_head: bool,
    parts: Sequence[str] = (*ATTENTION, *MLP),
    progress: Callable[[Iterable], Iterable] = iter,
) -> Copies:
    """Copies of the layers' products by `scheme` (None for none), and with `with_head` of the head in int8.

    Raises:
        VlmoptError: a weight cannot be quantised by this scheme.
    """
    body = {}
    if scheme is not None:
        products = products_of(text, parts).items()
        body = {name: quantize(joint(linears), scheme) for name, linears in progress(products)}
    head = head8(text.head.weight, quantize(text.head.weight, SCHEMES["int8"])) if with_head else None
    return Copies(body, head)


def joint(linears: tuple[Linear, ...]) -> Tensor:
    """A product's weight [out, in]: where it is not packed, its parts' one below the other."""
    return linears[0].weight if len(linears) == 1 else torch.cat([linear.weight for linear in linears])


def bytes_of(text: TextWeights, scheme: Scheme | None, with_head: bool) -> int:
    """What `pack` would add to the memory, from shapes alone; the products need not be packed."""
    size = text.embed.element_size()
    found = 0
    if scheme is not None:
        for layer in text.layers:
            for linear in (*layer.qkv, layer.o, *layer.gate_up, layer.down):
                found += scheme.bytes(*linear.weight.shape, size)
    vocabulary, hidden = text.head.weight.shape
    return found + with_head * (SCHEMES["int8"].bytes(vocabulary, hidden, size) + 4 * vocabulary)


def require_scheme(copies: Copies, weights: str, with_head: bool) -> None:
    """Make sure that copies made before are those that a config asks for.

    Raises:
        VlmoptError: they are of another scheme, or the head's is missing or not asked for.
    """
    found = {copy.scheme.values for copy in copies.body.values()} or {"none"}
    if found != {weights} or (copies.head is not None) != with_head:
        held, asked = ("a" if has_head else "no" for has_head in (copies.head is not None, with_head))
        raise VlmoptError(
            f"the copies hold {', '.join(sorted(found))} weights and {held} head, the config asks for {weights} and "
            f"{asked} head; give copies of the config's own scheme"
        )


def with_copies(text: TextWeights, copies: Copies) -> TextWeights:
    """The weights as decode steps read them: copies where there are some, everything else as it is."""
    layers = tuple(_layer(layer, f"layers.{index}", copies.body) for index, layer in enumerate(text.layers))
    head = text.head if copies.head is None else replace(text.head, weight=copies.head)
    return replace(text, layers=layers, head=head)


def _layer(layer: TextLayer, name: str, body: dict[str, Quantized]) -> TextLayer:
    changes: dict[str, Any] = {}
    for part in (*ATTENTION, *MLP):
        copy = body.get(f"{name}.{part}")
        if copy is not None:
            linear = Linear(copy)
            changes[part] = (linear,) if isinstance(getattr(layer, part), tuple) else linear
    return replace(layer, **changes)


def fingerprint(text: TextWeights) -> str:
    """A hash of the weights that copies are made of, packed or not; takes seconds for the 2B model."""
    digest = hashlib.sha256(str(text.head.weight.dtype).encode())
    products = [linear.weight for linears in products_of(text).values() for linear in linears]
    for weight in (*products, text.head.weight):
        digest.update(weight.contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def save(path: str | Path, copies: Copies, text: TextWeights) -> Path:
    """Write copies of `text` as one safetensors file that names the scheme and the weights it was made from.

    Raises:
        VlmoptError: the folder cannot be written.
    """
    require_writable(path)
    tensors = {f"{name}.{part}": tensor for name, copy in copies.body.items() for part, tensor in copy.tensors.items()}
    if copies.head is not None:
        tensors |= {f"{HEAD}.{part}": tensor for part, tensor in copies.head.copy.tensors.items()}
        tensors[f"{HEAD}.radius"] = copies.head.radius
    schemes = {name: copy.scheme.to_dict() for name, copy in copies.body.items()}
    about = {"format": FORMAT, "schemes": json.dumps(schemes), "source": fingerprint(text)}
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, about)
    return Path(path)


def load(path: str | Path, text: TextWeights) -> Copies:
    """The copies that `save` wrote, on the device of `text`.

    Raises:
        VlmoptError: the file cannot be read, or was made from other weights.
    """
    device = text.embed.device
    try:
        with safetensors.safe_open(path, "pt", device=str(device)) as file:
            about, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise VlmoptError(f"{path} cannot be read ({error}); save the copies again") from error
    if about.get("format") != FORMAT:
        raise VlmoptError(f"{path} holds no copies that this version knows; save them again")
    if about["source"] != fingerprint(text):
        raise VlmoptError(f"{path} was made from other weights than this model's; save copies of this model")
    schemes = {name: Scheme.from_dict(data) for name, data in json.loads(about["schemes"]).items()}
    body = {name: Quantized(scheme, **_parts(tensors, name)) for name, scheme in schemes.items()}
    if f"{HEAD}.radius" not in tensors:
        return Copies(body)
    parts = _parts(tensors, HEAD)
    radius = parts.pop("radius")
    return Copies(body, Head8(text.head.weight, Quantized(SCHEMES["int8"], **parts), radius))


def _parts(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.rpartition(".")[0] == name}
