"""Keys and values in eight bits: e4m3 with a scale for each KV head of a layer, one for keys and one for values.

    x8 = e4m3(x / s),   x ≈ s · x8

`scales` [2, Hkv] fp32 are powers of two, so dividing and multiplying by them rounds nothing, and a value of half
precision is rounded once: to nearest, ties to even, on 3 bits of mantissa (relative error up to 1/16 from s/64 on,
absolute error up to s/1024 below). Beyond 448·s values saturate; a NaN stays one. What a row is stored as depends on
that row alone. `quant.kv_scales` makes scales under which nothing saturates.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmopt.kernels.case import misplaced, refusal

DTYPE = torch.float8_e4m3fn
LARGEST = 448
CAPABILITY = (8, 9)
"""Of the first GPUs that convert e4m3."""


def to_fp8(x: Tensor, scales: Tensor) -> Tensor:
    """x / `scales` as e4m3, saturating; `scales` is broadcast against x."""
    return (x / scales).clamp_(-LARGEST, LARGEST).to(DTYPE)


def from_fp8(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What e4m3 values stand for, in `dtype`, which holds it exactly unless it overflows or underflows."""
    return (x.float() * scales).to(dtype)


def put(cache: Tensor, positions: Tensor, rows: Tensor, scales: Tensor | None) -> None:
    """Write rows [Hkv, T, D] to the positions [T] of a cache [Hkv, capacity, D]; `scales` [Hkv] if it is of e4m3."""
    if scales is not None:  # torch copies rows of e4m3 by index on no CPU
        cache, rows = cache.view(torch.uint8), to_fp8(rows, scales[:, None, None]).view(torch.uint8)
    cache.index_copy_(1, positions, rows)


def widened(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention over q, k, v and more that also takes `scales` [2, Hkv] of caches of e4m3.

    It attends to what these stand for in q's dtype: the whole capacity is made anew for every call.
    """

    @wraps(attend)
    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scales: Tensor | None = None, **named: Any) -> Tensor:
        if scales is not None:
            k, v = (from_fp8(cache, own[:, None, None], q.dtype) for cache, own in zip((k, v), scales, strict=True))
        return attend(q, k, v, *rest, **named)

    return run


@triton.jit
def to_e4m3(x, scale):
    """`to_fp8` of fp32 values; they are on e4m3's grid before they are converted, as the interpreter rounds wrongly."""
    x = tl.div_rn(x, scale)
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power, 0.015625) * 1572864.0  # 1.5 · 2²⁰: the sum's last bit is worth an eighth of the power
    nan = tl.full(x.shape, 0x7FF00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(x == x, (x + shift) - shift, nan).to(tl.float8e4nv)


def caches_refusal(like: Tensor, name: str, scales: Tensor | None, **caches: Tensor) -> str | None:
    """Why a kernel cannot take these caches [Hkv, capacity, D] beside `like`, or None.

    Without scales they must be of its dtype, with them of e4m3.
    """
    if scales is None:
        return refusal(**{name: like}, **caches)
    for key, cache in caches.items():
        if cache.dtype != DTYPE:
            return f"{key} is {cache.dtype}; with scales the kernel takes float8_e4m3fn"
    heads = next(iter(caches.values())).shape[0]
    if scales.dtype != torch.float32 or tuple(scales.shape) != (2, heads) or not scales.is_contiguous():
        return f"scales is {scales.dtype} of shape {tuple(scales.shape)}; give dense float32 (2, {heads})"
    return misplaced(like, name, scales=scales, **caches) or refusal(**{name: like}) or unsupported(like.device)


def unsupported(device: torch.device) -> str | None:
    """Why no kernel can convert e4m3 on this device, or None; the interpreter stands in for a GPU."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        return "float8_e4m3fn needs a GPU of compute capability 8.9 or more; keep the cache in the model's dtype"
    return None
