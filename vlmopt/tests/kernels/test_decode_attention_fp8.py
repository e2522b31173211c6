"""decode_attention_fp8: the kernel over a cache of e4m3 against its reference, and against float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from vlmopt.bench.compilations import compiled
from vlmopt.kernels import decode_attention, kv_fp8, oracle
from vlmopt.kernels import decode_attention_fp8 as module
from vlmopt.kernels.case import Case
from vlmopt.kernels.decode_attention import LAUNCH
from vlmopt.tests.kernels import ahead, checks

OP = "decode_attention_fp8"
SHORT = replace(LAUNCH, programs=2, block=16, warps=1)
FOUR = next(case for case in module.CASES if case.cpu and case.params["rows"] == 4)
LONG = {"rows": 1, "heads": 16, "kv_heads": 8, "width": 128, "length": 31000, "capacity": 32768}


@pytest.fixture
def args():
    return checks.arguments(module, FOUR)


@checks.variants(module)
def test_agrees_with_the_reference(case, dtype):
    checks.agrees(module, OP, case, dtype)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("held", [False, True])
def test_every_length_around_chunk_edges(rows, held):
    shape = {"rows": rows, "heads": 4, "kv_heads": 2, "width": 16, "length": 50, "capacity": 50}
    q, k, v, _, scales = checks.arguments(module, Case("", shape))
    for length in (rows, 16, 17, 32, 33, 50):
        row = torch.tensor([length - 1], device=q.device)
        out = module.launch(q, k, v, row, scales, config=replace(SHORT, held=held))
        expected = module.decode_attention_fp8_ref(q, k, v, row, scales)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_the_result_is_that_of_attention_over_what_the_cache_stands_for(args):
    q, k, v, row, scales = args
    plain = [kv_fp8.from_fp8(cache, own[:, None, None], q.dtype) for cache, own in zip((k, v), scales, strict=True)]
    expected = decode_attention.decode_attention_live(q, *plain, row)
    torch.testing.assert_close(module.decode_attention_fp8(*args), expected, rtol=1e-5, atol=1e-6)


def test_the_oracle_rejects_wrong_answers(args):
    def with_scales(change):
        def wrong(q, k, v, row, scales):
            return module.decode_attention_fp8_ref(q, k, v, row, change(scales))

        return wrong

    def one_key_less(q, k, v, row, scales):
        return module.decode_attention_fp8_ref(q, k, v, row - 1, scales)

    changes = (torch.ones_like, partial(torch.flip, dims=(0,)), partial(torch.flip, dims=(1,)))
    for wrong in (one_key_less, *map(with_scales, changes)):
        checks.rejects(module, OP, args, wrong)


def test_a_cache_full_of_nan_beyond_the_live_length_changes_nothing(args):
    q, k, v, row, scales = args
    grown = [torch.full((len(x), 333, x.shape[2]), float("nan"), device=x.device).to(kv_fp8.DTYPE) for x in (k, v)]
    for new, old in zip(grown, (k, v), strict=True):
        assert new.float().isnan().all()
        new[:, :70] = old[:, :70]
    checks.same_bits([module.decode_attention_fp8(*args)], [module.decode_attention_fp8(q, *grown, row, scales)])


def test_a_query_has_the_same_bits_alone_and_among_others(args):
    q, k, v, row, scales = args
    together = module.decode_attention_fp8(*args)
    alone = [module.decode_attention_fp8(q[i : i + 1], k, v, row - 3 + i, scales) for i in range(4)]
    checks.same_bits([together], [torch.cat(alone)])


def test_writes_everything_and_takes_rows_that_lie_apart(args):
    checks.writes_everything(module, OP, args)
    checks.takes_strides(module, OP, args, (0,))
    wide = [
        torch.cat([cache.view(torch.uint8)] * 2, 2).view(kv_fp8.DTYPE)[..., : cache.shape[2]] for cache in args[1:3]
    ]
    q, _, _, row, scales = args
    checks.same_bits([module.decode_attention_fp8(*args)], [module.decode_attention_fp8(q, *wide, row, scales)])


@pytest.mark.parametrize(
    ("index", "change", "words"),
    [
        (1, lambda k: k.float(), "with scales the kernel takes float8_e4m3fn"),
        (2, lambda v: v.to(torch.float8_e5m2), "v is torch.float8_e5m2"),
        (2, lambda v: v[:, :-1], "two caches"),
        (1, lambda k: k.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(k.dtype), "not contiguous"),
        (3, lambda row: row.int(), "row is torch.int32"),
        (4, lambda scales: scales.double(), "give dense float32 (2, 2)"),
        (4, lambda scales: scales[:1], "give dense float32 (2, 2)"),
        (4, lambda scales: None, "k is torch.float8_e4m3fn"),
    ],
)
def test_refuses(args, index, change, words):
    own = list(args)
    own[index] = change(own[index])
    checks.refuses(module, OP, own, words)


def test_refuses_scales_on_another_device(args):
    assert "scales is on meta" in module.supports(*args[:4], args[4].to("meta"))


def test_refuses_a_gpu_that_cannot_convert(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "8.9 or more" in kv_fp8.unsupported(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kv_fp8.unsupported(torch.device("cuda")) is None
    assert kv_fp8.unsupported(torch.device("cpu")) is None


def test_the_cost_is_half_of_the_plain_caches():
    plain, flops = decode_attention.cost(**LONG)
    moved, own_flops = module.cost(**LONG)
    query = 2 * 2 * 128 * 16
    assert moved - query == (plain - query) // 2 and own_flops == flops


def test_compiles_ahead_of_time_without_spilling():
    found = ahead.compiled(f"{module.__name__}:launch", ["length 800"], [90])
    assert [kernel["kernel"] for kernel in found] == ["_attend_chunks", "_combine"]
    assert found[0]["mma"] and not any(kernel["spills"] for kernel in found)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [800, 16384, 31000])
def test_on_a_gpu_the_error_against_float64_is_that_of_plain_attention(length):
    """Over the same cache: the reference attends to what it stands for, in bf16."""
    errors = oracle.compare_case(
        module, OP, Case("", LONG | {"length": length}), "cuda", torch.bfloat16, fn=module.launch
    )
    assert errors.ok, errors


@pytest.mark.gpu
@pytest.mark.parametrize("case", [module.CASES[0], module.CASES[4]], ids=lambda case: case.name)
def test_replays_from_a_graph(case):
    checks.replays(module, OP, checks.arguments(module, case, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "rows"), [(800, 1), (5000, 8)])
def test_a_dependent_launch_sees_what_the_kernel_in_front_wrote(length, rows):
    shape = LONG | {"rows": rows, "length": length, "capacity": length}
    q, k, v, row, scales = checks.arguments(module, Case("", shape), torch.bfloat16)
    newest = torch.arange(length - rows, length, device=q.device)

    def run(config):
        generator, found = torch.Generator("cuda").manual_seed(0), []
        for _ in range(20):
            fresh = [torch.randn(8, rows, 128, generator=generator, device="cuda") for _ in (k, v)]
            for cache, new in zip((k, v), fresh, strict=True):
                kv_fp8.put(cache, newest, new, scales[0])
            found.append(module.launch(q, k, v, row, scales, config=config))
        return found

    checks.same_bits(run(replace(LAUNCH, dependent=False)), run(LAUNCH))


@pytest.mark.gpu
def test_a_new_size_compiles_nothing():
    calls = [
        partial(module.launch, *checks.arguments(module, Case("", LONG | {"length": n, "capacity": n}), torch.bfloat16))
        for n in (17, 500, 3000)
    ]
    checks.forget(decode_attention)
    assert compiled(calls[:1]), "the warm-up compiled nothing, so nothing was counted"
    assert compiled(calls[1:]) == []
