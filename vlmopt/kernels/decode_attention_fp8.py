"""`decode_attention` over a cache in eight bits: half the bytes of a long context.

    o = softmax(q · (s_k·k8)ᵀ / √D) · (s_v·v8)   over the first cache rows, each query's own the last

q [R, Hq, D], R from 1 to 8; k8 and v8 [Hkv, capacity, D] of e4m3 with `scales` [2, Hkv] as `kv_fp8` describes them;
`row` [1] int64 on the device, the cache row of the last query; result [R, Hq·D] in q's dtype. The kernel is that of
`decode_attention`, which says how it splits the cache and what it asks of a dependent launch. Against float64 over the
same cache it is near; lossy is what the cache holds. Moves 2·length·Hkv·D bytes; 4·R·Hq·D·length FLOPs. Needs a GPU
from Ada on. Hopper's own attention (`decode_attention_cluster`), and with it `decode_layer`, read no such cache.
"""

import torch
from torch import Tensor

from vlmopt.kernels import decode_attention, kv_fp8

launch = decode_attention.launch
supports = decode_attention.supports
decode_attention_fp8 = decode_attention.decode_attention_live
"""The registered op; it takes `scales` last."""


def decode_attention_fp8_ref(q: Tensor, k: Tensor, v: Tensor, row: Tensor, scales: Tensor) -> Tensor:
    """Return [R, Hq·D] over what the cache stands for in q's dtype. Waits for the device."""
    return kv_fp8.widened(decode_attention.decode_attention_live_ref)(q, k, v, row, scales=scales)


def cost(rows: int, heads: int, kv_heads: int, width: int, length: int, itemsize: int = 2, **_: int) -> tuple[int, int]:
    """Bytes moved (the live keys and values once, q and the result) and FLOPs; `itemsize` is q's."""
    moved, flops = decode_attention.cost(rows, heads, kv_heads, width, length, itemsize)
    return moved - 2 * width * length * kv_heads * (itemsize - 1), flops


def make(params: dict, device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Random arguments of a case; the cache is full of NaN beyond the live length, and heads have scales far apart."""
    q, k, v, row = decode_attention.make(params, device, dtype, generator)
    exponents = torch.randint(-9, -3, (2, len(k)), generator=generator, device=device)
    scales = torch.ldexp(torch.ones(2, len(k), device=device), exponents)
    return q, *(kv_fp8.to_fp8(x, own[:, None, None]) for x, own in zip((k, v), scales, strict=True)), row, scales


CASES = decode_attention.CASES
