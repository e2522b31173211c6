"""A cache of keys and values in eight bits: what runs, what is told, and how far it is from the plain one."""

import json

import pytest
import torch

import vlmopt
from vlmopt import OptimizeConfig, VlmoptError
from vlmopt.kernels import decode_attention, kv_fp8
from vlmopt.ops import KERNELS, Ops, kernels_of, table
from vlmopt.quant import costs
from vlmopt.quant.kv_scales import bounds, with_kv_scales
from vlmopt.runtime.cache import KVCache
from vlmopt.runtime.generate import ENGINES
from vlmopt.stages.decode import attention, decode_step
from vlmopt.stages.prefill import prefill
from vlmopt.stages.tables import rope
from vlmopt.tests.passes import record_logits
from vlmopt.weights import collect
from vlmopt.workbook.conversations import padded

PLAIN = OptimizeConfig.preset("exact", packed=True)
EIGHT = PLAIN.model_copy(update={"name": "custom", "kv_cache_dtype": "fp8"})
OPTIONS = {"max_new_tokens": 24, "do_sample": False}
PAD = 256


@pytest.fixture(scope="module")
def inputs(prompt):
    return [prompt((64, 96), f"what is written on sign {i}?", (32, 64 + 32 * i), seed=i) for i in range(4)]


def config(**changes) -> OptimizeConfig:
    return EIGHT.model_copy(update=changes)


def answers(model, inputs, **options):
    return [model.generate(**each, **{**OPTIONS, **options}) for each in inputs]


def held(model, length: int) -> torch.Tensor:
    """The live rows of the cache as floats."""
    return ENGINES[model].cache.buffer[:, :, :, :length].float()


def test_scales_are_powers_of_two_just_above_the_bounds(reference):
    plain = collect(reference.model, packed=False).text
    for layer in with_kv_scales(plain).layers:
        found = bounds(layer, plain.n_kv_heads, plain.head_dim)
        assert layer.kv_scales.shape == found.shape == (2, plain.n_kv_heads)
        assert (torch.frexp(layer.kv_scales).mantissa == 0.5).all()
        room = layer.kv_scales * kv_fp8.LARGEST / found
        assert (room >= 1).all() and (room < 2).all()


def test_the_bounds_hold_for_the_worst_rows(reference):
    """A row along a value's own weights reaches its bound, a normalised head of one value the key's."""
    text = collect(reference.model, packed=False).text
    layer = text.layers[0]
    keys, values = bounds(layer, text.n_kv_heads, text.head_dim).double()
    weight = layer.qkv[2].weight.double() * layer.input_norm.weight.double()
    worst = weight / weight.norm(dim=1, keepdim=True) * weight.shape[1] ** 0.5
    reached = (weight * worst).sum(1).unflatten(0, (text.n_kv_heads, -1)).amax(1)
    torch.testing.assert_close(reached, values, rtol=1e-6, atol=0)
    one = torch.eye(text.head_dim).double() * text.head_dim**0.5
    torch.testing.assert_close((one * layer.k_norm.weight).abs().max(), keys[0], rtol=1e-6, atol=0)


def test_nothing_saturates_and_the_cache_holds_the_plain_one_rounded(tiny, inputs):
    length = inputs[0]["input_ids"].shape[1]
    vlmopt.optimize(tiny.model, PLAIN)
    answers(tiny.model, inputs[:1])
    plain = held(tiny.model, length)
    vlmopt.optimize(tiny.model, EIGHT)
    answers(tiny.model, inputs[:1])
    assert ENGINES[tiny.model].cache.buffer.dtype == torch.float8_e4m3fn
    stored = held(tiny.model, length)
    scales = torch.stack([layer.kv_scales for layer in ENGINES[tiny.model].weights.text.layers])[..., None, None]
    assert 4 < stored.abs().max() < kv_fp8.LARGEST
    # a prompt attends to what is not rounded, so that every layer's rows are the plain cache's, rounded once
    assert torch.equal(stored, kv_fp8.to_fp8(plain, scales).float())
    error = (stored * scales - plain).double().norm() / plain.double().norm()
    assert 0.01 < error < 0.04


def test_ids_agree_and_logits_are_near(tiny, inputs):
    logits, ids = {}, {}
    for name, running in (("plain", PLAIN), ("eight", EIGHT)):
        vlmopt.optimize(tiny.model, running)
        seen = record_logits(tiny.model)
        ids[name] = answers(tiny.model, inputs)
        logits[name] = torch.cat([row[None] if row.dim() == 1 else row for row in seen[:4]])
    same = [torch.equal(*pair) for pair in zip(ids["plain"], ids["eight"], strict=True)]
    assert sum(same) >= 3
    assert torch.equal(logits["plain"][0], logits["eight"][0]), "the first token is chosen before anything is rounded"
    assert 0 < (logits["plain"][1] - logits["eight"][1]).abs().max() < 1
    status = vlmopt.status(tiny.model)
    assert status.cls == "lossy" and status.calls == {"stages": 4, "kernels": 0, "stock": 0}


@pytest.mark.parametrize("masked", [False, True], ids=["live rows", "whole capacity"])
def test_a_step_is_attention_over_what_the_cache_stands_for(reference, masked):
    """Against float64 over the same cache, a step is as good as a plain one over those values."""
    text = with_kv_scales(collect(reference.model, packed=False).text)
    ops = table(EIGHT)
    generator = torch.Generator().manual_seed(0)
    q, kv = torch.randn(1, text.n_heads, text.head_dim, generator=generator), KVCache(text, fp8=True)
    kv.reserve(40)
    kv.buffer.copy_(100 * torch.randn(kv.buffer.shape, generator=generator))
    kv.buffer[:, :, :, 41:] = 0 if masked else float("nan")
    row, scales = torch.tensor([40]), text.layers[1].kv_scales
    out = attention(row, kv.buffer, ops, may_wait=not masked)(q, *kv.buffer[1], scales=scales)
    k, v = (kv.buffer[1, :, :, :41].double() * scales[..., None, None]).unbind(0)
    truth = decode_attention.decode_attention_ref(q.double(), k, v, 41)
    assert (out - truth).norm() / truth.norm() < 1e-6
    launched = decode_attention.launch(q, *kv.buffer[1], row, scales)
    assert (launched - truth).norm() / truth.norm() < 1e-6


@pytest.mark.parametrize("checked", [False, True])
def test_kernels_and_references_store_the_same(reference, checked):
    """A prompt and a step of the stages, by the interpreted kernels that touch the cache, and by the references."""
    text = with_kv_scales(collect(reference.model, packed=True).text)
    ids = torch.arange(20, 31)
    angles = rope(torch.arange(12).expand(3, -1), text, torch.float32)
    found = []
    names = ("qkv_norm_rope_cache", "decode_attention_live")
    for ops in (table(EIGHT), table(EIGHT.model_copy(update={"kernels": names}), checked)):
        cache = KVCache(text, fp8=True)
        cache.reserve(12)
        cache.buffer[:, :, :, 12:] = float("nan") if ops.decode_attention_live else 0
        head = prefill(
            text.embed[ids], tuple(x[:11] for x in angles), cache.buffer, torch.arange(11), None, (), text, ops
        )
        row = torch.tensor([11])
        attend = attention(row, cache.buffer, ops, may_wait=True)
        h = decode_step(ids[:1], tuple(x[11:] for x in angles), cache.buffer, row, attend, text, ops)
        found.append((head, h, cache.buffer[:, :, :, :12].float()))
    (head, h, kv), (own_head, own_h, own_kv) = found
    torch.testing.assert_close(own_head, head, rtol=1e-4, atol=1e-4)
    assert (own_kv != kv).float().mean() < 1e-3
    torch.testing.assert_close(own_h, h, rtol=1e-2, atol=1e-1)
    unpacked = with_kv_scales(collect(reference.model, packed=False).text)
    assert all(map(torch.equal, *([layer.kv_scales for layer in each.layers] for each in (text, unpacked))))


def test_a_prefix_is_stored_alike_whatever_follows(tiny, prompt):
    vlmopt.optimize(tiny.model, EIGHT)
    rows = []
    for text in ("the same beginning", "the same beginning, and more after it"):
        ids = prompt(text)["input_ids"]
        answers(tiny.model, [prompt(text)], max_new_tokens=1)
        rows.append((ids[0], held(tiny.model, ids.shape[1])))
    common = next(i for i, (a, b) in enumerate(zip(rows[0][0], rows[1][0], strict=False)) if a != b)
    assert common > 5
    assert torch.equal(rows[0][1][..., :common, :], rows[1][1][..., :common, :])


def test_a_step_stores_what_a_prompt_stores(tiny, prompt):
    """The first layer's rows are the tokens' own, so they are the same bits whoever writes them."""
    vlmopt.optimize(tiny.model, EIGHT)
    given = prompt("one two three")
    ids = tiny.model.generate(**given, **OPTIONS, eos_token_id=None)
    length = ids.shape[1] - 1
    stepped = held(tiny.model, length)[0]
    whole = {"input_ids": ids[:, :length], "attention_mask": torch.ones_like(ids[:, :length])}
    answers(tiny.model, [whole], max_new_tokens=1)
    differing = (stepped != held(tiny.model, length)[0]).float().mean()
    assert differing < 1e-3


def test_stale_rows_are_not_read(tiny, inputs):
    vlmopt.optimize(tiny.model, EIGHT)
    expected = answers(tiny.model, inputs)
    ENGINES[tiny.model].cache.buffer.fill_(float("nan"))
    assert all(map(torch.equal, expected, answers(tiny.model, inputs)))
    ENGINES[tiny.model].reserve(2000)
    assert all(map(torch.equal, expected, answers(tiny.model, inputs)))


def test_batches_and_drafts_say_the_same(tiny, prompt):
    given = [prompt("short"), prompt((64, 64), "what is written here?", seed=1)]
    vlmopt.optimize(tiny.model, config(batches=True))
    alone = answers(tiny.model, given, pad_token_id=PAD)
    both = padded(given, PAD)
    length = both["input_ids"].shape[1]
    rows = tiny.model.generate(**both, **OPTIONS, pad_token_id=PAD)[:, length:]
    for own, each, row in zip(alone, given, rows, strict=True):
        new = own[0, each["input_ids"].shape[1] :]
        assert torch.equal(row[: len(new)], new)
    vlmopt.optimize(tiny.model, config(speculate="lookup"))
    assert all(map(torch.equal, alone, answers(tiny.model, given)))
    assert vlmopt.status(tiny.model).speculation["calls"] == 2


def test_copies_of_the_weights_may_stand_beside_it(tiny, inputs):
    status = vlmopt.optimize(tiny.model, config(weights="int8", head8=True))
    parts = {part.name: part for part in status.parts}
    assert "beside int8 copies" in parts["kv_cache_dtype"].reason and status.cls == "lossy"
    answers(tiny.model, inputs[:1])
    assert vlmopt.status(tiny.model).calls["stages"] == 1
    with pytest.raises(VlmoptError, match="no recorded task cost for kv fp8 beside int8 read by the prompt too"):
        vlmopt.optimize(tiny.model, config(weights="int8", keep_originals=False))


def test_a_cache_to_be_returned_is_stocks_own(tiny, inputs):
    """Stock serves such calls, with keys and values that it can go on with."""
    vlmopt.optimize(tiny.model, EIGHT)
    output = tiny.model.generate(**inputs[0], **OPTIONS, return_dict_in_generate=True)
    assert output.past_key_values.layers[0].keys.dtype == torch.float32
    assert vlmopt.status(tiny.model).calls == {"stages": 0, "kernels": 0, "stock": 1}


def test_revert_and_an_edit_in_place(tiny, inputs):
    stock = answers(tiny.model, inputs[:1])
    vlmopt.optimize(tiny.model, EIGHT)
    with torch.no_grad():
        tiny.model.model.language_model.layers[1].self_attn.k_norm.weight.mul_(1.0)
    answers(tiny.model, inputs[:1])
    assert vlmopt.status(tiny.model).calls["stock"] == 1, "scales were made of the weights as they were"
    vlmopt.revert(tiny.model)
    assert torch.equal(stock[0], answers(tiny.model, inputs[:1])[0])


def test_plan_tells_class_cost_memory_and_who_attends(tiny):
    planned, plain = (vlmopt.plan(tiny.model, each) for each in (EIGHT, PLAIN))
    parts = {part.name: part for part in planned.parts}
    assert planned.cls == "lossy" and parts["kv_cache_dtype"].state == "on"
    for words in ("accuracy", "500 samples", "Triton", "decode_layer"):
        assert words in parts["kv_cache_dtype"].reason
    text = collect(tiny.model, packed=False).text
    cache = KVCache(text, fp8=True)
    cache.reserve(2048)
    # the embedded model is in fp32 here, so a quarter; of a model in half precision it is half
    assert planned.memory["kv_cache"] == cache.buffer.nbytes == plain.memory["kv_cache"] // 4
    assert {part.name: part for part in plain.parts}["kv_cache_dtype"].state == "off"
    driven = {part.name: part.reason for part in vlmopt.plan(tiny.model, config(cpp_runtime=True)).parts}
    assert driven["cpp_runtime"] == "the layer loops of vision are driven from C++"


def test_without_a_recorded_cost_it_does_not_run(tiny, tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    record = dict(costs.recorded())
    record["rows"] = {name: row for name, row in record["rows"].items() if not name.endswith(costs.KV)}
    path.write_text(json.dumps(record))
    monkeypatch.setattr(costs, "recorded", lambda: json.loads(path.read_text()))
    with pytest.raises(VlmoptError, match=r"kv_cache_dtype has no recorded task cost for kv fp8; measure it with"):
        vlmopt.optimize(tiny.model, EIGHT)
    status = vlmopt.optimize(tiny.model, config(strict=False))
    assert {part.name: part.state for part in status.parts}["kv_cache_dtype"] == "skipped" and status.cls == "near"
    assert ENGINES[tiny.model].cache.buffer.dtype == torch.float32


def test_without_the_text_part_it_is_refused(tiny):
    with pytest.raises(VlmoptError, match="kv_cache_dtype needs the text part"):
        vlmopt.optimize(tiny.model, OptimizeConfig.make(kv_cache_dtype="fp8"))


def test_what_fills_no_such_cache_is_refused():
    with pytest.raises(VlmoptError, match="prompt_graphs fill no cache of eight bits"):
        OptimizeConfig.preset("fast", kv_cache_dtype="fp8", cpp_runtime=False, prompt_graphs=True)
    with pytest.raises(VlmoptError, match="bad option 'kv_cache_dtype'"):
        OptimizeConfig.preset("fast", kv_cache_dtype="int8")
    named = OptimizeConfig.preset("fast", kv_cache_dtype="fp8", kernels=("linear", "decode_layer"))
    with pytest.raises(VlmoptError, match="the kernel of 'decode_layer' reads no cache of eight bits"):
        table(named)


def test_the_table_leaves_out_what_reads_no_such_cache():
    fast = OptimizeConfig.preset("fast", kv_cache_dtype="fp8")
    assert set(KERNELS) - set(kernels_of(fast)) == {"decode_layer"}
    ops = table(fast)
    assert ops.decode_layer is None and ops.decode_attention_live is decode_attention.launch
    assert table(fast, checked=True).decode_attention_live is decode_attention.decode_attention_live
    assert table(PLAIN) == Ops()


@pytest.mark.gpu
def test_on_a_gpu_fast_serves_every_call_by_kernels(inputs):
    from vlmopt.bench.models import TINY, load

    loaded = load(TINY, "cuda")
    on_gpu = [{name: tensor.to("cuda") for name, tensor in each.items()} for each in inputs]
    found = {}
    for dtype in ("auto", "fp8"):
        status = vlmopt.optimize(loaded.model, OptimizeConfig.preset("fast", kv_cache_dtype=dtype))
        found[dtype] = answers(loaded.model, on_gpu)
        assert vlmopt.status(loaded.model).calls == {"stages": 4, "kernels": 4, "stock": 0}
    assert status.cls == "lossy" and ENGINES[loaded.model].ops.decode_layer is None
    assert len(ENGINES[loaded.model].graphs) == 2
    assert sum(map(torch.equal, found["auto"], found["fp8"])) >= 3
    vlmopt.optimize(loaded.model, OptimizeConfig.preset("fast", kv_cache_dtype="fp8", speculate="lookup"))
    assert all(map(torch.equal, found["fp8"], answers(loaded.model, on_gpu)))
