"""Residual add and LayerNorm against the library's."""

import random
from functools import partial

import pytest
import torch

from vlmopt.bench.compilations import compiled
from vlmopt.kernels import add_layer_norm as module
from vlmopt.tests.kernels import checks

OP = "add_layer_norm"


def without_centring(x, residual, weight, bias, eps):
    h = residual + x
    return torch.nn.functional.rms_norm(h, h.shape[-1:], weight, eps) + bias, h


def made(rows, width, residual=True, dtype=torch.float32):
    generator = torch.Generator(checks.DEVICE).manual_seed(0)
    return module.make({"rows": rows, "width": width, "residual": residual}, checks.DEVICE, dtype, generator)


@checks.variants(module)
def test_agrees(case, dtype):
    checks.agrees(module, OP, case, dtype)
    args = checks.arguments(module, case, dtype)
    checks.same_bits(module.add_layer_norm(*args), module.launch(*args))


@checks.variants(module)
def test_the_sum_has_its_reference_s_bits(case, dtype):
    args = checks.arguments(module, case, dtype)
    assert torch.equal(module.add_layer_norm(*args)[1], module.add_layer_norm_ref(*args)[1])


@pytest.mark.parametrize("width", [1, 2, 31, 256, 257, 8192])
def test_widths(width):
    x, residual, weight, bias, eps = made(3, width)
    y, h = module.add_layer_norm(x, residual, weight, bias, eps)
    torch.testing.assert_close((y, h), module.add_layer_norm_ref(x, residual, weight, bias, eps), rtol=1e-5, atol=1e-5)


def test_a_large_mean_does_not_cancel():
    """A one-pass variance E[h²] - E[h]² loses all of its digits here."""
    x, _, weight, bias, eps = made(4, 192, residual=False)
    truth = module.add_layer_norm_ref((x + 3000).double(), None, weight.double(), bias.double(), eps)[0]
    torch.testing.assert_close(
        module.add_layer_norm(x + 3000, None, weight, bias, eps)[0].double(), truth, rtol=0, atol=1e-2
    )
    h = (x + 3000).float()
    one_pass = (h - h.mean(-1, keepdim=True)) * ((h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True) ** 2).rsqrt()
    assert not (one_pass * weight + bias - truth).abs().max() < 1e-2


def test_the_oracle_rejects_a_norm_without_centring():
    checks.rejects(module, OP, checks.small(module), without_centring)


def test_every_element_is_written_and_inputs_stay():
    checks.writes_everything(module, OP, checks.small(module))
    checks.leaves_inputs_alone(module, OP, checks.small(module))


def test_without_a_residual_h_is_x():
    x, residual, weight, bias, eps = made(3, 40, residual=False)
    assert residual is None
    assert module.add_layer_norm(x, None, weight, bias, eps)[1] is x
    assert module.launch(x, None, weight, bias, eps)[1] is x


def test_rows_may_lie_apart_and_have_any_leading_shape():
    args = checks.small(module)
    checks.takes_strides(module, OP, args, [0, 1])
    x, residual, *rest = made(6, 77)
    deep = module.add_layer_norm(x.view(2, 3, 77), residual.view(2, 3, 77), *rest)
    flat = module.add_layer_norm(x, residual, *rest)
    checks.same_bits([out.view(2, 3, 77) for out in flat], deep)


def test_no_rows_give_no_rows():
    x, residual, *rest = made(3, 40)
    assert [out.shape for out in module.add_layer_norm(x[:0], residual[:0], *rest)] == [(0, 40)] * 2


@pytest.mark.parametrize("argument", [0, 1])
def test_poison_stays_in_its_row(argument):
    def poison(args, value):
        args[argument][1, 3] = value

    checks.keeps_poison_in_its_row(
        module, OP, checks.small(module), poison, lambda out: [torch.cat([y[:1], y[2:]]) for y in out]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, r, w, b: (x.double(), r, w, b), "float64"),
        (lambda x, r, w, b: (x, r.half(), w, b), "float16"),
        (lambda x, r, w, b: (x, r[:-1], w, b), "one shape"),
        (lambda x, r, w, b: (x, r, w[:-1], b), "width of x"),
        (lambda x, r, w, b: (x, r, w, b[None]), "width of x"),
        (lambda x, r, w, b: (x.t().contiguous().t(), r, w, b), "not contiguous"),
        (lambda x, r, w, b: (x.expand(2, *x.shape), r.expand(2, *r.shape), w, b), "not evenly spaced"),
        (lambda x, r, w, b: (x.repeat(1, 200), None, w.repeat(200), b.repeat(200)), "1 to 8192"),
        (lambda x, r, w, b: (x[:, :0], None, w[:0], b[:0]), "1 to 8192"),
        (lambda x, r, w, b: (x, r.to("meta"), w, b), "one device"),
    ],
)
def test_refuses(change, words):
    *args, eps = checks.small(module)
    checks.refuses(module, OP, (*change(*args), eps), words)


def test_is_registered():
    x, residual, weight, bias, eps = checks.small(module)
    checks.is_registered(torch.ops.vlmopt.add_layer_norm.default, (x, residual, weight, bias, eps))
    checks.is_registered(torch.ops.vlmopt.layer_norm.default, (x, weight, bias, eps))


@pytest.mark.gpu
@pytest.mark.parametrize("case", module.CASES[:3], ids=lambda case: case.name)
def test_replays_the_same_bits(case):
    checks.replays(module, OP, checks.arguments(module, case, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [True, False])
def test_a_new_size_compiles_nothing(residual):
    sets = [made(rows, 1024, residual, torch.bfloat16) for rows in (64, *random.Random(0).sample(range(1, 5000), 50))]
    assert len(compiled([lambda: module.launch(*sets[0])])) <= 1
    assert compiled(partial(module.launch, *args) for args in sets[1:]) == []
