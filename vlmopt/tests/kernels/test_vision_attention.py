"""Vision attention: the kernel, and the library's one call, against the reference."""

from functools import partial

import pytest
import torch

from vlmopt.bench.compilations import compiled
from vlmopt.errors import VlmoptError
from vlmopt.kernels import oracle
from vlmopt.kernels import vision_attention as module
from vlmopt.kernels.case import Case
from vlmopt.kernels.vision_attention import Tiles, vision_attention_ref
from vlmopt.tests.kernels import checks

OP = "vision_attention"
SHORT = Tiles(block=16, warps=1, keys=16, stages=1)


def draw(lengths=(37, 1, 33), heads=2, width=16, dtype=torch.float32):
    return checks.arguments(module, Case("", {"lengths": lengths, "heads": heads, "width": width}), dtype)


@pytest.fixture
def args():
    return draw()


@checks.variants(module)
def test_agrees_with_the_reference(case, dtype):
    checks.agrees(module, OP, case, dtype)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
def test_every_length_around_the_edges_of_tiles(length):
    args = draw((5, length), heads=1)
    torch.testing.assert_close(module.launch(*args, config=SHORT), vision_attention_ref(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [module.LAUNCH, module.WIDE_LAUNCH, Tiles(128, 8, 32, 2), Tiles(16, 4, 64, 2)])
def test_tiles_of_half_precision(config):
    args = draw((70, 129, 3), heads=1, width=64)
    torch.testing.assert_close(module.launch(*args, config=config), vision_attention_ref(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 8, 24, 32, 64, 80])
def test_heads_of_any_size(width):
    assert oracle.compare(module, OP, draw((20, 5), heads=1, width=width)).ok


def test_large_scores_do_not_overflow(args):
    q, *rest = args
    args = (1000 * q, *rest)
    out = module.vision_attention(*args)
    torch.testing.assert_close(out, vision_attention_ref(*args), rtol=1e-2, atol=1e-2)


def test_a_row_far_above_its_first_keys_leaves_the_others_alone():
    """Its weights overflow under their shift, so it is done once more; the other rows of its tile keep their bits."""
    q, k, v, lengths = draw((40,), heads=1)
    k[:20] *= 0.01
    plain = module.launch(q, k, v, lengths, config=SHORT)
    q[7] *= 1000
    out = module.launch(q, k, v, lengths, config=SHORT)
    torch.testing.assert_close(out, _softmax(q, k, v), rtol=1e-2, atol=1e-2)
    others = torch.arange(40) != 7
    assert torch.equal(out[others], plain[others]) and not torch.equal(out[7], plain[7])


def test_keys_without_any_weight_come_first():
    """A row whose first step has scores of minus infinity only is as good as any other."""
    q, k, v, lengths = draw((40,), heads=1)
    q[:, 0, 0], k[:20, 0, 0] = -1.0, float("inf")
    expected = _softmax(q, k, v)
    torch.testing.assert_close(module.launch(q, k, v, lengths, config=SHORT), expected, rtol=1e-5, atol=1e-5)
    assert not expected.isnan().any()


def _softmax(q, k, v):
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


@pytest.mark.parametrize("lengths", [(37, 1, 33), (16,), (5, 32)], ids=str)
def test_a_table_on_the_device_stands_for_the_lengths(lengths):
    """Rows behind the segments, which here hold NaN, reach none of theirs; spare tiles do nothing."""
    q, k, v, _ = draw(lengths)
    padded = [torch.cat([part, torch.full((50, 2, 16), float("nan"))]) for part in (q, k, v)]
    count, rows = sum(lengths), sum(lengths) + 50
    table = module.padded_tiles(lengths, rows, 4, 16, torch.float32)
    assert len(table) == rows // 16 + 4 and not table[-1].any()
    out = module.launch(*padded, table)
    assert out.shape[0] == rows and torch.equal(out[:count], module.launch(q, k, v, lengths))
    reference = vision_attention_ref(*padded, table)
    assert torch.equal(reference[:count], vision_attention_ref(q, k, v, lengths)) and not reference[count:].any()


def test_the_largest_number_of_tiles_finds_room():
    for lengths in ((1,) * 7, (17, 17, 1), (16, 16), (65, 130, 1)):
        table = module.padded_tiles(lengths, sum(lengths), len(lengths), 16, torch.float32)
        assert table.tolist()[: len(module.tiles(lengths, 16))] == [list(tile) for tile in module.tiles(lengths, 16)]


def test_an_image_has_the_same_bits_whoever_stands_beside_it(args):
    q, k, v, _ = args
    together = module.vision_attention(*args)
    alone = [module.vision_attention(q[a:b], k[a:b], v[a:b], (b - a,)) for a, b in ((0, 37), (37, 38), (38, 71))]
    checks.same_bits([together], [torch.cat(alone)])
    assert not torch.equal(together, module.vision_attention(q, k, v, (71,)))


def test_the_oracle_rejects_wrong_answers(args):
    def as_one_image(q, k, v, lengths):
        return vision_attention_ref(q, k, v, [len(q)])

    def one_key_less(q, k, v, lengths):
        first = _softmax(q[:37], k[:36], v[:36])
        return torch.cat([first, vision_attention_ref(q, k, v, lengths)[37:]])

    def other_scale(q, k, v, lengths):
        return vision_attention_ref(1.01 * q, k, v, lengths)

    def heads_in_turn(q, k, v, lengths):
        return vision_attention_ref(q, k.flip(1), v.flip(1), lengths)

    for wrong in (as_one_image, one_key_less, other_scale, heads_in_turn):
        checks.rejects(module, OP, args, wrong)


def test_writes_everything_and_leaves_inputs_alone(args):
    checks.writes_everything(module, OP, args)
    checks.leaves_inputs_alone(module, OP, args)


@pytest.mark.parametrize("indices", [(0,), (1,), (2,), (0, 1, 2)])
def test_takes_rows_that_lie_apart(args, indices):
    checks.takes_strides(module, OP, args, indices)


def test_takes_heads_that_lie_apart(args):
    q, k, v, lengths = args
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    checks.same_bits([module.vision_attention(*args)], [module.vision_attention(*turned, lengths)])


def test_poison_in_a_query_stays_with_it(args):
    def poison(own, value):
        own[0][40, 1, 3] = value

    def others(out):
        return [out[0][:40], out[0][41:], out[0][40, :16]]

    checks.keeps_poison_in_its_row(module, OP, args, poison, others)


@pytest.mark.parametrize("index", [1, 2])
def test_poison_in_a_key_or_value_stays_in_its_image(args, index):
    def poison(own, value):
        own[index][38, 1, 3] = value

    def others(out):
        return [out[0][:38], out[0][38:, :16]]

    checks.keeps_poison_in_its_row(module, OP, args, poison, others)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v, n: (q.double(), k, v, n), "float64"),
        (lambda q, k, v, n: (q, k.bfloat16(), v, n), "give all one dtype"),
        (lambda q, k, v, n: (q.transpose(0, 2).contiguous().transpose(0, 2), k, v, n), "not contiguous"),
        (lambda q, k, v, n: (q, k[:-1], v, n), "three of [N, heads, D]"),
        (lambda q, k, v, n: (q, k, v[:, :1], n), "three of [N, heads, D]"),
        (lambda q, k, v, n: (q[None], k[None], v[None], n), "three of [N, heads, D]"),
        (lambda q, k, v, n: (*(x.repeat(1, 1, 9) for x in (q, k, v)), n), "heads of 144 values"),
        (lambda q, k, v, n: (*(x[:, :0] for x in (q, k, v)), n), "0 heads"),
        (lambda q, k, v, n: (q, k, v, (37, 33)), "that sum to the rows"),
        (lambda q, k, v, n: (q, k, v, (37, 0, 34)), "at least 1"),
        (lambda q, k, v, n: (q, k, v, ()), "that sum to the rows"),
    ],
)
def test_refuses(args, change, words):
    checks.refuses(module, OP, change(*args), words)


def test_is_registered(args):
    checks.is_registered(torch.ops.vlmopt.vision_attention.default, (*args[:3], list(args[3])))


def test_tiles_begin_with_their_segment_and_long_segments_come_first():
    assert module.tiles((3, 40, 17), 16) == [
        (3, 3, 43),
        (19, 3, 43),
        (35, 3, 43),
        (43, 43, 60),
        (59, 43, 60),
        (0, 0, 3),
    ]
    assert module.bounds((3, 40, 17)) == [0, 3, 43, 60]


def test_tables_are_made_once_and_their_number_is_bounded(monkeypatch):
    device, tables = torch.device(checks.DEVICE), module._Tables()
    first = tables.get(module.tiles, (40,), device, 16)
    assert tables.get(module.tiles, (40,), device, 16) is first
    assert tables.get(module.tiles, (40,), device, 32) is not first
    assert tables.get(module.bounds, (40,), device).tolist() == [0, 40]
    monkeypatch.setattr(module, "TABLES_KEPT", 4)
    for length in range(1, 9):
        tables.get(module.tiles, (length,), device, 16)
        tables.get(module.tiles, (40,), device, 16)
    assert len(tables) == 4 and tables.get(module.tiles, (40,), device, 16) is first


def test_a_table_that_a_capture_used_stays(monkeypatch):
    tables, device = module._Tables(), torch.device("cuda")
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(module, "_to_device", lambda values, device: torch.tensor(values))
    monkeypatch.setattr(module, "TABLES_KEPT", 2)
    with pytest.raises(VlmoptError, match=r"\(40,\) for the first time"):
        tables.get(module.tiles, (40,), device, 16)
    capturing = False
    first = tables.get(module.tiles, (40,), device, 16)
    capturing = True
    assert tables.get(module.tiles, (40,), device, 16) is first
    capturing = False
    for length in range(1, 9):
        tables.get(module.tiles, (length,), device, 16)
    capturing = True
    assert tables.get(module.tiles, (40,), device, 16) is first


def test_the_cost_counts_every_segment_alone():
    moved, flops = module.cost(lengths=(3072,), heads=16, width=64)
    assert moved == 4 * 3072 * 1024 * 2 and flops == 4 * 3072**2 * 1024
    assert module.cost(lengths=(1536, 1536), heads=16, width=64) == (moved, flops // 2)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(3072,), (77, 1, 300)], ids=str)
@pytest.mark.parametrize("width", [32, 64, 80, 128])
def test_every_head_size_in_half_precision(lengths, width):
    assert oracle.compare(module, OP, draw(lengths, heads=3, width=width, dtype=torch.bfloat16)).ok


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("sharpness", [2, 4, 8, 32])
def test_few_keys_have_the_weight(sharpness, dtype):
    """Where a row's highest weight is rounded, and where it is far above the first keys'."""
    q, *rest = draw((1024, 77), heads=4, width=64, dtype=dtype)
    assert oracle.compare(module, OP, (sharpness * q, *rest)).ok
    assert oracle.compare(module, OP, (1.5 * rest[0].flip(0), *rest)).ok


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", [case for case in module.CASES if not case.cpu], ids=lambda case: case.name)
def test_the_library_agrees_with_the_reference(case, dtype):
    assert oracle.compare(module, OP, checks.arguments(module, case, dtype), module.launch_library).ok


@pytest.mark.gpu
@pytest.mark.parametrize("launch", [module.vision_attention, module.launch, module.launch_library])
def test_replays_the_same_bits(launch, monkeypatch):
    monkeypatch.setattr(module, OP, launch)
    for case in (module.CASES[0], module.CASES[4]):
        checks.replays(module, OP, checks.arguments(module, case, torch.bfloat16))


@pytest.mark.gpu
def test_a_graph_keeps_its_table():
    args = draw((300, 77), heads=4, width=64, dtype=torch.bfloat16)
    expected = module.launch(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module.launch(*args)
    others = [draw((length,), heads=1, width=64, dtype=torch.bfloat16) for length in range(1, module.TABLES_KEPT + 9)]
    for other in others:
        module.launch(*other)
    graph.replay()
    checks.same_bits([expected], [out])


@pytest.mark.gpu
def test_a_new_size_compiles_nothing():
    sizes = [(3072,), (768, 77), *((length, 2 * length + 1) for length in range(1, 1000, 20))]
    sets = [draw(lengths, heads=4, width=64, dtype=torch.bfloat16) for lengths in sizes]
    compiled(partial(module.launch, *args) for args in sets[:2])
    assert compiled(partial(module.launch, *args) for args in sets[2:]) == []


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    rows = 700_000  # of 3,072 packed values each: 2.15e9
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    qkv = torch.zeros(rows, 3, 16, 64, dtype=torch.bfloat16, device="cuda")
    qkv[-300:] = torch.randn(300, 3, 16, 64, device="cuda")
    lengths = (*[1000] * 699, 700, 300)
    out = module.launch(*qkv.unbind(1), lengths)
    checks.same_bits([module.launch(*qkv[-300:].unbind(1), (300,))], [out[-300:]])
