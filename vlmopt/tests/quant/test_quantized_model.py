"""A model that decodes from quantised copies: what runs, what is told, and that the originals are never touched."""

import json

import pytest
import torch

import vlmopt
from vlmopt import OptimizeConfig, VlmoptError
from vlmopt.kernels import decode_layer, gemv_ring_copies
from vlmopt.ops import Ops
from vlmopt.quant import costs, pack, products
from vlmopt.quant.copies import quantize
from vlmopt.quant.products import over_copies
from vlmopt.quant.schemes import SCHEMES
from vlmopt.runtime.generate import ENGINES
from vlmopt.tests.passes import record_logits
from vlmopt.weights import collect

BASE = OptimizeConfig.preset("exact", packed=True)
OPTIONS = {"max_new_tokens": 24, "do_sample": False}


def config(**changes) -> OptimizeConfig:
    return BASE.model_copy(update={"name": "custom", **changes})


@pytest.fixture(scope="module")
def inputs(prompt):
    return [prompt((64, 96), f"what is written on sign {i}?", seed=i) for i in range(3)]


def answers(model, inputs, **options):
    return [model.generate(**each, **{**OPTIONS, **options}) for each in inputs]


def bits(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_the_int8_heads_ids_are_the_plain_heads(tiny, inputs):
    stock = answers(tiny.model, inputs)
    status = vlmopt.optimize(tiny.model, config(head8=True))
    assert status.cls == "near" and {part.name: part.cls for part in status.parts}["head8"] == "exact"
    for expected, got in zip(stock, answers(tiny.model, inputs), strict=True):
        assert torch.equal(expected, got)
    assert vlmopt.status(tiny.model).calls == {"stages": 3, "kernels": 0, "stock": 0}


def test_sampling_takes_the_plain_heads_logits(tiny, inputs):
    drawn = []
    for changes in ({}, {"head8": True}):
        vlmopt.optimize(tiny.model, config(**changes))
        torch.manual_seed(0)
        drawn.append(answers(tiny.model, inputs, do_sample=True, temperature=1.5))
    assert all(map(torch.equal, *drawn))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_decode_step_reads_the_copies_and_a_prompt_the_originals(scheme, tiny, inputs):
    logits = {}
    for name, running in (("plain", config()), (scheme, config(weights=scheme))):
        vlmopt.optimize(tiny.model, running)
        seen = record_logits(tiny.model)
        tiny.model.generate(**inputs[0], **{**OPTIONS, "max_new_tokens": 2})
        logits[name] = seen
    assert vlmopt.status(tiny.model).cls == "lossy"
    first, second = zip(logits["plain"], logits[scheme], strict=True)
    assert torch.equal(*first)
    assert not torch.equal(*second)
    torch.testing.assert_close(*second, atol=3.0 if scheme == "int4" else 0.5, rtol=0)


def test_revert_gives_back_every_bit(tiny, inputs):
    before, stock = bits(tiny.model), answers(tiny.model, inputs)
    vlmopt.optimize(tiny.model, config(weights="int4", head8=True))
    answers(tiny.model, inputs)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.model.state_dict().items())
    vlmopt.revert(tiny.model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.model.state_dict().items())
    assert all(map(torch.equal, stock, answers(tiny.model, inputs)))


def test_an_edit_in_place_sends_the_call_to_stock(tiny, inputs):
    vlmopt.optimize(tiny.model, config(weights="int8"))
    with torch.no_grad():
        tiny.model.model.language_model.layers[1].mlp.down_proj.weight.mul_(0.5)
    after = answers(tiny.model, inputs[:1])
    edited = "model.language_model.layers.1.mlp.down_proj.weight was edited"
    assert vlmopt.status(tiny.model).stock_reasons == {f"{edited} after copies or scales were made of the weights": 1}
    vlmopt.revert(tiny.model)
    assert torch.equal(after[0], answers(tiny.model, inputs[:1])[0])


def test_without_copies_an_edit_in_place_takes_effect_and_is_served(tiny, inputs):
    vlmopt.optimize(tiny.model, config())
    with torch.no_grad():
        tiny.model.model.language_model.layers[1].mlp.down_proj.weight.mul_(0.5)
    answers(tiny.model, inputs[:1])
    assert vlmopt.status(tiny.model).calls["stock"] == 0


def test_plan_tells_class_cost_and_memory(tiny):
    planned = vlmopt.plan(tiny.model, OptimizeConfig.preset("fast8", strict=False))
    parts = {part.name: part for part in planned.parts}
    assert planned.cls == "lossy" and parts["weights"].state == parts["head8"].state == "on"
    assert "accuracy" in parts["weights"].reason and "500 samples" in parts["weights"].reason
    vlmopt.optimize(tiny.model, config(weights="int8", head8=True))
    text = ENGINES[tiny.model].weights.text
    held = sum(getattr(layer, part).weight.bytes for layer in text.layers for part in ("o", "down"))
    held += sum(getattr(layer, part)[0].weight.bytes for layer in text.layers for part in ("qkv", "gate_up"))
    assert planned.memory["copies"] == held + text.head.weight.copy.bytes + 4 * len(text.head.weight)
    assert "copies" not in vlmopt.plan(tiny.model, BASE).memory


def test_copies_need_no_packed_products(tiny, inputs):
    vlmopt.optimize(tiny.model, config(weights="int4", head8=True))
    expected = answers(tiny.model, inputs)
    vlmopt.optimize(tiny.model, config(weights="int4", head8=True, packed=False))
    assert all(map(torch.equal, expected, answers(tiny.model, inputs)))


def test_without_the_text_part_nothing_is_copied(tiny):
    with pytest.raises(VlmoptError, match="weights needs the text part"):
        vlmopt.optimize(tiny.model, config(weights="int8", text=False, vision=False, connector=False, packed=False))


def test_a_scheme_without_a_recorded_cost_does_not_run(tiny, tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    record = dict(costs.recorded())
    record["rows"] = {name: row for name, row in record["rows"].items() if not name.startswith("int4")}
    path.write_text(json.dumps(record))
    monkeypatch.setattr(costs, "recorded", lambda: json.loads(path.read_text()))
    vlmopt.optimize(tiny.model, config(weights="int8"))
    with pytest.raises(VlmoptError, match=r"no recorded task cost for int4; measure it with python -m"):
        vlmopt.optimize(tiny.model, config(weights="int4"))


def test_copies_made_before_are_taken_and_others_refused(tiny, inputs, tmp_path):
    vlmopt.optimize(tiny.model, config(weights="int8"))
    expected = answers(tiny.model, inputs)
    text = collect(tiny.model, packed=False).text
    path = pack.save(tmp_path / "copies.safetensors", pack.pack(text, SCHEMES["int8"], with_head=False), text)
    vlmopt.revert(tiny.model)
    copies = pack.load(path, collect(tiny.model, packed=False).text)
    vlmopt.optimize(tiny.model, config(weights="int8"), copies)
    held = ENGINES[tiny.model].weights.text.layers[0].o.weight
    assert held is copies.body["layers.0.o"]
    assert all(map(torch.equal, expected, answers(tiny.model, inputs)))
    for other in (config(weights="int4"), config(weights="int8", head8=True), config()):
        with pytest.raises(VlmoptError, match="give copies of the config's own scheme"):
            vlmopt.optimize(tiny.model, other, copies)


def test_several_prompts_in_one_call_decode_from_copies(tiny, inputs):
    vlmopt.optimize(tiny.model, config(weights="int8", head8=True, batches=True))
    alone = answers(tiny.model, inputs)
    length = inputs[0]["input_ids"].shape[1]
    both = {name: torch.cat([inputs[0][name], inputs[1][name]]) for name in inputs[0]}
    rows = tiny.model.generate(**both, **OPTIONS)[:, length:]
    for i, row in enumerate(rows):
        own = alone[i][0, length:]
        assert torch.equal(row[: len(own)], own)


def test_drafts_are_verified_by_the_copies_too(tiny, inputs):
    vlmopt.optimize(tiny.model, config(weights="int4", head8=True))
    expected = answers(tiny.model, inputs)
    vlmopt.optimize(tiny.model, config(weights="int4", head8=True, speculate="lookup"))
    assert all(map(torch.equal, expected, answers(tiny.model, inputs)))
    assert vlmopt.status(tiny.model).speculation["calls"] == 3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_kernels_compute_what_the_references_do(scheme, reference):
    """One product of the embedded model and one with its activation, by interpreted kernels."""
    text = collect(reference.model, packed=False).text
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(0))
    weights = quantize(text.layers[0].o.weight, SCHEMES[scheme]), quantize(text.layers[0].down.weight, SCHEMES[scheme])
    plain, kernels = over_copies(Ops(), ()), over_copies(Ops(), ("linear",), checked=True)
    longer = torch.cat([x, x], 1)[:, :768]
    for expected, got in zip(
        *([ops.linear(x, weights[0], None), ops.linear_swiglu(longer, weights[1])] for ops in (plain, kernels)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(VlmoptError, match="512"):
        kernels.linear(torch.zeros(2, 256), weights[0], None)


def test_a_table_over_copies_serves_plain_weights_as_before(tiny):
    ops, plain = over_copies(Ops(), ()), Ops()
    x, weight = torch.randn(3, 16), torch.randn(8, 16)
    assert torch.equal(ops.linear(x, weight, None), plain.linear(x, weight, None))
    assert torch.equal(ops.linear_swiglu(x, weight), plain.swiglu([plain.linear(x, weight, None)]))
    head = (x, torch.ones(16), 1e-6, weight)
    assert torch.equal(ops.lm_head_argmax(*head), plain.lm_head_argmax(*head))
    assert torch.equal(ops.lm_head_logits(*head), plain.lm_head_logits(*head))


def test_a_layer_is_one_entry_where_that_has_a_kernel():
    for kernels in ((), ("linear",), ("decode_attention_live", "lm_head_argmax")):
        assert over_copies(Ops(), kernels).decode_layer is None
    assert over_copies(Ops(), ("linear", "decode_layer")).decode_layer is products.launch_layer
    assert over_copies(Ops(), ("decode_layer",), checked=True).decode_layer is products.checked_layer


def test_a_layer_is_refused_with_the_reason_of_its_part():
    """On a machine without a Hopper GPU, and everywhere for e4m3, whose copies no ring serves."""
    decode_case = next(case for case in decode_layer.CASES if case.cpu)
    args = list(decode_layer.make(decode_case.params, "cpu", torch.bfloat16, torch.Generator().manual_seed(0)))
    weights = decode_layer.Layer(*args[1])
    args[1] = weights._replace(qkv=quantize(weights.qkv, SCHEMES["fp8"]))
    with pytest.raises(VlmoptError, match=r"^qkv: "):
        products.checked_layer(*args)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["fast8", "fast4"])
def test_on_a_gpu_a_preset_serves_every_call_by_kernels(preset, inputs):
    from vlmopt.bench.models import TINY, load

    loaded = load(TINY, "cuda")
    status = vlmopt.optimize(loaded.model, preset)
    assert status.cls == "lossy"
    on_gpu = [{name: tensor.to("cuda") for name, tensor in each.items()} for each in inputs]
    answers(loaded.model, on_gpu)
    assert vlmopt.status(loaded.model).calls == {"stages": 3, "kernels": 3, "stock": 0}


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_on_hopper_products_are_the_rings(scheme):
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(n, 512, generator=generator, device="cuda").bfloat16() for n in (3, 256))
    copy = quantize(weight, SCHEMES[scheme])
    torch.cuda.synchronize()
    ops = over_copies(Ops(), ("linear",))
    assert gemv_ring_copies.serves(x, *copy.parts)
    assert torch.equal(ops.linear(x, copy, None), gemv_ring_copies.launch(x, *copy.parts))
    assert torch.equal(ops.linear_swiglu(x, copy), gemv_ring_copies.launch(x, *copy.parts, gated=True))


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["fast8", "fast4"])
def test_on_a_gpu_drafts_change_no_id(preset, inputs):
    from vlmopt.bench.models import TINY, load

    loaded = load(TINY, "cuda")
    on_gpu = [{name: tensor.to("cuda") for name, tensor in each.items()} for each in inputs]
    found = []
    for speculate in ("none", "lookup"):
        vlmopt.optimize(loaded.model, OptimizeConfig.preset(preset, speculate=speculate))
        found.append(answers(loaded.model, on_gpu))
        assert ENGINES[loaded.model].ops.decode_layer is not None, ENGINES[loaded.model].left_out
    assert all(map(torch.equal, *found))
