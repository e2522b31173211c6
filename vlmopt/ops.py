"""The table of fused steps: the only way by which stages reach a kernel.

An entry is a reference or a kernel, chosen by the config; switching one entry is an ablation. An entry that covers
several others has no default: a stage calls it where the table offers it, and else the entries that it covers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType, ModuleType

from vlmopt.config import OptimizeConfig
from vlmopt.errors import VlmoptError
from vlmopt.kernels import (
    add_layer_norm,
    add_rms_norm,
    bias_gelu,
    decode_attention,
    decode_attention_cluster,
    decode_layer,
    deepstack_add,
    kv_fp8,
    linear,
    linear_swiglu,
    lm_head,
    merge_embeddings,
    patch_embed,
    prefill_attention,
    qkv_norm_rope_cache,
    swiglu,
    vision_attention,
    vision_rotary,
)


@dataclass(frozen=True)
class Ops:
    """Every entry's implementation; the defaults are the references."""

    # text
    add_rms_norm: Callable = add_rms_norm.add_rms_norm_ref
    linear: Callable = linear.linear_ref
    qkv_norm_rope_cache: Callable = qkv_norm_rope_cache.qkv_norm_rope_cache_ref
    prefill_attention: Callable = prefill_attention.prefill_attention_ref
    decode_attention_masked: Callable = decode_attention.decode_attention_masked_ref
    decode_attention: Callable = decode_attention.decode_attention_ref
    swiglu: Callable = swiglu.swiglu_ref
    lm_head_logits: Callable = lm_head.lm_head_logits_ref
    lm_head_argmax: Callable = lm_head.lm_head_argmax_ref
    # text, covering several: linear and swiglu; attention over a live length that the device knows; a layer of a decode
    # step; all of a step
    linear_swiglu: Callable | None = None
    decode_attention_live: Callable | None = None
    decode_layer: Callable | None = None
    decode_step: Callable | None = None
    # between vision and text
    deepstack_add: Callable = deepstack_add.deepstack_add_ref
    merge_embeddings: Callable = merge_embeddings.merge_embeddings_ref
    # vision
    patch_embed: Callable = patch_embed.patch_embed_ref
    add_layer_norm: Callable = add_layer_norm.add_layer_norm_ref
    vision_rotary: Callable = vision_rotary.vision_rotary_ref
    vision_attention: Callable = vision_attention.vision_attention_ref
    bias_gelu: Callable = bias_gelu.bias_gelu_ref


ENTRIES = tuple(field.name for field in fields(Ops))
padded_tiles = vision_attention.padded_tiles
"""What `vision_attention` takes in place of lengths where they are to be data on the device."""
KERNELS: Mapping[str, ModuleType] = MappingProxyType(
    {
        "add_rms_norm": add_rms_norm,
        "linear": linear,
        "linear_swiglu": linear_swiglu,
        "qkv_norm_rope_cache": qkv_norm_rope_cache,
        "decode_attention_live": decode_attention_cluster,
        "decode_layer": decode_layer,
        "swiglu": swiglu,
        "lm_head_logits": lm_head,
        "lm_head_argmax": lm_head,
        "deepstack_add": deepstack_add,
        "merge_embeddings": merge_embeddings,
        "add_layer_norm": add_layer_norm,
        "vision_rotary": vision_rotary,
        "vision_attention": vision_attention,
        "prefill_attention": prefill_attention,
        "patch_embed": patch_embed,
        "bias_gelu": bias_gelu,
    }
)
"""Entries that have a kernel; one is added here once it has been measured to win, which its notebook's record shows."""
PLAIN_CACHE_ALONE = ("decode_layer",)
"""Entries whose kernels read a cache in the model's dtype and no other."""
to_fp8 = kv_fp8.to_fp8
"""How a cache of eight bits holds a prompt's keys and values."""


def kernels_of(config: OptimizeConfig) -> tuple[str, ...]:
    """Names of the entries that `config` serves by a kernel.

    Raises:
        VlmoptError: the config names an entry that does not exist, or has no kernel, or none for its cache.
    """
    if config.kernels == "none":
        return ()
    if config.kernels == "all":
        return tuple(name for name in KERNELS if not (config.has_fp8_cache and name in PLAIN_CACHE_ALONE))
    for name in config.kernels:
        if config.has_fp8_cache and name in PLAIN_CACHE_ALONE:
            raise VlmoptError(f"the kernel of {name!r} reads no cache of eight bits; leave out it or kv_cache_dtype")
        if name not in ENTRIES:
            raise VlmoptError(f"ops has no entry {name!r}; entries are {', '.join(ENTRIES)}")
        if name not in KERNELS:
            raise VlmoptError(f"entry {name!r} has no kernel; entries with one: {', '.join(KERNELS)}")
    return config.kernels


def launcher(name: str) -> Callable:
    """The raw launcher of an entry's kernel."""
    module = KERNELS[name]
    return getattr(module, f"launch_{name}", None) or module.launch


def table(config: OptimizeConfig, checked: bool = False) -> Ops:
    """The table that `config` asks for (see `kernels_of` for the errors).

    With `checked` kernels are the registered ops, which look at their arguments first and refuse what they cannot take.
    Over a cache of eight bits attention is the kernel in Triton on Hopper too.
    """
    found = {name: launcher(name) for name in kernels_of(config)}
    if config.has_fp8_cache and "decode_attention_live" in found:
        found["decode_attention_live"] = decode_attention.launch
    ops = Ops(**{name: getattr(KERNELS[name], name, fn) if checked else fn for name, fn in found.items()})
    attending = ("decode_attention", "decode_attention_masked") if config.has_fp8_cache else ()
    return replace(ops, **{name: kv_fp8.widened(getattr(ops, name)) for name in attending})
