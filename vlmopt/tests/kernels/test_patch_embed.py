"""Patch embedding as a matrix product and a pass that adds positions, against the convolution and its gathers."""

import random
from functools import partial

import pytest
import torch

from vlmopt.bench.compilations import compiled
from vlmopt.kernels import oracle
from vlmopt.kernels import patch_embed as module
from vlmopt.tests.kernels import checks

OP = "patch_embed"


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """On a GPU the library's fp32 convolution is by default one of tf32, which is no reference for fp32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def nearest(pixels, weight, bias, pos_embed, indices, taps):
    return module.patch_embed_ref(pixels, weight, bias, pos_embed, indices, taps.round())


@checks.variants(module)
def test_agrees(case, dtype):
    checks.agrees(module, OP, case, dtype)
    args = checks.arguments(module, case, dtype)
    checks.same_bits([module.patch_embed(*args)], [module.launch(*args)])


@checks.variants(module)
def test_the_positions_have_their_reference_s_bits(case, dtype):
    """Everything after the product: the gathers' sum in the reference's order, its rounding, the add."""
    _, _, _, pos_embed, indices, taps = checks.arguments(module, case, dtype)
    y = torch.randn(len(indices), pos_embed.shape[1], device=checks.DEVICE).to(dtype)
    positions = (torch.nn.functional.embedding(indices, pos_embed) * taps[:, :, None]).sum(1)
    expected = y + positions.to(dtype)
    checks.same_bits([expected], [module.add_positions_(y, pos_embed, indices, taps)])


def test_the_oracle_rejects_the_nearest_position():
    checks.rejects(module, OP, checks.small(module), nearest)


def test_every_element_is_written_and_inputs_stay():
    checks.writes_everything(module, OP, checks.small(module))
    checks.leaves_inputs_alone(module, OP, checks.small(module))


def test_pixels_come_in_any_float_and_their_rows_may_lie_apart():
    """To the oracle's bounds, not bit by bit: the library may choose another product for another stride."""
    pixels, *rest = checks.small(module)
    assert oracle.compare(module, OP, (checks.spread(pixels), *rest)).ok
    assert torch.equal(module.patch_embed(pixels.half(), *rest), module.patch_embed(pixels.half().float(), *rest))


def test_no_rows_give_no_rows():
    pixels, weight, bias, pos_embed, indices, taps = checks.small(module)
    assert module.patch_embed(pixels[:0], weight, bias, pos_embed, indices[:0], taps[:0]).shape == (0, len(weight))


@pytest.mark.parametrize("argument", [0, 5])
def test_poison_stays_in_its_row(argument):
    def poison(args, value):
        args[argument][1, 2] = value

    checks.keeps_poison_in_its_row(
        module, OP, checks.small(module), poison, lambda out: [torch.cat([y[:1], y[2:]]) for y in out]
    )


@pytest.mark.parametrize(
    ("argument", "change", "words"),
    [
        (0, lambda pixels: pixels.long(), "int64"),
        (0, lambda pixels: pixels[:, :-1], "the weight's patch"),
        (0, lambda pixels: pixels[None], "the weight's patch"),
        (0, lambda pixels: pixels.to("meta"), "pixels is on meta"),
        (1, lambda weight: weight.double(), "float64"),
        (1, lambda weight: weight.transpose(2, 1).contiguous().transpose(2, 1), "weight is not contiguous"),
        (2, lambda bias: bias[:-1], "do not fit"),
        (3, lambda pos_embed: pos_embed[:, :-1], "do not fit"),
        (3, lambda pos_embed: pos_embed.half(), "float16"),
        (3, lambda pos_embed: checks.spread(pos_embed), "pos_embed is not contiguous"),
        (4, lambda indices: indices.int(), "torch.int64"),
        (4, lambda indices: indices.t().contiguous().t(), "indices is not contiguous"),
        (5, lambda taps: taps.half(), "torch.float32"),
        (5, lambda taps: taps[:-1], "torch.float32"),
    ],
)
def test_refuses(argument, change, words):
    args = list(checks.small(module))
    args[argument] = change(args[argument])
    checks.refuses(module, OP, args, words)


def test_is_registered():
    checks.is_registered(torch.ops.vlmopt.patch_embed.default, checks.small(module))


@pytest.mark.gpu
def test_replays_the_same_bits():
    checks.replays(module, OP, checks.arguments(module, module.CASES[0], torch.bfloat16))


@pytest.mark.gpu
def test_a_new_size_compiles_nothing():
    generator = torch.Generator("cuda").manual_seed(0)
    params = {"hidden": 1024, "patch": (3, 2, 4, 4), "side": 48}
    sizes = [64, *random.Random(0).sample(range(1, 5000), 50)]
    sets = [module.make({"rows": rows, **params}, "cuda", torch.bfloat16, generator) for rows in sizes]
    assert len(compiled([lambda: module.launch(*sets[0])])) <= 1
    assert compiled(partial(module.launch, *args) for args in sets[1:]) == []
