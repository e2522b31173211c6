"""Prefill attention: the kernel, and the library's own, against the reference; test_references has the formula."""

from functools import partial

import pytest
import torch

from vlmopt.bench.compilations import compiled
from vlmopt.kernels import oracle
from vlmopt.kernels import prefill_attention as module
from vlmopt.kernels.case import Case
from vlmopt.kernels.prefill_attention import prefill_attention_ref
from vlmopt.kernels.vision_attention import Tiles
from vlmopt.tests.kernels import ahead, checks

OP = "prefill_attention"
SHORT = Tiles(block=16, warps=1, keys=16, stages=1)


def draw(length=37, heads=4, kv_heads=2, width=16, capacity=64, dtype=torch.float32):
    shape = {"length": length, "heads": heads, "kv_heads": kv_heads, "width": width, "capacity": capacity}
    return checks.arguments(module, Case("", shape), dtype)


@pytest.fixture
def args():
    return draw()


@checks.variants(module)
def test_agrees_with_the_reference(case, dtype):
    checks.agrees(module, OP, case, dtype)


@pytest.mark.parametrize("case", [case for case in module.CASES if case.cpu], ids=lambda case: case.name)
def test_nothing_beyond_the_prompt_is_read(case):
    q, k, v = checks.arguments(module, case)
    length = case.params["length"]
    assert k[:, :length].isfinite().all() and (k[:, length:].isnan().all() and v[:, length:].isnan().all())
    for attend in (prefill_attention_ref, module.prefill_attention):
        out = attend(q, k, v)
        assert out.shape == (length, q.shape[1] * q.shape[2]) and out.isfinite().all()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 64])
def test_every_length_around_the_edges_of_tiles(length):
    args = draw(length, heads=2, kv_heads=1)
    torch.testing.assert_close(module.launch(*args, config=SHORT), prefill_attention_ref(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [module.LAUNCH, Tiles(128, 8, 64, 3), Tiles(64, 4, 128, 2), Tiles(32, 4, 64, 2)])
def test_tiles_of_half_precision(config):
    args = draw(201, heads=2, kv_heads=1, width=64, capacity=256)
    torch.testing.assert_close(module.launch(*args, config=config), prefill_attention_ref(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(3, 1, 24), (2, 2, 8), (4, 2, 80), (1, 1, 128)])
def test_groups_and_heads_of_any_size(heads, kv_heads, width):
    assert oracle.compare(module, OP, draw(21, heads, kv_heads, width)).ok


def test_a_row_has_the_same_bits_whatever_follows_it(args):
    q, k, v = args
    whole = module.prefill_attention(q, k, v)
    for length in (1, 16, 20, 33):
        checks.same_bits([whole[:length]], [module.prefill_attention(q[:length], k[:, :40].clone(), v[:, :40].clone())])


def test_the_oracle_rejects_wrong_answers(args):
    def seeing_one_more(q, k, v):
        out = prefill_attention_ref(torch.cat([q[:1], q]), k, v)
        return torch.cat([prefill_attention_ref(q[:20], k, v), out[21:]])

    def another_scale(q, k, v):
        return prefill_attention_ref(1.01 * q, k, v)

    def the_other_group(q, k, v):
        return prefill_attention_ref(q, k.flip(0), v.flip(0))

    for wrong in (seeing_one_more, another_scale, the_other_group):
        checks.rejects(module, OP, args, wrong)


def test_writes_everything_and_leaves_inputs_alone(args):
    checks.writes_everything(module, OP, args)
    checks.leaves_inputs_alone(module, OP, draw(capacity=37))  # the rest of a longer cache is NaN, equal to nothing


@pytest.mark.parametrize("indices", [(0,), (1,), (2,), (0, 1, 2)])
def test_takes_rows_that_lie_apart(args, indices):
    checks.takes_strides(module, OP, args, indices)


def test_takes_heads_that_lie_apart(args):
    q, k, v = args
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    checks.same_bits([module.prefill_attention(q, k, v)], [module.prefill_attention(turned, k, v)])


def test_poison_in_a_query_stays_with_it(args):
    def poison(own, value):
        own[0][20, 1, 3] = value

    def others(out):
        return [out[0][:20], out[0][21:], out[0][20, :16]]

    checks.keeps_poison_in_its_row(module, OP, args, poison, others)


@pytest.mark.parametrize(("index", "clean"), [(1, 20), (2, 16)])
def test_poison_in_a_key_or_value_reaches_no_row_before_it_and_no_other_group(args, index, clean):
    """A value has weight zero in the earlier rows of its own tile, and zero times NaN is NaN, as in the library's."""

    def poison(own, value):
        own[index][1, 20, 3] = value

    def others(out):
        return [out[0][:clean], out[0][clean:, :32]]

    checks.keeps_poison_in_its_row(module, OP, args, poison, others)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q.double(), k, v), "float64"),
        (lambda q, k, v: (q, k.bfloat16(), v), "give all one dtype"),
        (lambda q, k, v: (q.transpose(0, 2).contiguous().transpose(0, 2), k, v), "not contiguous"),
        (lambda q, k, v: (q, k, v[:, :-1]), "twice [Hkv, capacity, D]"),
        (lambda q, k, v: (q[..., :8], k, v), "twice [Hkv, capacity, D]"),
        (lambda q, k, v: (*(x.repeat(1, 1, 9) for x in (q, k, v)),), "heads of 144 values"),
        (lambda q, k, v: (q[:, :3], k, v), "3 heads of 16 values over 2 key/value heads"),
        (lambda q, k, v: (q, k[:, :36], v[:, :36]), "37 rows over a cache of 36"),
        (lambda q, k, v: (q[:0], k, v), "at least one"),
    ],
)
def test_refuses(args, change, words):
    checks.refuses(module, OP, change(*args), words)


def test_is_registered(args):
    checks.is_registered(torch.ops.vlmopt.prefill_attention.default, args)


def test_the_cost_counts_half_of_the_square():
    shape = {"heads": 16, "kv_heads": 8, "width": 128}
    moved, flops = module.cost(length=798, **shape)
    assert moved == 2 * 798 * 24 * 128 * 2 and flops == 2 * 798**2 * 16 * 128
    assert module.cost(length=798, **shape, capacity=1024) == (moved, flops)


def test_compiles_for_gpus_that_are_not_there():
    for found in ahead.compiled("vlmopt.kernels.prefill_attention:launch", [module.CASES[0].name]):
        assert found["mma"] and not found["spills"], found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", module.CASES, ids=lambda case: case.name)
def test_the_library_agrees_with_the_reference(case, dtype):
    args = checks.arguments(module, case, dtype)
    assert oracle.compare(module, OP, args, module.launch_library).ok


@pytest.mark.gpu
def test_a_length_never_seen_compiles_nothing():
    sets = [draw(length, 16, 8, 128, 1024, torch.bfloat16) for length in (300, 16, 1, 301, 307, 411, 613, 977)]
    compiled(partial(module.launch, *args) for args in sets[:2])
    assert compiled(partial(module.launch, *args) for args in sets[2:]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in module.CASES if not case.cpu], ids=lambda case: case.name)
def test_replays_the_same_bits(case):
    checks.replays(module, OP, checks.arguments(module, case, torch.bfloat16))


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    """The last head of a cache whose heads lie so far apart."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    rows = 2**31 // 128 // 3
    cache = torch.zeros(2, 4, rows, 128, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(300, 4, 128, device="cuda").bfloat16()
    cache[:, :, :300] = torch.randn(2, 4, 300, 128, device="cuda")
    expected = module.launch(q[:, 3:], *(part[3:, :300].clone() for part in cache))
    checks.same_bits([expected], [module.launch(q, *cache)[:, 3 * 128 :]])
