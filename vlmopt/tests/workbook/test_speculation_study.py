"""The study of drafts: what it counts, what it derives from costs and acceptance, and what it says of a record."""

import copy
import dataclasses

import pytest
import torch

import vlmopt
from vlmopt import OptimizeConfig
from vlmopt.bench.dataset import open_samples
from vlmopt.runtime.acceptance import break_even
from vlmopt.runtime.eagle_head import Head, shape_for
from vlmopt.runtime.generate import ENGINES
from vlmopt.weights import collect
from vlmopt.workbook import figures, speculation_study
from vlmopt.workbook.kernel_study import Bench
from vlmopt.workbook.record import ROOT, Record, Roof
from vlmopt.workbook.speculation_study import (
    EAGLE,
    ITSELF,
    LOOKUP,
    PLAIN,
    READ_ALL,
    VERIFY,
    WITH_LOOKUP,
    Drafted,
    drafted,
)

ENVIRONMENT = {"device": "test", "torch": "0", "transformers": "0", "commit": "0", "dirty": False}
OWN_COSTS = {LOOKUP: 0.0, ITSELF: 1.0, EAGLE: 0.3}
CPU = Bench(torch.device("cpu"), torch.float32, "smoke", Roof(1e10), (1.0,))


@pytest.fixture(scope="module")
def rows():
    return open_samples(ROOT / "data")


@pytest.fixture(scope="module")
def head(reference):
    torch.manual_seed(0)
    return Head(shape_for(collect(reference.model, packed=False).text, (0, 1, 2)))


@pytest.fixture(scope="module")
def field(reference, head):
    return speculation_study.drafters(reference, 0, head)


@pytest.fixture
def made() -> Record:
    """A record whose checks have passed and that knows what steps cost and how often drafts hold."""
    record = Record("41_speculative_decoding", "?", "full", "random-2b", dict(ENVIRONMENT))
    record.check("nothing", "exact", 0, 0)
    for prediction in speculation_study.predictions("m", CPU):
        record.predict(*prediction)
    for k, cost in ((0, 1.0), (1, 1.02), (3, 1.1), (7, 1.3)):
        for who, more in ((VERIFY, 0.0), (WITH_LOOKUP, 0.1)):
            record.measure(drafted("m", k), who, "cost", "plain steps", [cost + more * (k > 0)])
    record.measure(drafted("m", 3), VERIFY, "break_even", "share", [break_even(1.1, 3)])
    for name, found, share in ((LOOKUP, 0.5, 0.2), (ITSELF, 1.0, 1.0), (EAGLE, 1.0, 0.6)):
        record.measure(READ_ALL, name, "acceptance", "share", [share])
        record.measure(READ_ALL, name, "draft_share", "share", [found])
    for name, ms in ((PLAIN, 30.0), (LOOKUP, 31.0), (EAGLE, 25.0)):
        record.measure(f"tiny, {READ_ALL}", name, "answer_ms", "ms", [ms])
    return record


def test_the_same_number_of_samples_of_each_kind_is_picked(rows):
    picked = speculation_study.pick(rows, 3, 2)
    assert {kind: len(own) for kind, own in picked.items()} == {kind: 3 if kind == READ_ALL else 2 for kind in picked}
    assert len(picked) == 6
    assert all(rows.text(index)["kind"] == kind for kind, own in picked.items() for index in own)


def test_answers_are_compared_and_drafts_counted(field, reference, rows):
    picked = {READ_ALL: speculation_study.pick(rows, 1, 0)[READ_ALL]}
    wrong = copy.deepcopy(reference.model)
    with torch.no_grad():
        wrong.model.language_model.norm.weight.neg_()
    vlmopt.optimize(wrong, OptimizeConfig.preset("exact", speculate="lookup"))
    plain = field[LOOKUP].plain
    field = {name: field[name] for name in (LOOKUP, ITSELF, EAGLE)}
    field["wrong"] = Drafted(plain, dataclasses.replace(plain, model=wrong))
    differing, counted = speculation_study.same_answers(field, rows, picked)
    assert differing == {LOOKUP: 0, ITSELF: 0, EAGLE: 0, "wrong": 1}
    assert counted[EAGLE, READ_ALL]["drafts"] > 10
    seen = counted[ITSELF, READ_ALL]
    assert seen["held"] == seen["tried"] > 10 and seen["drafts"] == seen["steps"]
    record = Record("41_speculative_decoding", "?", "smoke", "tiny", dict(ENVIRONMENT))
    record.check("nothing", "exact", 0, 0)
    speculation_study.measure_acceptance(record, {(ITSELF, READ_ALL): seen})
    (row,) = speculation_study.accepted(record)
    assert (row["question"], row["drafter"], row["acceptance"], row["draft_share"]) == (READ_ALL, ITSELF, 1, 1)
    assert row["tokens_a_step"] > 4


def test_what_a_draft_model_costs_is_its_share_of_the_layers_and_a_head_of_what_is_read(field, reference):
    layers = reference.model.model.language_model.layers
    read = sum(p.numel() for p in layers.parameters()) + reference.model.lm_head.weight.numel()
    assert {name: subject.own_cost for name, subject in field.items()} == {
        LOOKUP: 0.0,
        ITSELF: 1.0,
        speculation_study.NOISY: 1.0,
        speculation_study.SHORTER: 0.75,
        EAGLE: 1_524_736 / read,
    }
    shorter = field[speculation_study.SHORTER].draft_model
    assert len(ENGINES[shorter].weights.text.layers) == 3
    assert len(reference.model.model.language_model.layers) == 4


def test_drawn_tokens_are_held_against_their_distribution(monkeypatch):
    state = torch.random.get_rng_state()
    assert speculation_study.draws_off(0) < speculation_study.CHI_SQUARE
    assert torch.equal(torch.random.get_rng_state(), state)
    monkeypatch.setattr(speculation_study, "accept_drawn", lambda draft, q, p: (torch.tensor(1), p[1].argmax()[None]))
    assert speculation_study.draws_off(0, 300) > speculation_study.CHI_SQUARE


def test_steps_are_timed_by_number_of_drafts(made, tiny):
    made.measurements = []
    name = speculation_study.measure_steps(made, tiny, CPU, 40, [0, 3], 2)
    assert name == "tiny at 40" and not vlmopt.status(tiny.model).active
    assert made.value("cost", VERIFY, drafted(name, 0)) == 1
    assert set(speculation_study.costs(made, VERIFY)) == {0, 3} and set(speculation_study.costs(made, WITH_LOOKUP)) == {
        3
    }
    assert 0 <= made.value("break_even", VERIFY, drafted(name, 3)) <= 1


def test_whole_answers_are_timed_with_a_head_as_well(made, reference, head, rows):
    made.measurements = []
    picked = speculation_study.pick(rows, 1, 0)[READ_ALL]
    speculation_study.measure_answers(made, reference, head, rows, picked, CPU, 1)
    assert {row["provider"] for row in made.find("answer_ms")} == {PLAIN, LOOKUP, EAGLE}
    assert not vlmopt.status(reference.model).active


def test_gains_take_the_best_number_of_drafts_and_what_a_drafter_costs(made):
    speculation_study.measure_gains(made, OWN_COSTS)
    assert made.value("speedup_of_verifying", ITSELF) == pytest.approx(8 / 1.3)
    assert made.value("speedup", ITSELF) == pytest.approx(1 / 1.0375, abs=0.05)
    assert made.value("speedup", LOOKUP) == made.value("speedup_of_verifying", LOOKUP) == pytest.approx(1.1 / 1.12)


def test_the_record_is_settled_concluded_and_drawn(made):
    speculation_study.measure_gains(made, OWN_COSTS)
    speculation_study.settle(made, "m")
    assert [entry["measured"] for entry in made.predictions] == [1.1, 0.2, 1.0, 0.6]
    answer, verdict = speculation_study.conclude(made, "m", CPU)
    assert "Verifying 4 rows costs 1.1 plain steps (m), paid for where 9% of drafts hold" in answer
    assert "gives a speed-up of 0.982, the head 1.21; drafts" in answer and "would give 6.15" in answer
    assert (
        "30 ms plainly, 31 with prompt lookup that adapts itself, 25 with the head." in verdict
        and "no speed is claimed" in verdict
    )
    assert [entry["what"] for entry in made.lost] == [LOOKUP, ITSELF]
    assert list(figures.of(made)) == ["41_speculative_decoding"]
    assert speculation_study.one(made, 3, 1.0)["speed-up"] == pytest.approx(4 / 1.1)


def test_a_step_that_costs_too_much_is_said(made):
    on_gpu = dataclasses.replace(CPU, device=torch.device("cuda"))
    made.measure(drafted("m", 3), VERIFY, "cost", "plain steps", [1.2])
    speculation_study.measure_gains(made, OWN_COSTS)
    assert "costs more than the 1.15 allowed" in speculation_study.conclude(made, "m", on_gpu)[1]
