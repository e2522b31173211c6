"""Dependent launches (GPUs from Hopper on): a kernel's blocks start while the kernel before it still runs.

A kernel of ours waits for its predecessor before it reads or writes anything that another kernel could have written,
and only then lets its own dependents go, so at most two are in flight and all before them have ended (`gemv_ring` lets
them go earlier: behind it more are in flight, and each still waits for the one before it to end). After a kernel that
knows nothing of this, and before one, the stream's usual order holds.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def wait_for_predecessor(USE_PDL: tl.constexpr):
    """Nothing that another kernel wrote may be read, and nothing may be written, before this."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def knows_dependents(x: Tensor) -> bool:
    """Whether kernels on the device of `x` can be launched as dependents."""
    return x.is_cuda and _has_dependents(x.device.index)


@cache
def _has_dependents(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)
