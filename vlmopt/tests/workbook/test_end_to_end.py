"""The comparison behind notebook 61: who competes, what is timed, how a difference in answers is judged."""

import dataclasses
import math
import time

import pytest
import torch

import vlmopt
from vlmopt.bench import models, protocol, roofline
from vlmopt.bench.dataset import open_samples
from vlmopt.config import PRESETS, OptimizeConfig
from vlmopt.errors import VlmoptError
from vlmopt.workbook import answers, end_to_end, record, roof
from vlmopt.workbook.answers import Answers
from vlmopt.workbook.record import Record, Roof


@pytest.fixture(scope="module")
def data():
    return open_samples(record.ROOT / "data")


@pytest.fixture(scope="module")
def base() -> models.Loaded:
    return models.load(models.TINY, "cpu", torch.float32)


@pytest.fixture
def fresh() -> Record:
    return Record("61_end_to_end", "q", "smoke", "tiny", {})


def test_the_host_s_time_ends_with_the_tower_s_launch(base, fresh, data, monkeypatch):
    field = end_to_end.contenders(base, ["exact"], fresh)
    fresh.check("c", "exact", 0, 0)
    engine = end_to_end.ENGINES[field["exact"].target.model]
    monkeypatch.setattr(type(engine), "_admit", _late(type(engine)._admit))
    end_to_end.measure_host(fresh, "c", field, data[0])
    (row,) = fresh.find("host_before_launch_ms")
    assert row["provider"] == "exact" and len(row["samples"]) == 20
    assert min(row["samples"]) >= 5 and "_encode" not in vars(engine)


def _late(admit):
    def late(*args):
        time.sleep(0.005)
        return admit(*args)

    return late


def test_each_preset_runs_on_its_own_copy_and_one_that_cannot_run_is_skipped(base, fresh):
    field = end_to_end.contenders(base, ["exact", "fast"], fresh)
    assert list(field) == ["stock", "exact"]
    assert field["stock"].target is base
    assert field["exact"].target.model is not base.model
    assert vlmopt.status(field["exact"].target.model).active
    assert not vlmopt.status(base.model).active
    assert field["exact"].describe()["class"] == "exact"
    assert field["exact"].parts["text"] == "on"
    (skip,) = fresh.skipped
    assert skip["what"] == "preset fast on tiny"
    assert "cannot run" in skip["reason"]


def test_speed_measures_every_metric_of_every_contender_and_warms_up_first(base, fresh, data):
    field = end_to_end.contenders(base, ["exact"], fresh)
    speed = end_to_end.speed(field, data[0], rounds=2, first_token_rounds=1)
    for metric, count in (("ttft_ms", 3), ("ttft_with_preprocessing_ms", 3), ("tokens_per_s", 2)):
        assert {name: len(values) for name, values in speed[metric].items()} == {"stock": count, "exact": count}
    for name in field:
        rows = zip(
            *(speed[m][name] for m in ("ttft_ms", "preprocessing_ms", "ttft_with_preprocessing_ms")), strict=True
        )
        assert all(ttft + before == whole for ttft, before, whole in rows)
    assert vlmopt.status(field["exact"].target.model).calls["stages"] == 1 + 1 + 2 * 2


def test_a_contender_that_hands_a_call_to_stock_has_no_speed(base, fresh, data):
    field = end_to_end.contenders(base, ["exact"], fresh)
    model = field["exact"].target.model
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(VlmoptError, match="exact handed 2 calls to stock"):
        end_to_end.speed(field, data[0], rounds=0, first_token_rounds=1)
    handle.remove()
    assert end_to_end.calls(field)["exact"]["stock"] == 2


def test_a_panel_gets_one_measurement(base, fresh):
    field = end_to_end.contenders(base, ["exact"], fresh)
    row = end_to_end.one_first_token(field["exact"], 64, 96, Roof(1e9, 1e12))
    assert (row["case"], row["provider"], row["n"]) == ("64x96", "exact", 3)
    assert row["roofline_share"] > 0


def test_the_decode_time_is_the_long_call_less_the_first_token(base, fresh, monkeypatch):
    result = protocol.SampleResult(1, ttft_ms=30.0, preprocess_ms=5.0, tokens_per_s=100.0, n_tokens=11)
    monkeypatch.setattr(protocol, "measure_sample", lambda *_, **__: result)
    monkeypatch.setattr(protocol, "warm_up", lambda *_: None)
    field = end_to_end.contenders(base, [], fresh)
    assert end_to_end.speed(field, {}, 1, 0)["decode_ms_per_token"] == {"stock": [pytest.approx(8.0)]}
    result = dataclasses.replace(result, n_tokens=1)
    assert "decode_ms_per_token" not in end_to_end.speed(field, {}, 1, 0)


def test_the_subject_is_the_embedded_model_with_something_to_decode(data):
    subject = end_to_end.subject("smoke", data, 0)
    width, height = subject.sample["image"].size
    assert subject.case == f"tiny {height}x{width}"
    longest = max(len(answer) for answer in subject.sample["answers"])
    assert longest == max(len(answer) for i in range(len(data)) for answer in data.text(i)["answers"])


@pytest.mark.parametrize("real", [True, False])
def test_full_takes_the_real_weights_where_they_are(data, monkeypatch, tmp_path, base, real):
    asked = []
    folder = tmp_path if real else tmp_path / "missing"
    monkeypatch.setattr(end_to_end, "settings", lambda: type("S", (), {"model_dir": folder}))
    monkeypatch.setattr(models, "load", lambda path: asked.append(path) or base)
    subject = end_to_end.subject("full", data, 3)
    assert asked == [subject.model] == [str(folder) if real else "random-2b"]
    assert subject.case == "tiny 768x1024"
    assert subject.sample["image"].tobytes() == end_to_end.synthetic_sample(768, 1024, 3)["image"].tobytes()


def test_measured_speed_knows_its_floor(fresh, base):
    fresh.check("c", "exact", 0, 0)
    limits = Roof(bytes_per_s=1e9, flops_per_s=1e12)
    speed = {"ttft_ms": {"stock": [10.0]}, "decode_ms_per_token": {"stock": [20.0], "exact": []}}
    end_to_end.measure_speed(fresh, "c", speed, base.model, {"stock": None, "exact": None}, (1, 12, 20), 110, limits)
    roof.add_floors(fresh, "c", base.model.config, (1, 12, 20), 110, limits)
    for metric in speed:
        row = fresh.find(metric, "stock")[0]
        assert row["roofline_share"] == pytest.approx(fresh.value(metric, "floor") / row["p50"])
    assert not fresh.find("decode_ms_per_token", "exact")


def test_a_step_over_copies_is_held_against_the_bytes_of_the_copies(base):
    exact, plain = PRESETS["exact"], roofline.decode_bytes(base.model.config, 110)
    cache = plain - roofline.decode_bytes(base.model.config)
    weights = vlmopt.plan(base.model, OptimizeConfig.make(**exact, weights="int8", head8=True)).memory["copies"]
    configs = {"both": {"weights": "int8", "head8": True}, "body": {"weights": "int8"}, "head": {"head8": True}}
    read = {
        name: end_to_end.step_bytes(base.model, OptimizeConfig.make(**exact, **changes), 110)
        for name, changes in configs.items()
    }
    assert read["both"] == weights + cache
    assert (plain - read["body"]) + (plain - read["head"]) == plain - read["both"]
    assert min(plain - read["body"], plain - read["head"]) > 0
    assert end_to_end.step_bytes(base.model, OptimizeConfig.preset("exact"), 110) == plain
    assert end_to_end.step_bytes(base.model, None, 110) == plain


def test_what_each_contender_runs_is_told(base, fresh):
    found = end_to_end.configs(end_to_end.contenders(base, ["exact"], fresh))
    assert found == {"stock": OptimizeConfig.preset("stock"), "exact": OptimizeConfig.preset("exact")}


def given(stock: list[list[int]], exact: list[list[int]], to_stock: int = 0) -> dict[str, Answers]:
    return {"stock": Answers(stock, [1.0] * len(stock), 0), "exact": Answers(exact, [0.5] * len(exact), to_stock)}


def test_answers_are_scored_and_counted(base, fresh, data):
    field = end_to_end.contenders(base, ["exact"], fresh)
    found = answers.answer(field, data, [0, 1], tokens=4)
    assert found["stock"].ids == found["exact"].ids
    assert [len(own.accuracy) for own in found.values()] == [2, 2]
    assert found["exact"].to_stock == 0
    answers.check_answers(fresh, field, found, data, [0, 1])
    answers.measure_answers(fresh, "tiny", found)
    assert fresh.value("ids_equal", "exact", "tiny, 2 samples") == 1


def test_an_exact_provider_with_another_id_fails_its_check(base, fresh, data):
    field = end_to_end.contenders(base, ["exact"], fresh)
    with pytest.raises(VlmoptError, match="other ids, tiny' failed: 1 is above its bound 0"):
        answers.check_answers(fresh, field, given([[1], [2]], [[1], [3]]), data, [0, 1])


def test_a_call_handed_to_stock_fails_its_check(base, fresh, data):
    field = end_to_end.contenders(base, ["exact"], fresh)
    with pytest.raises(VlmoptError, match="calls handed to stock"):
        answers.check_answers(fresh, field, given([[1]], [[1]], to_stock=1), data, [0])


def test_a_near_provider_may_differ_at_a_near_tie_only(fresh, data):
    half = models.load(models.TINY, "cpu")
    field = end_to_end.contenders(half, ["exact"], fresh)
    field["exact"] = dataclasses.replace(field["exact"], cls="near")
    right = answers.new_ids(half, data[0], 3)
    with torch.no_grad():
        logits = half.model(**protocol.prepare(half, data[0])).logits[0, -1]
    worst = int(logits.argmin())
    with pytest.raises(VlmoptError, match="margin of a differing id"):
        answers.check_answers(fresh, field, given([right], [[worst, *right[1:]]]), data, [0])
    answers.check_answers(fresh, field, given([right], [right]), data, [0])


@pytest.mark.parametrize(("scheme", "most"), [("int8", 50.5), ("int4", 52.0)])
def test_a_lossy_provider_may_lose_little_accuracy_and_one_answer(base, fresh, data, scheme, most):
    config = OptimizeConfig.make(**PRESETS["exact"], weights=scheme, head8=True)
    field = end_to_end.contenders(base, {"copies": config}, fresh)
    assert field["copies"].cls == "lossy"
    found = {"stock": Answers([[1], [2]], [1.0, 1.0], 0), "copies": Answers([[1], [3]], [1.0, 0.0], 0)}
    answers.check_answers(fresh, field, found, data, [0, 1])
    row = fresh.checks[-1]
    assert fresh.checks[-2] == {**row, "name": "copies: calls handed to stock", "measured": 0.0, "bound": 0.0}
    assert row == {**row, "name": "copies: points of accuracy lost, tiny", "class": "lossy", "measured": 50.0}
    assert row["bound"] == most
    found["copies"] = Answers([[4], [3]], [0.9, 0.0], 0)
    with pytest.raises(VlmoptError, match="points of accuracy lost, tiny' failed: 55"):
        answers.check_answers(fresh, field, found, data, [0, 1])


def test_the_margin_is_measured_where_the_ids_part_against_the_error_there(fresh, data):
    half = models.load(models.TINY, "cpu")
    index = next(i for i in range(len(data)) if data.text(i)["kind"] == "read_all")
    right = answers.new_ids(half, data[index], 3)
    other = [*right[:2], (right[2] + 1) % 300]
    margin = answers.worst_margin(half, given([right], [other]), "exact", data, [index])
    inputs = answers._extended(protocol.prepare(half, data[index]), right[:2])
    exact = models.load(models.TINY, "cpu", torch.float32).model
    with torch.no_grad():
        own = half.model(**inputs).logits[0, -1].double()
        reference = exact(**inputs).logits[0, -1].double()
    error = (own - reference).abs().max().item()
    assert margin == pytest.approx(abs(reference[right[2]] - reference[other[2]]).item() / (2 * error), rel=1e-3)
    assert answers.worst_margin(half, given([right], [right]), "exact", data, [index]) == 0
    assert answers.worst_margin(half, given([right], [right[:2]]), "exact", data, [index]) == math.inf


def test_the_conclusion_names_the_fastest_and_who_is_behind(make_record):
    made = make_record()
    assert end_to_end.conclude(made, made.measurements[0]["case"])[0].endswith("its answers could not be asked here.")
    for name, share in (("stock", 1.0), ("fast", 0.99)):
        made.measure("tiny, 100 samples", name, "accuracy", "share", [share])
        made.measure("tiny, 100 samples", name, "ids_equal", "share", [share])
    case = made.measurements[0]["case"]
    answer, verdict = end_to_end.conclude(made, case)
    assert answer.startswith(
        "`fast` (near) takes 10.2 ms to the first token against stock's 20.4, 1.02 ms a further token"
    )
    assert "99.0% of its answers have stock's ids (tiny, 100 samples), accuracy 99.0% against stock's 100.0%" in answer
    assert verdict == "Every preset that runs here is faster than stock in both parts."
    made.measure(case, "fast", "ttft_ms", "ms", [30.0])
    assert end_to_end.conclude(made, case)[1] == "`fast` (near) is behind stock in the first token."


def test_a_lossy_preset_stands_apart_however_fast_it_is(make_record):
    made = make_record()
    case = made.measurements[0]["case"]
    made.config["providers"]["fast8"] = {"class": "lossy"}
    for metric, unit, value in (
        ("ttft_ms", "ms", 9.0),
        ("decode_ms_per_token", "ms", 0.6),
        ("tokens_per_s", "/s", 900),
    ):
        made.measure(case, "fast8", metric, unit, [value])
    for name, share in (("stock", 1.0), ("fast8", 0.975)):
        made.measure("tiny, 40 samples", name, "accuracy", "share", [share])
        made.measure("tiny, 40 samples", name, "ids_equal", "share", [share])
    answer, verdict = end_to_end.conclude(made, case)
    assert answer.startswith("`fast` (near) takes 10.2 ms")
    assert answer.endswith(
        " `fast8` (lossy) takes 0.6 ms a further token and makes 900 tokens/s; 97.5% of its answers have stock's ids "
        "(tiny, 40 samples), accuracy 97.5% against stock's 100.0%."
    )
    assert verdict.startswith("Every preset")
    made.find("decode_ms_per_token", "fast8")[0]["p50"] = 1.2
    assert end_to_end.conclude(made, case)[1] == (
        "`fast8` (lossy) takes longer a further token than `fast` (near), which reads more bytes."
    )


def test_settling_takes_ratios_to_stock_and_leaves_out_who_did_not_run(make_record):
    made = make_record()
    case = made.measurements[0]["case"]
    for part in ("first token", "decode"):
        made.predict(f"fast (near): {part}, times faster than stock", 2.0, "×")
    end_to_end.settle(made, case, ["fast", "fast8"])
    assert [entry["measured"] for entry in made.predictions] == [2.1, pytest.approx(2.0), pytest.approx(2.0)]
