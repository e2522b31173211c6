"""Measured ceilings of the machine, and the floors that they put under Qwen3-VL's decode step and prefill.

Ceilings are medians over repeated measurements with random data. On a CPU the same functions take smaller sizes, so
that they answer in seconds. Floors are plain arithmetic on a transformers `Qwen3VLConfig`; they count matrix products
and attention, and leave out norms, rotary and activations, which move and compute next to nothing beside them.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from vlmopt.bench.timing import copies_for_cold_reads, launch_time

GIB = 2**30
COLD_BYTES = 400_000_000  # eight times the L2 cache of an H200
COLD_BYTES_CPU = 64_000_000


@dataclass(frozen=True)
class Ceiling:
    """A measured rate: `unit` is "GB/s" (1e9 bytes) or "TFLOP/s" (1e12); `samples` are single measurements."""

    name: str
    unit: str
    samples: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    def __str__(self) -> str:
        return f"{self.name}: {self.value:,.1f} {self.unit}"


def _on_cuda(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"


def _rates(name: str, unit: str, amount: float, times_ms: Sequence[float]) -> Ceiling:
    scale = {"GB/s": 1e6, "TFLOP/s": 1e9}[unit]
    return Ceiling(name, unit, tuple(amount / ms / scale for ms in times_ms))


def copy_rate(device: torch.device | str, n_bytes: int | None = None) -> Ceiling:
    """Bytes read plus bytes written per second by an elementwise pass over `n_bytes` (2 GiB; 64 MiB on a CPU).

    The pass is a kernel (a negation), not `copy_`: a captured `copy_` is a memory-copy node, which the slower copy
    engine may serve (2.7 TB/s on an H200 whose kernels move 4.3).
    """
    n_bytes = n_bytes or (2 * GIB if _on_cuda(device) else GIB // 16)
    source = torch.empty(n_bytes // 4, dtype=torch.float32, device=device).uniform_()
    target = torch.empty_like(source)
    times = launch_time([lambda: torch.neg(source, out=target)], device=device, replays=25, min_nodes=4)
    return _rates("copy", "GB/s", 2 * 4 * source.numel(), times)


def read_rate(device: torch.device | str, n_bytes: int | None = None) -> Ceiling:
    """Bytes per second of a pass that reads `n_bytes` (4 GiB; 64 MiB on a CPU) and writes next to nothing.

    On CUDA the faster of PyTorch's sum and a Triton kernel of one load per element: a ceiling is what can be reached.
    """
    n_bytes = n_bytes or (4 * GIB if _on_cuda(device) else GIB // 16)
    x = torch.empty(n_bytes // 4, dtype=torch.float32, device=device).uniform_()
    launches = {"read (torch.sum)": lambda: x.sum()}
    if _on_cuda(device):
        from vlmopt.bench.read_kernel import CHUNK, partial_sums

        whole = x[: x.numel() // CHUNK * CHUNK]
        partial = torch.empty(whole.numel() // CHUNK, device=device)
        launches["read (triton)"] = lambda: partial_sums(whole, partial)
    ceilings = [
        _rates(name, "GB/s", 4 * x.numel(), launch_time([launch], device=device, replays=25, min_nodes=4))
        for name, launch in launches.items()
    ]
    return max(ceilings, key=lambda ceiling: ceiling.value)


def gemm_rate(device: torch.device | str, size: int | None = None, dtype: torch.dtype | None = None) -> Ceiling:
    """FLOP rate of a square matrix product on normally distributed data: bf16 8192³ on CUDA, fp32 768³ on a CPU.

    Random data matters: on zeros a chip draws less power and clocks higher.
    """
    size = size or (8192 if _on_cuda(device) else 768)
    dtype = dtype or (torch.bfloat16 if _on_cuda(device) else torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    times = launch_time([lambda: torch.mm(a, b, out=out)], device=device, replays=20, min_nodes=20)
    return _rates(f"gemm {str(dtype).removeprefix('torch.')} {size}", "TFLOP/s", 2 * size**3, times)


def matvec_shapes(config: Any) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the five matrices that a decode step of this model reads, q/k/v and gate/up packed."""
    text = config.text_config
    hidden, attention = text.hidden_size, text.num_attention_heads * text.head_dim
    return {
        "qkv": (attention + 2 * text.num_key_value_heads * text.head_dim, hidden),
        "o": (hidden, attention),
        "gate_up": (2 * text.intermediate_size, hidden),
        "down": (hidden, text.intermediate_size),
        "head": (text.vocab_size, hidden),
    }


def matvec_rates(
    shapes: Mapping[str, tuple[int, int]], device: torch.device | str, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Ceiling]:
    """Bytes per second of the vendor's matrix-vector product (`F.linear` at one row) with cold weights, per shape.

    As many copies of each matrix are cycled through as exceed the caches by far; on CUDA inside one graph of at least
    200 nodes.
    """
    return {name: _matvec_rate(name, rows, columns, device, dtype) for name, (rows, columns) in shapes.items()}


def _matvec_rate(name: str, rows: int, columns: int, device: torch.device | str, dtype: torch.dtype) -> Ceiling:
    n_bytes = rows * columns * dtype.itemsize
    copies = copies_for_cold_reads(n_bytes, COLD_BYTES if _on_cuda(device) else COLD_BYTES_CPU)
    weights = [torch.randn(rows, columns, device=device, dtype=dtype) for _ in range(copies)]
    x = torch.randn(1, columns, device=device, dtype=dtype)
    launches = [lambda w=w: F.linear(x, w) for w in weights]
    times = launch_time(launches, device=device, replays=20 if _on_cuda(device) else 3)
    return _rates(f"matvec {name} {rows}x{columns}", "GB/s", n_bytes, times)


def element_bytes(config: Any) -> int:
    """Bytes of one element in the checkpoint's own dtype, 2 where the config does not name one."""
    dtype = getattr(config, "dtype", None) or getattr(config.text_config, "dtype", None) or torch.bfloat16
    return (getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize


def _layer_elements(config: Any) -> int:
    return sum(rows * columns for name, (rows, columns) in matvec_shapes(config).items() if name != "head")


def decode_bytes(
    config: Any, positions: int = 0, weight_bytes: float | None = None, cache_bytes: float | None = None
) -> int:
    """Bytes that one decode step has to read at batch 1: every layer's matrices, the head, and `positions` cached keys
    and values. `weight_bytes` per weight element (1 for an 8-bit copy) and `cache_bytes` per cached value default to
    the config's dtype."""
    text, own = config.text_config, element_bytes(config)
    weights = text.num_hidden_layers * _layer_elements(config) + text.vocab_size * text.hidden_size
    cache = 2 * text.num_hidden_layers * positions * text.num_key_value_heads * text.head_dim
    sizes = (own if size is None else size for size in (weight_bytes, cache_bytes))
    return sum(round(values * size) for values, size in zip((weights, cache), sizes, strict=True))


def decode_flops(config: Any, positions: int = 0) -> int:
    """FLOPs of one decode step at batch 1 that attends to `positions` positions."""
    text = config.text_config
    weights = text.num_hidden_layers * _layer_elements(config) + text.vocab_size * text.hidden_size
    return 2 * weights + 4 * text.num_hidden_layers * positions * text.num_attention_heads * text.head_dim


def decode_floor_ms(config: Any, positions: int = 0, *, gb_per_s: float, weight_bytes: float | None = None) -> float:
    """Least time of a decode step when memory streams at `gb_per_s` (1e9 bytes)."""
    return decode_bytes(config, positions, weight_bytes) / gb_per_s / 1e6


def vision_flops(config: Any, grid: Sequence[int]) -> int:
    """FLOPs of the vision tower for one image of `grid` = (frames, rows, columns) in patches, mergers included.

    Attention is full within a frame.
    """
    vision = config.vision_config
    frames, rows, columns = (int(side) for side in grid)
    patches, hidden, depth = frames * rows * columns, vision.hidden_size, vision.depth
    patch_input = vision.in_channels * _product(vision.temporal_patch_size, 1) * _product(vision.patch_size, 2)
    block = 4 * hidden**2 + 2 * hidden * vision.intermediate_size
    merged = hidden * vision.spatial_merge_size**2
    mergers = 1 + len(vision.deepstack_visual_indexes)
    return (
        2 * patches * patch_input * hidden
        + depth * (2 * patches * block + 4 * patches * rows * columns * hidden)
        + mergers * 2 * (patches // vision.spatial_merge_size**2) * merged * (merged + vision.out_hidden_size)
    )


def _product(size: int | Sequence[int], dimensions: int) -> int:
    """A patch size is one number for all dimensions or one number each."""
    return size**dimensions if isinstance(size, int) else math.prod(size)


def text_prefill_flops(config: Any, n_tokens: int) -> int:
    """FLOPs of the text model over a prompt of `n_tokens`: causal attention at half the square, the head at one row."""
    text = config.text_config
    pairs = n_tokens * (n_tokens + 1) // 2
    attention = 4 * pairs * text.num_attention_heads * text.head_dim
    layers = text.num_hidden_layers * (2 * n_tokens * _layer_elements(config) + attention)
    return layers + 2 * text.vocab_size * text.hidden_size


def prefill_flops(config: Any, n_tokens: int, grid: Sequence[int] | None = None) -> int:
    """FLOPs up to the first token: the text model over `n_tokens`, and the vision tower where there is an image."""
    return text_prefill_flops(config, n_tokens) + (vision_flops(config, grid) if grid is not None else 0)


def prefill_floor_ms(config: Any, n_tokens: int, grid: Sequence[int] | None = None, *, tflop_per_s: float) -> float:
    """Least time to the first token when matrix products run at `tflop_per_s` (1e12)."""
    return prefill_flops(config, n_tokens, grid) / tflop_per_s / 1e9
