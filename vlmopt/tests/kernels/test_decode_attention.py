"""decode_attention_live: the kernel against its reference."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from vlmopt.kernels import decode_attention as module
from vlmopt.kernels import oracle
from vlmopt.kernels.case import Case
from vlmopt.kernels.decode_attention import LAUNCH, decode_attention_live_ref
from vlmopt.tests.kernels import checks

OP = "decode_attention_live"
SHORT = replace(LAUNCH, programs=2, block=16, warps=1)
"""Two programs that walk short chunks."""
SMALL = {"rows": 1, "heads": 4, "kv_heads": 2, "width": 16, "length": 40, "capacity": 40}
FOUR = next(case for case in module.CASES if case.cpu and case.params["rows"] == 4)


def draw(dtype=torch.float32, **changes):
    return checks.arguments(module, Case("", SMALL | changes), dtype)


@pytest.fixture
def args():
    return checks.arguments(module, FOUR)


@checks.variants(module)
def test_agrees_with_the_reference(case, dtype):
    checks.agrees(module, OP, case, dtype)


@pytest.mark.parametrize("rows", [1, 3])
def test_every_length_around_chunk_edges(rows):
    q, k, v, _ = draw(rows=rows, length=50, capacity=50)
    for length in [n for n in range(rows, 51) if (n + 1) % SHORT.block <= 2 or n < 5]:
        row = torch.tensor([length - 1], device=q.device)
        out = module.launch(q, k, v, row, config=SHORT)
        torch.testing.assert_close(out, decode_attention_live_ref(q, k, v, row), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("programs", [2, 3, 32])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("rows", [1, 8])
def test_programs_that_walk_any_number_of_chunks(programs, held, rows):
    config = replace(SHORT, programs=programs, held=held)
    for length in (16, 16 * programs + 4, 5 * 16 * min(programs, 3) + 1):
        args = draw(rows=rows, heads=2, kv_heads=1, length=length, capacity=length)
        args[1][0, -rows] = args[0][0, 0]  # the largest score comes last
        out = module.launch(*args, config=config)
        torch.testing.assert_close(out, decode_attention_live_ref(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "heads", "kv_heads"), [(8, 4, 4), (8, 8, 2), (5, 7, 1), (1, 16, 1)])
def test_any_small_group(rows, heads, kv_heads):
    args = draw(rows=rows, heads=heads, kv_heads=kv_heads)
    assert oracle.compare(module, OP, args).ok


def test_large_scores_do_not_overflow():
    q, *rest = draw(rows=2)
    args = (1000 * q, *rest)
    out = module.decode_attention_live(*args)
    torch.testing.assert_close(out, decode_attention_live_ref(*args), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("capacity", "garbage"),
    [(70, 0.0), (333, float("inf")), (512, float("nan")), (1024, 3e38), (4096, float("nan"))],
)
def test_neither_capacity_nor_what_lies_beyond_changes_a_bit(args, capacity, garbage):
    q, k, v, row = args
    grown = [cache.new_full((cache.shape[0], capacity, cache.shape[2]), garbage) for cache in (k, v)]
    for new, old in zip(grown, (k, v), strict=True):
        new[:, :70] = old[:, :70]
    checks.same_bits([module.decode_attention_live(*args)], [module.decode_attention_live(q, *grown, row)])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("length", "kv_heads"), [(70, 2), (64, 2), (66, 2), (200, 1)])
@pytest.mark.parametrize("config", [LAUNCH, SHORT, replace(SHORT, held=False)], ids=["package", "short", "loop alone"])
def test_a_query_has_the_same_bits_alone_and_among_others(length, kv_heads, config, dtype):
    attend = partial(module.launch, config=replace(config, dependent=False))
    q, k, v, row = draw(dtype, rows=8, heads=4, kv_heads=kv_heads, length=length, capacity=256)
    for rows in (4, 8):
        together = attend(q[-rows:], k, v, row)
        alone = [attend(q[8 - rows + i][None], k, v, row - rows + 1 + i) for i in range(rows)]
        checks.same_bits([together], [torch.cat(alone)])


def test_the_row_is_read_where_it_lies(args):
    before = module.decode_attention_live(*args)
    args[3].sub_(1)
    after = module.decode_attention_live(*args)
    torch.testing.assert_close(after, decode_attention_live_ref(*args), rtol=1e-5, atol=1e-5)
    assert not torch.equal(before, after)


def test_a_row_outside_of_the_cache_reads_nothing_outside():
    q, k, v, row = draw(length=40, capacity=40)
    inside = module.decode_attention_live(q, k, v, row)
    checks.same_bits([inside], [module.decode_attention_live(q, k, v, row + 2**40)])
    assert module.decode_attention_live(q, k, v, row - row - 1).isnan().all()


def test_a_query_that_sees_nothing_gets_nan():
    q, k, v, row = draw(rows=3)
    out = module.decode_attention_live(q, k, v, row - row + 1)
    assert out[0].isnan().all() and not out[1:].isnan().any()


def test_the_oracle_rejects_wrong_answers(args):
    def one_key_less(q, k, v, row):
        return decode_attention_live_ref(q, k, v, row - 1)

    def all_see_all(q, k, v, row):
        return torch.cat([decode_attention_live_ref(q[i : i + 1], k, v, row) for i in range(q.shape[0])])

    def other_scale(q, k, v, row):
        return decode_attention_live_ref(1.01 * q, k, v, row)

    def heads_in_turn(q, k, v, row):
        return decode_attention_live_ref(q, k.flip(0), v.flip(0), row)

    for wrong in (one_key_less, all_see_all, other_scale, heads_in_turn):
        checks.rejects(module, OP, args, wrong)


def test_writes_everything_and_leaves_inputs_alone(args):
    checks.writes_everything(module, OP, args)
    checks.leaves_inputs_alone(module, OP, draw(rows=4))  # whose cache holds no NaN, which would never be equal


@pytest.mark.parametrize("indices", [(0,), (1,), (2,), (0, 1, 2)])
def test_takes_rows_that_lie_apart(args, indices):
    checks.takes_strides(module, OP, args, indices)


def test_poison_in_a_query_stays_with_it(args):
    def poison(own, value):
        own[0][2, 1, 3] = value

    def others(out):
        return [out[0][:2], out[0][3:], out[0][2].view(4, -1)[[0, 2, 3]]]

    checks.keeps_poison_in_its_row(module, OP, args, poison, others)


@pytest.mark.parametrize("cache", [1, 2])
@pytest.mark.parametrize("length", [70, 66])
def test_poison_in_a_key_or_value_reaches_only_queries_that_see_it(cache, length):
    args = draw(rows=4, length=length, capacity=80)

    def poison(own, value):
        own[cache][1, length - 2, 3] = value

    def others(out):
        return [out[0][:2], out[0][2:].view(2, 4, -1)[:, :2]]

    checks.keeps_poison_in_its_row(module, OP, args, poison, others)
    poison(args, float("nan"))
    dirty = module.decode_attention_live(*args)
    assert dirty[2:].view(2, 4, -1)[:, 2:, 3].isnan().all()


@pytest.mark.parametrize(
    ("index", "change", "words"),
    [
        (0, lambda q: q.double(), "float64"),
        (1, lambda k: k.bfloat16(), "give all one dtype"),
        (0, lambda q: q.transpose(0, 2).contiguous().transpose(0, 2), "not contiguous"),
        (0, lambda q: q.repeat(3, 1, 1), "12 query rows"),
        (0, lambda q: q[:0], "0 query rows"),
        (0, lambda q: q[:, :3], "3 query heads over 2 KV heads"),
        (0, lambda q: q.repeat(1, 10, 1), "40 query heads over 2 KV heads"),
        (0, lambda q: q[0], "give [R, Hq, D]"),
        (1, lambda k: k[:, :-1], "two caches"),
        (3, lambda row: row.int(), "row is torch.int32"),
        (3, lambda row: row.repeat(2), "give one int64"),
    ],
)
def test_refuses(args, index, change, words):
    own = list(args)
    own[index] = change(own[index])
    checks.refuses(module, OP, own, words)


def test_refuses_other_head_sizes(args):
    q, k, v, row = args
    checks.refuses(module, OP, (q[..., :24], k[..., :24], v[..., :24], row), "heads of 24 values")


def test_refuses_empty_caches(args):
    q, k, v, row = args
    checks.refuses(module, OP, (q, k[:, :0], v[:, :0], row), "two caches")
    checks.refuses(module, OP, (q, k[:0], v[:0], row), "two caches")


def test_is_registered():
    checks.is_registered(module.decode_attention_live, draw(rows=4))


def test_the_cost_is_that_of_the_live_rows():
    shape = {"rows": 1, "heads": 16, "kv_heads": 8, "width": 128, "length": 800}
    moved, flops = module.cost(**shape, capacity=1024)
    assert moved == 2 * 800 * 8 * 128 * 2 + 2 * 16 * 128 * 2
    assert flops == 4 * 16 * 128 * 800
    assert module.cost(**shape, capacity=4096) == (moved, flops)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*module.CASES[:2], module.CASES[4]], ids=lambda case: case.name)
def test_replays_from_a_graph(case):
    checks.replays(module, OP, checks.arguments(module, case, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [replace(LAUNCH, held=held) for held in (True, False)], ids=["held", "loop alone"])
@pytest.mark.parametrize(("length", "rows"), [(800, 1), (833, 1), (5000, 8), (4, 4)])
def test_a_dependent_launch_sees_what_the_kernel_in_front_wrote(length, rows, config):
    shape = module.CASES[0].params | {"rows": rows, "length": length, "capacity": length}
    args = checks.arguments(module, Case("", shape), torch.bfloat16)
    in_order = partial(module.launch, config=replace(config, dependent=False))
    checks.sees_the_kernel_in_front(in_order, partial(module.launch, config=config), *args)


@pytest.mark.gpu
def test_a_graph_advances_the_row():
    case = Case("", module.CASES[0].params | {"length": 300})
    args = checks.arguments(module, case, torch.bfloat16)
    checks.advances_in_a_graph(module.decode_attention_live, module.launch, *args)


@pytest.mark.gpu
def test_a_new_size_compiles_nothing():
    shape = {"heads": 8, "kv_heads": 4, "width": 128}
    sizes = {"rows": (1, 8), "length": (8, 500), "capacity": (500, 3000)}
    checks.compiles_nothing_new(module, OP, Case("", shape), **sizes)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    positions = 74_900  # all layers' caches hold 4.3e9 values
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    cache = torch.zeros(28, 2, 8, positions, 128, dtype=torch.bfloat16, device="cuda")
    own = torch.randn(2, 8, positions, 128, dtype=torch.bfloat16, device="cuda")
    cache[-1] = own
    q = torch.randn(1, 16, 128, dtype=torch.bfloat16, device="cuda")
    last = torch.tensor([positions - 1], device="cuda")
    expected = module.decode_attention_live(q, *own, last)
    checks.same_bits([expected], [module.decode_attention_live(q, *cache[-1], last)])
    assert oracle.compare(module, OP, (q, *own, last)).ok
