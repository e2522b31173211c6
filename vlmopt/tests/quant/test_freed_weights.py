"""`keep_originals=False`: the weights that copies stand for are really gone, and whoever needs them is told."""

import copy
import gc
import json

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import vlmopt
from vlmopt import OptimizeConfig, VlmoptError, weights
from vlmopt.ops import Ops
from vlmopt.quant import costs, pack
from vlmopt.quant.products import over_copies
from vlmopt.quant.schemes import SCHEMES
from vlmopt.runtime.generate import ENGINES
from vlmopt.stages.prefill import prefill
from vlmopt.tests.passes import record_logits
from vlmopt.weights import collect

BASE = OptimizeConfig.preset("exact", packed=True, weights="int8", head8=True)
OPTIONS = {"max_new_tokens": 24, "do_sample": False}


def config(**changes) -> OptimizeConfig:
    return OptimizeConfig(**{**BASE.model_dump(), "name": "custom", "keep_originals": False, **changes})


@pytest.fixture(scope="module")
def inputs(prompt):
    return [prompt((64, 96), f"what is written on sign {i}?", seed=i) for i in range(2)]


def answers(model, inputs, **options):
    return [model.generate(**each, **{**OPTIONS, **options}) for each in inputs]


def products(model) -> list[torch.nn.Linear]:
    layers = model.model.language_model.layers
    return [module for layer in layers for module in layer.modules() if isinstance(module, torch.nn.Linear)]


@pytest.mark.parametrize("packed", [True, False])
def test_no_storage_of_the_products_lives_on(packed, tiny, inputs, monkeypatch):
    held, free = [], weights.free

    def watched(model):
        held.extend(StorageWeakRef(module.weight.untyped_storage()) for module in products(model))
        free(model)

    monkeypatch.setattr(weights, "free", watched)
    planned = vlmopt.plan(tiny.model, config(packed=packed))
    before = sum(p.nbytes for p in tiny.model.parameters())
    vlmopt.optimize(tiny.model, config(packed=packed))
    answers(tiny.model, inputs)
    gc.collect()
    assert len(held) == 7 * 4 and all(storage.expired() for storage in held)
    assert planned.memory["freed"] == before - sum(p.nbytes for p in tiny.model.parameters())
    assert planned.memory["freed"] > 5e6


def test_with_the_originals_kept_their_storages_live(tiny):
    vlmopt.optimize(tiny.model, config(keep_originals=True))
    held = [StorageWeakRef(module.weight.untyped_storage()) for module in products(tiny.model)]
    gc.collect()
    assert not any(storage.expired() for storage in held)
    assert "freed" not in vlmopt.plan(tiny.model, config(keep_originals=True)).memory


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prompt_and_decode_read_what_the_copies_stand_for(scheme, tiny, inputs):
    other = copy.deepcopy(tiny.model)
    packed = pack.pack(collect(other, packed=True).text, SCHEMES[scheme], with_head=False).body
    for name, linears in pack.products_of(collect(other, packed=True).text).items():
        linears[0].weight.copy_(packed[name].dequantize(torch.float32))
    found = []
    plain = OptimizeConfig.preset("exact", packed=True)
    for model, running in ((other, plain), (tiny.model, config(weights=scheme, head8=False))):
        vlmopt.optimize(model, running)
        seen = record_logits(model)
        ids = answers(model, inputs)
        found.append((ids, seen))
    (expected, theirs), (got, ours) = found
    assert all(map(torch.equal, expected, got))
    assert torch.equal(theirs[0], ours[0])  # of the prompt
    assert vlmopt.status(tiny.model).calls == {"stages": 2, "kernels": 0, "stock": 0}


def test_a_plan_says_what_is_given_up(tiny):
    planned = vlmopt.plan(tiny.model, config())
    reason = {part.name: part.reason for part in planned.parts}["weights"]
    assert planned.cls == "lossy" and "all rows read int8 copies" in reason and "not revertible" in reason
    assert "freed" in str(planned)
    kept = {part.name: part.reason for part in vlmopt.plan(tiny.model, config(keep_originals=True)).parts}["weights"]
    assert "decode reads int8 copies" in kept and "revertible" not in kept


def test_whoever_needs_the_originals_gets_one_sentence(tiny, inputs, tmp_path):
    vlmopt.optimize(tiny.model, config())
    answers(tiny.model, inputs)
    words = "the weights of its text layers were freed; load the model again"
    with pytest.raises(VlmoptError, match=rf"^only stock serves this call \(.*beams\), and stock cannot: {words}$"):
        answers(tiny.model, inputs, num_beams=2)
    for door in (vlmopt.plan, vlmopt.optimize):
        with pytest.raises(VlmoptError, match=rf"^this model cannot be optimised: {words}$"):
            door(tiny.model, "exact")
    with pytest.raises(VlmoptError, match=rf"^this model cannot be reverted: {words}$"):
        vlmopt.revert(tiny.model)
    answers(tiny.model, inputs)
    assert vlmopt.status(tiny.model).calls == {"stages": 4, "kernels": 0, "stock": 0}
    with pytest.raises(NotImplementedError, match="no data"):
        tiny.model.save_pretrained(tmp_path)
    for model in (tiny.model, copy.deepcopy(tiny.model)):
        with pytest.raises(RuntimeError, match="size mismatch"):
            model(**inputs[0])


def test_a_model_of_shapes_alone_was_not_freed(reference):
    with torch.device("meta"):
        model = type(reference.model)(reference.model.config)
    assert weights.refusal(model) is None
    weights.free(model)
    assert weights.refusal(model) == weights.FREED


def test_an_edit_of_what_is_left_is_noticed(tiny, inputs):
    vlmopt.optimize(tiny.model, config())
    with torch.no_grad():
        tiny.model.lm_head.weight.mul_(0.5)
    with pytest.raises(VlmoptError, match="was edited after copies or scales were made"):
        answers(tiny.model, inputs)


def test_a_with_block_is_refused_before_anything_is_freed(tiny, inputs):
    with pytest.raises(VlmoptError, match="a with block gives the model back"), vlmopt.optimized(tiny.model, config()):
        pass
    assert not weights.freed(tiny.model) and not vlmopt.status(tiny.model).active


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"weights": "none"}, "say by weights which copies to make"), ({"cpp_runtime": True}, "cpp_runtime reads the")],
)
def test_a_config_that_cannot_free_is_refused(changes, words):
    with pytest.raises(VlmoptError, match=words):
        OptimizeConfig.preset("exact", **{"weights": "int8", "keep_originals": False, **changes})


def test_where_copies_cannot_be_made_nothing_is_freed(tiny, inputs, tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    record = dict(costs.recorded())
    record["rows"] = {name: row for name, row in record["rows"].items() if not name.endswith(" prompt")}
    path.write_text(json.dumps(record))
    monkeypatch.setattr(costs, "recorded", lambda: json.loads(path.read_text()))
    vlmopt.optimize(tiny.model, config(keep_originals=True))
    with pytest.raises(VlmoptError, match="no recorded task cost for int8 read by the prompt too; measure it with"):
        vlmopt.optimize(tiny.model, config())
    status = vlmopt.optimize(tiny.model, config(strict=False))
    assert {part.name: part.state for part in status.parts}["weights"] == "skipped"
    assert status.active and not weights.freed(tiny.model)
    running = ENGINES[tiny.model].config
    assert running.keep_originals and OptimizeConfig.model_validate_json(running.model_dump_json()) == running
    vlmopt.revert(tiny.model)


def test_batches_and_drafts_do_without_the_originals(tiny, inputs):
    vlmopt.optimize(tiny.model, config(batches=True, speculate="lookup"))
    alone = answers(tiny.model, inputs)
    both = {name: torch.cat([each[name] for each in inputs]) for name in inputs[0]}
    length = inputs[0]["input_ids"].shape[1]
    for row, own in zip(tiny.model.generate(**both, **OPTIONS)[:, length:], alone, strict=True):
        own = own[0, length:]
        assert torch.equal(row[: len(own)], own)
    status = vlmopt.status(tiny.model)
    assert status.calls == {"stages": 3, "kernels": 0, "stock": 0} and status.speculation["calls"] == 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_many_rows_are_multiplied_by_the_weight_that_a_copy_stands_for(scheme, reference):
    """Whatever the kernels refuse: they serve few rows alone."""
    text = collect(reference.model, packed=False).text
    packed = pack.pack(text, SCHEMES[scheme], with_head=False).body
    gate_up, down = packed["layers.0.gate_up"], packed["layers.0.down"]
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(0))
    ops, plain = over_copies(Ops(), ("linear",), checked=True), Ops()
    gated = plain.swiglu([plain.linear(x, gate_up.dequantize(torch.float32), None)])
    assert torch.equal(ops.linear_swiglu(x, gate_up), gated)
    expected = plain.linear(gated, down.dequantize(torch.float32), None)
    assert torch.equal(ops.linear(gated, down, None), expected)


def test_the_last_layer_of_a_prompt_is_not_cut_over_copies(reference):
    """Where kernels are on, a prompt's last layer takes rows of the packed weight, which a copy does not give."""
    text = collect(copy.deepcopy(reference.model), packed=True).text
    ops, copied = over_copies(Ops(), ()), pack.with_copies(text, pack.pack(text, SCHEMES["int8"], with_head=False))
    rows = torch.arange(20)
    h = torch.randn(20, 256, generator=torch.Generator().manual_seed(0))
    angles = torch.ones(20, 128), torch.zeros(20, 128)
    found = []
    for narrow in (False, True):
        cache = torch.zeros(len(text.layers), 2, text.n_kv_heads, 32, text.head_dim)
        found.append((prefill(h, angles, cache, rows, None, [], copied, ops, narrow=narrow), cache))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["fast8", "fast4"])
@pytest.mark.parametrize("prompt_graphs", [False, True])
def test_on_a_gpu_memory_falls_and_every_call_is_served(preset, prompt_graphs, inputs):
    from vlmopt.bench.models import TINY, load

    loaded = load(TINY, "cuda")
    own = OptimizeConfig.preset(preset, cpp_runtime=False, prompt_graphs=prompt_graphs, keep_originals=False)
    freed = vlmopt.plan(loaded.model, own).memory["freed"]
    before = sum(p.nbytes for p in loaded.model.parameters())
    vlmopt.optimize(loaded.model, own)
    assert before - sum(p.nbytes for p in loaded.model.parameters()) == freed
    answers(loaded.model, [{name: tensor.to("cuda") for name, tensor in each.items()} for each in inputs])
    assert vlmopt.status(loaded.model).calls == {"stages": 2, "kernels": 2, "stock": 0}
