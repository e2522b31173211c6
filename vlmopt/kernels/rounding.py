"""Attention's weights rounded and, as rounded, added up.

Rounding a copy for the sum compiles to one more conversion a weight, which costs as much as its exponential; here a
matrix instruction adds up what the product with v is about to take.
"""

import triton
import triton.language as tl


def _rounding(kind: str, eighth: str) -> str:
    """PTX that rounds eight weights $12 to $19 of a thread to $0 to $3, and adds them to the sums $20 to $27.

    In a matrix instruction's result these are 16 columns of two rows, as m16n8k16 wants its left side. Its right side
    is 1/8 throughout, so each of 8 columns of sums gets an eighth of what a row has in these 16; the others stay 0.
    """
    packs = [f"cvt.rn.{kind}x2.f32 ${i}, ${2 * i + 13}, ${2 * i + 12};" for i in range(4)]
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    operands = "{$4, $5, $6, $7}, {$0, $1, $2, $3}, {eighth, eighth}, {$20, $21, $22, $23}"
    zeros = [f"mov.b32 ${i}, 0;" for i in range(8, 12)]
    return " ".join(["{", f".reg .b32 eighth; mov.b32 eighth, {eighth};", *packs, product, f"{operands};", *zeros, "}"])


BF16_ROUNDING = tl.constexpr(_rounding("bf16", "0x3e003e00"))
FP16_ROUNDING = tl.constexpr(_rounding("f16", "0x30003000"))
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter runs no PTX."""
ROUNDING_OPERANDS = tl.constexpr(",".join(["=&r"] * 4 + ["=&f"] * 8 + ["f"] * 16))


@triton.jit
def round_weights(weights, total, dtype: tl.constexpr):
    """Weights [M, N], from a product, in this dtype; and `total` [M, N], whose rows' sums grow by them as rounded.

    In fp32 nothing is rounded.
    """
    if INTERPRETED:
        rounded = weights.to(dtype)
        total += rounded.to(tl.float32)
    elif dtype == tl.bfloat16:
        rounded, total = tl.inline_asm_elementwise(
            BF16_ROUNDING, ROUNDING_OPERANDS, [weights, total], dtype=(tl.bfloat16, tl.float32), is_pure=True, pack=8
        )
    elif dtype == tl.float16:
        rounded, total = tl.inline_asm_elementwise(
            FP16_ROUNDING, ROUNDING_OPERANDS, [weights, total], dtype=(tl.float16, tl.float32), is_pure=True, pack=8
        )
    else:
        rounded, total = weights, total + weights
    return rounded, total
