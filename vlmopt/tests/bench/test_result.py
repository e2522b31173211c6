import json

import pytest

from vlmopt.bench import result as results

FACTS = {
    "system_info": {"gpu_name": None},
    "complete": True,
    "mode": "compare",
    "plan": {"cls": "exact"},
    "answers_given": True,
}


def measured(prediction="red", ttft=10.0, preprocess=5.0, tokens_per_s=100.0, accuracy=1.0, **more):
    values = {"prediction": prediction, "ttft_ms": ttft, "preprocess_ms": preprocess, "tokens_per_s": tokens_per_s}
    return values | {"error": None, "accuracy": accuracy, "calls": {}} | more


def failed():
    nothing = dict.fromkeys(("ttft_ms", "preprocess_ms", "tokens_per_s"))
    return nothing | {"prediction": "", "error": "ValueError: no", "accuracy": 0.0, "calls": {}}


def build(ours, stock=None, **facts):
    names = ["ours"] if stock is None else ["stock", "ours"]
    rows = []
    for index, mine in enumerate(ours):
        row = {"index": index, "question_id": 100 + index, "ours": mine}
        rows.append(row if stock is None else row | {"stock": stock[index]})
    return results.build(rows, names=names, settings={"seed": 1}, facts=FACTS | facts)


def test_contest_keys_and_means():
    result = build([measured(ttft=10.0, tokens_per_s=100.0), measured(ttft=30.0, tokens_per_s=50.0, accuracy=0.3)])
    performance = result["performance"]
    assert performance["avg_ttft_ms"] == 20.0
    assert performance["avg_throughput_tokens_per_sec"] == 75.0
    assert performance["ttft_with_preprocessing_ms"] == 25.0
    assert performance["quantiles"]["ttft_ms"]["p50"] == 20.0
    assert result["answers"] == [
        {"question_id": 100, "prediction": "red"},
        {"question_id": 101, "prediction": "red"},
    ]
    assert result["accuracy"] == pytest.approx(0.65)
    assert result["score"] == pytest.approx(0.4 * 0.65 + 0.3 * 60 / 80 + 0.3 * 20 / 55)
    assert json.loads(json.dumps(result)) == result


def test_a_failed_sample_is_counted_scored_zero_and_kept_out_of_the_means():
    result = build([measured(ttft=10.0), failed()])
    assert result["performance"]["avg_ttft_ms"] == 10.0
    assert result["performance"]["failed_samples"] == 1
    assert result["accuracy"] == 0.5
    assert result["answers"][1]["prediction"] == ""


def test_all_failed_is_null_with_a_reason():
    result = build([failed(), failed()])
    assert result["performance"]["avg_ttft_ms"] is None
    assert result["performance"]["avg_throughput_tokens_per_sec"] is None
    assert result["score"] is None
    assert result["no_score_because"] == "no sample was measured"
    assert "none (no sample was measured)" in results.table(result | {"mode": "ours"})


def test_answers_that_were_not_scored_give_no_score():
    result = build([measured(accuracy=None)])
    assert result["accuracy"] is None
    assert result["no_score_because"] == "no answers were scored"


def test_comparison_is_over_the_samples_that_both_measured():
    ours = [measured(ttft=5.0, tokens_per_s=200.0), failed(), measured("blue", ttft=5.0, tokens_per_s=200.0)]
    stock = [measured(ttft=10.0), measured(ttft=1000.0, tokens_per_s=1.0), measured("red", ttft=10.0)]
    result = build(ours, stock)
    assert result["baseline"]["performance"]["avg_ttft_ms"] == pytest.approx(340.0)
    assert result["baseline"]["answers"][2]["prediction"] == "red"
    assert (result["compared_samples"], result["same_predictions"]) == (2, 1)
    assert result["score_vs_stock"] == pytest.approx(0.4 * 2 / 3 + 0.3 * 0.5 + 0.3 * 1.0)


def test_calls_and_reasons_add_up_over_the_rows():
    first = measured(calls={"stages": 3, "kernels": 7})
    second = measured(calls={"stages": 2, "stock": 1, "reason: hooks on the model": 1})
    result = build([first, second])
    assert result["calls"] == {"stages": 5, "kernels": 7, "stock": 1}
    assert result["stock_reasons"] == {"hooks on the model": 1}


def test_table_shows_both_and_the_calls():
    ours = [measured(ttft=5.0, calls={"stages": 3, "stock": 1, "reason: beams": 1})]
    text = results.table(build(ours, [measured(ttft=10.0)]))
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert text.splitlines()[0].split() == ["stock", "ours"]
    assert lines["time to first token, ms"].split()[-2:] == ["10.00", "5.00"]
    assert "by the stages: 3, of these with kernels: 0; handed to stock: 1" in text
    assert "to stock: beams (1)" in text
    assert "same answer as stock: 1 of 1" in text


def test_table_of_one_entrant_has_one_column():
    text = results.table(build([measured()], mode="ours"))
    assert text.splitlines()[0].split() == ["ours"]
    assert "score against stock" not in text
