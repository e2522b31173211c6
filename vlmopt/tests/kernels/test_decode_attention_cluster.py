"""decode_attention_cluster: CUDA C++ against the references of `decode_attention` and `qkv_norm_rope_cache`.

Without a GPU it is only compiled, and refuses.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from vlmopt.errors import VlmoptError
from vlmopt.kernels import decode_attention, gemv, native, oracle, qkv_norm_rope_cache
from vlmopt.kernels import decode_attention_cluster as module
from vlmopt.kernels.case import Case
from vlmopt.kernels.decode_attention import decode_attention_live_ref
from vlmopt.tests.kernels import checks

needs_nvcc = pytest.mark.skipif(native.compiler() is None, reason="nvcc is not installed")

OP = "decode_attention_live"
DECODE = {"rows": 1, "heads": 16, "kv_heads": 8, "width": 128}
IN_ORDER = replace(module.LAUNCH, dependent=False)
attend = partial(module.launch, config=IN_ORDER)
attend_qkv = partial(module.launch_qkv, config=IN_ORDER)


def fits(params: dict) -> bool:
    group = params["heads"] // params["kv_heads"]
    return params["width"] in module.WIDTHS and params["rows"] * group <= module.COLUMNS


FITTING = [case for case in decode_attention.CASES if fits(case.params) and not case.cpu]
ODD = [
    Case(str(shape), dict(zip(("rows", "heads", "kv_heads", "width", "length", "capacity"), shape, strict=True)))
    for shape in [
        (8, 4, 4, 128, 20, 20),
        (1, 16, 1, 128, 1025, 1300),
        (5, 3, 1, 128, 17, 17),
        (2, 14, 2, 128, 64, 100),
        (7, 2, 1, 64, 1024, 1024),
        (1, 64, 8, 64, 3000, 4096),
        (1, 3, 3, 64, 2, 2),
        (4, 8, 2, 128, 1027, 1030),
    ]
]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def arguments(dtype=torch.bfloat16, **changes):
    """Arguments of `launch`, written before it: what is past is read without waiting for the kernel ahead."""
    args = checks.arguments(decode_attention, Case("", DECODE | {"length": 800, "capacity": 1024} | changes), dtype)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return args


def qkv_arguments(dtype=torch.bfloat16, capacity=None, **changes):
    """Arguments of `launch_qkv`, caches full of NaN from the newest rows on, and the positions of these."""
    params = DECODE | {"length": 800} | changes
    rows, length = params["rows"], params.pop("length")
    case = Case("", params | {"start": length - rows, "packed": True})
    *args, k, v, positions = checks.arguments(qkv_norm_rope_cache, case, dtype)
    caches = []
    for cache in (k, v):
        grown = cache.new_full((cache.shape[0], capacity or cache.shape[1], cache.shape[2]), float("nan"))
        grown[:, : length - rows] = cache[:, : length - rows]
        caches.append(grown)
    row = positions[-1:].clone()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return [*args, *caches, row], positions


@pytest.fixture
def as_on_hopper(monkeypatch):
    """What the arguments alone are refused for, also where there is no such GPU."""
    monkeypatch.setattr(native, "refusal", lambda device: None)


@needs_nvcc
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": 1}, "2 to 8 stages"),
        ({"rows": 9}, "1 to 8 rows"),
        ({"rows": 6, "group": 3}, "16 heads"),
        ({"width": 32}, "128 values"),
    ],
)
def test_compiles_and_says_what_it_takes(change, words):
    at = {"rows": 1, "group": 2, "width": 128, "stages": 3} | change
    numbers = 64, at["rows"], at["group"], 8, at["width"], 0, at["stages"], 0, 0, 0, 0
    with pytest.raises(VlmoptError, match=words):
        module._function()(*[None] * 11, *[0] * 8, 0.1, 0.0, *numbers, None, None)


@pytest.mark.parametrize(
    ("changes", "change", "words"),
    [
        ({"width": 32}, lambda *args: args, "heads of 32 values"),
        ({"rows": 6, "heads": 24}, lambda *args: args, "6 query rows of 3 heads"),
        ({}, lambda q, k, v, row: (q.float(), k.float(), v.float(), row), "q is torch.float32"),
        ({}, lambda q, k, v, row: (checks.spread(q)[..., 4:68], k[..., :64], v[..., :64], row), "a row of q"),
        ({}, lambda q, k, v, row: (q[..., :64], k[..., :64], v[..., 4:68], row), "a row of v"),
        ({}, lambda q, k, v, row: (q, k, v, row.int()), "row is torch.int32"),
        ({"rows": 9}, lambda *args: args, "9 query rows"),
    ],
)
def test_refuses(as_on_hopper, changes, change, words):
    args = arguments(**changes)
    assert changes or module.supports(*args) is None
    reason = module.supports(*change(*args))
    assert reason is not None and words in reason


@pytest.mark.parametrize(
    ("changes", "index", "change", "words"),
    [
        ({}, 0, lambda products: products * 3, "3 products"),
        ({}, 0, lambda products: [], "0 products"),
        ({}, 1, lambda norm: norm[:64], "norm weights"),
        ({}, 4, lambda cos: checks.spread(cos.repeat(2, 1))[:1, 4:132], "cos"),
        ({}, 8, lambda row: row.repeat(2), "give one int64"),
        ({}, 8, lambda row: row.int(), "row is torch.int32"),
        ({"width": 64}, 8, lambda row: row, "the kernel takes 128"),
        ({"rows": 4, "heads": 40}, 8, lambda row: row, "4 query rows of 5 heads"),
    ],
)
def test_qkv_refuses(as_on_hopper, changes, index, change, words):
    args, _ = qkv_arguments(**changes)
    assert changes or module.supports_qkv(*args) is None
    args[index] = change(args[index])
    reason = module.supports_qkv(*args)
    assert reason is not None and words in reason


def test_refuses_other_devices():
    assert "CUDA" in module.supports(*(tensor.cpu() for tensor in arguments()))
    args, _ = qkv_arguments()
    assert "CUDA" in module.supports_qkv([args[0][0].cpu()], *args[1:])


@pytest.mark.gpu
def test_a_cluster_fits_for_every_head():
    assert module.clusters(*arguments()) >= 8


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("case", [*FITTING, *ODD], ids=str)
def test_agrees_with_the_reference(case, dtype):
    for seed in (0, 1):
        args = checks.arguments(decode_attention, case, dtype, seed)
        torch.cuda.synchronize()
        assert module.supports(*args) is None
        errors = oracle.compare(decode_attention, OP, args, module.launch)
        assert errors.ok, str(errors)


@pytest.mark.gpu
def test_the_oracle_rejects_wrong_answers():
    args = arguments(rows=4)

    def without_16_keys(q, k, v, row):
        k = k.clone()
        k[:, 528:544] = 0
        return attend(q, k, v, row)

    def all_one_row_less(q, k, v, row):
        return attend(q, k, v, row - 1)

    for wrong in (without_16_keys, all_one_row_less):
        assert not oracle.compare(decode_attention, OP, args, wrong).ok


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_every_length_around_the_edges_of_keys_and_chunks(rows):
    q, k, v, _ = arguments(rows=rows, length=2200, capacity=2200)
    lengths = {edge + i for edge in (16, 32, 64, 80, 1024, 1040, 1088, 2048, 2064) for i in (-1, 0, 1, rows - 1)}
    for length in sorted({*lengths, rows, rows + 1}):
        row = torch.tensor([length - 1], device=q.device)
        out, expected = attend(q, k, v, row), decode_attention_live_ref(q, k, v, row)
        torch.testing.assert_close(out, expected, rtol=0.03, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [IN_ORDER, replace(IN_ORDER, stages=2, ahead=0), replace(IN_ORDER, stages=6)])
@pytest.mark.parametrize(("length", "kv_heads"), [(70, 8), (64, 8), (66, 8), (1030, 2), (5000, 2)])
def test_a_query_has_the_same_bits_alone_and_among_others(length, kv_heads, config):
    q, k, v, row = arguments(rows=8, heads=2 * kv_heads, kv_heads=kv_heads, length=length, capacity=length)
    for rows in (4, 8):
        together = module.launch(q[-rows:], k, v, row, config=config)
        alone = [attend(q[8 - rows + i][None], k, v, row - rows + 1 + i) for i in range(rows)]
        checks.same_bits([together], [torch.cat(alone)])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("capacity", "garbage"), [(803, 0.0), (1000, float("inf")), (4096, float("nan"))])
def test_neither_capacity_nor_what_lies_beyond_changes_a_bit(rows, capacity, garbage):
    q, k, v, row = arguments(rows=rows, length=803, capacity=900)
    grown = [cache.new_full((cache.shape[0], capacity, cache.shape[2]), garbage) for cache in (k, v)]
    for new, old in zip(grown, (k, v), strict=True):
        new[:, :803] = old[:, :803]
    checks.same_bits([attend(q, k, v, row)], [attend(q, *grown, row)])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("length", [9, 70, 800, 1030, 5000])
def test_blocks_on_their_own_have_the_bits_of_a_cluster(rows, length):
    args = arguments(rows=rows, length=length, capacity=8192)
    own = [module.launch(*args, config=replace(IN_ORDER, apart=True, dependent=dependent)) for dependent in (0, 1)]
    checks.same_bits([attend(*args)] * 2, own)
    one, _ = qkv_arguments(rows=rows, length=length)
    other = oracle.clone(one)
    torch.cuda.synchronize()
    apart = module.launch_qkv(*other, config=replace(module.LAUNCH, apart=True))
    checks.same_bits([attend_qkv(*one), *one[6:8]], [apart, *other[6:8]])


@pytest.mark.gpu
def test_the_capacity_chooses_who_adds_up_and_changes_no_bit():
    q, k, v, row = arguments(length=700, capacity=module.LONG)
    longer = [cache.new_full((8, module.LONG + 1, 128), float("nan")) for cache in (k, v)]
    for new, old in zip(longer, (k, v), strict=True):
        new[:, :700] = old[:, :700]
    torch.cuda.synchronize()
    with torch.profiler.profile() as profiler:
        checks.same_bits([module.launch(q, k, v, row)], [module.launch(q, *longer, row)])
    launches = [event.name for event in profiler.events() if "combine" in event.name and "cluster" in event.name]
    assert len(launches) == 1


@pytest.mark.gpu
def test_a_row_outside_of_the_cache_reads_nothing_outside():
    q, k, v, row = arguments(length=40, capacity=40)
    checks.same_bits([attend(q, k, v, row)], [attend(q, k, v, row + 2**40)])
    assert attend(q, k, v, row - row - 1).isnan().all()
    q, k, v, row = arguments(rows=3)
    out = attend(q, k, v, row - row + 1)
    assert out[0].isnan().all() and not out[1:].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [1, 2])
@pytest.mark.parametrize("length", [70, 66, 1026])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_poison_in_a_key_or_value_reaches_only_queries_that_see_it(cache, length, value):
    args = list(arguments(rows=4, length=length, capacity=length + 9))
    clean = attend(*args).view(4, 8, 2, 128)
    args[cache][1, length - 2, 3] = value
    dirty = attend(*args).view(4, 8, 2, 128)
    checks.same_bits([clean[:2], clean[2:, [0, *range(2, 8)]]], [dirty[:2], dirty[2:, [0, *range(2, 8)]]])
    if value != value:
        assert dirty[2:, 1, :, 3].isnan().all()


@pytest.mark.gpu
def test_takes_rows_that_lie_apart():
    args = arguments(rows=3)
    apart = [checks.spread(tensor) for tensor in args[:3]]
    torch.cuda.synchronize()
    checks.same_bits([attend(*args)], [attend(*apart, args[3])])
    one, _ = qkv_arguments(rows=2)
    other = [*(checks.spread(arg) if i not in (3, 8) else arg for i, arg in enumerate(one))]
    other[1:3] = one[1:3]
    torch.cuda.synchronize()
    checks.same_bits([attend_qkv(*one), *one[6:8]], [attend_qkv(*other), *other[6:8]])


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [8, 65, 800, 1028, 4099])
def test_from_the_product_the_bits_are_those_of_two_launches(rows, length, dtype):
    one, positions = qkv_arguments(dtype, rows=rows, length=length, capacity=length + 70)
    two = oracle.clone(one)
    assert module.supports_qkv(*one) is None
    q = qkv_norm_rope_cache.launch(*two[:8], positions)
    torch.cuda.synchronize()
    expected = attend(q, *two[6:])
    checks.same_bits([expected, *two[6:8]], [attend_qkv(*one), *one[6:8]])


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(4, 2, 1), (12, 2, 2), (3, 3, 8), (16, 1, 1), (7, 1, 1)])
def test_from_the_product_with_any_small_group(heads, kv_heads, rows):
    one, positions = qkv_arguments(rows=rows, heads=heads, kv_heads=kv_heads, length=130)
    two = oracle.clone(one)
    q = qkv_norm_rope_cache.launch(*two[:8], positions)
    torch.cuda.synchronize()
    expected = attend(q, *two[6:])
    checks.same_bits([expected, *two[6:8]], [attend_qkv(*one), *one[6:8]])


@pytest.mark.gpu
def test_a_row_outside_of_the_cache_is_not_written():
    args, _ = qkv_arguments(rows=4, length=100, capacity=100)
    before = oracle.clone(args[6:8])
    attend_qkv(*args[:8], args[8] + 4)
    checks.same_bits(before, args[6:8])


@pytest.mark.gpu
def test_a_graph_advances_the_row():
    checks.advances_in_a_graph(attend, module.launch, *arguments(length=300))


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "rows"), [(800, 1), (833, 1), (5000, 8), (4, 4)])
def test_a_dependent_launch_sees_what_the_kernel_in_front_wrote(length, rows):
    args = arguments(rows=rows, length=length, capacity=length)
    for apart in (False, True):
        dependent = partial(module.launch, config=replace(module.LAUNCH, apart=apart))
        checks.sees_the_kernel_in_front(attend, dependent, *args)


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "rows"), [(800, 1), (1025, 2), (2000, 8)])
def test_a_chain_of_dependent_launches_changes_no_bit(length, rows):
    """Each launch reads what the one before has written, so a kernel that does not wait is seen."""
    layers = [qkv_arguments(rows=rows, length=length)[0] for _ in range(12)]
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [torch.randn(4096, 2048, generator=generator, device="cuda").bfloat16() / 45 for _ in layers]
    first = torch.randn(rows, 2048, generator=generator, device="cuda").bfloat16()
    torch.cuda.synchronize()

    def chain(launch):
        x = first
        for args, weight in zip(layers, weights, strict=True):
            x = launch([gemv.launch(x, weight)], *args[1:])
        return [x, *(cache for args in layers for cache in args[6:8])]

    expected = oracle.clone(chain(attend_qkv))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(module.launch_qkv)
    for _ in range(10):
        graph.replay()
        torch.cuda.synchronize()
        checks.same_bits(expected, found)
