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


@pytest.mark.parametrize("rows", [[11], [0], [7, 3, 11, 0, 4, 10, 2], list(range(12))])
def test_features_of_any_number_in_any_order_give_the_reference_bits(args, rows):
    h, slots, _ = args
    slots.fill_(-1)
    for slot, row in enumerate(rows):
        slots[row] = slot
    features = torch.randn(len(rows), h.shape[1], device=h.device)
    expected = h.clone()
    expected[rows] += features
    for add in (deepstack_add_ref, module.deepstack_add):
        checks.same_bits([expected], [add(h, slots, features)])


def test_a_slot_without_a_feature_leaves_its_row_alone(args):
    h, slots, features = args
    other = slots.clone()
    other[slots < 0] = torch.tensor([-7, 7, 2**31 - 1, -(2**31), 8], dtype=torch.int32, device=h.device)
    checks.same_bits([deepstack_add_ref(h, slots, features)], [module.deepstack_add(h, other, features)])


def test_the_oracle_rejects_wrong_answers(args):
    checks.rejects(module, OP, args, lambda h, slots, features: deepstack_add_ref(h, slots, features.roll(1, 0)))
    checks.rejects(module, OP, args, lambda h, slots, features: h)
    checks.rejects(module, OP, args, lambda h, slots, features: deepstack_add_ref(h, slots.roll(1), features))


def test_writes_everything_and_leaves_inputs_alone(args):
    checks.writes_everything(module, OP, args)
    checks.leaves_inputs_alone(module, OP, args)


def test_takes_rows_that_lie_apart(args):
    checks.takes_strides(module, OP, args, (0, 2))


def test_poison_stays_in_its_row(args):
    row = args[1].tolist().index(2)

    def others(out):
        return [torch.cat([out[0][:row], out[0][row + 1 :]])]

    checks.keeps_poison_in_its_row(module, OP, args, lambda own, value: own[0][row].fill_(value), others)
    checks.keeps_poison_in_its_row(module, OP, args, lambda own, value: own[2][2].fill_(value), others)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h, slots, f: (h.double(), slots, f), "float64"),
        (lambda h, slots, f: (h, slots, f.bfloat16()), "give all one dtype"),
        (lambda h, slots, f: (h.t(), slots, f), "not contiguous"),
        (lambda h, slots, f: (h, slots.long(), f), "slots is torch.int64"),
        (lambda h, slots, f: (h, slots[1:], f), "(11,) for 12 rows"),
        (lambda h, slots, f: (h, slots, f[:, 1:]), "rows of one width"),
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
