"""Whatever a head drafts, ids are plain decode's; and a head that knows an answer drafts it, row by row, to the end."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

import vlmopt
from vlmopt import OptimizeConfig
from vlmopt.bench.models import TINY, load
from vlmopt.errors import VlmoptError
from vlmopt.kernels.decode_layer import decode_layer_ref
from vlmopt.runtime import eagle_head, speculate
from vlmopt.runtime.acceptance import Pace
from vlmopt.runtime.eagle import Eagle
from vlmopt.runtime.eagle_head import Head, shape_for
from vlmopt.runtime.generate import ENGINES
from vlmopt.runtime.graphs import DecodeGraphs
from vlmopt.runtime.speculate import LADDER, Speculation
from vlmopt.workbook.eagle_train import save

TAPS = (0, 1, 2)
GREEDY = {"do_sample": False, "eos_token_id": None}
WANTED = 25
CHAIN = 7
PROMPTS = {
    "image": ((64, 96), "read all"),
    "text": ("abcabcabc",),
    "images": ("first", (64, 64), "second", (96, 64), "which?"),
}
every_prompt = pytest.mark.parametrize("parts", PROMPTS.values(), ids=PROMPTS)


@pytest.fixture(scope="module")
def loaded():
    loaded = load(TINY, "cpu", torch.float32)
    vlmopt.optimize(loaded.model, "exact")
    return loaded


@pytest.fixture
def ours(loaded):
    engine = ENGINES[loaded.model]
    engine.speculation, engine.graphs = None, None
    return loaded.model


@pytest.fixture(scope="module")
def plain(reference):
    """Stock's new ids."""

    def run(inputs):
        ids = reference.model.generate(**inputs, **GREEDY, max_new_tokens=WANTED)
        return ids[0, inputs["input_ids"].shape[1] :].tolist()

    return run


def text_of(model):
    return ENGINES[model].weights.text


def made_up(text, seed=0, **changes):
    torch.manual_seed(seed)
    return Head(shape_for(text, TAPS), **changes)


def draft_with(model, head):
    engine = ENGINES[model]
    engine.speculation = Speculation(engine, Eagle(engine, head))
    return engine


def new_ids(model, inputs, new=WANTED):
    ids = model.generate(**inputs, **GREEDY, max_new_tokens=new)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def always(monkeypatch, *pattern):
    turns = itertools.cycle(pattern)
    monkeypatch.setattr(Pace, "choose", lambda self, costs: next(turns))


@torch.no_grad()
def stock_rows(model, inputs, answer):
    """All tokens, the rows that enter the layers after the tapped ones, and the angles, from stock's own forward."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer], dtype=torch.int64)], 1)
    seen, kinds = {}, torch.zeros_like(ids)
    kinds[:, : inputs["input_ids"].shape[1]] = inputs["mm_token_type_ids"]
    layers = model.model.language_model.layers

    def keep(tap):
        def hook(module, arguments, words):
            seen[tap] = (arguments[0] if arguments else words["hidden_states"])[0]
            seen["rope"] = tuple(table[0] for table in words["position_embeddings"])

        return hook

    hooks = [layers[tap + 1].register_forward_pre_hook(keep(tap), with_kwargs=True) for tap in TAPS]
    rest = {name: value for name, value in inputs.items() if name in ("pixel_values", "image_grid_thw")}
    model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **rest)
    for hook in hooks:
        hook.remove()
    return ids[0], [seen[tap] for tap in TAPS], seen["rope"]


@torch.no_grad()
def chain(head, embed, rows, start, steps):
    """The states of a chain that begins at row `start`, by whole passes without a cache, the right tokens drafted."""
    ids, taps, rope = rows
    features, states = head.fuse([tap[: start + 1] for tap in taps]), []
    for step in range(steps):
        length = start + 1 + step
        angles = tuple(table[:length] for table in rope)
        x = head.mix(embed[ids[1 : length + 1]], features)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        states.append(head(x, features, angles, *head.keys(x, angles), seen)[-1])
        features = torch.cat([features, states[-1][None]])
    return states


@torch.no_grad()
def knowing(model, reference, inputs, answer, wrong=()):
    """A made-up head whose last product is solved for: after every chain of this text it names the text's next token,
    but another one at the places of the answer that are `wrong`."""
    head, embed = made_up(text_of(model)), text_of(model).embed
    length, rows = inputs["input_ids"].shape[1], stock_rows(reference.model, inputs, answer)
    states, named = [], []
    for start in range(length - 1, length + len(answer) - 2):
        for step, state in enumerate(chain(head, embed, rows, start, min(CHAIN, length + len(answer) - 2 - start))):
            place = start + step + 2 - length
            states.append(state)
            named.append(answer[place] + (place in wrong))
    wanted = torch.nn.functional.one_hot(torch.tensor(named), len(embed)).double()
    solution = torch.linalg.lstsq(head.norm(torch.stack(states)).double(), wanted, driver="gelsd").solution
    head.lm_head.weight.copy_(solution.T)
    assert (head.choose(torch.stack(states)) == torch.tensor(named)).all()
    return head


@every_prompt
@pytest.mark.parametrize("k", LADDER[1:])
def test_ids_are_the_plain_ones_whatever_a_head_drafts(ours, plain, prompt, monkeypatch, k, parts):
    always(monkeypatch, k, k, 0)
    engine = draft_with(ours, made_up(text_of(ours), seed=k))
    inputs = prompt(*parts)
    assert new_ids(ours, inputs) == plain(inputs)
    assert engine.speculation.counts["drafts"] > 5


@every_prompt
def test_a_head_that_knows_the_answer_is_always_right(ours, reference, plain, prompt, monkeypatch, parts):
    """Features, tokens, angles and cache rows line up with stock's: one off, and nothing that was solved for holds."""
    inputs = prompt(*parts)
    expected = plain(inputs)
    engine = draft_with(ours, knowing(ours, reference, inputs, expected))
    for pattern, steps in (((2, 0, 0, 4), 10), ((4,), 5), ((7,), 3)):
        always(monkeypatch, *pattern)
        engine.speculation.counts.clear()
        assert new_ids(ours, inputs) == expected
        seen = engine.speculation.counts
        assert seen["steps"] == steps and seen["held"] == WANTED - 1 - steps, dict(seen)


def test_after_drafts_that_do_not_hold_the_next_ones_do(ours, reference, plain, prompt, monkeypatch):
    inputs, wrong = prompt(*PROMPTS["image"]), {3, 4, 9, 16, 21}
    expected = plain(inputs)
    engine = draft_with(ours, knowing(ours, reference, inputs, expected, wrong))
    always(monkeypatch, 4)
    assert new_ids(ours, inputs) == expected
    at = steps = 0
    while at < WANTED - 1:
        held = next(i for i in range(5) if i == 4 or at + 1 + i in wrong)
        at, steps = at + held + 1, steps + 1
    assert engine.speculation.counts["steps"] == steps > 5


def test_a_call_reads_nothing_of_the_one_before(ours, reference, plain, prompt, monkeypatch):
    inputs, other = prompt(*PROMPTS["image"]), prompt((128, 128), "long " * 20)
    expected = plain(inputs)
    engine = draft_with(ours, knowing(ours, reference, inputs, expected))
    always(monkeypatch, 4)
    for _ in range(2):
        engine.speculation.counts.clear()
        assert new_ids(ours, inputs) == expected
        assert engine.speculation.counts["steps"] == 5
        new_ids(ours, other, 30)
        new_ids(ours, prompt("ab" * 400), 3)


class MadeUpGraph:
    def __init__(self, step):
        self.replay = step

    def pool(self):
        return None


def test_captured_steps_draft_the_same(ours, reference, plain, prompt, monkeypatch):
    """A capture runs a step between prompt and answer, which must not be taken for the prompt."""

    def capture(step, *_):
        step()
        return MadeUpGraph(step)

    monkeypatch.setattr(speculate, "capture", capture)
    inputs = prompt(*PROMPTS["image"])
    expected = plain(inputs)
    engine = draft_with(ours, knowing(ours, reference, inputs, expected))
    engine.graphs = DecodeGraphs(engine.weights.text, engine.ops, engine.cache)
    always(monkeypatch, 4)
    assert new_ids(ours, inputs) == expected
    assert engine.speculation.counts["held"] == WANTED - 1 - 5


def refuse(*_):
    raise AssertionError("called")


def test_a_layer_in_one_tells_the_same_and_a_driver_of_the_layer_loops_stands_back(
    tiny, reference, plain, prompt, monkeypatch
):
    vlmopt.optimize(tiny.model, OptimizeConfig.preset("exact", packed=True))
    inputs = prompt(*PROMPTS["text"])
    expected, seen = plain(inputs), []
    engine = draft_with(tiny.model, knowing(tiny.model, reference, inputs, expected))
    engine.ops = replace(engine.ops, decode_layer=lambda *each: (seen.append(1), decode_layer_ref(*each))[1])
    engine.cpp = SimpleNamespace(prefill=refuse, encode=refuse, launches=0)
    always(monkeypatch, 4)
    assert new_ids(tiny.model, inputs) == expected
    assert engine.speculation.counts["steps"] == 5 and len(seen) == 5 * 4


def test_a_prompt_that_is_not_drafted_for_is_not_looked_at(ours, prompt):
    engine = draft_with(ours, made_up(text_of(ours)))
    ours.generate(**prompt("x"), do_sample=True, max_new_tokens=2)
    assert engine.speculation.taps == dict.fromkeys(TAPS) and engine.speculation.counts == {}
    new_ids(ours, prompt("x"), 2)
    assert engine.speculation.taps == dict.fromkeys(TAPS), "a prompt's rows are let go of"


def published(head, **changes):
    """Its tensors, as somebody else would have written them."""
    tensors = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    return {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}


def write(folder, tensors, config=None):
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, folder / eagle_head.WEIGHTS)
    if config is not None:
        (folder / eagle_head.CONFIG).write_text(json.dumps(config))
    return folder


def test_a_saved_head_comes_back(ours, tmp_path):
    for own_embedding in (False, True):
        head = made_up(text_of(ours), own_embedding=own_embedding)
        again = eagle_head.load(save(head, tmp_path / "head"), text_of(ours))
        assert again.shape == head.shape
        assert again.state_dict().keys() == head.state_dict().keys()
        assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_the_other_layout_and_a_draft_vocabulary_are_read(ours, plain, prompt, tmp_path, monkeypatch):
    text, head = text_of(ours), made_up(text_of(ours))
    kept = torch.arange(40, 140)
    inside = torch.zeros(len(text.embed), dtype=torch.bool).index_fill(0, kept, True)
    rows = head.lm_head.weight.detach()[kept].clone()
    tensors = published(head, **{"lm_head.weight": rows, "d2t": (kept - torch.arange(100)).int(), "t2d": inside})
    theirs = {f"model.{name}".replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    found = eagle_head.load(write(tmp_path, theirs, {"rms_norm_eps": 1e-5}), text, TAPS)
    assert (found.shape.drafted, found.shape.eps, found.shape.taps) == (100, 1e-5, TAPS)
    assert found.norm.eps == found.midlayer["hidden_norm"].eps == 1e-5
    states = torch.randn(5, 256)
    best = head.logits(states)[:, kept].argmax(-1)
    assert torch.equal(found.choose(states), kept[best])
    always(monkeypatch, 4)
    draft_with(ours, found)
    assert new_ids(ours, prompt("abcabcabc")) == plain(prompt("abcabcabc"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fc.weight": torch.zeros(256, 512)}, r"fc.weight is \[256, 512\] where this model needs \[256, 768\]"),
        ({"midlayer.self_attn.q_proj.weight": torch.zeros(512, 256)}, r"q_proj.weight is \[512, 256\]"),
        ({"midlayer.self_attn.k_proj.weight": torch.zeros(384, 512)}, "4 heads of 128 over 3"),
        ({"midlayer.self_attn.q_proj.weight": torch.zeros(100, 512)}, "0 heads of 128 over 2"),
        ({"midlayer.mlp.up_proj.weight": torch.zeros(700, 256)}, "up_proj.weight is"),
        ({"lm_head.weight": torch.zeros(320, 128)}, "lm_head.weight is"),
        ({"lm_head.weight": torch.zeros(100, 256)}, r"d2t is \[320\] where this model needs \[100\]"),
        ({"t2d": torch.zeros(319, dtype=torch.bool)}, "t2d is"),
        ({"d2t": torch.ones(320, dtype=torch.int64)}, "d2t names tokens beyond the model's 320"),
        ({"embed_tokens.weight": torch.zeros(320, 128)}, "embed_tokens.weight is"),
        ({"midlayer.hidden_norm.weight": None}, "there is no midlayer.hidden_norm.weight"),
        ({"midlayer.self_attn.q_proj.weight": None}, "there is no midlayer.self_attn.q_proj.weight"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(128)}, "q_norm.weight is no part of"),
    ],
)
def test_another_models_head_is_refused_in_a_sentence(ours, tmp_path, changes, words):
    write(tmp_path, published(made_up(text_of(ours)), **changes))
    with pytest.raises(VlmoptError, match=words):
        eagle_head.load(tmp_path, text_of(ours), TAPS)


@pytest.mark.parametrize(
    ("config", "taps", "words"),
    [
        ({"rope_theta": 5e6}, TAPS, "base 5,000,000 and the model's of 10,000"),
        ({"rope_parameters": {"rope_theta": 5e6}}, TAPS, "base 5,000,000"),
        ({"norm_before_residual": True}, TAPS, "another kind of head"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, None, "name the taps yourself"),
        ({}, None, r"not \(1, 1, 0\) of 4"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, None, r"not \(1, 2, 3\) of 4"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(ours, tmp_path, config, taps, words):
    write(tmp_path, published(made_up(text_of(ours))), config)
    with pytest.raises(VlmoptError, match=words):
        eagle_head.load(tmp_path, text_of(ours), taps)


@pytest.mark.parametrize("content", [None, b"\x80\x02}q\x00."])
def test_a_folder_without_safetensors_is_refused(ours, tmp_path, content):
    if content is not None:
        (tmp_path / eagle_head.WEIGHTS).write_bytes(content)
    with pytest.raises(VlmoptError, match=r"holds no whole model\.safetensors"):
        eagle_head.load(tmp_path, text_of(ours), TAPS)


def test_the_layers_of_the_published_heads():
    text = load(TINY, "cpu", torch.float32).model
    text = vlmopt.weights.collect(text, packed=False).text
    long = vlmopt.weights.TextWeights(**{**vars(text), "layers": text.layers * 7})
    assert shape_for(long).taps == (1, 13, 24)


def test_a_config_names_the_head(tiny, plain, prompt, tmp_path, monkeypatch):
    with pytest.raises(VlmoptError, match="needs draft_head"):
        OptimizeConfig.preset("exact", speculate="eagle")
    config = OptimizeConfig.preset("exact", speculate="eagle", draft_head=tmp_path)
    assert OptimizeConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(VlmoptError, match=r"holds no whole model\.safetensors"):
        vlmopt.optimize(tiny.model, config)
    status = vlmopt.optimize(tiny.model, config.model_copy(update={"strict": False}))
    (part,) = [part for part in status.parts if part.name == "speculate"]
    assert part.state == "skipped" and "model.safetensors" in part.reason
    text = ENGINES[tiny.model].weights.text
    save(made_up(text), tmp_path)
    monkeypatch.setattr(Speculation, "_time", lambda *_: 1.0)
    (part,) = [part for part in vlmopt.optimize(tiny.model, config).parts if part.name == "speculate"]
    assert part.state == "on" and "an EAGLE-3 head" in part.reason
    assert 4 * 1_524_736 < vlmopt.plan(tiny.model, config).memory["draft_head"] < 4.1 * 1_524_736
    always(monkeypatch, 4)
    assert new_ids(tiny.model, prompt(*PROMPTS["image"])) == plain(prompt(*PROMPTS["image"]))
    assert vlmopt.status(tiny.model).speculation["drafts"] > 5


@pytest.mark.gpu
@pytest.mark.parametrize("k", LADDER[1:])
def test_on_a_gpu_ids_are_those_of_plain_steps(samples, tmp_path, monkeypatch, k):
    from vlmopt.bench.models import prompt as ask

    loaded = load(TINY, "cuda:0", torch.bfloat16)
    inputs = [ask(loaded.processor, s["image"], s["question"]).to("cuda:0") for s in samples.select(range(60))]
    fast, found = OptimizeConfig.preset("fast"), []
    vlmopt.optimize(loaded.model, fast)
    save(made_up(text_of(loaded.model)), tmp_path)
    always(monkeypatch, k, k, 0)
    for config in (fast, fast.model_copy(update={"speculate": "eagle", "draft_head": tmp_path})):
        vlmopt.optimize(loaded.model, config)
        found.append([loaded.model.generate(**each, do_sample=False, max_new_tokens=80).tolist() for each in inputs])
    assert found[0] == found[1]
    assert vlmopt.status(loaded.model).speculation["drafts"] > 60
