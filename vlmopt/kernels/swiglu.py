"""Gated activation of the text MLP.

    y = silu(gate) · up

Products come packed as one [rows, 2·n] (gate first) or separately as two [rows, n]; result [rows, n]. silu is rounded
to the model's dtype before the product, as transformers does. The reference is of class exact; on a CPU the strided
halves of a narrow packed row may take another loop than separate rows do, and differ in silu's last bit. Moves 3·n
values a row; about 5·n FLOPs.

The kernel replaces the reference's two launches by one, so that silu never goes to memory. It rounds where the
reference does; its exponential is the hardware's, so a value may differ by one unit in the last place: near.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels.case import Case, Launch, refusal, require, row_stride
from vlmopt.kernels.dependent import knows_dependents, wait_for_predecessor


def swiglu_ref(products: Sequence[Tensor]) -> Tensor:
    """Return [rows, n]."""
    gate, up = products[0].chunk(2, dim=-1) if len(products) == 1 else products
    return F.silu(gate) * up


LAUNCH = Launch(block=1024, warps=4)


@triton.jit
def _swiglu(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_stride_row,
    up_stride_row,
    N_COLS: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    wait_for_predecessor(USE_PDL)
    blocks: tl.constexpr = (N_COLS + BLOCK_N - 1) // BLOCK_N
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N_COLS
    gate = tl.load(gate_ptr + row * gate_stride_row + cols, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride_row + UP_OFFSET + cols, mask=mask).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    activated = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32)
    tl.store(y_ptr + row * N_COLS + cols, (activated * up).to(dtype), mask=mask)


def supports(products: Sequence[Tensor]) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if len(products) not in (1, 2):
        return f"{len(products)} products; give one packed [rows, 2·n] or two [rows, n]"
    reason = refusal(**{f"products[{i}]": product for i, product in enumerate(products)})
    if reason is not None:
        return reason
    shapes = [tuple(product.shape) for product in products]
    if any(len(shape) != 2 for shape in shapes):
        return f"products of shape {shapes[0]}; the kernel takes rows, two dimensions"
    if len(products) == 1 and shapes[0][1] % 2:
        return f"a packed product of {shapes[0][1]} columns; gate and up need an even number"
    if len(set(shapes)) != 1:
        return f"products of the shapes {shapes[0]} and {shapes[1]}; give both one shape"
    return None


def launch(products: Sequence[Tensor], *, config: Launch = LAUNCH) -> Tensor:
    """`swiglu` without its checks."""
    gate, up = products[0], products[-1]
    rows, n = gate.shape
    offset = 0
    if len(products) == 1:
        n = offset = n // 2
    y = torch.empty(rows, n, dtype=gate.dtype, device=gate.device)
    grid = (rows * triton.cdiv(n, config.block),)
    dependent = knows_dependents(gate)
    _swiglu[grid](
        *(gate, up, y, row_stride(gate), row_stride(up), n, offset),
        BLOCK_N=config.block,
        USE_PDL=dependent,
        num_warps=config.warps,
        launch_pdl=dependent,
    )
    return y


@torch.library.custom_op("vlmopt::swiglu", mutates_args=(), schema="(Tensor[] products) -> Tensor")
def swiglu(products: Sequence[Tensor]) -> Tensor:
    """Return [rows, n].

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(products))
    return launch(products)


@swiglu.register_fake
def _(products: Sequence[Tensor]) -> Tensor:
    rows, columns = products[0].shape
    return products[0].new_empty(rows, columns // 2 if len(products) == 1 else columns)


def cost(rows: int, width: int, packed: bool, itemsize: int = 2) -> tuple[int, int]:
    """Bytes moved and FLOPs."""
    return 3 * rows * width * itemsize, 5 * rows * width


def make(params: dict, device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[list[Tensor]]:
    """Random arguments of a case; wide enough that silu is seen on both of its ends."""
    rows, width = params["rows"], params["width"]
    packed = (3 * torch.randn(rows, 2 * width, generator=generator, device=device)).to(dtype)
    return ([packed] if params["packed"] else [half.contiguous() for half in packed.chunk(2, dim=-1)],)


def _case(name: str, rows: int, width: int, packed: bool = True, cpu: bool = False) -> Case:
    params = {"rows": rows, "width": width, "packed": packed}
    return Case(f"{name} {rows}x{width}" + ("" if packed else " separate"), params, cpu)


CASES = (
    _case("decode", 1, 6144),
    _case("prefill", 798, 6144),
    _case("prefill", 798, 6144, packed=False),
    _case("prefill", 4096, 6144),
    _case("odd", 333, 1111),
    _case("small", 1, 768, cpu=True),
    _case("small", 3, 768, packed=False, cpu=True),
    _case("small odd", 7, 1025, cpu=True),
    _case("small odd", 5, 77, packed=False, cpu=True),
)
