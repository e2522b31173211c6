"""add_rms_norm: the kernel against its reference."""

import pytest
import torch

from vlmopt.kernels import add_rms_norm as module
from vlmopt.tests.kernels import checks

OP = "add_rms_norm"


@pytest.fixture
def args():
    return checks.small(module)


@checks.variants(module)
def test_agrees_with_the_reference(case, dtype):
    checks.agrees(module, OP, case, dtype)


def test_without_a_residual_h_is_x_itself(args):
    x, _, weight, eps = args
    assert module.add_rms_norm(x, None, weight, eps)[1] is x
    assert module.launch(x, None, weight, eps)[1] is x


def test_takes_more_than_two_dimensions(args):
    x, residual, weight, eps = checks.arguments(module, module.CASES[-2])
    for given in (residual, None):
        flat = module.add_rms_norm(x, given, weight, eps)
        deep = module.add_rms_norm(*(None if t is None else t[None] for t in (x, given)), weight, eps)
        checks.same_bits(flat, [tensor[0] for tensor in deep])


def test_the_oracle_rejects_wrong_answers(args):
    def larger_eps(x, residual, weight, eps):
        return module.add_rms_norm_ref(x, residual, weight, 1e-2)

    def h_without_the_sum(x, residual, weight, eps):
        return module.add_rms_norm_ref(x, residual, weight, eps)[0], x

    checks.rejects(module, OP, args, larger_eps)
    checks.rejects(module, OP, args, h_without_the_sum)


def test_writes_everything_and_leaves_inputs_alone(args):
    checks.writes_everything(module, OP, args)
    checks.leaves_inputs_alone(module, OP, args)


def test_takes_rows_that_lie_apart():
    checks.takes_strides(module, OP, checks.arguments(module, module.CASES[-2]), (0, 1))


@pytest.mark.parametrize("argument", [0, 1])
def test_poison_stays_in_its_row(argument):
    args = checks.arguments(module, module.CASES[-2])

    def poison(own, value):
        own[argument][7, 3] = value

    checks.keeps_poison_in_its_row(
        module, OP, args, poison, lambda out: [torch.cat([tensor[:7], tensor[8:]]) for tensor in out]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, r, w: (x.double(), r, w), "float64"),
        (lambda x, r, w: (x, r.bfloat16(), w), "give all one dtype"),
        (lambda x, r, w: (x.expand(3, -1).t(), r, w), "not contiguous"),
        (lambda x, r, w: (x, r, w[:-1]), "weight has the shape"),
        (lambda x, r, w: (x, r[:, :-1], w), "residual has the shape"),
        (lambda x, r, w: (x.expand(2, 3, -1)[:, :2], None, w), "not contiguous"),
        (lambda x, r, w: (x.new_zeros(1, 8193), None, x.new_ones(8193)), "1 to 8192"),
    ],
)
def test_refuses(args, change, words):
    checks.refuses(module, OP, (*change(*args[:3]), args[3]), words)


def test_is_registered(args):
    checks.is_registered(module.registered, args)
    checks.is_registered(module.registered_alone, (args[0], *args[2:]))


@pytest.mark.gpu
@pytest.mark.parametrize("case", module.CASES[:3], ids=lambda case: case.name)
def test_replays_from_a_graph(case):
    checks.replays(module, OP, checks.arguments(module, case, torch.bfloat16))


def test_a_row_has_the_same_bits_whatever_its_neighbours():
    x, residual, weight, eps = checks.arguments(module, module.CASES[-2])
    alone = module.add_rms_norm(x[4:5], residual[4:5], weight, eps)
    checks.same_bits(alone, [tensor[4:5] for tensor in module.add_rms_norm(x, residual, weight, eps)])


@pytest.mark.gpu
def test_a_new_size_compiles_nothing():
    checks.compiles_nothing_new(module, OP, module.Case("", {"width": 384, "residual": True}), rows=(1, 4096))
