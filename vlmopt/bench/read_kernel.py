"""A Triton kernel that reads a buffer once and writes next to nothing: the read-only ceiling of a GPU's memory.

Imported only where a GPU is measured (`roofline.read_rate`).
"""

import torch
import triton
import triton.language as tl

BLOCK_N = 2048
STEPS = 8  # loads in flight per program
CHUNK = BLOCK_N * STEPS  # elements a program reads


@triton.jit
def _partial_sums(x_ptr, partial_ptr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    offsets = program * (BLOCK_N * STEPS) + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for step in tl.static_range(STEPS):
        total += tl.load(x_ptr + offsets + step * BLOCK_N)
    tl.store(partial_ptr + program, tl.sum(total))


def partial_sums(x: torch.Tensor, partial: torch.Tensor) -> torch.Tensor:
    """Read all of `x` (float32, contiguous, a multiple of `CHUNK` elements) into `partial`, one sum per chunk.

    Raises:
        ValueError: `x` is not of that form, or `partial` does not hold one float32 per chunk.
    """
    chunks, rest = divmod(x.numel(), CHUNK)
    if rest or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"partial_sums reads contiguous float32 in multiples of {CHUNK} elements")
    if partial.numel() != chunks or partial.dtype != torch.float32:
        raise ValueError(f"partial_sums needs {chunks} float32 for its sums")
    _partial_sums[(chunks,)](x, partial, BLOCK_N=BLOCK_N, STEPS=STEPS, num_warps=8)
    return partial
