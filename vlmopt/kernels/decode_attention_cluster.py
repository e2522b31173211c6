"""Attention of one query row, or a few, over the live cache in one launch: CUDA C++ for Hopper's block clusters.

    o = softmax(q·kᵀ / √D) · v   over the first rows of the cache                          `launch`
    q = rope(rms_norm(q)),  k = rope(rms_norm(k));  cache[:, newest] = k, v;  o as above   `launch_qkv`

`launch` computes what `decode_attention.launch` does, whose reference and cases are this one's too: q [R, Hq, D], k and
v [Hkv, capacity, D], `row` [1] int64 on the device, result [R, Hq·D]; the last query sees cache rows 0 … `row`, each
before it one row less. D is 128 or 64, R·Hq/Hkv at most 16, bf16 or fp16. `launch_qkv` starts from the packed product
[R, (Hq + 2·Hkv)·D] with D = 128 and takes the place of `qkv_norm_rope_cache.launch` and `launch` with the same bits in
caches and result: the newest R rows, row − R + 1 … row, are written to both caches. Moves 2·length·Hkv·D values once;
4·R·Hq·D·length FLOPs. Class near.

The cache is cut into chunks of 64 keys at absolute positions. A KV head has a cluster of 16 blocks, however long the
cache: slot s walks chunks s, s + 16, s + 32, …, each of its four warps 16 keys of every chunk, with a running maximum,
sum and output of its own (online softmax) in fp32 and weights rounded to the model's dtype. No warp waits for another
until its keys are done: one of its threads has the copy engine keep the warp's part of the shared memory full of keys
and values. Then a block adds its warps up and sends each block of the cluster that one's 1/16 of the columns through
distributed shared memory; each adds the 16 slots in order and rounds once. No partial result goes through global
memory. Over a capacity above `LONG` the same blocks run on their own instead, wherever there is room for one, since
clusters leave a part of the GPU idle; they leave their sums in global memory, and a second launch adds the slots in
the same order to the same bits. The order of all sums depends on a query's own position alone, so its bits depend on
neither the capacity, nor what lies beyond the live length, nor the other queries. A NaN or infinity in a newest row of
v that not all queries see makes the whole result of a KV head NaN for the queries that see it, and changes nothing for
the others.

A block takes a third of a multiprocessor's shared memory, so that the next launch of a chain can start reading while
this one computes; over a long cache more, to have more keys on their way. Keys and values come in before the kernel
ahead is over, one chunk of each slot: more on their way would stand before q in the memory's queues. What that kernel
may write, q and the newest R rows, is read after it and put over them. So with a dependent launch, `row`, cosines and
sines of the first eight columns and the cache rows before the newest R must have been written before the kernel in
front started to let dependents go. The norms' weights are read early, too.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from vlmopt.kernels import decode_attention, native, qkv_norm_rope_cache
from vlmopt.kernels.case import row_stride

WIDTHS = (64, 128)
QKV_WIDTH = 128
"""The head size from which `launch_qkv` can start."""
COLUMNS = 16
"""The most query rows times heads of a group."""
SLOTS = 16
CHUNK = 64
TREE = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
"""Whether this Triton sums a thread's neighbours as a tree, so that `launch_qkv` gives the bits of its kernel."""


@dataclass(frozen=True)
class Cluster:
    """How the cache is streamed. Changes no bit."""

    stages: int = 3
    """Chunks that a block holds, 32 KB each where D is 128: 2 to 8. From 4 on, a multiprocessor holds one block."""
    ahead: int = 1
    """Chunks beyond these that a block calls into the L2 cache before the kernel ahead is over."""
    spread: bool = False
    """Whether the GPU is asked to put a cluster's blocks on as many multiprocessors as it can."""
    dependent: bool = True
    """Whether the launch is a dependent one."""
    apart: bool = False
    """Whether blocks run on their own, and a second launch adds up what they leave."""


LAUNCH = Cluster(stages=2, spread=True)
LONG_LAUNCH = Cluster(stages=4, ahead=0, apart=True)
LONG = 8192
"""The capacity up to which a KV head's blocks form a cluster, by `LAUNCH`; above it `LONG_LAUNCH` serves."""


@cache
def _function():
    pointer, whole, real, number = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_float, ctypes.c_int
    kinds = (*[pointer] * 11, *[whole] * 8, *[real] * 2, *[number] * 11, ctypes.POINTER(number), pointer)
    return native.function("decode_attention_cluster", "decode_attention_cluster", *kinds)


def supports(q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> str | None:
    """Why `launch` cannot take these arguments, or None."""
    reason = native.refusal(q.device) or decode_attention.supports(q, k, v, row)
    if reason is not None:
        return reason
    n_rows, heads, width = q.shape
    if width not in WIDTHS:
        return f"heads of {width} values; the kernel takes {' and '.join(map(str, WIDTHS))}"
    return _common_refusal(n_rows, heads // k.shape[0], q=q, k=k, v=v)


def supports_qkv(
    products: Sequence[Tensor],
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
) -> str | None:
    """Why `launch_qkv` cannot take these arguments, or None."""
    reason = native.refusal(products[0].device) if products else None
    if reason is not None:
        return reason
    if len(products) != 1 or products[0].dim() != 2:
        return f"{len(products)} products; the kernel takes one packed [R, (Hq + 2·Hkv)·D]"
    tensors = (q_norm, k_norm, eps, cos, sin, k_cache, v_cache)
    rows, columns = products[0].shape
    reason = qkv_norm_rope_cache.supports(products, *tensors, cos.new_empty(rows, dtype=torch.int64))
    if reason is not None:
        return reason
    kv_heads, _, width = k_cache.shape
    if width != QKV_WIDTH:
        return f"heads of {width} values; the kernel takes {QKV_WIDTH}"
    heads = columns // width - 2 * kv_heads
    q = products[0][:, : heads * width].unflatten(1, (heads, width))
    reason = decode_attention.supports(q, k_cache, v_cache, row)
    if reason is not None:
        return reason
    named = {"products[0]": products[0], "q_norm": q_norm, "k_norm": k_norm, "cos": cos, "sin": sin}
    return _common_refusal(rows, heads // kv_heads, **named, k_cache=k_cache, v_cache=v_cache)


def _common_refusal(n_rows: int, group: int, **tensors: Tensor) -> str | None:
    first = next(iter(tensors.values()))
    if first.dtype not in (torch.bfloat16, torch.float16):
        return f"{next(iter(tensors))} is {first.dtype}; the kernel takes bfloat16 and float16"
    if n_rows * group > COLUMNS:
        return f"{n_rows} query rows of {group} heads to a KV head; the kernel takes {COLUMNS} in all"
    for name, tensor in tensors.items():
        strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
        if tensor.data_ptr() % 16 or any(stride % 8 for stride in strides[:-1]):
            return f"a row of {name} does not begin at a multiple of 16 bytes"
    return None


def serves(q: Tensor, k: Tensor) -> bool:
    """Whether `launch` is the one to attend for these rows on their device; cheap on every call.

    The first call on a Hopper GPU compiles the kernel where that has not been done yet; where it cannot be compiled,
    the answer is no.
    """
    return _serves(q.get_device(), q.dtype, q.shape[2], q.shape[0] * q.shape[1] // k.shape[0])


@cache
def _serves(index: int, dtype: torch.dtype, width: int, columns: int) -> bool:
    fits = width in WIDTHS and columns <= COLUMNS and dtype in (torch.bfloat16, torch.float16)
    return fits and index >= 0 and native.works("decode_attention_cluster", index, "decode_attention")


decode_attention_live = decode_attention.decode_attention_live
"""The registered op, which stays with the kernels in Triton."""


def launch_decode_attention_live(q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> Tensor:
    """`launch` where it serves, else `decode_attention.launch`."""
    return (launch if serves(q, k) else decode_attention.launch)(q, k, v, row)


def launch(q: Tensor, k: Tensor, v: Tensor, row: Tensor, *, config: Cluster | None = None) -> Tensor:
    """Attention over the live rows, without checks and with the precondition above.

    Raises:
        VlmoptError: the kernel cannot be compiled or launched.
    """
    n_rows, heads, width = q.shape
    out = torch.empty(n_rows, heads * width, dtype=q.dtype, device=q.device)
    _call((q, None, None, None, None), k, v, row, out, (*_strides(q), 0, 0), 0.0, config)
    return out


def launch_qkv(
    products: Sequence[Tensor],
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    *,
    config: Cluster | None = None,
) -> Tensor:
    """From the packed product to the attention's result, writing the newest rows of both caches; as `launch`.

    Raises:
        VlmoptError: the kernel cannot be compiled or launched.
    """
    (product,) = products
    kv_heads, _, width = k_cache.shape
    out = product.new_empty(product.shape[0], product.shape[1] - 2 * kv_heads * width)
    strides = row_stride(product), width, row_stride(cos), row_stride(sin)
    _call((product, q_norm, k_norm, cos, sin), k_cache, v_cache, row, out, strides, eps, config)
    return out


def clusters(q: Tensor, k: Tensor, v: Tensor, row: Tensor, *, config: Cluster = LAUNCH) -> int:
    """How many clusters the GPU can hold at once; launches nothing."""
    room = ctypes.c_int()
    _call((q, None, None, None, None), k, v, row, None, (*_strides(q), 0, 0), 0.0, config, ctypes.byref(room))
    return room.value


def _call(
    inputs: tuple[Tensor | None, ...],
    k: Tensor,
    v: Tensor,
    row: Tensor,
    out: Tensor | None,
    strides: tuple[int, int, int, int],
    eps: float,
    config: Cluster | None,
    room: object = None,
) -> None:
    """`inputs` are q or the product, then both norms, cos and sin; `strides` those of q, of cos and of sin."""
    kv_heads, capacity, width = k.shape
    q, n_rows = inputs[0], inputs[0].shape[0]
    heads = q.shape[1] if inputs[1] is None else q.shape[1] // width - 2 * kv_heads
    q_row, q_head, cos_row, sin_row = strides
    config = config or (LONG_LAUNCH if capacity > LONG else LAUNCH)
    sums = stats = None
    if config.apart:
        pairs = kv_heads * SLOTS * math.ceil(n_rows * heads // kv_heads / 2)
        sums, stats = q.new_empty(pairs, width, 2, dtype=torch.float32), q.new_empty(pairs, 4, dtype=torch.float32)
    _function()(
        *(native.address(tensor) for tensor in (*inputs, k, v, row, out, sums, stats)),
        *(q_row, q_head, *_strides(k), *_strides(v), cos_row, sin_row),
        *(math.log2(math.e) / math.sqrt(width), eps, capacity, n_rows, heads // kv_heads, kv_heads, width),
        *(k.dtype == torch.float16, config.stages, config.ahead, TREE, config.spread, config.dependent, room),
        native.stream(k.device),
    )


def _strides(x: Tensor) -> tuple[int, int]:
    """The first two strides; one of a single item says nothing, so it is given that of dense rows."""
    second = x.stride(1) if x.shape[1] > 1 else x.shape[2]
    return x.stride(0) if x.shape[0] > 1 else x.shape[1] * second, second
