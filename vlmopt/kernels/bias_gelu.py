"""First product of a vision MLP or merger with its bias and GELU.

    y = gelu(x · Wᵀ + b)

x [rows, in], W [out, in], b [out]; GELU in its tanh form for the blocks and exact (erf) for the mergers. On a GPU the
tanh form is the epilogue of the library's own product (cuBLASLt), which rounds once, after the activation: class near.
The erf form, and what cuBLASLt does not take, stay with the library's two launches: class exact. 2·rows·in·out FLOPs;
must move x, W, b and y once.

`second_pass` is the draft that lost to the epilogue: one Triton pass in place over the library's product, rounded
before the activation as transformers does; it moves y twice more. Its tanh form is computed as x / (1 + exp(-2u)),
which does not cancel for negative x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels.case import Case, Launch, refusal, require

FORMS = ("tanh", "none")
LAUNCH = Launch(block=2048, warps=4)


def bias_gelu_ref(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """Return [rows, out]; `approximate` is "tanh" or "none" as in torch."""
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


@triton.jit
def _gelu_rows(y_ptr, n_cols, TANH: tl.constexpr, BLOCK_N: tl.constexpr):
    """One block of one contiguous row a program, in place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = column < n_cols
    block = y_ptr + row * n_cols + column
    x = tl.load(block, mask=mask, other=0.0).to(tl.float32)
    if TANH:
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # sqrt(2 / pi)
        y = x / (1.0 + tl.exp(-2.0 * u))
    else:
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
    tl.store(block, y.to(y_ptr.dtype.element_ty), mask=mask)


def supports(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    reason = refusal(x=x, weight=weight, bias=bias)
    if reason:
        return reason
    if approximate not in FORMS:
        return f"approximate is {approximate!r}; the kernel knows {' and '.join(map(repr, FORMS))}"
    if x.ndim != 2:
        return f"x is {list(x.shape)}; the kernel takes [rows, in]"
    if weight.ndim != 2 or weight.shape[1] != x.shape[1] or bias.shape != weight.shape[:1]:
        return f"weight {list(weight.shape)} and bias {list(bias.shape)} do not fit rows of {x.shape[1]}"
    return None


def gelu_(y: Tensor, approximate: str, *, config: Launch = LAUNCH) -> Tensor:
    """GELU of contiguous rows [rows, n] in place, without any check."""
    rows, width = y.shape
    grid = (rows, triton.cdiv(width, config.block))
    _gelu_rows[grid](y, width, TANH=approximate == "tanh", BLOCK_N=config.block, num_warps=config.warps)
    return y


def second_pass(x: Tensor, weight: Tensor, bias: Tensor, approximate: str, *, config: Launch = LAUNCH) -> Tensor:
    """The draft: the library's product, then `gelu_`."""
    return gelu_(F.linear(x, weight, bias), approximate, config=config)


def is_stock(*, width: int, out: int, approximate: str, **_: int) -> bool:
    """Whether the library's two launches stay: where cuBLASLt does not take a product, torch falls back to erf."""
    return approximate != "tanh" or bool(width % 8 or out % 8)


def launch(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """`bias_gelu` without its checks and the dispatcher."""
    out, width = weight.shape
    if x.is_cuda and not is_stock(width=width, out=out, approximate=approximate):
        return torch.ops.aten._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return bias_gelu_ref(x, weight, bias, approximate)


@torch.library.custom_op(
    "vlmopt::bias_gelu",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor bias, str approximate) -> Tensor",
)
def _registered(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return launch(x, weight, bias, approximate)


@_registered.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def bias_gelu(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """Return [rows, out]; `approximate` is "tanh" or "none" as in torch.

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(x, weight, bias, approximate))
    return _registered(x, weight, bias, approximate)


def cost(*, rows: int, width: int, out: int, approximate: str, itemsize: int = 2) -> tuple[int, int]:
    """Bytes that the step must move (x, W, b and y once) and FLOPs of the product."""
    return (rows * width + out * width + out + rows * out) * itemsize, 2 * rows * width * out


def make(
    params: dict, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, str]:
    """Arguments of the op for a case's parameters; the product's values are about normal."""
    rows, width, out = params["rows"], params["width"], params["out"]
    x, weight, bias = (
        torch.randn(*shape, generator=generator, device=device) for shape in ((rows, width), (out, width), (out,))
    )
    return x.to(dtype), (weight / width**0.5).to(dtype), bias.to(dtype), params["approximate"]


CASES = (
    Case("block 3072x1024x4096", {"rows": 3072, "width": 1024, "out": 4096, "approximate": "tanh"}),
    Case("merger 768x4096x4096", {"rows": 768, "width": 4096, "out": 4096, "approximate": "none"}),
    Case("odd 77x96x1001", {"rows": 77, "width": 96, "out": 1001, "approximate": "tanh"}),
    Case("odd 5x24x77", {"rows": 5, "width": 24, "out": 77, "approximate": "tanh"}, cpu=True),
    Case("odd erf 5x24x77", {"rows": 5, "width": 24, "out": 77, "approximate": "none"}, cpu=True),
    Case("one row 1x32x4096", {"rows": 1, "width": 32, "out": 4096, "approximate": "tanh"}, cpu=True),
)
