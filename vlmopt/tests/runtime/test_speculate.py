"""Decoding with drafts says what plain decoding says, whatever is drafted, and counts what it did."""

import copy
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import vlmopt
from vlmopt import OptimizeConfig
from vlmopt.bench.models import TINY, load
from vlmopt.bench.models import prompt as ask
from vlmopt.errors import PartFailed
from vlmopt.ops import KERNELS, Ops, launcher
from vlmopt.runtime import speculate
from vlmopt.runtime.acceptance import Pace
from vlmopt.runtime.drafters import Drafter, DraftModel
from vlmopt.runtime.generate import ENGINES
from vlmopt.runtime.graphs import DecodeGraphs
from vlmopt.runtime.speculate import LADDER, SPARE, Speculation
from vlmopt.stages.decode import attention, decode_step
from vlmopt.tests.passes import LONGEST

GREEDY = {"do_sample": False}
LOOKUP = OptimizeConfig.preset("exact", speculate="lookup")
WANTED = 25


@pytest.fixture(scope="module")
def loaded():
    return load(TINY, "cpu", torch.float32)


@pytest.fixture
def ours(loaded, monkeypatch):
    """The model with prompt lookup, of which no step costs more than a plain one, and without an end."""
    monkeypatch.setattr(Speculation, "_time", lambda *_: 1.0)
    vlmopt.optimize(loaded.model, LOOKUP)
    loaded.model.generation_config.eos_token_id = None
    return loaded.model


@pytest.fixture(scope="module")
def plain(reference):
    """Stock's new ids without an end; asked for once a prompt."""
    known = {}

    def run(inputs, new=WANTED):
        ids = inputs["input_ids"]
        key = tuple(ids[0].tolist())
        if len(known.get(key, ())) < new:
            options = {**GREEDY, "eos_token_id": None, "max_new_tokens": max(new, WANTED)}
            known[key] = reference.model.generate(**inputs, **options)[0, ids.shape[1] :].tolist()
        return known[key][:new]

    return run


def new_ids(model, inputs, new=WANTED, **options):
    ids = model.generate(**inputs, **GREEDY, max_new_tokens=new, **options)[0]
    assert torch.equal(ids[: inputs["input_ids"].shape[1]], inputs["input_ids"][0])
    return ids[inputs["input_ids"].shape[1] :].tolist()


def counts(model):
    return vlmopt.status(model).speculation


def always(monkeypatch, k):
    monkeypatch.setattr(Pace, "choose", lambda self, costs: k)


class Scripted(Drafter):
    """Drafts that are right for `right` tokens and wrong from there on."""

    def __init__(self, prompt_length, answer, right):
        self.start, self.answer, self.right = prompt_length, answer, right

    def begin(self, request):
        pass

    def __call__(self, history, row, k):
        said = int(row) - self.start + 1
        coming = [*self.answer[said:], *[0] * k][:k]
        draft = [token if i < self.right else (token + 1) % 256 for i, token in enumerate(coming)]
        return torch.tensor(draft), torch.ones(1, dtype=torch.bool)


@pytest.mark.parametrize("k", LADDER[1:])
@pytest.mark.parametrize("right", [0, 1, 3, 7])
def test_ids_are_the_plain_ones_and_a_step_gives_what_holds_and_one_more(ours, plain, prompt, monkeypatch, k, right):
    inputs = prompt((64, 96), "read all")
    length, expected = inputs["input_ids"].shape[1], plain(inputs)
    always(monkeypatch, k)
    engine = ENGINES[ours]
    engine.speculation = Speculation(engine, Scripted(length, expected, right))
    assert new_ids(ours, inputs) == expected
    held, tried = min(right, k), min(right + 1, k)
    steps = -(-(WANTED - 1) // (held + 1))
    seen = counts(ours)
    assert (seen["calls"], seen["steps"], seen["drafts"]) == (1, steps, steps)
    assert seen["held"] == WANTED - 1 - steps
    assert tried * (steps - 1) < seen["tried"] <= tried * steps


@pytest.mark.parametrize("k", LADDER)
def test_prompt_lookup_changes_no_answer(ours, plain, prompt, monkeypatch, k):
    always(monkeypatch, k)
    for parts in (("abcabcabc",), ((64, 96), "read all"), ("t" * 60,)):
        inputs = prompt(*parts)
        assert new_ids(ours, inputs) == plain(inputs)
    assert counts(ours)["calls"] == vlmopt.status(ours).calls["stages"] == 3
    assert ("drafts" in counts(ours)) == (k > 0)


@pytest.mark.parametrize("new", [1, 2, 3, 8, 9, 17])
def test_limits(ours, plain, prompt, monkeypatch, new):
    always(monkeypatch, 7)
    inputs = prompt((64, 64), "x")
    assert new_ids(ours, inputs, new) == plain(inputs, new)
    assert ENGINES[ours].speculation.row <= inputs["input_ids"].shape[1] + new - 1


def test_nothing_follows_the_end(ours, plain, prompt, monkeypatch):
    always(monkeypatch, 4)
    inputs = prompt((64, 64), "x")
    free = plain(inputs)
    for end in list(dict.fromkeys(free))[:6]:
        assert new_ids(ours, inputs, eos_token_id=[end, 259]) == free[: free.index(end) + 1]


def test_a_call_reads_nothing_of_the_one_before(ours, plain, prompt):
    inputs, long = prompt((64, 64), "x"), prompt((128, 128), "long " * 20)
    expected = plain(inputs)
    assert new_ids(ours, inputs) == expected
    new_ids(ours, long, 30)
    engine = ENGINES[ours]
    engine.cache.buffer[:, :, :, inputs["input_ids"].shape[1] + WANTED + SPARE :] = float("nan")
    engine.speculation.history.fill_(3)
    assert new_ids(ours, inputs) == expected


def test_the_last_token_may_stand_at_the_end_of_the_cache(ours, plain, prompt, monkeypatch):
    always(monkeypatch, 7)
    inputs = prompt("ab" * 230)
    engine = ENGINES[ours]
    engine.cache.release()
    new = 512 - SPARE - inputs["input_ids"].shape[1]
    assert new_ids(ours, inputs, new) == plain(inputs, new)
    assert engine.cache.capacity == 512 and len(engine.speculation.history) == 513


def test_a_streamer_gets_every_token_by_itself(ours, plain, prompt, monkeypatch):
    always(monkeypatch, 7)
    inputs, heard = prompt((64, 64), "x"), []
    streamer = SimpleNamespace(put=lambda value: heard.append(value.tolist()), end=lambda: heard.append("end"))
    expected = plain(inputs, 12)
    assert new_ids(ours, inputs, 12, streamer=streamer) == expected
    assert heard == [inputs["input_ids"].tolist(), *[[token] for token in expected], "end"]


@pytest.mark.parametrize("options", [{"do_sample": True, "temperature": 2.0}, {"repetition_penalty": 1.3}])
def test_calls_that_draw_or_shape_go_the_plain_way(ours, reference, prompt, options):
    inputs, options = prompt((64, 64), "x"), {**GREEDY, **options, "max_new_tokens": 12, "eos_token_id": None}
    drawn = []
    for model in (ours, reference.model):
        torch.manual_seed(5)
        drawn.append(model.generate(**inputs, **options))
    assert torch.equal(*drawn)
    assert counts(ours) == {} and vlmopt.status(ours).calls["stages"] == 1


def test_the_part_is_planned_and_is_no_part_of_a_preset(tiny):
    planned = vlmopt.plan(tiny.model, LOOKUP)
    (part,) = [part for part in planned.parts if part.name == "speculate"]
    assert (part.state, part.cls, planned.cls) == ("on", "near", "near") and "plain steps" in part.reason
    assert OptimizeConfig.preset("fast").speculate == OptimizeConfig.preset("exact").speculate == "none"
    with pytest.raises(vlmopt.VlmoptError, match="speculate needs the text part"):
        vlmopt.optimize(tiny.model, OptimizeConfig(speculate="lookup"))
    with pytest.raises(vlmopt.VlmoptError, match="bad option 'speculate'"):
        OptimizeConfig.preset("exact", speculate="eagl")


@pytest.mark.parametrize("strict", [True, False])
def test_a_part_that_cannot_start_raises_or_is_recorded_as_skipped(tiny, plain, prompt, monkeypatch, strict):
    def refuse(*_):
        raise PartFailed("speculate", "the decode step could not be captured in a CUDA graph: refused")

    monkeypatch.setattr(Speculation, "start", refuse)
    config = LOOKUP.model_copy(update={"strict": strict})
    if strict:
        with pytest.raises(vlmopt.VlmoptError, match="refused"):
            vlmopt.optimize(tiny.model, config)
        assert not vlmopt.status(tiny.model).active
        return
    status = vlmopt.optimize(tiny.model, config)
    (part,) = [part for part in status.parts if part.name == "speculate"]
    assert part.state == "skipped" and part.reason.endswith("refused") and status.cls == "exact"
    tiny.model.generation_config.eos_token_id = None
    assert new_ids(tiny.model, prompt("abcabcabc")) == plain(prompt("abcabcabc"))


def test_costs_are_measured_when_the_model_is_optimised(tiny):
    vlmopt.optimize(tiny.model, LOOKUP)
    costs = ENGINES[tiny.model].speculation.costs
    assert list(costs) == list(LADDER) and costs[0] == 1 and all(cost > 0 for cost in costs.values())


def draft_model(ours, model):
    """Let a copy of `model` draft for ours."""
    drafts = copy.deepcopy(model)
    vlmopt.optimize(drafts, "exact")
    engine = ENGINES[ours]
    engine.speculation = Speculation(engine, DraftModel(ENGINES[drafts], drafts))
    return drafts


def test_a_draft_model_that_is_the_model_itself_is_always_right_also_after_plain_steps(
    ours, reference, plain, prompt, monkeypatch
):
    drafts = draft_model(ours, reference.model)
    inputs = prompt((64, 96), "read all")
    for k in (2, 7):
        # more plain steps between drafts than a draft model takes at once
        pattern = itertools.cycle([k, *[0] * 10])
        monkeypatch.setattr(Pace, "choose", lambda self, costs, pattern=pattern: next(pattern))
        new = 1 + (k + 1) + 10 + (k + 1)
        assert new_ids(ours, inputs, new) == plain(inputs, new)
    assert counts(ours) == {"calls": 2, "steps": 24, "drafts": 4, "tried": 18, "held": 18}
    assert vlmopt.status(drafts).calls["stages"] == 0


def test_a_draft_model_that_errs_changes_no_answer(ours, reference, plain, prompt, monkeypatch):
    drafts = copy.deepcopy(reference.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in drafts.model.language_model.layers[-1].parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.5 * parameter.std().item())
    draft_model(ours, drafts)
    always(monkeypatch, 4)
    for parts in (((64, 96), "read all"), ("abcabcabc",)):
        assert new_ids(ours, prompt(*parts)) == plain(prompt(*parts))
    assert 0 < counts(ours)["held"] < counts(ours)["tried"]


@pytest.mark.parametrize("full_pass", [torch.float32], indirect=True, ids=["fp32"])
def test_all_500_answers_are_the_plain_ones(tiny, samples, full_pass, monkeypatch):
    """Each sample with another number of drafted tokens, half of them taken from the answer that is to come."""
    vlmopt.optimize(tiny.model, LOOKUP)
    engine = ENGINES[tiny.model]
    looked_up, total = engine.speculation, 0
    for number, (sample, expected) in enumerate(zip(samples, full_pass.our_ids, strict=True)):
        inputs = ask(tiny.processor, sample["image"], sample["question"])
        always(monkeypatch, LADDER[number % len(LADDER)])
        engine.speculation = looked_up
        if number % 8 >= 4:
            engine.speculation = Speculation(engine, Scripted(inputs["input_ids"].shape[1], expected, number % 7))
        assert new_ids(tiny.model, inputs, LONGEST) == expected, f"sample {sample['question_id']}"
        total += engine.speculation.counts["held"] if number % 8 >= 4 else 0
    assert looked_up.counts["calls"] == 252 and total > 500


class MadeUpGraph:
    """Stands for a captured graph: its replay runs the step."""

    def __init__(self, step):
        self.replay = step

    def pool(self):
        return "pool"


@pytest.fixture
def captured(monkeypatch):
    """Steps as a GPU runs them, without a GPU: the list of what was captured."""
    found = []

    def capture(step, steps, device, pool, part):
        step()
        found.append((step.args, steps, pool, part))
        return MadeUpGraph(step)

    monkeypatch.setattr(speculate, "capture", capture)
    return found


def with_graphs(model):
    engine = ENGINES[model]
    engine.graphs = DecodeGraphs(engine.weights.text, engine.ops, engine.cache)
    engine.graphs.forget()
    return engine


def test_captured_steps_answer_the_same_with_two_of_them_in_flight(ours, plain, prompt, captured):
    engine = with_graphs(ours)
    expected = {parts: plain(prompt(*parts)) for parts in (((64, 96), "read all"), ("abcabcabc",))}
    for parts in (*expected, *expected):
        assert new_ids(ours, prompt(*parts)) == expected[parts]
    assert captured == [((k, 512), 1, "pool" if k else None, "speculate") for k in LADDER]
    inputs, free = prompt("abcabcabc"), expected["abcabcabc",]
    for end in free[3:6]:
        assert new_ids(ours, inputs, eos_token_id=[end]) == free[: free.index(end) + 1]
    engine.cache.release()
    assert new_ids(ours, inputs) == free
    assert len(captured) == 2 * len(LADDER), "the cache moved, so the old graphs are gone"


def test_a_capture_that_fails_leaves_plain_decoding_and_says_so(ours, plain, prompt, monkeypatch, caplog):
    with_graphs(ours)

    def refuse(*args):
        raise PartFailed("speculate", "the decode step could not be captured in a CUDA graph: refused")

    monkeypatch.setattr(speculate, "capture", refuse)
    ENGINES[ours].graphs.get = refuse
    for _ in range(2):
        assert new_ids(ours, prompt("abcabcabc")) == plain(prompt("abcabcabc"))
    assert len([record for record in caplog.records if "without drafts from now on" in record.message]) == 1
    (part,) = [part for part in vlmopt.status(ours).parts if part.name == "speculate"]
    assert part.state == "skipped" and part.reason.endswith("refused") and counts(ours) == {}


@torch.no_grad()
def test_the_kernels_give_a_row_the_same_bits_beside_others_as_alone(tiny):
    """What makes the ids equal on a GPU; here one layer of Triton kernels in the interpreter."""
    vlmopt.optimize(tiny.model, OptimizeConfig.preset("exact", packed=True))
    engine = ENGINES[tiny.model]
    engine.reserve(100)
    cache = engine.cache.buffer.normal_(generator=torch.Generator().manual_seed(0))
    weights = replace(engine.weights.text, layers=engine.weights.text.layers[:1])
    ops = Ops(**{name: launcher(name) for name in KERNELS if name != "decode_layer"})

    def run(tokens, rows):
        angles = tuple(table[rows] for table in engine.rope_table)
        return decode_step(tokens, angles, cache, rows, attention(rows, cache, ops), weights, ops)

    tokens, rows = torch.tensor([97, 98]), torch.arange(70, 72)
    together = run(tokens, rows)
    assert torch.equal(run(tokens[1:], rows[1:]), together[1:])
    assert not torch.equal(together[:1], together[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("k", LADDER)
def test_on_a_gpu_ids_are_those_of_plain_steps_bit_for_bit(samples, monkeypatch, k):
    fast = OptimizeConfig.preset("fast")
    loaded = load(TINY, "cuda:0", torch.bfloat16)
    inputs = [ask(loaded.processor, s["image"], s["question"]).to("cuda:0") for s in samples.select(range(125))]
    found = []
    for config in (fast, fast.model_copy(update={"speculate": "lookup"})):
        vlmopt.optimize(loaded.model, config)
        always(monkeypatch, k)
        found.append([loaded.model.generate(**each, **GREEDY, max_new_tokens=LONGEST).tolist() for each in inputs])
    assert found[0] == found[1]
    assert counts(loaded.model)["calls"] == 125
