"""What notebook 13 tells of the embedded model, and the ceilings of notebook 12."""

import json

import pytest
import torch

from vlmopt.bench import roofline
from vlmopt.bench.dataset import open_samples
from vlmopt.bench.roofline import Ceiling
from vlmopt.errors import VlmoptError
from vlmopt.workbook import embedded, record, roof, signs, structure, tiny
from vlmopt.workbook.answers import Answers
from vlmopt.workbook.end_to_end import STOCK
from vlmopt.workbook.record import Record


@pytest.fixture(scope="module")
def data():
    return open_samples(record.ROOT / "data")


@pytest.fixture
def fresh() -> Record:
    made = Record("13_tiny_model", "q", "smoke", "tiny", {})
    made.check("c", "exact", 0, 0)
    return made


def test_one_example_of_each_kind(data):
    shown = embedded.examples(data)
    assert len(shown) == len(signs.KINDS)
    assert all(" → " in caption for _, caption in shown)


def test_the_facts_keep_to_the_limits(reference, data):
    facts = embedded.facts(reference, data)
    assert facts["parameters"] <= 9_500_000
    assert facts["weight_bytes"] <= 19_000_000
    assert facts["data_bytes"] <= 6_000_000
    assert facts["image_sizes"] >= 8
    assert facts["strings"] > 300
    assert facts["strings_seen"] == 0


def test_a_string_from_training_is_counted(monkeypatch, reference, data):
    monkeypatch.setattr(signs, "held_out", lambda text: False)
    facts = embedded.facts(reference, data)
    assert facts["strings_seen"] == facts["strings"]


def test_the_strings_of_a_sample():
    row = {"kind": "read_all", "answers": ["ab, cd", "ab, cd", "ab cd"]}
    assert list(embedded.strings(row)) == ["ab", "cd"]
    assert list(embedded.strings({**row, "kind": "count"})) == []


def said(reference, texts, accuracy=1.0):
    ids = [reference.processor.tokenizer(text)["input_ids"] for text in texts]
    return Answers(ids, [accuracy] * len(ids), 0)


def test_accuracy_is_kept_by_kind(fresh, reference, data):
    shares = embedded.measure_accuracy(fresh, reference, said(reference, ["1"] * 40), data, range(40))
    assert {row["provider"]: row["p50"] for row in fresh.find("accuracy")} == shares
    assert 0 < shares["count"] < 1
    assert shares["top"] == 0


def test_answers_may_differ_from_stock_s_on_one_of_a_hundred(fresh, reference):
    stock, other = said(reference, ["1"] * 100), said(reference, ["1"] * 99 + ["2"])
    embedded.check_alike(fresh, {STOCK: stock, "near": other})
    assert [check["measured"] for check in fresh.checks[1:]] == [0.01, 0]
    with pytest.raises(VlmoptError, match="share of answers with other ids"):
        embedded.check_alike(fresh, {STOCK: stock, "far": said(reference, ["1"] * 98 + ["2"] * 2)})
    with pytest.raises(VlmoptError, match="points of accuracy"):
        embedded.check_alike(fresh, {STOCK: stock, "worse": said(reference, ["1"] * 100, accuracy=0.997)})


def test_the_training_curve_is_thinned_and_ends_with_the_last_step(fresh, tmp_path):
    log = tmp_path / "train_log.json"
    exact = dict.fromkeys(signs.KINDS, 0.5)
    rows = [{"step": i, "loss": 1.0 / i, "seconds": i} for i in range(1, 1001)]
    log.write_text(json.dumps({"losses": rows, "evaluations": [{"step": 1000, "exact": {**exact, "count": 1.0}}]}))
    embedded.add_training(fresh, log, points=50)
    losses = fresh.find("loss")
    assert 40 <= len(losses) <= 50
    assert (losses[-1]["case"], losses[-1]["p50"]) == ("step 1000", 0.001)
    assert fresh.value("train_exact", "training", "step 1000") == pytest.approx((0.5 * 5 + 1) / 6)


def test_without_a_log_the_curve_is_skipped(fresh, tmp_path):
    embedded.add_training(fresh, tmp_path / "train_log.json")
    assert fresh.skipped[0]["what"] == "training curve"
    assert not fresh.find("loss")


def test_a_second_training_may_differ_by_a_point(fresh, data, monkeypatch):
    first, again = {"count": 1.0, "all": 0.98}, {"count": 1.0, "all": 0.971}
    monkeypatch.setattr(tiny, "evaluate", lambda *_: again)
    embedded.measure_again(fresh, first, data, range(2), record.ROOT / "vlmopt" / "assets" / "tiny")
    assert {row["provider"]: row["p50"] for row in fresh.find("accuracy_again")} == again
    again["all"] = 0.969
    with pytest.raises(VlmoptError, match="points of accuracy between two trainings"):
        embedded.measure_again(fresh, first, data, range(2), record.ROOT / "vlmopt" / "assets" / "tiny")


def test_without_a_second_training_nothing_is_said_of_it(fresh, data):
    embedded.measure_again(fresh, {"all": 1.0}, data, range(2), record.ROOT / "results" / "none")
    assert fresh.skipped[0]["what"] == "a second training"
    assert not fresh.find("accuracy_again")


def test_the_answer_to_a_sample_stands_beside_the_right_one(reference, data, monkeypatch):
    monkeypatch.setattr(tiny, "ask", lambda *_: "wrong")
    sample = data[0]
    right = tiny.right_answer(sample["answers"])
    assert embedded.ask(reference, sample) == f"{sample['question']} → wrong (right: {right})"


def test_ceilings_fill_the_record_and_give_the_floors(fresh, monkeypatch):
    config = structure.config_tiny()
    monkeypatch.setattr(roofline, "copy_rate", lambda device: Ceiling("copy", "GB/s", (10.0, 10.0)))
    monkeypatch.setattr(roofline, "read_rate", lambda device: Ceiling("read", "GB/s", (12.0,)))
    monkeypatch.setattr(roofline, "gemm_rate", lambda device, dtype: Ceiling("gemm", "TFLOP/s", (0.5,)))
    rates = {name: Ceiling(name, "GB/s", (6.0,)) for name in roofline.matvec_shapes(config)}
    monkeypatch.setattr(roofline, "matvec_rates", lambda shapes, device, dtype: rates)
    limits = roof.measure_ceilings(fresh, config, "cpu", torch.bfloat16)
    assert (limits.bytes_per_s, limits.flops_per_s) == (12e9, 0.5e12)
    assert all(row["roofline_share"] == pytest.approx(0.5) for row in fresh.find("matvec_us"))
    step = roofline.decode_bytes(config) / 6e9 * 1e3
    assert roof.matvec_step_ms(fresh, config) == pytest.approx(step)
    assert roof.matvec_share(fresh, config) == pytest.approx(0.5)


def test_one_product_for_a_panel(monkeypatch):
    monkeypatch.setattr(roofline, "matvec_rates", lambda shapes, *_: {"chosen": Ceiling("x", "GB/s", (5.0,))})
    row = roof.one_matvec((100, 10), "cpu", torch.float32, roof.Roof(10e9))
    assert row["p50"] == pytest.approx(0.8)
    assert row["roofline_share"] == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_products_error_is_within_its_bound_and_a_wrong_product_is_not(dtype, monkeypatch):
    shape = (64, 256)
    assert 0 < roof.matvec_error(shape, "cpu", dtype, 0) <= roof.matvec_bound(shape, dtype)
    right = roof.F.linear
    wrong = lambda x, w: right(x, w) * (1 if x.dtype == torch.float64 else 1.1)  # noqa: E731
    monkeypatch.setattr(roof.F, "linear", wrong)
    assert roof.matvec_error(shape, "cpu", dtype, 0) > roof.matvec_bound(shape, dtype)
