"""The model's tensors by our names, packed where that helps.

This file and `runtime/stock.py` are the only ones that know transformers' attribute names.
"""

from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

from vlmopt.errors import VlmoptError

MODEL_CLASS = "Qwen3VLForConditionalGeneration"
TESTED_TRANSFORMERS = ("5.17", "5.24")
"""The oldest and the newest release of transformers against which the tests have been run (`./run.sh drift`)."""
FREED = "the weights of its text layers were freed; load the model again"


@dataclass(frozen=True)
class Norm:
    """Weight, bias (None for RMSNorm) and epsilon of one normalisation."""

    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class Linear:
    """`weight` [out, in], or a quantised copy in its place, and `bias` [out] or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class TextLayer:
    """One decoder layer. `qkv` and `gate_up` hold one weight when packed, else the separate ones in order.

    `kv_scales` [2, Hkv] are those of its keys and values where a cache holds these in eight bits.
    """

    input_norm: Norm
    qkv: tuple[Linear, ...]
    q_norm: Norm
    k_norm: Norm
    o: Linear
    post_norm: Norm
    gate_up: tuple[Linear, ...]
    down: Linear
    kv_scales: Tensor | None = None


@dataclass(frozen=True)
class TextWeights:
    """The language model; `embed` [vocabulary, hidden], `head` the tied or own output projection."""

    embed: Tensor
    layers: tuple[TextLayer, ...]
    norm: Norm
    head: Linear
    inv_freq: Tensor
    rope_scale: float
    mrope_section: tuple[int, int, int]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int


@dataclass(frozen=True)
class VisionBlock:
    """One block of the vision tower."""

    norm1: Norm
    qkv: Linear
    proj: Linear
    norm2: Norm
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True)
class Merger:
    """2×2 patch merger; `norm_after_shuffle` says whether the norm sees one patch or the four joined."""

    norm: Norm
    norm_after_shuffle: bool
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True)
class VisionWeights:
    """The vision tower; `patch` weight [hidden, channels, frames, height, width], `pos_embed` [side², hidden]."""

    patch: Linear
    pos_embed: Tensor
    blocks: tuple[VisionBlock, ...]
    merger: Merger
    deepstack: dict[int, Merger]
    inv_freq: Tensor
    n_heads: int
    merge_size: int
    side: int


@dataclass(frozen=True)
class Tokens:
    """Ids that the connector needs."""

    image: int
    video: int


@dataclass(frozen=True)
class Weights:
    """Everything that the stages read.

    Where `text` holds quantised copies, `originals` are what they stand for, unless these are to be freed.
    """

    text: TextWeights
    vision: VisionWeights
    tokens: Tokens
    originals: TextWeights | None = None

    @property
    def prompt(self) -> TextWeights:
        """What a prompt's many rows read: the originals where they are kept, since computing is all of their time, so
        that copies of fewer bytes gain nothing."""
        return self.originals or self.text


def refusal(model: nn.Module) -> str | None:
    """Why `model` cannot be served by the stages at all, or None."""
    if type(model).__name__ != MODEL_CLASS or not type(model).__module__.startswith("transformers."):
        return f"it is a {type(model).__name__}; vlmopt serves transformers' {MODEL_CLASS} itself"
    if reason := untested(transformers.__version__) or _foreign(model):
        return reason
    if freed(model):
        return FREED
    text, vision = model.config.text_config, model.config.vision_config
    if text.hidden_act != "silu" or vision.hidden_act != "gelu_pytorch_tanh":
        return f"activations {text.hidden_act}/{vision.hidden_act} are not silu/gelu_pytorch_tanh"
    if text.rope_parameters.get("rope_type", "default") != "default":
        return f"rope type {text.rope_parameters['rope_type']!r} is not 'default'"
    if getattr(text, "attention_bias", False):
        return "its text attention has biases"
    implementations = attention_implementations(model)
    if implementations != ("sdpa", "sdpa"):
        return f"attention implementation {implementations} is not sdpa; load the model with attn_implementation='sdpa'"
    if len({parameter.dtype for parameter in model.parameters()}) != 1:
        return "its parameters have several dtypes"
    if len({parameter.device for parameter in model.parameters()}) != 1:
        return "its parameters lie on several devices"
    return None


def untested(version: str) -> str | None:
    """Why a transformers of this version is not served, or None within the range that the tests have been run on.

    Stock may change in any release what our stages take for given, so what nobody has compared is refused.
    """
    oldest, newest = TESTED_TRANSFORMERS
    if _release(oldest) <= _release(version) <= _release(newest):
        return None
    return f"transformers {version} is outside the tested range; install one from {oldest} to {newest}"


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _foreign(model: nn.Module) -> str | None:
    """The first module that is not torch's or transformers' as it comes: an adapter, a parametrisation, a patch."""
    own = "transformers.", "torch.nn.modules."
    for name, module in model.named_modules():
        cls = type(module)
        if not cls.__module__.startswith(own):
            return f"{name} is a {cls.__module__}.{cls.__name__}, which the stages would pass over; undo that first"
        if not getattr(cls.forward, "__module__", "").startswith(own):
            return f"{cls.__name__}.forward was replaced by {cls.forward!r}; undo that first"
    return None


def attention_implementations(model: nn.Module) -> tuple[str | None, str | None]:
    """The attention implementation of the text model and of the vision tower."""
    # past the configuration's own way of reading, which takes microseconds; this is asked in every call
    plain, config = object.__getattribute__, model.config
    text, vision = (plain(plain(config, name), "_attn_implementation") for name in ("text_config", "vision_config"))
    return text, vision


def collect(model: nn.Module, packed: bool) -> Weights:
    """Name the model's tensors; with `packed`, first move q/k/v and gate/up into joint storage (values unchanged).

    The stock parameters stay the same objects and become views of the packed storage, so an edit in place reaches both.

    Raises:
        VlmoptError: the model cannot be served (see `refusal`).
    """
    if reason := refusal(model):
        raise VlmoptError(f"this model cannot be optimised: {reason}")
    text = _text(model.model.language_model, model.lm_head, packed)
    return Weights(text, _vision(model.model.visual), Tokens(model.config.image_token_id, model.config.video_token_id))


def unpack(model: nn.Module) -> None:
    """Give every packed parameter its own storage again; values are copied bit for bit."""
    for layer in model.model.language_model.layers:
        for linear in _products(layer):
            if linear is not layer.mlp.down_proj:  # which is never packed
                linear.weight.data = linear.weight.data.clone()


def free(model: nn.Module) -> None:
    """Let go of the text layers' products, once quantised copies stand in their place; there is no way back.

    Parameters of no size on the meta device take their places, so that whoever would compute with them or save them
    gets an error and no wrong numbers.
    """
    for layer in model.model.language_model.layers:
        for linear in _products(layer):
            nothing = torch.empty(0, dtype=linear.weight.dtype, device="meta")
            linear.weight = nn.Parameter(nothing, requires_grad=False)


def product_inputs(model: nn.Module) -> dict[str, nn.Module]:
    """By a text layer's product (`layers.0.qkv`, …) a module of the model that is called with the product's input."""
    found = {}
    for index, layer in enumerate(model.model.language_model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        modules = {"qkv": attention.q_proj, "o": attention.o_proj, "gate_up": mlp.gate_proj, "down": mlp.down_proj}
        found |= {f"layers.{index}.{part}": module for part, module in modules.items()}
    return found


def freed(model: nn.Module) -> bool:
    """Whether `free` was called; a model that was made without values, for its shapes, was not freed."""
    return model.model.language_model.layers[0].mlp.down_proj.weight.numel() == 0


def require_originals(model: nn.Module, what: str) -> None:
    """Make sure that the weights have not been freed; `what` says what needs them.

    Raises:
        VlmoptError: they have been.
    """
    if freed(model):
        raise VlmoptError(f"{what}: {FREED}")


def _text(language_model: nn.Module, lm_head: nn.Linear, packed: bool) -> TextWeights:
    config = language_model.config
    join = _pack if packed else _separate
    layers = tuple(
        TextLayer(
            input_norm=_rms_norm(layer.input_layernorm),
            qkv=join(*_inputs(layer.self_attn), beside=layer.self_attn.o_proj),
            q_norm=_rms_norm(layer.self_attn.q_norm),
            k_norm=_rms_norm(layer.self_attn.k_norm),
            o=_linear(layer.self_attn.o_proj),
            post_norm=_rms_norm(layer.post_attention_layernorm),
            gate_up=join(layer.mlp.gate_proj, layer.mlp.up_proj),
            down=_linear(layer.mlp.down_proj),
        )
        for layer in language_model.layers
    )
    rotary = language_model.rotary_emb
    return TextWeights(
        embed=language_model.embed_tokens.weight.detach(),
        layers=layers,
        norm=_rms_norm(language_model.norm),
        head=_linear(lm_head),
        inv_freq=rotary.inv_freq,
        rope_scale=rotary.attention_scaling,
        mrope_section=tuple(rotary.mrope_section),
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=language_model.layers[0].self_attn.head_dim,
        max_positions=config.max_position_embeddings,
    )


def _vision(visual: nn.Module) -> VisionWeights:
    blocks = tuple(
        VisionBlock(
            norm1=_layer_norm(block.norm1),
            qkv=_linear(block.attn.qkv),
            proj=_linear(block.attn.proj),
            norm2=_layer_norm(block.norm2),
            fc1=_linear(block.mlp.linear_fc1),
            fc2=_linear(block.mlp.linear_fc2),
        )
        for block in visual.blocks
    )
    mergers = [_merger(merger) for merger in visual.deepstack_merger_list]
    return VisionWeights(
        patch=_linear(visual.patch_embed.proj),
        pos_embed=visual.pos_embed.weight.detach(),
        blocks=blocks,
        merger=_merger(visual.merger),
        deepstack=dict(zip(visual.deepstack_visual_indexes, mergers, strict=True)),
        inv_freq=visual.rotary_pos_emb.inv_freq,
        n_heads=visual.config.num_heads,
        merge_size=visual.spatial_merge_size,
        side=visual.num_grid_per_side,
    )


def _merger(merger: nn.Module) -> Merger:
    fc1, fc2 = _linear(merger.linear_fc1), _linear(merger.linear_fc2)
    return Merger(_layer_norm(merger.norm), merger.use_postshuffle_norm, fc1, fc2)


def _rms_norm(norm: nn.Module) -> Norm:
    return Norm(norm.weight.detach(), None, norm.variance_epsilon)


def _layer_norm(norm: nn.LayerNorm) -> Norm:
    return Norm(norm.weight.detach(), norm.bias.detach(), norm.eps)


def _linear(module: nn.Module) -> Linear:
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _inputs(attention: nn.Module) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return attention.q_proj, attention.k_proj, attention.v_proj


def _products(layer: nn.Module) -> tuple[nn.Linear, ...]:
    mlp = layer.mlp
    return *_inputs(layer.self_attn), layer.self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj


def _separate(*modules: nn.Linear, beside: nn.Linear | None = None) -> tuple[Linear, ...]:
    return tuple(_linear(module) for module in modules)


def _pack(*modules: nn.Linear, beside: nn.Linear | None = None) -> tuple[Linear, ...]:
    """The modules' weights as one, with that of `beside` behind it in the same storage.

    torch puts parameters of a few MB several to a block of device memory, which is free once all have left it.
    """
    every = [*modules] if beside is None else [*modules, beside]
    storage = torch.cat([module.weight.detach().flatten() for module in every])
    for module, part in zip(every, storage.split([module.weight.numel() for module in every]), strict=True):
        module.weight.data = part.view_as(module.weight)
    rows, columns = sum(module.out_features for module in modules), modules[0].in_features
    return (Linear(storage[: rows * columns].view(rows, columns)),)
