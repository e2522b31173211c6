"""deepstack_add: the kernel against its reference."""

import pytest
import torch

from vlmopt.kernels import deepstack_add as module
from vlmopt.kernels.deepstack_add import deepstack_add_ref
from vlmopt.tests.kernels import checks

OP = "deepstack_add"
ODD = next(case for case in module.CASES if case.name.startswith("small odd"))


@pytest.fixture
def args():
    return checks.arguments(module, ODD)


@checks.variants(module)
def test_agrees_with_the_reference(case, dtype):
    checks.agrees(module, OP, case, dtype)


@pytest.mark.parametrize("rows", [[], [11], [0], [7, 3, 11, 0, 4, 10, 2], list(range(12))])
def test_rows_of_any_number_in_any_order_give_the_reference_bits(args, rows):
    h = args[0]
    index = torch.tensor(rows, dtype=torch.int64, device=h.device)
    features = torch.randn(len(rows), h.shape[1], device=h.device)
    checks.same_bits([deepstack_add_ref(h, index, features)], [module.deepstack_add(h, index, features)])


def test_rows_outside_of_h_are_left_out(args):
    h, rows, features = args
    rows[0], rows[-1] = -1, 12
    expected = deepstack_add_ref(h, rows[1:-1], features[1:-1])
    checks.same_bits([expected], [module.deepstack_add(h, rows, features)])


def test_the_oracle_rejects_wrong_answers(args):
    checks.rejects(module, OP, args, lambda h, rows, features: deepstack_add_ref(h, rows, features.roll(1, 0)))
    checks.rejects(module, OP, args, lambda h, rows, features: h)
    checks.rejects(module, OP, args, lambda h, rows, features: deepstack_add_ref(h, rows - 1, features))


def test_writes_everything_and_leaves_inputs_alone(args):
    checks.writes_everything(module, OP, args)
    checks.leaves_inputs_alone(module, OP, args)


def test_takes_rows_that_lie_apart(args):
    checks.takes_strides(module, OP, args, (0, 2))


def test_poison_stays_in_its_row(args):
    row = int(args[1][2])

    def others(out):
        return [torch.cat([out[0][:row], out[0][row + 1 :]])]

    checks.keeps_poison_in_its_row(module, OP, args, lambda own, value: own[0][row].fill_(value), others)
    checks.keeps_poison_in_its_row(module, OP, args, lambda own, value: own[2][2].fill_(value), others)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h, rows, f: (h.double(), rows, f), "float64"),
        (lambda h, rows, f: (h, rows, f.bfloat16()), "give all one dtype"),
        (lambda h, rows, f: (h.t(), rows, f), "not contiguous"),
        (lambda h, rows, f: (h, rows.int(), f), "int32"),
        (lambda h, rows, f: (h, rows[1:], f), "6 rows for 7 features"),
        (lambda h, rows, f: (h, rows, f[:, 1:]), "rows of one width"),
    ],
)
def test_refuses(args, change, words):
    checks.refuses(module, OP, change(*args), words)


def test_is_registered(args):
    checks.is_registered(module.deepstack_add, args)


@pytest.mark.gpu
@pytest.mark.parametrize("case", module.CASES[:2], ids=lambda case: case.name)
def test_replays_from_a_graph(case):
    checks.replays(module, OP, checks.arguments(module, case, torch.bfloat16))


@pytest.mark.gpu
def test_a_new_size_compiles_nothing():
    checks.compiles_nothing_new(module, OP, module.Case("", {"width": 384}), rows=(1000, 2000), features=(1, 1000))
