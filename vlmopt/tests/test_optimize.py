"""plan, optimize, status, revert: what they promise about the model they are given and about all others."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

import vlmopt
from vlmopt import OptimizeConfig, VlmoptError, weights
from vlmopt.errors import PartFailed
from vlmopt.runtime.guard import Guard

OPTIONS = {"max_new_tokens": 6, "do_sample": False}


def storages(model):
    return {name: p.untyped_storage().data_ptr() for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("config", ["exact", OptimizeConfig.preset("exact", packed=True)], ids=["exact", "packed"])
def test_revert_gives_back_the_stock_model_bit_for_bit(tiny, reference, prompt, config):
    model, before = tiny.model, copy.deepcopy(tiny.model.state_dict())
    vlmopt.optimize(model, config)
    model.generate(**prompt((64, 96), "hello"), **OPTIONS)
    assert list(model.state_dict()) == list(before)
    vlmopt.revert(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert "generate" not in vars(model)
    pointers = [pointer for name, pointer in storages(model).items() if name != "lm_head.weight"]
    assert len(set(pointers)) == len(pointers), "some parameters still share storage"
    assert Guard(model).reason(model) is None
    expected = reference.model.generate(**prompt((64, 96), "hello"), **OPTIONS)
    assert torch.equal(model.generate(**prompt((64, 96), "hello"), **OPTIONS), expected)


def test_packed_parameters_become_views_of_one_storage_with_the_same_values(tiny):
    before = copy.deepcopy(tiny.model.state_dict())
    vlmopt.optimize(tiny.model, OptimizeConfig.preset("exact", packed=True))
    attention = tiny.model.model.language_model.layers[0].self_attn
    pointers = {proj.weight.untyped_storage().data_ptr() for proj in (attention.q_proj, attention.k_proj)}
    assert len(pointers) == 1
    assert all(torch.equal(value, before[name]) for name, value in tiny.model.state_dict().items())


@pytest.mark.parametrize("version", ["4.57.0", "5.16.1", "5.25.0.dev0", "5.100.0", "6.0.0"])
def test_an_untested_transformers_is_refused_in_one_sentence_and_the_model_left_alone(tiny, monkeypatch, version):
    monkeypatch.setattr(weights.transformers, "__version__", version)
    expected = f"transformers {version} is outside the tested range; install one from 5.17 to 5.24$"
    for door in (vlmopt.plan, vlmopt.optimize):
        with pytest.raises(VlmoptError, match=expected):
            door(tiny.model, OptimizeConfig.preset("exact", strict=False))
    assert not vlmopt.status(tiny.model).active and "generate" not in vars(tiny.model)


@pytest.mark.parametrize("version", ["5.17.0", "5.20.1", "5.24.9"])
def test_every_transformers_of_the_tested_range_is_taken(tiny, monkeypatch, version):
    monkeypatch.setattr(weights.transformers, "__version__", version)
    assert vlmopt.optimize(tiny.model, "exact").active


def test_the_pinned_transformers_is_the_newest_that_was_tested():
    pins = (Path(__file__).parents[2] / "requirements.txt").read_text()
    assert f"\ntransformers=={weights.TESTED_TRANSFORMERS[1]}." in pins


def test_a_second_model_in_the_process_is_untouched(tiny, reference, prompt):
    before = storages(reference.model)
    vlmopt.optimize(tiny.model, "exact")
    assert type(reference.model).generate is Qwen3VLForConditionalGeneration.generate
    assert "generate" not in vars(reference.model)
    reference.model.generate(**prompt((64, 64), "x"), **OPTIONS)
    assert storages(reference.model) == before
    assert not vlmopt.status(reference.model).active
    assert vlmopt.status(tiny.model).calls["stages"] == 0


def test_a_deep_copy_runs_stock_and_does_not_touch_the_original(tiny, prompt):
    vlmopt.optimize(tiny.model, "exact")
    twin = copy.deepcopy(tiny.model)
    expected = tiny.model.generate(**prompt((64, 64), "x"), **OPTIONS)
    with torch.no_grad():
        twin.model.language_model.norm.weight.mul_(-1)
    assert not torch.equal(twin.generate(**prompt((64, 64), "x"), **OPTIONS), expected)
    assert vlmopt.status(tiny.model).calls["stages"] == 1
    assert not vlmopt.status(twin).active


def test_optimizing_twice_replaces_the_config_and_starts_the_counts_again(tiny, prompt):
    vlmopt.optimize(tiny.model, "exact")
    tiny.model.generate(**prompt("x"), **OPTIONS)
    report = vlmopt.optimize(tiny.model, OptimizeConfig.preset("exact", vision=False))
    assert report.calls["stages"] == 0
    assert not vlmopt.status(tiny.model).config.vision


def test_the_context_manager_reverts_after_an_exception(tiny):
    with pytest.raises(KeyError), vlmopt.optimized(tiny.model, "exact") as report:
        assert report.active
        raise KeyError
    assert not vlmopt.status(tiny.model).active


def test_preset_stock_switches_nothing_on(tiny):
    report = vlmopt.optimize(tiny.model, "stock")
    assert not report.active and "generate" not in vars(tiny.model)


def test_fast_is_refused_on_the_cpu_unless_told_to_skip(tiny, prompt):
    with pytest.raises(VlmoptError, match=r"decode_graph needs a CUDA device.*strict=False"):
        vlmopt.optimize(tiny.model, "fast")
    assert not vlmopt.status(tiny.model).active
    report = vlmopt.optimize(tiny.model, OptimizeConfig.preset("fast", strict=False))
    states = {part.name: part.state for part in report.parts}
    assert states["decode_graph"] == states["kernels"] == "skipped"
    assert states["text"] == states["vision"] == states["connector"] == "on"
    tiny.model.generate(**prompt((64, 64), "x"), **OPTIONS)
    assert vlmopt.status(tiny.model).calls == {"stages": 1, "kernels": 0, "stock": 0}


@pytest.mark.parametrize("strict", [True, False])
def test_a_capture_that_fails_raises_or_is_recorded_as_skipped(tiny, prompt, monkeypatch, strict):
    """As on a GPU whose driver refuses the capture: strict raises, else the stages run without graphs and say so."""
    api, runtime = sys.modules["vlmopt.optimize"], sys.modules["vlmopt.runtime.generate"]

    def refuse(*_):
        raise PartFailed("decode_graph", "the decode step could not be captured in a CUDA graph: refused")

    monkeypatch.setattr(runtime.Engine, "warm_up", refuse)
    part = api.Part("decode_graph", "on", "", "near")
    monkeypatch.setattr(api, "_parts", lambda *_: [api.Part("text", "on", "", "exact"), part])
    config = OptimizeConfig.preset("exact", packed=True, decode_graph=True, strict=strict)
    before = storages(tiny.model)
    if strict:
        with pytest.raises(VlmoptError, match="could not be captured"):
            vlmopt.optimize(tiny.model, config)
        assert not vlmopt.status(tiny.model).active and len(set(storages(tiny.model).values())) == len(
            set(before.values())
        )
        return
    report = vlmopt.optimize(tiny.model, config)
    assert [(p.name, p.state) for p in report.parts] == [("text", "on"), ("decode_graph", "skipped")]
    assert report.cls == "exact" and "refused" in report.parts[1].reason
    tiny.model.generate(**prompt((64, 64), "x"), **OPTIONS)
    assert vlmopt.status(tiny.model).calls["stages"] == 1


def test_plan_changes_nothing_and_states_class_and_memory(tiny):
    before = storages(tiny.model)
    planned = vlmopt.plan(tiny.model, OptimizeConfig.preset("fast", strict=False))
    assert storages(tiny.model) == before and "generate" not in vars(tiny.model)
    assert planned.cls == "near"
    assert vlmopt.plan(tiny.model, "exact").cls == "exact"
    parameters = sum(p.numel() for p in tiny.model.parameters())
    assert planned.memory["weights"] == 4 * parameters
    assert planned.memory["kv_cache"] == 4 * 2 * 2 * 2048 * 128 * 4
    assert "decode_graph" in str(planned)


def test_a_part_that_needs_the_text_stages_is_refused_without_them(tiny):
    with pytest.raises(VlmoptError, match="vision needs the text part"):
        vlmopt.optimize(tiny.model, OptimizeConfig(vision=True))


def test_an_unknown_kernel_is_refused(tiny):
    with pytest.raises(VlmoptError, match="ops has no entry 'swigloo'"):
        vlmopt.optimize(tiny.model, OptimizeConfig.preset("exact", kernels=("swigloo",)))
    with pytest.raises(VlmoptError, match="entry 'decode_attention' has no kernel"):
        vlmopt.optimize(tiny.model, OptimizeConfig.preset("exact", kernels=("decode_attention",)))


def test_other_models_are_refused_with_the_reason(tiny):
    class Subclass(Qwen3VLForConditionalGeneration):
        pass

    with pytest.raises(VlmoptError, match="it is a Subclass"):
        vlmopt.optimize(Subclass(tiny.model.config), "exact")
    with pytest.raises(VlmoptError, match="it is a Linear"):
        vlmopt.plan(torch.nn.Linear(2, 2), "exact")
    tiny.model.set_attn_implementation("eager")
    with pytest.raises(VlmoptError, match="attn_implementation='sdpa'"):
        vlmopt.optimize(tiny.model, "exact")


def test_a_generate_that_is_already_replaced_is_refused_and_kept(tiny):
    mine = lambda **kwargs: None  # noqa: E731 - a patch as users write it
    tiny.model.generate = mine
    with pytest.raises(VlmoptError, match="its generate was replaced"):
        vlmopt.optimize(tiny.model, "exact")
    assert tiny.model.generate is mine


def test_a_deep_copy_can_be_optimised_itself(tiny, prompt):
    vlmopt.optimize(tiny.model, "exact")
    twin = copy.deepcopy(tiny.model)
    vlmopt.optimize(twin, "exact")
    inputs = prompt((64, 64), "x")
    assert torch.equal(twin.generate(**inputs, **OPTIONS), tiny.model.generate(**inputs, **OPTIONS))
    assert vlmopt.status(twin).calls["stages"] == vlmopt.status(tiny.model).calls["stages"] == 1
    vlmopt.revert(twin)
    assert "generate" not in vars(twin) and vlmopt.status(tiny.model).active


def test_mixed_dtypes_are_refused(tiny):
    tiny.model.lm_head.bfloat16()
    tiny.model.model.visual.bfloat16()
    with pytest.raises(VlmoptError, match="several dtypes"):
        vlmopt.optimize(tiny.model, "exact")


@pytest.mark.parametrize("packed", [False, True])
def test_save_and_reload_as_stock(tiny, prompt, tmp_path, packed):
    stock_keys = set(tiny.model.state_dict())
    vlmopt.optimize(tiny.model, OptimizeConfig.preset("exact", packed=packed))
    expected = tiny.model.generate(**prompt((64, 64), "x"), **OPTIONS)
    tiny.model.save_pretrained(tmp_path)
    again = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert set(again.state_dict()) == stock_keys
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in tiny.model.state_dict().items())
    assert torch.equal(again.generate(**prompt((64, 64), "x"), **OPTIONS), expected)


def test_status_is_plain_json(tiny):
    import json

    vlmopt.optimize(tiny.model, "exact")
    content = json.loads(json.dumps(vlmopt.status(tiny.model).to_dict()))
    assert content["class"] == "exact" and content["config"]["name"] == "exact"


def test_a_deleted_model_is_collected(tiny):
    import gc
    import weakref

    from vlmopt.bench.models import TINY, load

    model = load(TINY, "cpu", torch.float32).model
    vlmopt.optimize(model, OptimizeConfig.preset("exact", packed=True))
    ghost = weakref.ref(model)
    del model
    gc.collect()
    assert ghost() is None
