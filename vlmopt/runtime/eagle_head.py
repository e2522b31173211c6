"""The network of an EAGLE-3 head, and the files in which heads are published.

    feature = fc([rows after a low, a middle, a high layer])
    x       = [input_layernorm(embedding of the token that follows); hidden_norm(feature)]
    h       = feature + attention(x);   state = h + mlp(post_attention_layernorm(h));   logits = lm_head(norm(state))

Attention is the model's own but for its width at the input and its missing norms of q and k. The draft vocabulary may
be a part of the model's: token i of it is token i + d2t[i] of the model, and t2d marks those that are in it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmopt.errors import VlmoptError
from vlmopt.weights import TextWeights

WEIGHTS, CONFIG = "model.safetensors", "config.json"
LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Shape:
    """Sizes of a head. `taps` are the model's layers after which it reads rows; `drafted` of `vocabulary` tokens are in
    the draft vocabulary."""

    taps: tuple[int, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    drafted: int
    vocabulary: int
    eps: float = 1e-6


def shape_for(text: TextWeights, taps: Sequence[int] | None = None) -> Shape:
    """A head of the same width as the model's layers, over the whole vocabulary.

    Args:
        taps: None for those of the published heads: the second layer, the one before the middle, the fourth from last.

    Raises:
        VlmoptError: the model has no such layers below its last.
    """
    last = len(text.layers) - 1
    taps = (1, last // 2, last - 3) if taps is None else tuple(taps)
    if len(taps) != 3 or [*taps] != sorted({*taps} & {*range(last)}):
        raise VlmoptError(f"a head reads three layers below the last, in order, not {taps} of {last + 1}; name others")
    vocabulary, hidden = text.embed.shape
    inner = text.layers[0].down.weight.shape[1]
    return Shape(taps, hidden, text.n_heads, text.n_kv_heads, text.head_dim, inner, vocabulary, vocabulary)


class Head(nn.Module):
    """One head; its parameters have the published names. [..., T, hidden] stands for one sequence or several."""

    def __init__(self, shape: Shape, own_embedding: bool = False):
        super().__init__()
        self.shape, hidden = shape, shape.hidden
        self.fc = _linear(len(shape.taps) * hidden, hidden)
        self.midlayer = nn.ModuleDict(
            {
                "input_layernorm": nn.RMSNorm(hidden, shape.eps),
                "hidden_norm": nn.RMSNorm(hidden, shape.eps),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": _linear(2 * hidden, shape.heads * shape.head_dim),
                        "k_proj": _linear(2 * hidden, shape.kv_heads * shape.head_dim),
                        "v_proj": _linear(2 * hidden, shape.kv_heads * shape.head_dim),
                        "o_proj": _linear(shape.heads * shape.head_dim, hidden),
                    }
                ),
                "post_attention_layernorm": nn.RMSNorm(hidden, shape.eps),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": _linear(hidden, shape.inner),
                        "up_proj": _linear(hidden, shape.inner),
                        "down_proj": _linear(shape.inner, hidden),
                    }
                ),
            }
        )
        self.norm = nn.RMSNorm(hidden, shape.eps)
        self.lm_head = _linear(hidden, shape.drafted)
        self.embed_tokens = nn.Embedding(shape.vocabulary, hidden) if own_embedding else None
        self.register_buffer("d2t", torch.zeros(shape.drafted, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(shape.vocabulary) < shape.drafted)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """The features [..., T, hidden] of the rows after each tapped layer."""
        return self.fc(torch.cat([*taps], -1))

    def mix(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """What the layer reads, [..., T, 2 · hidden]: tokens that follow, and the features of the rows they follow."""
        layer = self.midlayer
        return torch.cat([layer["input_layernorm"](embeddings), layer["hidden_norm"](features)], -1)

    def keys(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [..., Hkv, T, D] of what `mix` gave, at the angles cos and sin [T, D]."""
        return _rotate(self._heads("k_proj", x), rope), self._heads("v_proj", x)

    def forward(
        self, x: Tensor, features: Tensor, rope: tuple[Tensor, Tensor], k: Tensor, v: Tensor, seen: Tensor
    ) -> Tensor:
        """The states [..., T, hidden] of rows that attend to keys and values [..., Hkv, S, D] where `seen` [T, S]."""
        layer, q = self.midlayer, _rotate(self._heads("q_proj", x), rope)
        many = self.shape.heads // self.shape.kv_heads
        k, v = (part.repeat_interleave(many, -3) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, seen)
        h = features + layer["self_attn"]["o_proj"](attended.transpose(-3, -2).flatten(-2))
        y, mlp = layer["post_attention_layernorm"](h), layer["mlp"]
        return h + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))

    def logits(self, states: Tensor) -> Tensor:
        """[..., T, drafted]."""
        return self.lm_head(self.norm(states))

    def choose(self, states: Tensor) -> Tensor:
        """The model's ids [..., T] of the likeliest tokens."""
        chosen = self.logits(states).argmax(-1)
        return chosen + self.d2t[chosen]

    def _heads(self, name: str, x: Tensor) -> Tensor:
        return self.midlayer["self_attn"][name](x).unflatten(-1, (-1, self.shape.head_dim)).transpose(-3, -2)


def _linear(width: int, out: int) -> nn.Linear:
    return nn.Linear(width, out, bias=False)


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def load(folder: str | Path, text: TextWeights, taps: Sequence[int] | None = None) -> Head:
    """The head in a folder, for the model of these weights, on the CPU in its own dtype.

    Args:
        folder: holds `model.safetensors` and most often `config.json`. The names in the first may be EAGLE's and
            AngelSlim's (`midlayer.*`) or vLLM's and speculators' (`layers.0.*`), with or without `model.` before.
        taps: the layers whose output it was trained on, where its configuration does not tell and they are not the
            usual ones (see `shape_for`).

    Raises:
        VlmoptError: there is no such file, or the head is another kind's or another model's.
    """
    folder = Path(folder)
    tensors = {_our_name(name): tensor for name, tensor in _read(folder).items()}
    config = _config(folder, text, named=taps is not None)
    shape = shape_for(text, (config.get("eagle_config") or {}).get(LAYERS) if taps is None else taps)
    own_embedding = "embed_tokens.weight" in tensors
    if shape.drafted == _rows(tensors.get("lm_head.weight", torch.tensor(0))):  # then the maps may be left out
        whole = torch.arange(shape.vocabulary)
        tensors = {"d2t": torch.zeros_like(whole), "t2d": whole >= 0, **tensors}
    _require_names(folder, tensors, _shapes(shape, own_embedding))
    attention, d = "midlayer.self_attn", shape.head_dim
    heads, kv_heads = (_rows(tensors[f"{attention}.{name}_proj.weight"]) // d for name in "qk")
    if not heads or not kv_heads or heads % kv_heads:
        raise VlmoptError(f"{folder}: {heads} heads of {d} over {kv_heads}; it is another model's")
    inner, drafted = _rows(tensors["midlayer.mlp.gate_proj.weight"]), _rows(tensors["lm_head.weight"])
    eps = config.get("rms_norm_eps", shape.eps)
    shape = replace(shape, heads=heads, kv_heads=kv_heads, inner=inner, drafted=drafted, eps=eps)
    _require_shapes(folder, tensors, _shapes(shape, own_embedding))
    tensors["d2t"] = tensors["d2t"].long()
    targets = torch.arange(drafted) + tensors["d2t"]
    if targets.min() < 0 or targets.max() >= shape.vocabulary:
        raise VlmoptError(f"{folder}: d2t names tokens beyond the model's {shape.vocabulary}; it is another model's")
    with torch.device("meta"):
        found = Head(shape, own_embedding)
    found.load_state_dict(tensors, assign=True)
    return found


def _our_name(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)


def _read(folder: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(folder / WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise VlmoptError(f"{folder} holds no whole {WEIGHTS}; heads are read from that format alone") from error


def _config(folder: Path, text: TextWeights, named: bool) -> dict:
    """The head's configuration, whose angles must be the model's."""
    path = folder / CONFIG
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise VlmoptError(f"{path} is no JSON; fetch it again") from error
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    if config.get("norm_before_residual"):
        raise VlmoptError(f"{path}: norm_before_residual is on, which is another kind of head")
    if LAYERS in config and not named:
        raise VlmoptError(f"{path}: {LAYERS} may mean before or after these layers; name the taps yourself")
    own = text.inv_freq[1].item() ** (-text.head_dim / 2)
    if theta is not None and abs(theta / own - 1) > 1e-3:
        raise VlmoptError(
            f"{path}: its angles are of base {theta:,.0f} and the model's of {own:,.0f}; it is another model's"
        )
    return config


def _rows(tensor: Tensor) -> int:
    return (*tensor.shape, 0)[0]


def _shapes(shape: Shape, own_embedding: bool) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Head(shape, own_embedding).state_dict().items()}


def _require_names(folder: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, torch.Size]) -> None:
    for name in wanted.keys() - tensors.keys():
        raise VlmoptError(f"{folder}: there is no {name}; it is no EAGLE-3 head of one layer")
    for name in tensors.keys() - wanted.keys():
        raise VlmoptError(f"{folder}: {name} is no part of an EAGLE-3 head of one layer")


def _require_shapes(folder: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, torch.Size]) -> None:
    for name, size in wanted.items():
        if tensors[name].shape != size:
            own, ours = [*tensors[name].shape], [*size]
            raise VlmoptError(f"{folder}: {name} is {own} where this model needs {ours}; it is another model's")
