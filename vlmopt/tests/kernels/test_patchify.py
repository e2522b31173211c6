"""patchify: the reference against what stock does on a CPU, and the kernel against its reference."""

import pytest
import torch
from torchvision.transforms.v2 import functional as tv
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from vlmopt.kernels import patchify as module
from vlmopt.kernels.case import Case
from vlmopt.kernels.patchify import patchify_ref, taps
from vlmopt.tests.kernels import checks

OP = "patchify"
SMALL = [case for case in module.CASES if case.cpu]
SIZES = [
    *((1, 1, 32, 64), (2, 3, 64, 32), (31, 33, 32, 32), (64, 96, 32, 96), (500, 8, 128, 32), (97, 640, 96, 640)),
    *((640, 97, 320, 64), (1000, 1500, 224, 352), (768, 1024, 736, 1056), (5, 800, 32, 1600)),
]


@pytest.fixture
def args():
    return checks.arguments(module, SMALL[0])


def stock(image, height, width, patch=16, merge=2, frames=2):
    """Pixels and grid by stock's own steps on the CPU."""
    processor = Qwen2VLImageProcessor(image_mean=(0.4, 0.5, 0.6), image_std=(0.2, 0.3, 0.1))
    planes = image[..., :3].permute(2, 0, 1).contiguous()[None]
    resized = tv.resize(planes, [height, width], interpolation=tv.InterpolationMode.BICUBIC, antialias=True)
    options = (True, 1 / 255, True, processor.image_mean, processor.image_std)
    levels = torch.arange(256, dtype=torch.uint8).expand(1, 3, 256)[..., None].contiguous()
    normalised = (processor.rescale_and_normalize(each, *options) for each in (resized, levels))
    pixels, table = next(normalised), next(normalised)
    return processor.patchify(pixels, patch, merge, frames)[0][0], table[0, :, :, 0].contiguous()


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "{}x{}-to-{}x{}".format(*size))
def test_the_reference_is_stock_bit_by_bit(size):
    height, width, *out = size
    params = {"height": height, "width": width, "out_height": out[0], "out_width": out[1]}
    image, columns, column_bits, rows, row_bits, _, *cut = module.make(
        params, "cpu", torch.float32, torch.Generator().manual_seed(0)
    )
    expected, levels = stock(image, *out, *cut)
    got = patchify_ref(image, columns, column_bits, rows, row_bits, levels, *cut)
    checks.same_bits([expected], [got])
    four = torch.cat([image, torch.full_like(image[..., :1], 77)], dim=-1)  # as Pillow keeps a pixel
    checks.same_bits([expected], [patchify_ref(four, columns, column_bits, rows, row_bits, levels, *cut)])


def test_resizing_in_floating_point_is_not_stock():
    """Why the integers are kept: without the bytes between the two passes sharp edges move by many grey levels."""
    image = (torch.rand(3, 150, 150, generator=torch.Generator().manual_seed(0)) > 0.5).to(torch.uint8) * 255
    size, how = [96, 96], {"interpolation": tv.InterpolationMode.BICUBIC, "antialias": True}
    exact = tv.resize(image, size, **how).float()
    rounded = tv.resize(image.float(), size, **how).clamp(0, 255).round()
    assert (exact - rounded).abs().max() > 10


@pytest.mark.parametrize(("n_in", "n_out"), [(1, 32), (31, 32), (33, 32), (640, 32), (4000, 4032), (7, 7)])
def test_weights_of_every_output_add_up_to_one_within_their_precision(n_in, n_out):
    table, bits = taps(n_in, n_out)
    weights = table[1:].long()
    assert table.dtype == torch.int32 and table.shape[1] == n_out
    assert (weights.sum(0) - (1 << bits)).abs().max() <= len(weights) / 2
    assert weights.abs().max() < module.WEIGHT_LIMIT
    assert table[0].min() >= 0 and table[0].max() < n_in


@checks.variants(module)
def test_gives_the_references_bits(case, dtype):
    given = checks.arguments(module, case, dtype)
    assert module.supports(*given) is None
    checks.same_bits([patchify_ref(*given)], [module.patchify(*given)])


def test_the_oracle_rejects_wrong_answers(args):
    checks.rejects(module, OP, args, lambda image, *rest: patchify_ref(image.roll(1, 2), *rest))
    checks.rejects(module, OP, args, lambda image, *rest: patchify_ref(image.roll(1, 0), *rest))
    checks.rejects(module, OP, args, lambda *rest: patchify_ref(*rest).roll(1, 0))
    checks.rejects(module, OP, args, lambda image, c, bits, *rest: patchify_ref(image, c, bits + 1, *rest))


def test_writes_everything_and_leaves_inputs_alone(args):
    checks.writes_everything(module, OP, args)
    checks.leaves_inputs_alone(module, OP, args)


def test_a_fourth_byte_is_not_read(args):
    image, *rest = args
    wide = [torch.cat([image, torch.full_like(image[..., :1], byte)], dim=-1) for byte in (0, 255)]
    expected = module.patchify(image, *rest)
    checks.same_bits([expected, expected], [module.patchify(four, *rest) for four in wide])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda i, c, cb, r, rb, v, *cut: (i.float(), c, cb, r, rb, v, *cut), "image is torch.float32"),
        (lambda i, c, cb, r, rb, v, *cut: (i[..., :2], c, cb, r, rb, v, *cut), "3 or more"),
        (lambda i, c, cb, r, rb, v, *cut: (i[:, ::2], c, cb, r, rb, v, *cut), "image is not contiguous"),
        (lambda i, c, cb, r, rb, v, *cut: (i, c.long(), cb, r, rb, v, *cut), "columns is torch.int64"),
        (lambda i, c, cb, r, rb, v, *cut: (i, c, cb, r[:1], rb, v, *cut), "rows is torch.int32 [1, 8]"),
        (lambda i, c, cb, r, rb, v, *cut: (i, c, cb, taps(20, 12)[0].to(r.device), rb, v, *cut), "12 pixels"),
        (lambda i, c, cb, r, rb, v, *cut: (i, c, cb, r, rb, v[:, :9], *cut), "levels is torch.float32 [3, 9]"),
    ],
)
def test_refuses(args, change, words):
    checks.refuses(module, OP, change(*args), words)


def test_is_registered(args):
    checks.is_registered(module.patchify, args)


@pytest.mark.gpu
@pytest.mark.parametrize("case", module.CASES[:2], ids=lambda case: case.name)
def test_replays_from_a_graph(case):
    checks.replays(module, OP, checks.arguments(module, case))


@pytest.mark.gpu
def test_a_new_size_compiles_nothing():
    base = Case("", {"out_height": 64, "out_width": 96})
    checks.compiles_nothing_new(module, OP, base, height=(2, 900), width=(2, 900))
