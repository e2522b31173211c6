"""qkv_norm_rope_cache: the kernel against its reference."""

import pytest
import torch

from vlmopt.kernels import oracle
from vlmopt.kernels import qkv_norm_rope_cache as module
from vlmopt.kernels.qkv_norm_rope_cache import qkv_norm_rope_cache_ref
from vlmopt.tests.kernels import checks

OP = "qkv_norm_rope_cache"
ODD = next(case for case in module.CASES if case.name.startswith("small odd"))
SEPARATE = next(case for case in module.CASES if case.cpu and not case.params["packed"])


@pytest.fixture
def args():
    return checks.arguments(module, ODD)


@checks.variants(module)
def test_agrees_with_the_reference(case, dtype):
    checks.agrees(module, OP, case, dtype)


def test_packed_and_separate_products_give_the_same_bits():
    products, *rest = checks.arguments(module, SEPARATE)
    packed = [torch.cat(products, dim=-1)]
    views = packed[0].split([product.shape[1] for product in products], dim=-1)
    separate = oracle.outputs(module, module.qkv_norm_rope_cache, (products, *rest))
    for other in (packed, list(views)):
        checks.same_bits(separate, oracle.outputs(module, module.qkv_norm_rope_cache, (other, *rest)))


def test_positions_may_come_in_any_order(args):
    *rest, positions = args
    order = torch.tensor([6, 0], device=positions.device)
    assert oracle.compare(module, OP, (*rest, order)).ok


def test_positions_outside_of_the_cache_are_not_written(args):
    *rest, positions = args
    capacity = rest[6].shape[1]
    for beyond in (capacity, -1, 2**40):
        outside = torch.tensor([1, beyond], device=positions.device)
        _, k, v = oracle.outputs(module, module.qkv_norm_rope_cache, (*rest, outside))
        for before, after in ((rest[6], k), (rest[7], v)):
            changed = (before != after).any(dim=2).any(dim=0).nonzero().flatten().tolist()
            assert changed == [1]


def test_the_oracle_rejects_wrong_answers(args):
    def with_changed(index, change):
        def wrong(*given):
            given = list(given)
            given[index] = change(given[index])
            return qkv_norm_rope_cache_ref(*given)

        return wrong

    checks.rejects(module, OP, args, with_changed(8, lambda positions: positions + 1))
    checks.rejects(module, OP, args, with_changed(5, torch.neg))
    checks.rejects(module, OP, args, with_changed(2, lambda norm: norm.roll(1)))
    checks.rejects(module, OP, args, with_changed(0, lambda products: [products[0].roll(1, 1)]))


def test_writes_everything_and_leaves_inputs_alone(args):
    checks.writes_everything(module, OP, args)
    checks.leaves_inputs_alone(module, OP, args)


@pytest.mark.parametrize("indices", [(0,), (4, 5)])
@pytest.mark.parametrize("case", [ODD, SEPARATE], ids=["packed", "separate"])
def test_takes_rows_that_lie_apart(case, indices):
    checks.takes_strides(module, OP, checks.arguments(module, case), indices)


def test_takes_caches_whose_rows_lie_apart(args):
    *rest, k_cache, v_cache, positions = args
    wide = torch.stack([k_cache, v_cache]).repeat(1, 1, 1, 2)
    apart = wide[0, ..., : k_cache.shape[2]], wide[1, ..., : v_cache.shape[2]]
    fn = module.qkv_norm_rope_cache
    checks.same_bits(
        oracle.outputs(module, fn, args),
        [fn(*rest, *apart, positions), *apart],
    )


def test_poison_stays_in_its_row(args):
    width = ODD.params["width"]

    def others(out):
        q, k, v = out
        return [q[:1], k[:, :2], k[:, 3:], v[:, :2], v[:, 3:]]

    for column in (0, 6 * width, 9 * width):  # a query, a key, a value of the second row, which goes to position 2

        def poison(own, value, column=column):
            own[0][0][1, column] = value

        checks.keeps_poison_in_its_row(module, OP, args, poison, others)


@pytest.mark.parametrize(
    ("index", "change", "words"),
    [
        (0, lambda p: [*p, *p], "2 products"),
        (0, lambda p: [p[0].double()], "float64"),
        (0, lambda p: [p[0][:, :-1]], "columns in all"),
        (0, lambda p: [p[0], p[0][:, :24], p[0][:, :72]], "need 72"),
        (1, lambda w: w[:-2], "norm weights"),
        (2, lambda w: w.bfloat16(), "give all one dtype"),
        (4, lambda cos: cos[:1], "cos and sin"),
        (6, lambda cache: cache[:, :-1], "caches of the shapes"),
        (8, lambda positions: positions.int(), "positions is torch.int32"),
        (8, lambda positions: positions[:1], "positions is"),
    ],
)
def test_refuses(args, index, change, words):
    own = list(args)
    own[index] = change(own[index])
    checks.refuses(module, OP, own, words)


def test_refuses_heads_that_cannot_be_halved(args):
    products, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, positions = args
    own = (products, q_norm, k_norm, eps, cos, sin, k_cache[..., 1:], v_cache[..., 1:], positions)
    checks.refuses(module, OP, own, "an even number")


def test_is_registered(args):
    checks.is_registered(module.qkv_norm_rope_cache, args)


@pytest.mark.gpu
@pytest.mark.parametrize("case", module.CASES[:3], ids=lambda case: case.name)
def test_replays_from_a_graph(case):
    checks.replays(module, OP, checks.arguments(module, case, torch.bfloat16))


def test_a_row_has_the_same_bits_in_a_prompt_and_alone(args):
    products, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, positions = args
    both = oracle.outputs(module, module.qkv_norm_rope_cache, args)
    alone = oracle.outputs(
        module,
        module.qkv_norm_rope_cache,
        ([products[0][1:]], q_norm, k_norm, eps, cos[1:], sin[1:], k_cache, v_cache, positions[1:]),
    )
    checks.same_bits([both[0][1:], both[1][:, 2], both[2][:, 2]], [alone[0], alone[1][:, 2], alone[2][:, 2]])


@pytest.mark.gpu
def test_a_new_size_compiles_nothing():
    heads = {"heads": 6, "kv_heads": 3, "width": 64, "packed": True}
    checks.compiles_nothing_new(module, OP, module.Case("", heads), rows=(1, 1000), start=(0, 3000))


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    positions = 74_900  # all layers' caches hold 4.3e9 values
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of free GPU memory")
    products, *rest = checks.arguments(module, module.CASES[0], torch.bfloat16)
    cache = torch.zeros(28, 2, 8, positions, 128, dtype=torch.bfloat16, device="cuda")
    last = torch.tensor([positions - 1], device="cuda")
    short = [torch.zeros(8, 1, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    query = module.qkv_norm_rope_cache(products, *rest[:5], cache[-1, 0], cache[-1, 1], last)
    expected = module.qkv_norm_rope_cache(products, *rest[:5], *short, last - last)
    checks.same_bits([expected, *short], [query, *cache[-1, :, :, -1:]])
    assert not cache[0].any() and not cache[-1, :, :, :-1].any()
