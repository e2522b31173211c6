"""Where a Qwen3-VL's parameters, bytes and FLOPs are: one row per part, from the model's own tensors.

A model on the meta device is enough, so the 2B shapes need no weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vlmopt.bench import models
from vlmopt.weights import Linear, Norm, Weights, collect

VISION = ("patch embedding", "vision projections", "vision attention", "vision MLP", "mergers", "vision norms")
_MATRIX_PRODUCTS = ("mm", "addmm", "convolution", "bmm")


@dataclass(frozen=True)
class Request:
    """The size of one question: patches of the image (before merging), and tokens of the whole prompt."""

    grid: tuple[int, int, int]
    tokens: int

    @property
    def patches(self) -> int:
        """Patches that enter the vision tower."""
        frames, rows, columns = self.grid
        return frames * rows * columns


@dataclass(frozen=True)
class Part:
    """One part of the model.

    Attributes:
        parameters: how many.
        first_token_flops: matrix products (and attention, where it is the part's name) up to the first token.
        decode_bytes: weights that one decode step reads; the KV cache is a part of its own, without parameters.
    """

    name: str
    parameters: int
    first_token_flops: int
    decode_bytes: int


def meta_model(config: Any) -> nn.Module:
    """The model of `config` in bf16 on the meta device: every shape, no memory."""
    from transformers import Qwen3VLForConditionalGeneration

    with torch.device("meta"):
        return Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16).eval()


def parts(model: nn.Module, request: Request) -> list[Part]:
    """The model's parts in the order of computation; their parameters add up to the model's."""
    weights = collect(model, packed=False)
    return [*_vision_parts(weights, request), *_text_parts(weights, request)]


def _vision_parts(weights: Weights, request: Request) -> list[Part]:
    vision, n = weights.vision, request.patches
    blocks, mergers = vision.blocks, [vision.merger, *vision.deepstack.values()]
    merged, depth = n // vision.merge_size**2, len(vision.blocks)
    attention = [linear for block in blocks for linear in (block.qkv, block.proj)]
    mlp = [linear for block in blocks for linear in (block.fc1, block.fc2)]
    merger = [linear for m in mergers for linear in (m.fc1, m.fc2)]
    norms = [norm for block in blocks for norm in (block.norm1, block.norm2)] + [m.norm for m in mergers]
    scores = 4 * depth * n * request.patches // request.grid[0] * blocks[0].proj.weight.shape[0]
    return [
        Part("patch embedding", count([vision.patch]) + vision.pos_embed.numel(), products([vision.patch], n), 0),
        Part("vision projections", count(attention), products(attention, n), 0),
        Part("vision attention", 0, scores, 0),
        Part("vision MLP", count(mlp), products(mlp, n), 0),
        Part("mergers", count(merger), products(merger, merged), 0),
        Part("vision norms", count(norms), 0, 0),
    ]


def _text_parts(weights: Weights, request: Request) -> list[Part]:
    text, n = weights.text, request.tokens
    size = text.embed.element_size()
    projections = [linear for layer in text.layers for linear in (*layer.qkv, layer.o)]
    mlp = [linear for layer in text.layers for linear in (*layer.gate_up, layer.down)]
    norms = [text.norm, *(m for x in text.layers for m in (x.input_norm, x.q_norm, x.k_norm, x.post_norm))]
    pairs = n * (n + 1) // 2
    scores = 4 * len(text.layers) * pairs * text.n_heads * text.head_dim
    cache = 2 * len(text.layers) * n * text.n_kv_heads * text.head_dim * size
    head = text.embed.numel()
    return [
        Part("text projections", count(projections), products(projections, n), size * count(projections)),
        Part("text attention (KV cache)", 0, scores, cache),
        Part("text MLP", count(mlp), products(mlp, n), size * count(mlp)),
        Part("text norms", count(norms), 0, size * count(norms)),
        Part("embedding and head (tied)", head, 2 * head, size * head),
    ]


def count(modules: Iterable[Linear | Norm]) -> int:
    """Parameters of the given linears and norms, biases included."""
    return sum(_size(module.weight) + _size(module.bias) for module in modules)


def products(linears: Iterable[Linear], rows: int) -> int:
    """FLOPs of multiplying `rows` rows by each of the matrices."""
    return sum(2 * rows * linear.weight.numel() for linear in linears)


def _size(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()


def parameter_count(model: nn.Module) -> int:
    """Parameters as PyTorch counts them, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def counted_products(model: nn.Module, inputs: dict[str, Any]) -> int:
    """FLOPs of the linear layers of one `generate(max_new_tokens=1)`, counted by PyTorch while it runs.

    Attention is left out: PyTorch counts it for some of its kernels only.
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.generate(**inputs, max_new_tokens=1, do_sample=False)
    totals = counter.get_flop_counts()["Global"]
    return sum(flops for op, flops in totals.items() if op.__name__.split(".")[0] in _MATRIX_PRODUCTS)


def shape_rows(config: Any) -> list[dict[str, Any]]:
    """The sizes that name the model's shapes, text beside vision, for display."""
    text, vision = config.text_config, config.vision_config
    rows = [
        ("layers", text.num_hidden_layers, vision.depth),
        ("hidden", text.hidden_size, vision.hidden_size),
        ("MLP", text.intermediate_size, vision.intermediate_size),
        ("query heads", text.num_attention_heads, vision.num_heads),
        ("KV heads", text.num_key_value_heads, vision.num_heads),
        ("head size", text.head_dim, vision.hidden_size // vision.num_heads),
        ("vocabulary / patch", text.vocab_size, vision.patch_size),
    ]
    return [{"": name, "text": a, "vision": b} for name, a, b in rows]


def linear_flops(model: nn.Module, request: Request) -> int:
    """FLOPs of the linear layers alone, by formula: what `counted_products` should count."""
    return sum(p.first_token_flops for p in parts(model, request) if p.parameters)


def part_rows(rows: Iterable[Part]) -> list[dict[str, Any]]:
    """Parts for display: millions of parameters, GFLOP to the first token, MB a decode step."""
    return [
        {
            "part": part.name,
            "parameters, M": part.parameters / 1e6,
            "first token, GFLOP": part.first_token_flops / 1e9,
            "decode step, MB": part.decode_bytes / 1e6,
        }
        for part in rows
    ]


def photo_request(height: int, width: int, text_tokens: int = 30) -> Request:
    """One image of this many pixels (multiples of 32) and a short question."""
    return Request((1, height // 16, width // 16), (height // 32) * (width // 32) + text_tokens)


def config_tiny() -> Any:
    """The configuration of the embedded model."""
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig.from_pretrained(models.TINY, local_files_only=True)


def config_2b() -> Any:
    """The configuration of Qwen3-VL-2B-Instruct, with the embedded tokenizer's special ids."""
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(**models.config_2b(config_tiny()))
