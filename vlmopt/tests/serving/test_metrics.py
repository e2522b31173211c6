"""Summaries against numbers worked out by hand, and scores that are None, never 0, where they were not computed."""

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmopt.errors import VlmoptError
from vlmopt.serving.metrics import (
    UNITS,
    BilingualTokenizer,
    Times,
    attainment_over_factors,
    bert_score,
    percentile,
    rouge_l,
    slo_attainment_rate,
    summarise,
    summarise_kinds,
)

# Arrival, first token, end: latencies 4, 2, 6, first tokens after 1, 1, 2; 3, 1 and 4 tokens.
FINISHED = [
    Times("a", "chat", 10.0, "finished", 11.0, 14.0, 3, preemptions=1, slo=4.0),
    Times("b", "chat", 12.0, "finished", 13.0, 14.0, 1, slo=1.0),
    Times("c", "summary", 14.0, "finished", 16.0, 20.0, 5, preemptions=2),
]
LOST = [
    Times("d", "chat", 9.0, "refused", slo=30.0),
    Times("e", "chat", 12.0, "failed", 13.0, 14.0, 7, preemptions=1, slo=30.0),
    Times("f", "summary", 30.0, "unfinished", 31.0, None, 9, slo=30.0),
]
MEASURED = [
    name for name in UNITS if "_throughput_" in name or "_time" in name or "_latency" in name or "_ttft" in name
]


def test_three_finished_requests_by_hand():
    assert summarise(FINISHED, peak_memory=7) == pytest.approx(
        {
            "requests": 3,
            "requests_finished": 3,
            "requests_refused": 0,
            "requests_failed": 0,
            "requests_unfinished": 0,
            "total_time": 10.0,  # from 10 to 20
            "avg_latency": 4.0,
            "p50_latency": 4.0,
            "p95_latency": 5.8,  # 1.9 of the way through 2, 4, 6
            "p99_latency": 5.96,
            "avg_ttft": 4 / 3,
            "p50_ttft": 1.0,
            "p95_ttft": 1.9,
            "p99_ttft": 1.98,
            "avg_time_per_output_token": 1.25,  # 3 s / 2 and 4 s / 4; one token has none
            "p50_time_per_output_token": 1.25,
            "p95_time_per_output_token": 1.475,
            "p99_time_per_output_token": 1.495,
            "system_throughput_requests_per_sec": 0.3,
            "system_throughput_tokens_per_sec": 0.9,
            "slo_attainment_rate": 0.5,  # a just meets its 4 s, b misses its 1 s, c has no objective
            "preemptions": 3,
            "peak_memory": 7,
        }
    )


def test_every_number_has_a_unit_and_the_other_way_round():
    assert list(summarise(FINISHED)) == list(UNITS)


def test_lost_requests_are_counted_apart_and_miss_their_objective():
    alone, both = summarise(FINISHED), summarise([*LOST, *FINISHED])
    changed = {name for name in UNITS if alone[name] != both[name]}
    assert {name: both[name] for name in changed} == pytest.approx(
        {
            "requests": 6,
            "requests_refused": 1,
            "requests_failed": 1,
            "requests_unfinished": 1,
            "total_time": 11.0,  # the refused one came first, at 9
            "system_throughput_requests_per_sec": 3 / 11,
            "system_throughput_tokens_per_sec": 9 / 11,
            "slo_attainment_rate": 0.2,  # one of five with an objective
            "preemptions": 4,
        }
    )


@pytest.mark.parametrize("times", [[], LOST[:1], LOST], ids=["none", "refused", "lost"])
def test_without_a_finished_request_nothing_is_zero_that_was_not_measured(times):
    summary = summarise(times)
    assert summary["requests"] == len(times)
    assert summary["requests_finished"] == 0
    assert summary["slo_attainment_rate"] == (0.0 if times else None)  # they did miss it
    assert [name for name in MEASURED if summary[name] is not None] == []


def test_one_request_is_its_own_mean_and_percentile():
    summary = summarise(FINISHED[:1])
    assert {summary[f"{name}_latency"] for name in ("avg", "p50", "p95", "p99")} == {4.0}
    assert {summary[f"{name}_time_per_output_token"] for name in ("avg", "p50", "p95", "p99")} == {1.5}
    assert summary["system_throughput_requests_per_sec"] == 0.25
    assert summary["peak_memory"] is None
    assert summarise(FINISHED[1:2])["avg_time_per_output_token"] is None


def test_a_run_that_took_no_time_has_no_throughput():
    summary = summarise([Times("a", "chat", 1.0, "finished", 1.0, 1.0, 2)])
    assert summary["total_time"] == 0.0
    assert summary["system_throughput_requests_per_sec"] is None
    assert summary["avg_latency"] == 0.0


def test_a_summary_goes_into_json():
    assert json.loads(json.dumps(summarise(LOST), allow_nan=False))["avg_latency"] is None


def test_kinds_are_summarised_apart():
    kinds = summarise_kinds(FINISHED + LOST)
    assert list(kinds) == ["chat", "summary"]
    assert kinds["chat"] == summarise([r for r in FINISHED + LOST if r.kind == "chat"])
    assert (kinds["chat"]["avg_latency"], kinds["summary"]["avg_latency"]) == (3.0, 6.0)


def test_another_objective_judges_the_same_run():
    assert slo_attainment_rate(FINISHED, {"chat": 3.0, "summary": 6.0}) == pytest.approx(2 / 3)
    assert slo_attainment_rate(FINISHED, {"chat": 4.0}) == 1.0
    assert slo_attainment_rate(FINISHED, {}) is None
    assert slo_attainment_rate(FINISHED + LOST, {"chat": 4.0, "summary": 6.0}) == 0.5
    unloaded = {"chat": 1.0, "summary": 2.0}
    assert attainment_over_factors(FINISHED, unloaded, [1.5, 2, 3, 4]) == pytest.approx(
        {1.5: 0.0, 2: 1 / 3, 3: 2 / 3, 4: 1.0}
    )


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"outcome": "lost"}, "'lost' of request a is none of finished"),
        ({"end": None}, "without the time"),
        ({"first_token": None}, "without the time"),
        ({"first_token": 0.5}, "not in order"),
        ({"end": 1.5}, "not in order"),
        ({"outcome": "failed", "first_token": None, "end": 0.5}, "not in order"),
    ],
)
def test_times_that_cannot_be_are_refused(values, says):
    good = {"id": "a", "kind": "chat", "arrival": 1.0, "first_token": 2.0, "end": 3.0}
    assert Times(**good).latency == 2.0
    with pytest.raises(VlmoptError, match=says):
        Times(**{**good, **values})


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentiles_are_numpys(values, percent):
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


def test_no_values_have_no_percentile():
    assert percentile([], 50) is None


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("今天天气好。", "今 天 天 气 好"),
        ("The cat's hat, again!", "the cat s hat again"),
        ("用GPU跑了3.5倍", "用 gpu 跑 了 3 5 倍"),
        ("ＧＰＵ　１２", "gpu 12"),  # full-width
        ("カタカナ・ひらがなー", "カ タ カ ナ ひ ら が な ー"),
        ("한국어 text", "한 국 어 text"),
        ("café Straße", "café straße"),
        ("𠮷野家", "𠮷 野 家"),  # beyond the first 65,536 characters
        ("snake_case", "snake case"),
        ("，。！？ ...\n", ""),
        ("", ""),
    ],
)
def test_the_tokenizer_splits_cjk_into_characters_and_the_rest_into_words(text, tokens):
    assert BilingualTokenizer().tokenize(text) == tokens.split()


@given(st.text())
def test_the_tokenizer_loses_no_plain_letter_or_digit(text):
    tokens = BilingualTokenizer().tokenize(text)
    assert all(token and "_" not in token and not any(map(str.isspace, token)) for token in tokens)
    left = iter("".join(tokens))
    assert all(character in left for character in text.lower() if character.isascii() and character.isalnum())


class Scorer:
    """Stands in for rouge-score's scorer: its LCS F-measure, over whatever tokenizer it is given."""

    def __init__(self, kinds, tokenizer):
        assert kinds == ["rougeL"]
        self.tokenize = tokenizer.tokenize

    def score(self, target, prediction):
        target, prediction = self.tokenize(target), self.tokenize(prediction)
        row = [0] * (len(prediction) + 1)
        for token in target:
            above = row[:]
            for i, other in enumerate(prediction, 1):
                row[i] = above[i - 1] + 1 if token == other else max(above[i], row[i - 1])
        measure = 2 * row[-1] / (len(target) + len(prediction)) if row[-1] else 0.0
        return {"rougeL": SimpleNamespace(fmeasure=measure)}


@pytest.fixture
def rouge(monkeypatch):
    package, module = ModuleType("rouge_score"), ModuleType("rouge_score.rouge_scorer")
    module.RougeScorer = Scorer
    monkeypatch.setitem(sys.modules, "rouge_score", package)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", module)


def test_rouge_l_is_the_mean_over_the_pairs_in_both_languages(rouge):
    zh, en = ("今天天气很好", "今天天气好"), ("the cat sat on the mat", "The cat is on the mat.")
    assert rouge_l([zh[0]], [zh[1]]).value == pytest.approx(10 / 11)
    assert rouge_l([en[0]], [en[1]]).value == pytest.approx(5 / 6)
    quality = rouge_l([zh[0], en[0], ""], [zh[1], en[1], "x"])
    assert quality.value == pytest.approx((10 / 11 + 5 / 6 + 0) / 3)
    assert quality.note == ""


def test_rouge_l_of_no_answers_is_not_zero(rouge):
    quality = rouge_l([], [])
    assert (quality.value, quality.note) == (None, "not computed: there is no answer")


def test_rouge_l_without_its_package_is_not_zero(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    quality = rouge_l(["a"], ["a"])
    assert (quality.value, quality.note) == (None, "not computed: the package rouge_score is not installed")


@pytest.mark.parametrize("score", [rouge_l, lambda *pairs: bert_score(*pairs, model=None)])
def test_answers_without_their_references_are_refused(score):
    with pytest.raises(VlmoptError, match="2 answers cannot be compared with 1 references"):
        score(["a", "b"], ["a"])


@pytest.fixture
def encoder(tmp_path):
    """A folder that looks like a model of three layers."""
    folder = tmp_path / "encoder"
    folder.mkdir()
    (folder / "config.json").write_text('{"num_hidden_layers": 3}')
    return folder


@pytest.fixture
def made(monkeypatch):
    """How the stand-in for bert-score was called; it scores pairs by whether they are equal."""
    calls = []

    class BERTScorer:
        def __init__(self, **options):
            calls.append(options)

        def score(self, answers, references):
            f1 = np.array([float(answer == reference) for answer, reference in zip(answers, references, strict=True)])
            return None, None, f1

    package = ModuleType("bert_score")
    package.BERTScorer = BERTScorer
    package.utils = SimpleNamespace(model2layers={"bert-base-chinese": 8})
    monkeypatch.setitem(sys.modules, "bert_score", package)
    return calls


def test_bert_score_uses_the_local_model_with_its_layers(encoder, made):
    assert bert_score(["a", "b"], ["a", "c"], encoder).value == 0.5
    named = encoder.rename(encoder.with_name("bert-base-chinese"))
    assert bert_score(["a"], ["a"], named, "cuda").value == 1.0
    assert made == [
        {"model_type": str(encoder), "num_layers": 3, "device": "cpu"},
        {"model_type": str(named), "num_layers": 8, "device": "cuda"},
    ]


def test_bert_score_that_cannot_be_computed_is_not_zero(encoder, made, monkeypatch):
    reasons = {
        "no model folder was given": (["a"], ["a"], None),
        "there is no answer": ([], [], encoder),
        "bert-base-chinese is not the folder of a model": (["a"], ["a"], "bert-base-chinese"),
    }
    for reason, arguments in reasons.items():
        quality = bert_score(*arguments)
        assert (quality.value, quality.note) == (None, f"not computed: {reason}")
    assert made == []  # a name alone would be fetched
    (encoder / "config.json").write_text("{}")
    assert "that bert-score can use here ('num_hidden_layers')" in bert_score(["a"], ["a"], encoder).note
    monkeypatch.setitem(sys.modules, "bert_score", None)
    assert bert_score(["a"], ["a"], encoder).note == "not computed: the package bert_score is not installed"
