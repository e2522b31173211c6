"""What all kernels share besides their mathematics: named shapes, launch data, and the reasons to refuse a tensor."""

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from vlmopt.errors import VlmoptError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One named shape, shared by a kernel's test, benchmark and notebook."""

    name: str
    """Such as `decode 1x2048` or `prefill 798x2048`."""
    params: dict[str, Any] = field(default_factory=dict)
    """The shape's parameters: the keyword arguments of the module's `cost`, and the first argument of its `make`."""
    cpu: bool = False
    """Whether it is small enough for Triton's interpreter."""


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: found by the notebook's sweep, and the same for any number of rows."""

    block: int
    """Elements of a row, or of several short rows, that one program takes."""
    warps: int


def require(reason: str | None) -> None:
    """Let a kernel run unless there is a reason against it.

    Raises:
        VlmoptError: with the reason.
    """
    if reason is not None:
        raise VlmoptError(reason)


def refusal(**tensors: Tensor | None) -> str | None:
    """Why a kernel cannot take these named tensors, or None: device, dtype, one device and dtype for all, dense rows.

    The values of one row must be neighbours; rows may lie apart. None stands for an absent tensor.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, tensor = next(iter(given.items()))
    for name, other in given.items():
        if other.dtype not in FLOATS:
            return f"{name} is {other.dtype}; the kernel takes float32, bfloat16 and float16"
        if other.dtype != tensor.dtype:
            return f"{name} is {other.dtype} but {first} is {tensor.dtype}; give all one dtype"
        reason = misplaced(tensor, first, **{name: other})
        if reason is not None:
            return reason
    return device_refusal(tensor, first)


def misplaced(like: Tensor, like_name: str, **tensors: Tensor) -> str | None:
    """Why these named tensors, of any dtype, cannot be read beside `like`: their device, or the strides of a row."""
    for name, tensor in tensors.items():
        if tensor.device != like.device:
            return f"{name} is on {tensor.device} but {like_name} is on {like.device}; move them to one device"
        if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"the rows of {name} are not contiguous; call .contiguous() first"
    return None


def device_refusal(tensor: Tensor, name: str) -> str | None:
    """Why no Triton kernel can run where `tensor` lives, or None. The interpreter stands in for a GPU."""
    if triton.knobs.runtime.interpret:
        return None
    if not tensor.is_cuda:
        return f"{name} is on {tensor.device}; the kernel needs a CUDA device"
    if tensor.device.index != torch.cuda.current_device():
        return f"{name} is on {tensor.device}, not on the current device; call torch.cuda.set_device first"
    return None


def row_stride(x: Tensor) -> int:
    """Elements from one row of a 2-d tensor to the next.

    A single row's stride says nothing and can be anything, so it is given the value that compiles no further variant.
    """
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]
