"""The step time of an engine that was not measured: assumed from data sheets, to be replaced by `fit.fit`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmopt.errors import VlmoptError
from vlmopt.serving.replica import StepTime
from vlmopt.serving.shapes import kv_bytes


@dataclass(frozen=True)
class Shape:
    """What a step of a model moves and computes: bytes of weights, FLOPs of a token, bytes of a token in the cache."""

    weights: float
    flops: float
    kv: float

    @classmethod
    def of(cls, config: Mapping[str, Any], kv_width: int = 2) -> "Shape":
        """A decoder in 16 bits by its `config.json`; `kv_width` is the bytes of a cached element (2: bf16, 1: fp8)."""
        width, head = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        layer = width * head * (2 * heads + 2 * kv_heads) + 3 * width * config["intermediate_size"]
        parameters = config["num_hidden_layers"] * layer + width * config["vocab_size"]
        return cls(2.0 * parameters, 2.0 * parameters, float(kv_bytes(config, kv_width)))


@dataclass(frozen=True)
class Chip:
    """What a device reaches, assumed: bytes and FLOPs a second; seconds more for a step and for each request in it."""

    bytes_per_s: float
    flops_per_s: float
    step: float
    request: float


H200 = Chip(bytes_per_s=0.8 * 4.8e12, flops_per_s=0.6 * 989e12, step=1.5e-3, request=15e-6)  # shares of the data sheet


def assumed(shape: Shape, chip: Chip = H200) -> StepTime:
    """Weights are read once a step, the cache once a token held, and prompts are bound by computing."""
    return StepTime(
        base=shape.weights / chip.bytes_per_s + chip.step,
        prefill=shape.flops / chip.flops_per_s,
        running=chip.request,
        kv=shape.kv / chip.bytes_per_s,
    )


def speculative(step: StepTime, tokens: float, cost: float) -> StepTime:
    """Seconds of one token where a step takes `cost` times as long and gives `tokens` accepted ones on average.

    Prompt tokens cost what they did. All requests are taken to accept alike, in every step.

    Raises:
        VlmoptError: fewer than one token a step, or a step that takes less than one without speculation.
    """
    if not (tokens >= 1 and cost >= 1):
        raise VlmoptError(f"{tokens} tokens a step at {cost} times its time: both must be 1 or more")
    ratio = cost / tokens
    return StepTime(step.base * ratio, step.prefill, step.running * ratio, step.kv * ratio)
