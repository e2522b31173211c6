"""Product, bias and GELU against the library's three steps."""

import random
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from vlmopt.bench.compilations import compiled
from vlmopt.kernels import bias_gelu as module
from vlmopt.kernels import oracle
from vlmopt.tests.kernels import checks

OP = "bias_gelu"


def the_other_form(x, weight, bias, approximate):
    return module.bias_gelu_ref(x, weight, bias, "none" if approximate == "tanh" else "tanh")


@checks.variants(module)
def test_agrees(case, dtype):
    checks.agrees(module, OP, case, dtype)
    args = checks.arguments(module, case, dtype)
    checks.same_bits([module.bias_gelu(*args)], [module.launch(*args)])
    assert oracle.compare(module, OP, args, module.second_pass).ok


@pytest.mark.parametrize("form", module.FORMS)
def test_the_activation_alone_over_its_whole_range(form):
    x = torch.linspace(-40, 40, 4099, device=checks.DEVICE)[None]
    special = torch.tensor([[0.0, -0.0, 1e30, -1e30, float("nan")]], device=checks.DEVICE)
    for values in (x, special):
        expected = F.gelu(values, approximate=form)
        got = module.gelu_(values.clone(), form)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert module.gelu_(torch.full((1, 1), float("inf"), device=checks.DEVICE), form).item() == float("inf")


def test_negative_values_do_not_cancel():
    """At -4.5 the library's 1 + tanh(u) has few digits left; the kernel's form keeps them."""
    x = torch.full((1, 8), -4.5, device=checks.DEVICE)
    truth = F.gelu(x.double(), approximate="tanh")
    error = (module.gelu_(x.clone(), "tanh").double() / truth - 1).abs().max()
    assert error < 1e-5 < (F.gelu(x, approximate="tanh").double() / truth - 1).abs().max()


@pytest.mark.parametrize("index", [0, 1])
def test_the_oracle_rejects_the_other_form(index):
    case = [case for case in module.CASES if case.cpu][index]
    checks.rejects(module, OP, checks.arguments(module, case), the_other_form)


def test_every_element_is_written_and_inputs_stay():
    checks.writes_everything(module, OP, checks.small(module))
    checks.leaves_inputs_alone(module, OP, checks.small(module))


def test_rows_may_lie_apart():
    """To the oracle's bounds, not bit by bit: the library may choose another product for another stride."""
    x, weight, bias, form = checks.small(module)
    assert oracle.compare(module, OP, (checks.spread(x), checks.spread(weight), bias, form)).ok


def test_no_rows_give_no_rows():
    x, weight, bias, form = checks.small(module)
    assert module.bias_gelu(x[:0], weight, bias, form).shape == (0, len(weight))


def test_poison_stays_in_its_row():
    def poison(args, value):
        args[0][1, 3] = value

    checks.keeps_poison_in_its_row(
        module, OP, checks.small(module), poison, lambda out: [torch.cat([y[:1], y[2:]]) for y in out]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, b: (x.double(), w, b, "tanh"), "float64"),
        (lambda x, w, b: (x, w.half(), b, "tanh"), "float16"),
        (lambda x, w, b: (x, w, b, "sigmoid"), "'sigmoid'"),
        (lambda x, w, b: (x[None], w, b, "tanh"), "[rows, in]"),
        (lambda x, w, b: (x, w[:, :-1], b, "tanh"), "do not fit"),
        (lambda x, w, b: (x, w, b[:-1], "tanh"), "do not fit"),
        (lambda x, w, b: (x.t().contiguous().t(), w, b, "tanh"), "not contiguous"),
        (lambda x, w, b: (x, w.to("meta"), b, "tanh"), "one device"),
    ],
)
def test_refuses(change, words):
    x, weight, bias, _ = checks.small(module)
    checks.refuses(module, OP, change(x, weight, bias), words)


def test_is_registered():
    checks.is_registered(torch.ops.vlmopt.bias_gelu.default, checks.small(module))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 77, 3072])
def test_the_epilogue_is_the_tanh_form(rows):
    """Products that are exact, where the forms differ by up to 45 %: a fall-back to erf would be seen."""
    values = torch.linspace(-4, -1, 4096, device="cuda").bfloat16()
    weight = torch.zeros(4096, 1024, device="cuda", dtype=torch.bfloat16)
    weight[:, 7] = values
    x = torch.zeros(rows, 1024, device="cuda", dtype=torch.bfloat16)
    x[:, 7] = 1
    got = module.launch(x, weight, torch.zeros_like(values), "tanh").double()
    tanh, erf = ((got / F.gelu(values.double(), approximate=form) - 1).abs().max() for form in ("tanh", "none"))
    assert tanh < 0.02 and erf > 0.2


@pytest.mark.gpu
@pytest.mark.parametrize("case", module.CASES[:2], ids=lambda case: case.name)
def test_replays_the_same_bits(case):
    checks.replays(module, OP, checks.arguments(module, case, torch.bfloat16))


@pytest.mark.gpu
def test_a_new_size_compiles_nothing():
    sizes = [64, *random.Random(0).sample(range(1, 5000), 50)]
    products = [torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for rows in sizes]
    assert len(compiled([lambda: module.gelu_(products[0], "tanh")])) <= 1
    assert compiled(partial(module.gelu_, y, "tanh") for y in products[1:]) == []
