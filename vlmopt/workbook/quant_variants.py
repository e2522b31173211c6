"""The embedded model with part after part as quantised copies stand for it, and the samples to calibrate them by."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vlmopt.bench import models
from vlmopt.ops import Ops
from vlmopt.quant import costs, pack
from vlmopt.quant.calibration import GPTQ, calibrated
from vlmopt.quant.copies import Quantized, quantize
from vlmopt.quant.kv_scales import with_kv_scales
from vlmopt.quant.schemes import SCHEMES, Scheme
from vlmopt.weights import Linear, TextWeights, VisionWeights, Weights
from vlmopt.workbook import tiny_data

NONE, HEAD = "none", "head8"
PARTS = {"attention": pack.ATTENTION, "mlp": pack.MLP, "all": (*pack.ATTENTION, *pack.MLP)}
KV = costs.KV
PROMPT = "prompt"
"""All parts, and the prompt reads their copies too, as it must where the originals are freed."""
STUDIED = (*SCHEMES, GPTQ.name)
VISION, INPUTS = "vision", "vision inputs"
"""The blocks' qkv and MLP: their weights alone, and the rows that they multiply too, each by a scale of its own, as
products of eight bits by eight bits take them; weights alone would save memory and no time. No preset does either."""
TOWER_PARTS = ("qkv", "fc1", "fc2")
Tower = tuple[VisionWeights, Ops]


@dataclass(frozen=True)
class Variant:
    """The text model as a decode step reads it, and the bytes that a token's step reads of it.

    `prompt` is what the prompt reads and `vision` what its images go through, None for the plain model; `kv` says
    whether keys and values are held in eight bits.
    """

    text: TextWeights
    bytes: int
    prompt: TextWeights | None = None
    vision: Tower | None = None
    kv: bool = False


def variants(weights: Weights, schemes: Sequence[str], found: Mapping[str, Tensor]) -> dict[str, Variant]:
    """Nothing quantised, the head or keys and values alone, and each scheme over attention, MLP, both, both beside keys
    and values in eight bits, and both read by the prompt too; of eight bits also over the vision tower.

    Copies are expanded to the weights that they stand for, which is what the reference multiplies by.

    Args:
        found: the Hessians of the products, for the scheme that is calibrated.
    """
    text = weights.text
    every = {NONE: Variant(text, _bytes(text, {}))}
    head = pack.pack(text, None, with_head=True)
    every[HEAD] = Variant(pack.with_copies(text, head), _bytes(text, {}, head.bytes))
    scaled = with_kv_scales(text)
    every[KV] = replace(every[NONE], text=scaled, prompt=scaled, kv=True)
    for scheme in schemes:
        whole = calibrated(text, found, False) if scheme == GPTQ.name else pack.pack(text, SCHEMES[scheme], False)
        for part, names in PARTS.items():
            body = {name: copy for name, copy in whole.body.items() if name.rpartition(".")[2] in names}
            every[f"{scheme} {part}"] = Variant(_expanded(text, body), _bytes(text, body))
        both = every[f"{scheme} all"]
        every[f"{scheme} {KV}"] = replace(every[KV], text=_expanded(scaled, whole.body), bytes=both.bytes)
        every[f"{scheme} {PROMPT}"] = replace(both, prompt=both.text)
        if not whole.body["layers.0.qkv"].scheme.group:
            for part, tower in towers(weights.vision, SCHEMES[scheme]).items():
                every[f"{scheme} {part}"] = replace(every[NONE], vision=tower)
    return every


def towers(vision: VisionWeights, scheme: Scheme) -> dict[str, Tower]:
    """The tower over copies, and the same over rows of as few bits, as weights and the table of ops."""

    def expanded(linear: Linear) -> Linear:
        return replace(linear, weight=quantize(linear.weight, scheme).dequantize(linear.weight.dtype))

    blocks = [replace(own, **{part: expanded(getattr(own, part)) for part in TOWER_PARTS}) for own in vision.blocks]
    copied = {id(getattr(block, part).weight) for block in blocks for part in TOWER_PARTS}

    def over_rows(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
            return product(quantize(x, scheme).dequantize(x.dtype) if id(weight) in copied else x, weight, *rest)

        return run

    ops, weights = Ops(), replace(vision, blocks=tuple(blocks))
    rounded = replace(ops, linear=over_rows(ops.linear), bias_gelu=over_rows(ops.bias_gelu))
    return {VISION: (weights, ops), INPUTS: (weights, rounded)}


def _expanded(text: TextWeights, body: Mapping[str, Quantized]) -> TextWeights:
    layers = []
    for index, layer in enumerate(text.layers):
        changes: dict[str, Any] = {}
        for part in PARTS["all"]:
            if (copy := body.get(f"layers.{index}.{part}")) is not None:
                linear = Linear(copy.dequantize(text.embed.dtype))
                changes[part] = (linear,) if isinstance(getattr(layer, part), tuple) else linear
        layers.append(replace(layer, **changes))
    return replace(text, layers=tuple(layers))


def _bytes(text: TextWeights, body: Mapping[str, Quantized], head: int | None = None) -> int:
    """Of the products and the head: copies as they are, what is not copied as in bf16."""
    products = pack.products_of(text)
    copied = sum(copy.bytes for copy in body.values())
    kept = 2 * sum(linear.weight.numel() for name, own in products.items() if name not in body for linear in own)
    return copied + kept + (2 * text.head.weight.numel() if head is None else head)


def calibration_batches(target: models.Loaded, count: int) -> Iterator[dict[str, Tensor]]:
    """What `calibration.hessians` runs the embedded model on: prompts with their answers, of training strings alone."""
    end = torch.tensor([target.processor.tokenizer.eos_token_id])
    for image, question, answer in tiny_data.calibration(count):
        inputs = models.prompt(target.processor, image, question)
        ids = target.processor.tokenizer(answer, return_tensors="pt")["input_ids"][0]
        tail = torch.cat([ids, end])[None]
        whole = {name: torch.cat([inputs[name], fill(tail)], 1) for name, fill in FILLS.items()}
        yield {name: tensor.to(target.device) for name, tensor in {**inputs, **whole}.items()}


FILLS = {"input_ids": torch.Tensor.clone, "attention_mask": torch.ones_like, "mm_token_type_ids": torch.zeros_like}
"""What an answer's tokens add to a prompt's inputs."""
