"""Interrupts, memory that runs out, threads, forks, adapters: the next call is right, or it is stock's."""

import copy
import gc
import multiprocessing
import sys
import threading
from functools import partial

import pytest
import torch
from torch import nn
from transformers import Qwen3VLForConditionalGeneration

import vlmopt
from vlmopt import OptimizeConfig, VlmoptError
from vlmopt.bench.models import TINY, load
from vlmopt.errors import PartFailed
from vlmopt.ops import Ops
from vlmopt.runtime.generate import ENGINES, Engine
from vlmopt.tests.contract.compare import both, same, served
from vlmopt.tests.test_guard import Negate, add_adapter

GREEDY = {"do_sample": False, "max_new_tokens": 5}


@pytest.fixture
def inputs(prompt):
    return prompt((64, 96), "what is it?")


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def out_of_memory(*args, kind=torch.OutOfMemoryError, **kwargs):
    raise kind("CUDA out of memory. Tried to allocate 7.00 GiB\nand more lines")


def with_graphs(monkeypatch, warm_up):
    """As on a GPU: the part decode_graph can run, and warms up like this."""
    api = sys.modules["vlmopt.optimize"]
    parts = [api.Part("text", "on", "", "exact"), api.Part("decode_graph", "on", "", "near")]
    monkeypatch.setattr(api, "_parts", lambda *_: parts)
    monkeypatch.setattr(Engine, "warm_up", warm_up)
    return OptimizeConfig.preset("exact", packed=True, decode_graph=True, strict=False)


@pytest.mark.parametrize("when", ["warm-up", "packing"])
def test_an_interrupt_while_optimising_leaves_the_model_as_it_was(tiny, stock, inputs, monkeypatch, when):
    config = with_graphs(monkeypatch, interrupt)
    if when == "packing":
        monkeypatch.setattr("vlmopt.weights._vision", interrupt)
    with pytest.raises(KeyboardInterrupt):
        vlmopt.optimize(tiny.model, config)
    attention = tiny.model.model.language_model.layers[0].self_attn
    assert not vlmopt.status(tiny.model).active and "generate" not in vars(tiny.model)
    assert attention.q_proj.weight.untyped_storage().data_ptr() != attention.k_proj.weight.untyped_storage().data_ptr()
    assert same(*both(tiny.model, stock, inputs, **GREEDY))


@pytest.mark.parametrize("entry", ["vision_attention", "prefill_attention", "decode_attention", "lm_head_argmax"])
def test_an_interrupt_at_any_stage_leaves_the_next_call_right(ours, stock, inputs, entry):
    engine, calls = ENGINES[ours], []

    def second_time(*args, **kwargs):
        calls.append(entry)
        return interrupt() if len(calls) == 2 else getattr(Ops, entry)(*args, **kwargs)

    own, engine.ops = engine.ops, Ops(**{entry: second_time})
    with pytest.raises(KeyboardInterrupt):
        ours.generate(**inputs, **GREEDY)
    engine.ops = own
    assert same(*both(ours, stock, inputs, **GREEDY))
    assert served(ours) == {"stages": 1}


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError], ids=["GPU", "CPU"])
def test_no_memory_for_a_longer_cache_goes_to_stock_and_a_shorter_call_not(
    ours, stock, prompt, monkeypatch, caplog, kind
):
    long, short = prompt("word " * 150), prompt("short")
    ours.generate(**short, **GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", partial(out_of_memory, kind=kind))
        for _ in range(2):
            assert same(*both(ours, stock, long, **GREEDY))
    assert vlmopt.status(ours).stock_reasons == {"no memory for a cache of this length": 2}
    assert sum("no memory" in record.message for record in caplog.records) == 1
    assert ENGINES[ours].cache.capacity == 0, "what it held is stock's to use"
    for inputs in (short, long):
        assert same(*both(ours, stock, inputs, **GREEDY))
    assert served(ours) == {"stages": 3, "stock": 2}


def test_no_memory_for_the_tables_beside_a_grown_cache_forgets_it_too(ours, stock, inputs, monkeypatch):
    engine = ENGINES[ours]
    engine.cache.release()
    with monkeypatch.context() as patch:
        patch.setattr("vlmopt.runtime.generate.rope", out_of_memory)
        with pytest.raises(Exception, match="no memory for a cache"):
            engine.reserve(700)
    assert engine.cache.capacity == 0
    assert same(*both(ours, stock, inputs, **GREEDY))


@pytest.mark.parametrize("strict", [True, False])
def test_no_memory_to_warm_up_is_a_sentence_or_a_part_left_out(tiny, stock, inputs, monkeypatch, strict):
    own = Engine.warm_up
    config = with_graphs(monkeypatch, own).model_copy(update={"strict": strict})
    monkeypatch.setattr("vlmopt.runtime.generate.DecodeGraphs", lambda *args: None)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", out_of_memory)
        if strict:
            with pytest.raises(VlmoptError, match="not enough memory: no memory for a cache of this length"):
                vlmopt.optimize(tiny.model, config)
            assert not vlmopt.status(tiny.model).active
            return
        report = vlmopt.optimize(tiny.model, config)
    assert [part.state for part in report.parts] == ["on", "skipped"]
    assert "not enough memory" in report.parts[1].reason
    assert same(*both(tiny.model, stock, inputs, **GREEDY)) and served(tiny.model) == {"stages": 1}


def test_no_memory_to_join_the_weights_leaves_them_apart(tiny, stock, inputs, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("vlmopt.weights._pack", out_of_memory)
        with pytest.raises(VlmoptError, match="no memory to join"):
            vlmopt.optimize(tiny.model, OptimizeConfig.preset("exact", packed=True))
        report = vlmopt.optimize(tiny.model, OptimizeConfig.preset("exact", packed=True, strict=False))
    assert {part.name: part.state for part in report.parts}["packed"] == "skipped"
    assert same(*both(tiny.model, stock, inputs, **GREEDY)) and served(tiny.model) == {"stages": 1}


class NoGraphs:
    """Graphs of which none can be captured any more."""

    def get(self, *args, **kwargs):
        raise PartFailed("decode_graph", "it could not be captured in a CUDA graph: out of memory")

    def forget(self):
        pass


def test_a_capture_that_fails_in_a_call_is_said_once_and_decoded_without_graphs(ours, stock, inputs, caplog):
    ENGINES[ours].graphs = NoGraphs()
    for _ in range(2):
        assert same(*both(ours, stock, inputs, **GREEDY))
    assert served(ours) == {"stages": 2} and ENGINES[ours].graphs is None
    (said,) = [record.message for record in caplog.records if "without graphs" in record.message]
    assert said.endswith("it could not be captured in a CUDA graph: out of memory")
    (part,) = [part for part in vlmopt.status(ours).parts if part.name == "decode_graph"]
    assert part.state == "skipped" and "out of memory" in part.reason


def test_threads_on_two_optimised_models_never_mix_answers(ours, tiny, prompt):
    vlmopt.optimize(tiny.model, "exact")
    with torch.no_grad():
        tiny.model.model.language_model.norm.weight.mul_(-1)
    calls = [prompt((64, 64), f"question {i}", seed=i) for i in range(4)]
    models = (ours, tiny.model)
    expected = [[model.generate(**inputs, **GREEDY) for inputs in calls] for model in models]
    assert not torch.equal(expected[0][0], expected[1][0])
    wrong = []

    def work(which):
        for inputs, answer in zip(calls, expected[which], strict=True):
            if not torch.equal(models[which].generate(**inputs, **GREEDY), answer):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def answer_into(pipe, model, inputs):
    pipe.send(model.generate(**inputs, **GREEDY).tolist())


def test_a_fork_answers_though_another_thread_was_in_a_call(ours, inputs):
    expected = ours.generate(**inputs, **GREEDY).tolist()
    here, there = multiprocessing.Pipe()
    ENGINES[ours]._lock.acquire()
    try:
        child = multiprocessing.get_context("fork").Process(target=answer_into, args=(there, ours, inputs))
        child.start()
    finally:
        ENGINES[ours]._lock.release()
    assert here.poll(60), "the child hangs"
    assert here.recv() == expected
    child.join(10)


class Doubled(nn.Linear):
    """A layer of the user's own."""

    def forward(self, x):
        return super().forward(x) * 2


def swap_a_layer(model):
    old = model.model.language_model.layers[1].mlp.down_proj
    model.model.language_model.layers[1].mlp.down_proj = Doubled(old.in_features, old.out_features, bias=False)


def parametrize(model):
    torch.nn.utils.parametrize.register_parametrization(model.model.visual.blocks[0].attn.qkv, "weight", Negate())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (add_adapter, r"q_proj is a peft\.tuners\.lora\.layer\.Linear"),
        (swap_a_layer, r"down_proj is a .*test_faults\.Doubled"),
        (parametrize, r"attn\.qkv is a .*ParametrizedLinear"),
    ],
)
def test_what_the_stages_would_pass_over_is_refused_by_name(tiny, change, named):
    change(tiny.model)
    with pytest.raises(VlmoptError, match=f"cannot be optimised: .*{named}"):
        vlmopt.optimize(tiny.model, "exact")


@pytest.mark.parametrize("patch", [lambda self, x: x, partial(torch.mul, 2)], ids=["function", "partial"])
def test_a_class_patched_before_optimising_is_refused(tiny, monkeypatch, patch):
    cls = type(tiny.model.model.language_model.norm)
    monkeypatch.setattr(cls, "forward", patch)
    with pytest.raises(VlmoptError, match=rf"{cls.__name__}.forward was replaced by <?(function|functools)"):
        vlmopt.optimize(tiny.model, "exact")


def test_a_hook_from_before_sends_calls_to_stock(tiny, inputs):
    tiny.model.lm_head.register_forward_hook(lambda module, args, output: -output)
    expected = tiny.model.generate(**inputs, **GREEDY)
    vlmopt.optimize(tiny.model, "exact")
    assert torch.equal(tiny.model.generate(**inputs, **GREEDY), expected)
    assert served(tiny.model) == {"stock": 1}


def test_a_merged_adapter_is_served(tiny, inputs):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False, lora_alpha=64)
    merged = get_peft_model(tiny.model, config).merge_and_unload()
    expected = merged.generate(**inputs, **GREEDY)
    vlmopt.optimize(merged, "exact")
    assert torch.equal(merged.generate(**inputs, **GREEDY), expected) and served(merged) == {"stages": 1}


def test_compiled_around_it(ours, stock, inputs):
    compiled = torch.compile(ours, backend="eager")
    assert torch.equal(compiled.generate(**inputs, **GREEDY), stock.generate(**inputs, **GREEDY))
    assert served(ours) == {"stages": 1}


def test_to_the_same_place_is_served_and_to_another_dtype_is_stocks(tiny, stock, inputs):
    vlmopt.optimize(tiny.model, "exact")
    assert same(*both(tiny.model.to("cpu"), stock, inputs, **GREEDY))
    twin = copy.deepcopy(stock).double()
    assert same(*both(tiny.model.double(), twin, inputs, **GREEDY))
    assert served(tiny.model) == {"stages": 1, "stock": 1}


def test_a_model_unpickled_or_copied_is_stock_and_saves_stocks_file(ours, inputs, tmp_path):
    twin = copy.deepcopy(ours)
    assert not vlmopt.status(twin).active
    twin.save_pretrained(tmp_path)
    again = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert torch.equal(again.generate(**inputs, **GREEDY), ours.generate(**inputs, **GREEDY))


def live_bytes():
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_five_rounds_of_optimising_and_deleting_give_all_memory_back(inputs):
    levels = []
    for _ in range(5):
        model = load(TINY, "cpu", torch.float32).model
        vlmopt.optimize(model, OptimizeConfig.preset("exact", packed=True, batches=True))
        model.generate(**inputs, **GREEDY)
        model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
        del model
        levels.append(live_bytes())
    assert max(levels) - min(levels) < 2**16, levels
