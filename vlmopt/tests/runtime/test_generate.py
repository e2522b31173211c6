"""The loop: ends, limits, streamers, threads, images of every sort, and nothing left over from the call before."""

import copy
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, TextIteratorStreamer

import vlmopt
from vlmopt.errors import PartFailed, VlmoptError
from vlmopt.ops import Ops
from vlmopt.runtime import generate as runtime
from vlmopt.runtime.generate import ENGINES
from vlmopt.runtime.speculate import SPARE
from vlmopt.stages.prefill import prefill
from vlmopt.stages.tables import grid_table, rope
from vlmopt.stages.vision import encode

GREEDY = {"do_sample": False}


@pytest.fixture
def ours(tiny):
    vlmopt.optimize(tiny.model, "exact")
    return tiny.model


def served(model):
    return vlmopt.status(model).calls["stages"]


class Recorder:
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize(
    "parts",
    [
        ("hello",),
        ((64, 64), "x"),
        ("", (64, 64), "x"),
        ("t" * 200, (96, 32), "after"),
        ((64, 64), "one", (32, 96), "two", (96, 32), "three"),
        ("before", (33, 47), "between", (130, 70)),
        ((1, 1), "a single pixel"),
        ((27, 332), "a strip"),
        ((1, 200), "the longest aspect"),
    ],
    ids=lambda parts: "+".join("text" if isinstance(p, str) else f"{p[0]}x{p[1]}" for p in parts),
)
def test_prompts_of_every_sort_equal_stock(ours, reference, prompt, parts):
    inputs = prompt(*parts)
    expected = reference.model.generate(**inputs, **GREEDY, max_new_tokens=12)
    assert torch.equal(ours.generate(**inputs, **GREEDY, max_new_tokens=12), expected)
    assert served(ours) == 1


def test_a_then_b_then_text_then_a_again(ours, reference, prompt):
    first, second, text = prompt((64, 96), "A"), prompt((96, 32), "B"), prompt("only text")
    for inputs in (first, second, text, first):
        expected = reference.model.generate(**inputs, **GREEDY, max_new_tokens=10)
        assert torch.equal(ours.generate(**inputs, **GREEDY, max_new_tokens=10), expected)
    assert served(ours) == 4


def test_limits_agree_on_their_common_prefix(ours, prompt):
    inputs = prompt((64, 64), "x")
    length = inputs["input_ids"].shape[1]
    ours.generation_config.eos_token_id = None
    longest = ours.generate(**inputs, **GREEDY, max_new_tokens=700)[0]
    assert len(longest) == length + 700
    for limit in (1, 10, 128):
        assert torch.equal(ours.generate(**inputs, **GREEDY, max_new_tokens=limit)[0], longest[: length + limit])


def test_a_short_call_after_a_long_one_reads_nothing_of_it(ours, prompt):
    inputs = prompt((64, 64), "x")
    expected = ours.generate(**inputs, **GREEDY, max_new_tokens=10)
    ours.generation_config.eos_token_id = None
    ours.generate(**prompt((128, 128), "long " * 50), **GREEDY, max_new_tokens=200)
    length = inputs["input_ids"].shape[1]
    ENGINES[ours].cache.buffer[:, :, :, length + 10 :] = float("nan")
    ours.generation_config.eos_token_id = [258, 256]
    assert torch.equal(ours.generate(**inputs, **GREEDY, max_new_tokens=10), expected)


def test_nothing_follows_the_end(ours, prompt):
    inputs = prompt((64, 64), "x")
    length = inputs["input_ids"].shape[1]
    ours.generation_config.eos_token_id = None
    free = ours.generate(**inputs, **GREEDY, max_new_tokens=20)[0, length:].tolist()
    for end in set(free):
        ids = ours.generate(**inputs, **GREEDY, max_new_tokens=20, eos_token_id=[end])[0, length:].tolist()
        assert ids == free[: free.index(end) + 1]


def test_a_streamer_gets_the_prompt_then_one_token_a_call_then_the_end(ours, reference, prompt):
    inputs, mine, theirs = prompt((64, 64), "x"), Recorder(), Recorder()
    ours.generate(**inputs, **GREEDY, max_new_tokens=6, streamer=mine)
    reference.model.generate(**inputs, **GREEDY, max_new_tokens=6, streamer=theirs)
    assert (mine.values, mine.ended) == (theirs.values, 1)
    assert served(ours) == 1


def test_text_streams_from_a_worker_thread(ours, reference, prompt):
    streamer = TextIteratorStreamer(reference.processor.tokenizer, skip_prompt=True)
    worker = threading.Thread(
        target=ours.generate, kwargs={**prompt("abc"), **GREEDY, "max_new_tokens": 5, "streamer": streamer}
    )
    worker.start()
    text = "".join(streamer)
    worker.join()
    ids = ours.generate(**prompt("abc"), **GREEDY, max_new_tokens=5)[0, prompt("abc")["input_ids"].shape[1] :]
    assert text == reference.processor.tokenizer.decode(ids)


def test_two_threads_and_a_copy_never_mix_answers(ours, prompt):
    prompts = [prompt((64, 64), f"question {i}", seed=i) for i in range(6)]
    expected = [ours.generate(**inputs, **GREEDY, max_new_tokens=5) for inputs in prompts]
    wrong = []

    def work(model, order):
        for i in order:
            if not torch.equal(model.generate(**prompts[i], **GREEDY, max_new_tokens=5), expected[i]):
                wrong.append(i)

    models = [ours, ours, copy.deepcopy(ours)]
    threads = [threading.Thread(target=work, args=(m, range(6)[:: 1 if k else -1])) for k, m in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and served(ours) == 18


def test_a_call_from_inside_a_call_goes_to_stock(ours, reference, prompt):
    inner = []

    class Nosy(Recorder):
        def end(self):
            inner.append(ours.generate(**prompt("inner"), **GREEDY, max_new_tokens=4))

    ours.generate(**prompt("outer"), **GREEDY, max_new_tokens=4, streamer=Nosy())
    assert torch.equal(inner[0], reference.model.generate(**prompt("inner"), **GREEDY, max_new_tokens=4))
    assert vlmopt.status(ours).stock_reasons == {"a call from inside a running call": 1}


def test_an_exception_in_a_streamer_leaves_the_model_usable(ours, prompt):
    class Broken(Recorder):
        def put(self, value):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ours.generate(**prompt("x"), **GREEDY, max_new_tokens=4, streamer=Broken())
    ours.generate(**prompt("x"), **GREEDY, max_new_tokens=4)
    assert served(ours) == 1


def test_inference_mode_inside_and_outside(ours, reference, prompt):
    inputs = prompt((64, 64), "x")
    with torch.inference_mode():
        inside = ours.generate(**inputs, **GREEDY, max_new_tokens=6)
    outside = ours.generate(**inputs, **GREEDY, max_new_tokens=6)
    assert torch.equal(inside, outside) and served(ours) == 2


def test_the_reason_for_stock_is_said_once(ours, prompt, caplog):
    for _ in range(3):
        ours.generate(**prompt("x"), max_new_tokens=2, num_beams=2)
    said = [record.message for record in caplog.records if "hands calls" in record.message]
    assert said == ["vlmopt hands calls like this one to stock: option num_beams"]
    assert vlmopt.status(ours).stock_reasons == {"option num_beams": 3}


def test_the_images_are_under_way_before_the_prompt_is_laid_out(ours, prompt, monkeypatch):
    order, engine = [], ENGINES[ours]
    for holder, name in ((engine, "_encode"), (runtime, "positions")):
        own = getattr(holder, name)
        monkeypatch.setattr(holder, name, lambda *args, own=own, name=name: (order.append(name), own(*args))[1])
    ours.generate(**prompt((64, 96), "what is it?"), **GREEDY, max_new_tokens=1)
    assert order == ["_encode", "positions"]


@pytest.mark.parametrize("switch", ["vision", "connector"])
def test_one_stage_switched_off_is_stocks_own_and_gives_the_same_ids(tiny, reference, prompt, switch):
    vlmopt.optimize(tiny.model, vlmopt.OptimizeConfig.preset("exact", **{switch: False}))
    for inputs in (prompt((64, 96), "a", (96, 64), "b"), prompt("text")):
        expected = reference.model.generate(**inputs, **GREEDY, max_new_tokens=8)
        assert torch.equal(tiny.model.generate(**inputs, **GREEDY, max_new_tokens=8), expected)
    assert served(tiny.model) == 2


@pytest.mark.parametrize("seed", range(6))
def test_the_same_seed_draws_stocks_tokens_and_leaves_the_generator_where_stock_does(tiny, reference, prompt, seed):
    """Hot, so that draws decide: some answers end early, others run to the limit."""
    vlmopt.optimize(tiny.model, "exact")
    inputs = prompt((64, 96), "read", (96, 64), "all")
    options = {"do_sample": True, "temperature": 4.0, "top_k": 40, "repetition_penalty": 1.1, "max_new_tokens": 30}
    drawn = []
    for model in (tiny.model, reference.model):
        torch.manual_seed(seed)
        drawn.append((model.generate(**inputs, **options), torch.rand(1)))
    (mine, after), (theirs, after_theirs) = drawn
    assert torch.equal(mine, theirs) and torch.equal(after, after_theirs)
    assert vlmopt.status(tiny.model).calls["stages"] == 1


class Given:
    """Stands for graphs or speculation, and remembers what it was asked for."""

    def __init__(self):
        self.calls, self.ops = [], None

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args, kwargs))


def test_a_warm_up_makes_room_runs_a_prompt_of_that_length_and_captures_every_capacity(ours, monkeypatch):
    engine, prompts = ENGINES[ours], []
    monkeypatch.setattr(engine, "_first", lambda model, request, sampler: prompts.append((model, request, sampler)))
    engine.graphs = Given()
    engine.warm_up(ours, 14 + 32**2, iter)
    forget, *gets = engine.graphs.calls
    assert engine.cache.capacity == 2048 and forget == ("forget", {})
    assert [(capacity, options) for _, capacity, _, options in gets] == [
        (capacity, {"steps": steps}) for capacity in (512, 1024, 2048) for steps in (1, 8)
    ]
    assert all(name == "get" and table is engine.rope_table for name, _, table, _ in gets)
    [(model, request, sampler)] = prompts
    assert model is ours and sampler is None and request.grids == ((1, 64, 64),)


def test_a_trial_is_a_square_image_between_texts(ours):
    request = ENGINES[ours]._trial(3)
    image = ENGINES[ours].weights.tokens.image
    assert request.id_list == request.ids[0].tolist() == [0] * 2 + [image] * 9 + [0] * 12
    assert request.types.tolist() == [0] * 2 + [1] * 9 + [0] * 12
    assert request.grids == ((1, 6, 6),) and request.pixels.shape == (36, 1536) and not request.pixels.any()
    assert (request.max_new_tokens, request.eos, request.streamer) == (3, frozenset(), None)


def test_parts_are_started_with_what_they_need_and_want_of_memory_is_theirs(ours, monkeypatch):
    engine, made = ENGINES[ours], []
    engine.weights = replace(engine.weights, originals=replace(engine.weights.text))
    engine.speculation = Given()
    engine.start_speculation(77)
    assert engine.speculation.calls == [("start", 77, {})]
    monkeypatch.setattr(runtime, "Buckets", lambda *args, **options: made.append((*args, options)))
    engine.start_prompt_graphs(iter)
    [(weights, ops, options)] = made
    assert weights.text is engine.weights.prompt and ops is engine.ops and options == {"progress": iter}

    def full(*args, **options):
        raise torch.OutOfMemoryError("no room")

    engine.graphs = engine.speculation = SimpleNamespace(start=full, get=full, forget=list, taps={})
    monkeypatch.setattr(runtime, "Buckets", full)
    for part, start in {
        "speculate": lambda: engine.start_speculation(77),
        "prompt_graphs": lambda: engine.start_prompt_graphs(iter),
        "decode_graph": lambda: engine.warm_up(ours, 600, iter),
    }.items():
        with pytest.raises(PartFailed, match=r"^there is not enough memory: no room$") as failed:
            start()
        assert failed.value.part == part


def test_drafts_serve_greedy_calls_that_they_are_ready_for_and_have_rows_to_spare(ours, reference, prompt, monkeypatch):
    engine, inputs, asked, room = ENGINES[ours], prompt("hello"), [], []
    length = inputs["input_ids"].shape[1]
    reserve = engine.reserve
    monkeypatch.setattr(engine, "reserve", lambda rows: (room.append(rows), reserve(rows))[1])
    plain = ours.generate(**inputs, **GREEDY, max_new_tokens=4)
    engine.speculation = SimpleNamespace(
        ready=lambda positions: (asked.append(positions), positions < length + 6)[1],
        decode=lambda first, rows, delta, request, sampler: [int(first), rows, delta],
        counts={},
        forget=list,
        taps={},
    )
    drafted = ours.generate(**inputs, **GREEDY, max_new_tokens=4)[0, length:].tolist()
    assert drafted == [int(plain[0, length]), length, 0]
    longer = ours.generate(**inputs, **GREEDY, max_new_tokens=6)
    assert torch.equal(longer, reference.model.generate(**inputs, **GREEDY, max_new_tokens=6))
    ours.generate(**inputs, do_sample=True, max_new_tokens=4)
    assert asked == [length + 4, length + 6] and served(ours) == 4
    assert room == [length + 4, length + 4 + SPARE, length + 6 + SPARE, length + 4 + SPARE]


def test_a_copy_hands_every_argument_to_stock(ours, prompt):
    ids, config = prompt("hello")["input_ids"], GenerationConfig(max_new_tokens=3, pad_token_id=256)
    only_f = LogitsProcessorList([lambda ids, scores: scores.index_fill(1, torch.tensor([70]), 1e9)])
    assert copy.deepcopy(ours).generate(ids, config, only_f)[0, ids.shape[1] :].tolist() == [70] * 3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernels", [(), ("swiglu",)])
def test_the_last_layer_is_narrowed_under_kernels_over_packed_weights(tiny, prompt, monkeypatch, packed, kernels):
    vlmopt.optimize(tiny.model, vlmopt.OptimizeConfig.preset("exact", packed=packed))
    ENGINES[tiny.model].kernels, asked = kernels, []
    monkeypatch.setattr(runtime, "prefill", lambda *args, **taps: (asked.append(args[-1]), prefill(*args, **taps))[1])
    tiny.model.generate(**prompt("hello"), **GREEDY, max_new_tokens=1)
    assert asked == [packed and bool(kernels)]


class Driver:
    """Drives the layer loops as the C++ runtime does, by the stages."""

    def __init__(self, weights):
        self.weights, self.prompts = weights, []

    def encode(self, pixels, grids):
        vision = self.weights.vision
        return encode(pixels, grid_table(grids, vision), vision, Ops())

    def prefill(self, ids, slots, features, deepstack, places, rope_table, cache):
        self.prompts.append((ids.tolist(), rope_table))
        h = Ops().merge_embeddings(ids, self.weights.text.embed, slots, features)
        angles = rope(places, self.weights.text, torch.float32)
        return prefill(h, angles, cache, torch.arange(len(ids)), slots, deepstack, self.weights.text, Ops())


def test_a_driver_of_the_layer_loops_is_tried_and_then_serves_every_prompt(ours, reference, prompt, monkeypatch):
    engine, inputs, heard = ENGINES[ours], prompt((64, 96), "read", (96, 64), "all"), Recorder()
    monkeypatch.setattr(runtime, "CppRuntime", Driver)
    engine.weights, engine.graphs = replace(engine.weights, originals=replace(engine.weights.text)), Given()
    engine.start_cpp_runtime(ours)  # whose trial must not come to a graph
    engine.graphs = None
    assert [ids for ids, _ in engine.cpp.prompts] == [engine._trial(2).id_list]
    assert engine.cpp.weights.text is engine.weights.prompt
    ids = ours.generate(**inputs, **GREEDY, max_new_tokens=5, streamer=heard)
    assert torch.equal(ids, reference.model.generate(**inputs, **GREEDY, max_new_tokens=5))
    assert heard.values[0] == inputs["input_ids"].tolist() and heard.ended == 1
    assert engine.cpp.prompts[1] == (inputs["input_ids"][0].tolist(), engine.rope_table)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_driver_that_cannot_be_started_is_the_parts_failure(ours, monkeypatch, device):
    def refuse(weights):
        raise VlmoptError("no compiler")

    monkeypatch.setattr(runtime, "CppRuntime", refuse)
    ENGINES[ours].device = torch.device(device)
    with pytest.raises(PartFailed) as failed:
        ENGINES[ours].start_cpp_runtime(ours)
    reasons = {"cpu": "no compiler", "cuda": "on a GPU it launches the kernels, which are off"}
    assert (failed.value.part, str(failed.value)) == ("cpp_runtime", reasons[device])
