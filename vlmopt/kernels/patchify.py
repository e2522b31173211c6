"""A still image to the rows of patches that the vision tower reads: resized, normalised and cut as stock does, exactly.

    a[y, X, c] = clamp((Σ_k wx[X, k] · image[y, x0(X) + k, c] + half) >> bits)        columns first
    b[Y, X, c] = clamp((Σ_k wy[Y, k] · a[y0(Y) + k, X, c] + half) >> bits)            then rows
    pixels[patch(Y, X), c, frame, Y mod P, X mod P] = levels[c, b[Y, X, c]]           the same in every frame

image [H, W, 3 or more] uint8, of whose values a pixel only red, green and blue are read; columns and rows are tables
from `taps`; levels [3, 256] fp32 is what normalising makes of every grey level; pixels [N, 3·frames·P²] fp32 in the
order of the patch merger. On a CPU torchvision resizes as Pillow does: antialiased bicubic weights in 16-bit fixed
point, and the result rounded and clamped to a byte after the columns and again after the rows. torchvision on a GPU
does neither between the two, which moves sharp edges by dozens of grey levels; so the integers are kept here. Replaces
a copy to planes, the resize, a cast, a subtraction, a division and a permuting copy. Class exact. Must move the image
and the pixels once; the bytes between the two passes stay in the L2.
"""

import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmopt.kernels.case import Case, Launch, device_refusal, require

LAUNCH = Launch(block=128, warps=4)
REACH = 2
"""Bicubic weights vanish two pixels from the centre, in pixels of the coarser side."""
WEIGHT_LIMIT = 1 << 15
MOST_BITS = 22


def taps(n_in: int, n_out: int) -> tuple[Tensor, int]:
    """How `n_in` pixels in a line become `n_out`: the table [1 + K, n_out] int32, and the bits after its binary point.

    Row 0 is the first pixel that each output reads, row 1 + k the weight of the k-th from there; weights that would
    reach beyond the line's end are 0. An unchanged length is one weight of 1. Source: Pillow's resampling, which
    PyTorch's uint8 path on the CPU follows; the arithmetic is in float64, as there.
    """
    if n_in == n_out:
        return torch.stack([torch.arange(n_out), torch.ones(n_out, dtype=torch.int64)]).int(), 0
    scale = n_in / n_out
    stretch = max(scale, 1.0)
    support = REACH * stretch
    centre = scale * np.arange(0.5, n_out)
    first = np.maximum((centre - support + 0.5).astype(np.int32), 0)
    end = np.minimum((centre + support + 0.5).astype(np.int32), n_in)
    pixel = first + np.arange(2 * math.ceil(support) + 1, dtype=np.int32)[:, None]
    weight = _bicubic((pixel - centre + 0.5) * (1 / stretch))
    weight[pixel >= end] = 0.0
    weight /= weight.cumsum(0)[-1]  # added one after the other, as there
    bits = _bits(weight.max())
    weight *= 1 << bits
    weight += np.copysign(0.5, weight)
    return torch.from_numpy(np.concatenate([first[None], weight.astype(np.int32)])), bits


def _bicubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -1/2, in the order of operations of Pillow."""
    x = np.minimum(np.abs(x), REACH)  # where it is exactly 0
    near = (1.5 * x - 2.5) * x * x + 1
    far = -0.5 * (((x - 5) * x + 8) * x - 4)
    return np.where(x < 1, near, far)


def _bits(largest: float) -> int:
    """The most bits after the point with which the largest weight still fits into 16, its sign included."""
    return next((b for b in range(MOST_BITS) if int(0.5 + largest * (2 << b)) >= WEIGHT_LIMIT), MOST_BITS)


def patchify_ref(
    image: Tensor,
    columns: Tensor,
    column_bits: int,
    rows: Tensor,
    row_bits: int,
    levels: Tensor,
    patch: int,
    merge: int,
    frames: int,
) -> Tensor:
    """Return [N, 3·frames·patch²]."""
    resized = _resample(_resample(image[..., :3].int(), columns, column_bits, 1), rows, row_bits, 0)
    height, width, channels = resized.shape
    planes = levels.gather(1, resized.permute(2, 0, 1).reshape(channels, -1).long())
    cut = planes.view(channels, height // (patch * merge), merge, patch, width // (patch * merge), merge, patch)
    patches = cut.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)  # [.., merge, merge, channel, frame, patch, patch]
    count = height * width // patch**2
    return patches.expand(*patches.shape[:5], frames, patch, patch).reshape(count, -1)


def _resample(x: Tensor, table: Tensor, bits: int, dim: int) -> Tensor:
    first, *weights = table
    shape = [-1 if axis == dim else 1 for axis in range(x.ndim)]
    total = torch.full((), (1 << bits) >> 1, dtype=torch.int32, device=x.device)
    for k, weight in enumerate(weights):
        total = total + x.index_select(dim, (first + k).clamp(max=x.shape[dim] - 1)) * weight.view(shape)
    return (total >> bits).clamp(0, 255)


@triton.jit
def _to_level(total, bits):
    return tl.minimum(tl.maximum((total + ((1 << bits) >> 1)) >> bits, 0), 255)


@triton.jit(do_not_specialize=["n_in", "n_out", "pixel_stride", "n_taps", "bits"])
def _resize_columns(image_ptr, table_ptr, out_ptr, n_in, n_out, pixel_stride, n_taps, bits, BLOCK: tl.constexpr):
    """A block of one line's outputs a program; out holds 4 bytes a pixel."""
    line = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, 4)[None, :]
    mask = column < n_out
    first = tl.load(table_ptr + column, mask=mask, other=0)
    source = image_ptr + line * n_in * pixel_stride
    total = tl.zeros((BLOCK, 4), tl.int32)
    for tap in range(n_taps):
        weight = tl.load(table_ptr + (tap + 1) * n_out + column, mask=mask, other=0)
        pixel = first + tap
        inside = (mask & (pixel < n_in))[:, None] & (channel < 3)
        level = tl.load(source + pixel[:, None] * pixel_stride + channel, mask=inside, other=0)
        total += level.to(tl.int32) * weight[:, None]
    place = out_ptr + (line * n_out + column[:, None]) * 4 + channel
    tl.store(place, _to_level(total, bits).to(tl.uint8), mask=mask[:, None])


@triton.jit(do_not_specialize=["n_in", "n_out", "width", "n_taps", "bits"])
def _resize_rows_to_patches(
    lines_ptr,
    table_ptr,
    levels_ptr,
    out_ptr,
    n_in,
    n_out,
    width,
    n_taps,
    bits,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    FRAMES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one output line a program, written to its places in every frame of its patches."""
    line = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, 4)[None, :]
    mask = (column < width)[:, None] & (channel < 3)
    first = tl.load(table_ptr + line)
    total = tl.zeros((BLOCK, 4), tl.int32)
    for tap in range(n_taps):
        weight = tl.load(table_ptr + (tap + 1) * n_out + line)
        source = (first + tap).to(tl.int64)
        place = lines_ptr + (source * width + column[:, None]) * 4 + channel
        level = tl.load(place, mask=mask & (source < n_in), other=0)
        total += level.to(tl.int32) * weight
    value = tl.load(levels_ptr + channel * 256 + _to_level(total, bits), mask=mask, other=0.0)

    area: tl.constexpr = PATCH * PATCH
    grid_row, grid_column = line // PATCH, column // PATCH
    block = (grid_row // MERGE) * (width // (PATCH * MERGE)) + grid_column // MERGE
    patch = (block * MERGE + grid_row % MERGE) * MERGE + grid_column % MERGE
    inside = (line % PATCH) * PATCH + column % PATCH
    out = out_ptr + patch.to(tl.int64)[:, None] * (3 * FRAMES * area) + channel * (FRAMES * area) + inside[:, None]
    for frame in tl.static_range(FRAMES):
        tl.store(out + frame * area, value, mask=mask)


def supports(
    image: Tensor,
    columns: Tensor,
    column_bits: int,
    rows: Tensor,
    row_bits: int,
    levels: Tensor,
    patch: int,
    merge: int,
    frames: int,
) -> str | None:
    """Why the kernel cannot take these arguments, or None. What the tables hold is not read."""
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[2] < 3:
        return f"image is {image.dtype} {list(image.shape)}; give uint8 [height, width, 3 or more]"
    if levels.dtype != torch.float32 or levels.shape != (3, 256):
        return f"levels is {levels.dtype} {list(levels.shape)}; give float32 [3, 256]"
    for name, table in (("columns", columns), ("rows", rows)):
        if table.dtype != torch.int32 or table.ndim != 2 or len(table) < 2:
            return f"{name} is {table.dtype} {list(table.shape)}; give a table that taps made"
        if table.shape[1] == 0 or table.shape[1] % (patch * merge):
            return f"{name} makes {table.shape[1]} pixels, not a multiple of patch · merge = {patch * merge}"
    for name, tensor in (("image", image), ("columns", columns), ("rows", rows), ("levels", levels)):
        if not tensor.is_contiguous():
            return f"{name} is not contiguous; call .contiguous() first"
        if tensor.device != image.device:
            return f"{name} is on {tensor.device} but image is on {image.device}; move them to one device"
    return device_refusal(image, "image")


def launch(
    image: Tensor,
    columns: Tensor,
    column_bits: int,
    rows: Tensor,
    row_bits: int,
    levels: Tensor,
    patch: int,
    merge: int,
    frames: int,
    *,
    config: Launch = LAUNCH,
) -> Tensor:
    """`patchify` without its checks."""
    (lines, n_in, pixel_stride), width, height = image.shape, columns.shape[1], rows.shape[1]
    blocks = triton.cdiv(width, config.block)
    between = torch.empty(lines, width, 4, dtype=torch.uint8, device=image.device)
    _resize_columns[(lines, blocks)](
        *(image, columns, between, n_in, width, pixel_stride, len(columns) - 1, column_bits),
        BLOCK=config.block,
        num_warps=config.warps,
    )
    count, values = height * width // patch**2, 3 * frames * patch**2
    out = torch.empty(count, values, dtype=torch.float32, device=image.device)
    _resize_rows_to_patches[(height, blocks)](
        *(between, rows, levels, out, lines, height, width, len(rows) - 1, row_bits),
        PATCH=patch,
        MERGE=merge,
        FRAMES=frames,
        BLOCK=config.block,
        num_warps=config.warps,
    )
    return out


@torch.library.custom_op(
    "vlmopt::patchify",
    mutates_args=(),
    schema="(Tensor image, Tensor columns, int column_bits, Tensor rows, int row_bits, Tensor levels, int patch, "
    "int merge, int frames) -> Tensor",
)
def patchify(
    image: Tensor,
    columns: Tensor,
    column_bits: int,
    rows: Tensor,
    row_bits: int,
    levels: Tensor,
    patch: int,
    merge: int,
    frames: int,
) -> Tensor:
    """Return [N, 3·frames·patch²] fp32.

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    require(supports(image, columns, column_bits, rows, row_bits, levels, patch, merge, frames))
    return launch(image, columns, column_bits, rows, row_bits, levels, patch, merge, frames)


@patchify.register_fake
def _(image, columns, column_bits, rows, row_bits, levels, patch, merge, frames) -> Tensor:
    count = rows.shape[1] * columns.shape[1] // patch**2
    return levels.new_empty(count, 3 * frames * patch**2)


def cost(
    height: int,
    width: int,
    out_height: int,
    out_width: int,
    patch: int = 16,
    merge: int = 2,
    frames: int = 2,
    itemsize: int = 4,
) -> tuple[int, int]:
    """Bytes that must move: the image's three colours and the fp32 pixels in all frames, once each. No FLOPs."""
    return 3 * height * width + 3 * frames * out_height * out_width * 4, 0


def make(
    params: dict, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, int, Tensor, int, Tensor, int, int, int]:
    """Random arguments of a case; half of the pixels are black or white, where rounding and clamping matter most."""
    height, width = params["height"], params["width"]
    image = torch.randint(256, (height, width, 3), generator=generator, device=device, dtype=torch.uint8)
    hard = torch.randint(2, (height, width, 1), generator=generator, device=device, dtype=torch.bool)
    image = torch.where(hard, (image > 127) * 255, image).to(torch.uint8)
    columns, column_bits = taps(width, params["out_width"])
    rows, row_bits = taps(height, params["out_height"])
    levels = torch.linspace(-1, 1, 256, device=device) * torch.tensor([[1.0], [1.1], [1.2]], device=device)
    cut = (params.get(name, usual) for name, usual in (("patch", 16), ("merge", 2), ("frames", 2)))
    return image, columns.to(device), column_bits, rows.to(device), row_bits, levels, *cut


def _case(name: str, size: tuple[int, int], out: tuple[int, int], cpu: bool = False, **cut: int) -> Case:
    params = {"height": size[0], "width": size[1], "out_height": out[0], "out_width": out[1], **cut}
    return Case(f"{name} {size[0]}x{size[1]} to {out[0]}x{out[1]}", params, cpu)


CASES = (
    _case("photo", (768, 1024), (768, 1024)),
    _case("photo", (765, 1020), (768, 1024)),
    _case("photo", (1536, 2048), (1536, 2048)),
    _case("photo", (3000, 4000), (3008, 4000)),
    _case("odd", (701, 333), (704, 320)),
    _case("small larger", (5, 11), (8, 16), cpu=True, patch=4),
    _case("small smaller", (70, 45), (32, 32), cpu=True),
    _case("small same", (8, 8), (8, 8), cpu=True, patch=4),
    _case("small one pixel", (1, 1), (32, 32), cpu=True),
    _case("small odd patches", (20, 40), (28, 14), cpu=True, patch=7, merge=2, frames=1),
)
