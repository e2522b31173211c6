"""The text kernels inside the language model: on activations captured from it, and by what they make of its time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vlmopt.bench.models import Loaded
from vlmopt.kernels import (
    add_rms_norm,
    deepstack_add,
    merge_embeddings,
    oracle,
    qkv_norm_rope_cache,
    swiglu,
)
from vlmopt.ops import Ops
from vlmopt.stages.connector import slots_of
from vlmopt.stages.decode import decode_step
from vlmopt.stages.prefill import prefill
from vlmopt.stages.tables import rope
from vlmopt.weights import TextWeights, collect

MODULES: dict[str, ModuleType] = {
    "add_rms_norm": add_rms_norm,
    "qkv_norm_rope_cache": qkv_norm_rope_cache,
    "swiglu": swiglu,
    "deepstack_add": deepstack_add,
    "merge_embeddings": merge_embeddings,
}
"""The kernels of this study by the name of their entry in the table of ops."""


@dataclass(frozen=True)
class Prompt:
    """A language model with packed products, and a prompt of T tokens for it, N of them visual with random features."""

    name: str
    weights: TextWeights
    ids: Tensor
    slots: Tensor
    features: Tensor
    """[1 + DeepStack taps, N, hidden]; the first goes into the sequence."""
    angles: tuple[Tensor, Tensor]
    """cos and sin [T + 1, D]."""
    cache: Tensor

    @torch.no_grad()
    def prefill(self, ops: Ops) -> Tensor:
        """The whole prompt; the last hidden row [1, hidden]."""
        length = self.ids.shape[0]
        h = ops.merge_embeddings(self.ids, self.weights.embed, self.slots, self.features[0])
        angles = tuple(table[:length] for table in self.angles)
        rows = torch.arange(length, device=h.device)
        deepstack = list(self.features[1:])
        return prefill(h, angles, self.cache, rows, self.slots, deepstack, self.weights, ops)

    @torch.no_grad()
    def decode(self, ops: Ops) -> Tensor:
        """The token after the prompt; its hidden row [1, hidden]."""
        length = self.ids.shape[0]
        angles = tuple(table[length:] for table in self.angles)
        row = torch.full((1,), length, device=self.ids.device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ops.decode_attention(q, k, v, length + 1)

        return decode_step(self.ids[:1], angles, self.cache, row, attend, self.weights, ops)


def prompt(loaded: Loaded, tokens: int, visual: int, seed: int) -> Prompt:
    """A prompt of random ids with one run of `visual` image tokens in its middle; packs the model's products."""
    weights = collect(loaded.model, packed=True).text
    device, dtype, hidden = weights.embed.device, weights.embed.dtype, weights.embed.shape[1]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(weights.embed.shape[0], (tokens,), generator=generator).to(device)
    taps = min(3, len(weights.layers))
    features = 0.1 * torch.randn(1 + taps, visual, hidden, generator=generator)
    before = (tokens - visual) // 2
    slots = slots_of([before <= t < before + visual for t in range(tokens)]).to(device)
    positions = torch.arange(tokens + 1, device=device).expand(3, -1)
    shape = len(weights.layers), 2, weights.n_kv_heads, tokens + 1, weights.head_dim
    cache = torch.zeros(shape, dtype=dtype, device=device)
    return Prompt(
        *(loaded.name, weights, ids, slots, features.to(device, dtype), rope(positions, weights, dtype), cache)
    )


def table(names: Iterable[str]) -> Ops:
    """The references, with the kernels of these names in their places."""
    return Ops(**{name: MODULES[name].launch for name in names})


def runs(run: Callable[[Ops], Any], names: Iterable[str]) -> dict[str, Callable[[], Any]]:
    """`run` with the references alone, and with each of these entries switched, for `kernel_study.measure_effect`."""
    switched = {f"with {name}": table([name]) for name in names}
    return {who: partial(run, ops) for who, ops in {"references": Ops(), **switched}.items()}


def captured(subject: Prompt, name: str) -> list[tuple[Any, ...]]:
    """Arguments that prefill and decode give to an entry: for every kind of call, those of the deepest layer."""
    reference, found = getattr(Ops(), name), {}

    def record(*args: Any) -> Any:
        kind = str([tuple(tensor.shape) for tensor in oracle.flatten(list(args))])
        written = getattr(MODULES[name], "MUTATES", ())
        found[kind] = tuple(oracle.clone(arg) if i in written else arg for i, arg in enumerate(args))
        return reference(*args)

    ops = Ops(**{name: record})
    subject.prefill(ops)
    subject.decode(ops)
    return list(found.values())


def captured_errors(subject: Prompt, name: str) -> oracle.Errors:
    """The kernel's worst errors on the model's own activations, in units of its reference's."""
    return oracle.worst([oracle.compare(MODULES[name], name, args) for args in captured(subject, name)])
