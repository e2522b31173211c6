"""The Triton kernels of vision and prefill, as the C++ runtime launches them.

Every kernel is launched once by its own launcher, on a little memory of the model's widths, so that Triton compiles and
loads it; what it was called with says the rest: the function's handle, warps, shared bytes, the constants, and which
parameters are left of its signature. Triton folds constants and integers that are 1 out of it, and may rely on pointers
and integers being multiples of 16, which C++ checks at every launch. Rows are never folded: no launcher lets them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmopt.errors import VlmoptError
from vlmopt.kernels import (
    add_layer_norm,
    add_rms_norm,
    bias_gelu,
    deepstack_add,
    merge_embeddings,
    native,
    patch_embed,
    prefill_attention,
    qkv_norm_rope_cache,
    swiglu,
    vision_attention,
    vision_rotary,
)
from vlmopt.weights import TextWeights, VisionWeights, Weights

TYPES = {"i32": "i", "i64": "l", "fp32": "f"}
ROWS = 2
"""Of the little memory: with one alone a stride would say nothing."""


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel; `bridge.cpp` reads it by these names.

    `layout` has one letter for each parameter that is no constant: `p` a pointer, `i` and `l` an integer of 32 and 64
    bits, `f` a float, in upper case where it must be a multiple of 16, and `-` where it was 1 or None and is left out.
    Behind them the kernel takes two pointers to scratch memory, which it does not use.
    """

    function: int
    warps: int
    shared: int
    dependent: bool
    layout: str
    constants: dict[str, int]


@dataclass(frozen=True)
class Gpu:
    """What the C++ runtime needs of a GPU; `bridge.cpp` reads it by these names."""

    driver: str
    """The CUDA driver's library."""
    products: str
    """cuBLASLt's, which torch has loaded."""
    kernels: dict[str, Kernel]
    """By the name that `cuda_device.cpp` knows them by."""
    stream: int
    """On which products are tried before the first call."""


def describe(weights: Weights) -> Gpu:
    """The GPU that holds the weights, which is the current one, with every kernel of the loops compiled and loaded.

    Raises:
        VlmoptError: a kernel was compiled in a way that C++ cannot launch.
    """
    described = {name: _described(name, *launch) for name, launch in launches(weights).items()}
    products = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    return Gpu("libcuda.so.1", products, described, native.stream(weights.text.embed.device))


Launch = tuple[Any, Callable[[], Any]]
"""A Triton kernel, and a call that launches it."""


def launches(weights: Weights) -> dict[str, Launch]:
    """One launch of every kernel and variant that the loops need, by name."""
    return {**_vision(weights.vision), **_text(weights.text)}


def _vision(weights: VisionWeights) -> dict[str, Launch]:
    like = weights.pos_embed
    hidden, group = like.shape[1], weights.merge_size**2
    norm, merger = weights.blocks[0].norm1, weights.merger
    x, joined, qkv = (like.new_zeros(ROWS, width) for width in (hidden, hidden * group, 3 * hidden))
    q, k, v = qkv.view(ROWS, 3, weights.n_heads, -1).unbind(1)
    angles = torch.zeros(ROWS, q.shape[-1], device=like.device)
    indices = torch.zeros(ROWS, patch_embed.TAPS, dtype=torch.int64, device=like.device)

    def layer_norm(rows: Tensor, residual: Tensor | None, width: int) -> Launch:
        # a merger's norm may be wider than a block's; its values do not matter here
        weight, bias = (part if part.shape[0] == width else like.new_zeros(width) for part in (norm.weight, norm.bias))
        return add_layer_norm._add_layer_norm_rows, lambda: add_layer_norm.launch(
            rows, residual, weight, bias, norm.eps
        )

    return {
        "layer_norm": layer_norm(x, None, hidden),
        "layer_norm_joined": layer_norm(joined, None, hidden * group),
        "add_layer_norm": layer_norm(x, x, hidden),
        "positions": (
            patch_embed._add_positions_rows,
            lambda: patch_embed.add_positions_(x, weights.pos_embed, indices, indices.float()),
        ),
        "rotate": (
            vision_rotary._rotate_rows,
            lambda: vision_rotary.rotate_qk(qkv, angles, angles, weights.n_heads),
        ),
        "attend": (
            vision_attention._attend_tile,
            lambda: vision_attention.launch(q.contiguous(), k.contiguous(), v, (ROWS,)),
        ),
        "gelu": (
            bias_gelu._gelu_rows,
            lambda: bias_gelu.gelu_(like.new_zeros(ROWS, merger.fc1.weight.shape[0]), "none"),
        ),
    }


def _text(weights: TextWeights) -> dict[str, Launch]:
    embed, layer = weights.embed, weights.layers[0]
    x, gate_up = (embed.new_zeros(ROWS, width) for width in (embed.shape[1], layer.gate_up[0].weight.shape[0]))
    rows = torch.arange(ROWS, device=embed.device)
    width, values = weights.head_dim, weights.n_kv_heads * weights.head_dim
    packed = embed.new_zeros(ROWS, layer.qkv[0].weight.shape[0])
    k, v = embed.new_zeros(ROWS, 2 * values).chunk(2, dim=-1)
    q, angles = embed.new_zeros(ROWS, packed.shape[1] - 2 * values), embed.new_zeros(ROWS, width)
    caches = embed.new_zeros(2, weights.n_kv_heads, 16, width)

    def rms_norm(residual: Tensor | None) -> Launch:
        norm = layer.input_norm
        return add_rms_norm._add_rms_norm, lambda: add_rms_norm.launch(x, residual, norm.weight, norm.eps)

    def qkv(*products: Tensor) -> Launch:
        norms = layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
        return qkv_norm_rope_cache._qkv_norm_rope_cache, lambda: qkv_norm_rope_cache.launch(
            products, *norms, angles, angles, *caches, rows
        )

    return {
        "rms_norm": rms_norm(None),
        "add_rms_norm": rms_norm(x),
        "qkv": qkv(packed),
        "qkv_apart": qkv(q, k, v),
        "kv": qkv(k[:, :0], k, v),
        "attend_causal": (
            prefill_attention._attend_causal,
            lambda: prefill_attention.launch(q.view(ROWS, -1, width), *caches),
        ),
        "swiglu": (swiglu._swiglu, lambda: swiglu.launch([gate_up])),
        "embed": (merge_embeddings._merge_embeddings, lambda: merge_embeddings.launch(rows, embed, None, None)),
        "merge": (merge_embeddings._merge_embeddings, lambda: merge_embeddings.launch(rows, embed, rows.int(), x)),
        "deepstack": (deepstack_add._deepstack_add, lambda: deepstack_add.launch(x, rows.int(), x)),
    }


def arguments(kernel: Any, launch: Callable[[], Any]) -> tuple[tuple, dict]:
    """Launches, and gives what the kernel was last called with."""
    seen: list[tuple[tuple, dict]] = []

    def note(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))

    kernel.add_pre_run_hook(note)
    try:
        launch()
    finally:
        kernel.pre_run_hooks.remove(note)
    return seen[-1]


def _described(name: str, kernel: Any, launch: Callable[[], Any]) -> Kernel:
    args, kwargs = arguments(kernel, launch)
    compiled = kernel.warmup(*args, grid=(1,), **kwargs)  # found in Triton's cache, since it has just been launched
    metadata = compiled.metadata
    if metadata.num_ctas != 1 or metadata.launch_cooperative_grid:
        raise VlmoptError(f"the kernel {name} needs a cluster or a cooperative launch, which C++ does not make")
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise VlmoptError(f"the kernel {name} needs scratch memory, which C++ does not give")
    names = [parameter.name for parameter in kernel.params]
    constants = {names[path[0]]: value for path, value in compiled.src.constants.items()}
    return Kernel(
        function=compiled.function,
        warps=metadata.num_warps,
        shared=metadata.shared,
        dependent=bool(metadata.launch_pdl),
        layout=layout(kernel.params, compiled.src.signature, compiled.src.attrs),
        constants={name: int(value) for name, value in constants.items() if isinstance(value, int)},
    )


def layout(parameters: list, signature: dict[str, str], attributes: dict[tuple, list]) -> str:
    """`Kernel.layout` from what a compiled kernel says of itself.

    Args:
        parameters: of the kernel, with `name` and `is_constexpr`.
        signature: type by name; "constexpr" also for what was folded.
        attributes: by (index,) of the parameter.

    Raises:
        VlmoptError: a parameter of a type that C++ does not pass.
    """
    letters = []
    for index, parameter in enumerate(parameters):
        if parameter.is_constexpr:
            continue
        kind = signature[parameter.name]
        letter = "-" if kind == "constexpr" else "p" if kind.startswith("*") else TYPES.get(kind)
        if letter is None:
            raise VlmoptError(f"the parameter {parameter.name} is a {kind}, which C++ does not pass")
        divisible = any(attribute[0] == "tt.divisibility" for attribute in attributes.get((index,), ()))
        letters.append(letter.upper() if divisible else letter)
    return "".join(letters)
