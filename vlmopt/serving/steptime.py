"""The step time of an engine that was not measured: assumed from data sheets, to be replaced by `fit.fit`."""

from dataclasses import dataclass, replace

from vlmopt.errors import VlmoptError
from vlmopt.serving.replica import StepTime


@dataclass(frozen=True)
class Shape:
    """What a model moves and computes: bytes of its weights, FLOPs of a token, bytes of a token in the cache."""

    weights: float
    flops: float
    kv: float

    @classmethod
    def of(cls, parameters: float, layers: int, kv_heads: int, head_size: int = 128, width: int = 2) -> "Shape":
        """A transformer in 16 bits; `width` is the bytes of a cached element (2 for bf16, 1 for fp8)."""
        return cls(2 * parameters, 2 * parameters, 2 * layers * kv_heads * head_size * width)

    def fp8_cache(self) -> "Shape":
        """The same model with half the bytes in the cache."""
        return replace(self, kv=self.kv / 2)


SHAPES = {
    "8B": Shape.of(8.2e9, 36, 8),
    "3B": Shape.of(3.1e9, 36, 2),
    "2B": Shape.of(1.7e9, 28, 8),
}


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


def blocks_in(memory: float, shape: Shape, block_size: int = 16) -> int:
    """Blocks of `block_size` tokens in `memory` bytes.

    Raises:
        VlmoptError: not one fits.
    """
    blocks = int(memory // (shape.kv * block_size))
    if blocks < 1:
        raise VlmoptError(f"{memory:g} bytes hold no block of {block_size} tokens; give more memory")
    return blocks


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
