"""The table of fused steps: the only way by which stages reach a kernel.

An entry is a reference or a kernel, chosen by the config; switching one entry is an ablation.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from vlmopt.config import OptimizeConfig
from vlmopt.errors import VlmoptError
from vlmopt.kernels.add_layer_norm import add_layer_norm_ref
from vlmopt.kernels.add_rms_norm import add_rms_norm_ref
from vlmopt.kernels.bias_gelu import bias_gelu_ref
from vlmopt.kernels.decode_attention import decode_attention_masked_ref, decode_attention_ref
from vlmopt.kernels.deepstack_add import deepstack_add_ref
from vlmopt.kernels.linear import linear_ref
from vlmopt.kernels.lm_head import lm_head_argmax_ref, lm_head_logits_ref
from vlmopt.kernels.merge_embeddings import merge_embeddings_ref
from vlmopt.kernels.patch_embed import patch_embed_ref
from vlmopt.kernels.prefill_attention import prefill_attention_ref
from vlmopt.kernels.qkv_norm_rope_cache import qkv_norm_rope_cache_ref
from vlmopt.kernels.swiglu import swiglu_ref
from vlmopt.kernels.vision_attention import vision_attention_ref
from vlmopt.kernels.vision_rotary import vision_rotary_ref


@dataclass(frozen=True)
class Ops:
    """Every entry's implementation; the defaults are the references."""

    # text
    add_rms_norm: Callable = add_rms_norm_ref
    linear: Callable = linear_ref
    qkv_norm_rope_cache: Callable = qkv_norm_rope_cache_ref
    prefill_attention: Callable = prefill_attention_ref
    decode_attention: Callable = decode_attention_ref
    decode_attention_masked: Callable = decode_attention_masked_ref
    swiglu: Callable = swiglu_ref
    lm_head_logits: Callable = lm_head_logits_ref
    lm_head_argmax: Callable = lm_head_argmax_ref
    # between vision and text
    deepstack_add: Callable = deepstack_add_ref
    merge_embeddings: Callable = merge_embeddings_ref
    # vision
    patch_embed: Callable = patch_embed_ref
    add_layer_norm: Callable = add_layer_norm_ref
    vision_rotary: Callable = vision_rotary_ref
    vision_attention: Callable = vision_attention_ref
    bias_gelu: Callable = bias_gelu_ref


ENTRIES = tuple(field.name for field in fields(Ops))
KERNELS: dict[str, Callable] = {}
"""Entries that have a kernel; a kernel is added here once its notebook and its record show that it wins."""


def kernels_of(config: OptimizeConfig) -> tuple[str, ...]:
    """Names of the entries that `config` serves by a kernel.

    Raises:
        VlmoptError: the config names an entry that does not exist or has no kernel.
    """
    if config.kernels == "none":
        return ()
    if config.kernels == "all":
        return tuple(KERNELS)
    for name in config.kernels:
        if name not in ENTRIES:
            raise VlmoptError(f"ops has no entry {name!r}; entries are {', '.join(ENTRIES)}")
        if name not in KERNELS:
            raise VlmoptError(f"entry {name!r} has no kernel; entries with one: {', '.join(KERNELS) or 'none yet'}")
    return config.kernels


def table(config: OptimizeConfig) -> Ops:
    """The table that `config` asks for (see `kernels_of` for the errors)."""
    return Ops(**{name: KERNELS[name] for name in kernels_of(config)})
