"""Lessons are stock's own rows and choices, what is learnt is what drafting does, and training learns it."""

import random

import pytest
import torch

from vlmopt.runtime.eagle_head import Head, shape_for
from vlmopt.tests.runtime.test_eagle import chain, stock_rows
from vlmopt.workbook import eagle_train, signs, tiny_train
from vlmopt.workbook.eagle_train import AHEAD, TAPS, Effort, Teacher, answers_ahead, train
from vlmopt.workbook.tiny_forward import IGNORED, patches

SMALL = (128, 256)


@pytest.fixture(scope="module")
def strips():
    return signs.draw_strips(5, 300, is_held_out=False)


@pytest.fixture(scope="module")
def teacher(reference):
    return Teacher(reference.model, TAPS)


@pytest.fixture
def painted(monkeypatch):
    """Photographs without noise, all kept."""
    kept = []

    def paint(table, pixels, size):
        knots = torch.full((len(table), 3, *signs.KNOTS), 120.0)
        kept.append(signs.paint(table, pixels, knots, size))
        return kept[-1]

    monkeypatch.setattr(eagle_train, "photograph", paint)
    return kept


def batch_of(strips, *kinds):
    return tiny_train.make_batch(random.Random(3), strips, SMALL, list(kinds), singles=0.5)


def made_up(teacher):
    torch.manual_seed(0)
    return Head(shape_for(teacher.text, TAPS))


@torch.no_grad()
def test_a_lesson_is_what_stock_makes_of_the_same_text(teacher, reference, strips, painted):
    batch = batch_of(strips, "read_all", "colour")
    lesson = teacher.lesson(batch, strips.pixels)
    for row, image in enumerate(painted[0]):
        ids = lesson.tokens[row]
        frames = patches(image[None])[0].view(-1, 3, 1, 256).expand(-1, -1, 2, -1).flatten(1)
        inputs = {
            "input_ids": ids[None],
            "mm_token_type_ids": (ids[None] == reference.model.config.image_token_id).long(),
            "pixel_values": frames,
            "image_grid_thw": torch.tensor([[1, 8, 16]]),
        }
        tokens, taps, rope = stock_rows(reference.model, inputs, [])
        assert torch.equal(tokens, ids)
        for ours, theirs in zip([*(tap[row] for tap in lesson.taps), *lesson.rope], [*taps, *rope], strict=True):
            assert torch.allclose(ours, theirs, atol=2e-4 * theirs.abs().max())
        labels = batch.labels[row][batch.labels[row] != IGNORED]
        learnt = (lesson.greedy[row] != IGNORED).nonzero()[:, 0]
        # the token that follows each learnt position is the right one, but for the last, which the end follows
        assert torch.equal(ids[learnt[:-1] + 1], labels[:-1]) and len(learnt) == len(labels)
        words = {name: value for name, value in inputs.items() if name != "input_ids"}
        logits = reference.model(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]), **words).logits[0]
        assert torch.equal(lesson.greedy[row][learnt], logits[learnt].argmax(-1))


@torch.no_grad()
def test_what_is_learnt_is_what_drafting_does(teacher, strips, painted):
    """Every step from every position, against whole passes over the text up to there."""
    head, embed = made_up(teacher), teacher.text.embed
    lesson = teacher.lesson(batch_of(strips, "colour", "top"), strips.pixels)
    found, end = list(answers_ahead(head, embed, lesson)), lesson.tokens.shape[1] - 1
    first = int((lesson.greedy != IGNORED).any(0).nonzero().min()) - 1
    assert len(found) == AHEAD and found[0][0].shape[:2] == (2, end - first)
    for row in range(2):
        rows = lesson.tokens[row], [tap[row] for tap in lesson.taps], lesson.rope
        for start in range(first, end):
            states = chain(head, embed, rows, start, min(AHEAD, end - start))
            for ahead, (logits, asked) in enumerate(found):
                at = start + 1 + ahead
                assert asked[row, start - first] == (lesson.greedy[row, at] if at <= end else IGNORED)
                if at <= end:
                    expected = head.logits(states[ahead])
                    assert torch.allclose(logits[row, start - first], expected, atol=1e-4 * expected.abs().max())


def test_a_step_learns_from_its_own_states(teacher, strips, painted):
    """The loss of the last step alone moves what the first one read: nothing is cut off between them."""
    head = made_up(teacher)
    lesson = teacher.lesson(batch_of(strips, "read_all"), strips.pixels)
    logits, asked = list(answers_ahead(head, teacher.text.embed, lesson))[-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), asked.flatten(), ignore_index=IGNORED).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in head.parameters())


def test_answers_too_short_to_go_on_in_teach_what_they_can(tiny, monkeypatch):
    monkeypatch.setattr(tiny_train, "MIX", {"count": 1.0})
    head, told = train(tiny.model, Effort(2, 2, 100), 0)
    assert all(parameter.isfinite().all() for parameter in head.parameters())
    assert [(row["ahead 2"] is None, row["ahead 3"]) for row in told] == [(False, None)] * 2


def test_training_learns_and_leaves_the_model_alone(tiny):
    before = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    effort = Effort(10, 4, 200)
    head, told = train(tiny.model, effort, 0)
    assert [row["step"] for row in told] == list(range(1, 11))
    assert sum(row["loss"] for row in told[-3:]) < 0.8 * sum(row["loss"] for row in told[:3])
    assert all(0 <= row[f"ahead {i}"] <= 1 for row in told for i in range(1, AHEAD + 1))
    assert all(torch.equal(value, before[name]) for name, value in tiny.model.state_dict().items())
    assert all(parameter.grad is None for parameter in tiny.model.parameters())
    again, _ = train(tiny.model, effort, 0)
    assert torch.equal(again.fc.weight, head.fc.weight)
    assert not torch.equal(train(tiny.model, effort, 1)[0].fc.weight, head.fc.weight)
