"""swiglu: the kernel against its reference."""

import pytest
import torch

from vlmopt.kernels import swiglu as module
from vlmopt.kernels.swiglu import swiglu_ref
from vlmopt.tests.kernels import checks

OP = "swiglu"
ODD = next(case for case in module.CASES if case.name == "small odd 7x1025")


@pytest.fixture
def args():
    return checks.small(module)


@checks.variants(module)
def test_agrees_with_the_reference(case, dtype):
    checks.agrees(module, OP, case, dtype)


def test_packed_and_separate_products_give_the_same_bits():
    (products,) = checks.arguments(module, ODD)
    halves = list(products[0].chunk(2, dim=-1))
    checks.same_bits([module.swiglu(products)], [module.swiglu([half.contiguous() for half in halves])])
    checks.same_bits([module.swiglu(products)], [module.swiglu(halves)])


def test_both_ends_of_silu():
    gate = torch.tensor([[-200.0, -88.0, -0.0, 0.0, 88.0, 200.0]], device=checks.DEVICE)
    up = torch.full_like(gate, 2.0)
    torch.testing.assert_close(module.swiglu([gate, up]), swiglu_ref([gate, up]), rtol=1e-6, atol=1e-36)


def test_the_oracle_rejects_wrong_answers(args):
    checks.rejects(module, OP, args, lambda products: swiglu_ref([products[0].roll(products[0].shape[1] // 2, 1)]))
    checks.rejects(module, OP, args, lambda products: swiglu_ref(products) * 1.001)


def test_writes_everything_and_leaves_inputs_alone(args):
    checks.writes_everything(module, OP, args)
    checks.leaves_inputs_alone(module, OP, args)


def test_takes_rows_that_lie_apart():
    checks.takes_strides(module, OP, checks.arguments(module, ODD), (0,))


@pytest.mark.parametrize("column", [3, 1030])
def test_poison_stays_in_its_row(column):
    def poison(own, value):
        own[0][0][2, column] = value

    args = checks.arguments(module, ODD)
    checks.keeps_poison_in_its_row(module, OP, args, poison, lambda out: [torch.cat([out[0][:2], out[0][3:]])])


@pytest.mark.parametrize(
    ("products", "words"),
    [
        (lambda x: [], "0 products"),
        (lambda x: [x, x, x], "3 products"),
        (lambda x: [x.double()], "float64"),
        (lambda x: [x.expand(4, -1).t()], "not contiguous"),
        (lambda x: [x[None]], "two dimensions"),
        (lambda x: [x[:, 1:]], "an even number"),
        (lambda x: [x, x[:, 1:]], "give both one shape"),
    ],
)
def test_refuses(args, products, words):
    if not products(args[0][0]):
        assert words in module.supports([])
    else:
        checks.refuses(module, OP, (products(args[0][0]),), words)


def test_is_registered(args):
    checks.is_registered(module.swiglu, args)


@pytest.mark.gpu
@pytest.mark.parametrize("case", module.CASES[:3], ids=lambda case: case.name)
def test_replays_from_a_graph(case):
    checks.replays(module, OP, checks.arguments(module, case, torch.bfloat16))


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    rows, width = 174_800, 6144  # the packed product holds 2.15e9 values
    if torch.cuda.mem_get_info()[0] < 9 * 2**30:
        pytest.skip("needs 9 GiB of free GPU memory")
    packed = torch.zeros(rows, 2 * width, dtype=torch.bfloat16, device="cuda")
    packed[-1] = torch.randn(2 * width, device="cuda")
    checks.same_bits([module.swiglu([packed[-1:]])], [module.swiglu([packed])[-1:]])


@pytest.mark.gpu
def test_a_new_size_compiles_nothing():
    checks.compiles_nothing_new(module, OP, module.Case("", {"width": 640, "packed": True}), rows=(1, 4096))
