"""Causal attention of a whole prompt over itself, grouped-query.

    o = softmax(q·kᵀ / √D, causal) · v

q [T, Hq, D], k and v [Hkv, ≥ T, D] (the cache; only the first T rows are read), result [T, Hq·D]. No mask tensor.
Moves 2·T·(Hq + Hkv)·D values; 2·T²·Hq·D FLOPs (half of the square).

The reference is the library's causal attention as stock calls it: class exact. On a Hopper the library gives it to
cuDNN, which is fast at a length that it has seen and builds a plan for tens of milliseconds at every length that it has
not. `launch` is the library's FlashAttention-2 (Dao, 2023) by its own name, which takes strided caches and groups as
they are and any length at once: class near. `vlmopt.workbook.prefill_attention_study` times both.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels.case import Case

MAX_WIDTH = 256
"""Of a head, that FlashAttention-2 takes."""


def prefill_attention_ref(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return [T, Hq·D]."""
    length = q.shape[0]
    k, v = k[None, :, :length], v[None, :, :length]
    # transformers passes is_causal only to queries of several rows; one row over one key needs none
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=length > 1, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def launch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`prefill_attention_ref` at any length without a plan; the reference itself where FlashAttention-2 cannot run."""
    length, _, width = q.shape
    if not q.is_cuda or q.dtype == torch.float32 or width > MAX_WIDTH:
        return prefill_attention_ref(q, k, v)
    k, v = (cache[:, :length].transpose(0, 1) for cache in (k, v))
    ends = _ends(length, q.device)
    out = torch.ops.aten._flash_attention_forward(q, k, v, ends, ends, length, length, 0.0, True, False)[0]
    return out.flatten(1)


@lru_cache(maxsize=64)
def _ends(length: int, device: torch.device) -> Tensor:
    """Where the one sequence begins and ends, as the variable-length form takes it."""
    return torch.tensor([0, length], dtype=torch.int32, device=device)


def cost(*, length: int, heads: int, kv_heads: int, width: int, itemsize: int = 2, **_: int) -> tuple[int, int]:
    """Bytes moved and FLOPs."""
    return 2 * length * (heads + kv_heads) * width * itemsize, 2 * length * length * heads * width


def make(
    params: dict, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of the op for a case's parameters; the cache is full of NaN beyond the prompt."""
    length, width = params["length"], params["width"]
    q = torch.randn(length, params["heads"], width, generator=generator, device=device).to(dtype)
    cache = q.new_full((2, params["kv_heads"], params["capacity"], width), float("nan"))
    cache[:, :, :length] = torch.randn(2, params["kv_heads"], length, width, generator=generator, device=device)
    return q, *cache.unbind(0)


def _case(length: int, capacity: int, heads: int = 16, kv_heads: int = 8, width: int = 128, cpu: bool = False) -> Case:
    shape = {"heads": heads, "kv_heads": kv_heads, "width": width}
    return Case(f"{'small ' if cpu else ''}T {length:,}", {"length": length, "capacity": capacity, **shape}, cpu)


CASES = (
    _case(798, 1024),
    _case(4095, 4096),
    _case(77, 512),
    _case(110, 256, heads=4, kv_heads=2, cpu=True),
    _case(1, 16, heads=4, kv_heads=2, cpu=True),
)
