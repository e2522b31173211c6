"""Records: every rule of the schema is shown a record that breaks it; measurements, comparison, files."""

import copy
import json
import math

import pytest

from vlmopt.bench.timing import quantiles
from vlmopt.errors import VlmoptError
from vlmopt.workbook import record, schema
from vlmopt.workbook.record import Record, Roof, compare, folder, load, load_all, measurement, thin


def test_a_quantile_near_zero_may_lie_between_samples_whose_last_digits_are_rounded(make_record):
    made = make_record()
    row = made.measure("case", "without it", "lost_ms", "ms", [-0.3333333777, 0.3335333555])
    assert 0 < row["p50"] < 2e-4
    schema.validate(made.to_dict())
    row["p50"] += 1e-5
    with pytest.raises(VlmoptError, match="p50 is"):
        schema.validate(made.to_dict())


def test_lists_of_numbers_take_a_line_and_nothing_else_changes(make_record, tmp_path):
    made = make_record(
        config={"sizes": [1, -2.5, 3e-07, None], "words": ["a [ 1, 2 ]", "b"], "none": [], "rows": [[1, 2]]}
    )
    path = made.save(tmp_path).path
    text = path.read_text()
    assert '"sizes": [1, -2.5, 3e-07, null],' in text and "a [ 1, 2 ]" in text
    assert json.loads(text) == json.loads(json.dumps(made.to_dict()))


def test_a_measurement_holds_its_samples_quantiles():
    samples = [3.0, 1.0, 2.0, 5.0, 4.0]
    row = measurement("case", "stock", "ttft_ms", "ms", samples)
    assert row["samples"] == samples
    assert row["n"] == 5
    assert row["p50"] == 3.0
    assert {key: row[key] for key in ("p20", "p80", "p95")} == {k: quantiles(samples)[k] for k in ("p20", "p80", "p95")}


def test_no_samples_are_refused():
    with pytest.raises(VlmoptError, match="no samples"):
        measurement("case", "stock", "ttft_ms", "ms", [])


@pytest.mark.parametrize(
    ("unit", "p50", "work", "share"),
    [
        ("ms", 2.0, {"bytes": 4e9}, 0.5),  # 4 GB at 4 TB/s: 1 ms
        ("us", 2000.0, {"bytes": 4e9}, 0.5),
        ("ms", 4.0, {"bytes": 4e9, "flops": 2e12}, 0.5),  # the arithmetic, 2 ms, takes longer than the bytes
        ("GB/s", 1000.0, {}, 0.25),
        ("TFLOP/s", 250.0, {}, 0.25),
        ("ms", 2.0, {}, None),
        ("tokens/s", 2.0, {"bytes": 4e9}, None),
    ],
)
def test_the_share_of_the_roofline(unit, p50, work, share):
    row = measurement("case", "fast", "m", unit, [p50], **work, ceiling=Roof(4e12, 1e15))
    assert row["roofline_share"] == (None if share is None else pytest.approx(share))


def test_a_share_needs_a_ceiling():
    assert measurement("case", "fast", "m", "ms", [1.0], bytes=4e9)["roofline_share"] is None


def test_at_most_400_samples_are_kept_with_both_extremes_in_the_order_measured():
    values = [math.sin(i) for i in range(5000)]
    kept = thin(values)
    assert len(kept) == record.MAX_SAMPLES == 400
    assert min(values) in kept
    assert max(values) in kept
    assert kept == [value for value in values if value in set(kept)]
    assert thin(values[:400]) == values[:400]


def test_a_thinned_measurement_is_valid_and_a_forged_one_is_not(make_record):
    made = make_record()
    made.measure("long", "fast", "steps", "ms", [math.sin(i) ** 2 for i in range(3000)])
    schema.validate(made.to_dict())
    made.measurements[-1]["p50"] += 0.05
    with pytest.raises(VlmoptError, match=r"long/fast/steps: p50"):
        schema.validate(made.to_dict())


def test_a_record_survives_the_way_through_its_file(make_record, tmp_path):
    made = make_record()
    saved = made.save(tmp_path)
    assert saved.path == tmp_path / "test-gpu" / "61_end_to_end.json"
    assert load(saved.path) == made
    assert load_all(tmp_path) == [made]
    assert list(json.loads(saved.path.read_text())) == list(schema.KEYS)


def broken(change):
    return pytest.param(change[1], change[2], id=change[0])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        broken(("schema", lambda d: d.update(schema=2), "schema 2")),
        broken(("profile", lambda d: d.update(profile="quick"), "profile 'quick'")),
        broken(("slug", lambda d: d.update(slug="end_to_end"), "slug 'end_to_end'")),
        broken(("missing", lambda d: d.pop("verdict"), "verdict is missing")),
        broken(("unknown", lambda d: d.update(notes=""), "unknown key notes")),
        broken(("question", lambda d: d.update(question=" "), "question is empty")),
        broken(("answer", lambda d: d.update(answer=""), "answer is empty")),
        broken(("verdict", lambda d: d.update(verdict=""), "verdict is empty")),
        broken(("weights", lambda d: d.update(weights=None), "weights is empty")),
        broken(("environment", lambda d: d["environment"].pop("commit"), "environment.commit is missing")),
        broken(("nan", lambda d: d["config"].update(x=math.nan), "config.x is not finite")),
        broken(("infinite", lambda d: d["measurements"][0]["samples"].append(math.inf), "samples.5. is not finite")),
        broken(("prediction", lambda d: d["predictions"][0].update(measured=None), "never settled")),
        broken(("prediction keys", lambda d: d["predictions"][0].pop("unit"), "an entry of predictions")),
        broken(("class", lambda d: d["checks"][0].update({"class": "good"}), "class 'good'")),
        broken(("lied", lambda d: d["checks"][0].update(measured=1), "against its own numbers")),
        broken(("failed", lambda d: d["checks"][0].update(measured=1, passed=False), "failed")),
        broken(("skipped keys", lambda d: d["skipped"][0].pop("reason"), "an entry of skipped")),
        broken(("lost keys", lambda d: d["lost"][0].update(more=1), "an entry of lost")),
        broken(("measurement keys", lambda d: d["measurements"][0].pop("unit"), "a measurement has the keys")),
        broken(("p50", lambda d: d["measurements"][0].update(p50=1.0), "p50 is 1")),
        broken(("p95", lambda d: d["measurements"][0].update(p95=1.0), "p95 is 1")),
        broken(("n", lambda d: d["measurements"][0].update(n=7), "keeps 5 samples of 7")),
        broken(("no samples", lambda d: d["measurements"][0].update(n=0, samples=[]), "keeps 0 samples")),
        broken(("twice", lambda d: d["measurements"].append(d["measurements"][0]), "measured twice")),
    ],
)
def test_the_schema_rejects(make_record, change, fault):
    data = copy.deepcopy(make_record().to_dict())
    schema.validate(data)
    change(data)
    with pytest.raises(VlmoptError, match=fault):
        schema.validate(data)


def test_a_record_without_the_optional_key_is_read(make_record):
    data = make_record().to_dict()
    del data["lost"]
    assert Record.from_dict(data).lost == []


@pytest.mark.parametrize("content", [None, "", "[1]", "{"])
def test_a_file_that_is_no_record_is_named(tmp_path, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(VlmoptError, match=r"x\.json"):
        load(path)


def test_an_invalid_record_is_not_written_over_a_good_one(make_record, tmp_path):
    path = make_record().save(tmp_path).path
    before = path.read_bytes()
    with pytest.raises(VlmoptError, match="verdict is empty"):
        make_record(verdict="").save(tmp_path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_measuring_waits_for_a_green_check():
    fresh = Record("20_x", "q", "smoke", "tiny", {})
    with pytest.raises(VlmoptError, match="refusing to measure"):
        fresh.measure("case", "fast", "m", "ms", [1.0])
    with pytest.raises(VlmoptError, match="'same ids' failed: 2 is above its bound 0"):
        fresh.check("same ids", "exact", 2, 0)
    with pytest.raises(VlmoptError, match="refusing to measure"):
        fresh.measure("case", "fast", "m", "ms", [1.0])
    fresh.check("same ids", "exact", 0, 0)
    fresh.measure("case", "fast", "m", "ms", [1.0])
    fresh.measure("case", "fast", "m", "ms", [2.0])
    assert fresh.value("m", "fast") == 2.0
    assert len(fresh.measurements) == 1


def test_a_check_of_nan_fails():
    with pytest.raises(VlmoptError, match="failed"):
        Record("20_x", "q", "smoke", "tiny", {}).check("error", "near", math.nan, 1.5)


def test_settling_needs_a_prediction(make_record):
    with pytest.raises(VlmoptError, match="nothing was predicted"):
        make_record().settle("something else", 1.0)


def test_asking_for_what_was_not_measured_says_so(make_record):
    with pytest.raises(VlmoptError, match=r"holds no ttft_ms of vllm for x"):
        make_record().value("ttft_ms", "vllm", "x")


def test_compare_tells_what_moved_beyond_the_spread(make_record):
    old, slower = make_record(), make_record(scale=1.5)
    assert compare(old, make_record()) == []
    assert compare(make_record(scale=1.01), old) == []  # inside the spread
    moves = {move.metric: move for move in compare(slower, old)}
    assert set(moves) == {"ttft_ms", "decode_ms_per_token", "tokens_per_s"}
    assert not any(move.better for move in moves.values())
    assert all(move.better for move in compare(old, slower))
    assert "1.02 → 1.53 ms (worse)" in str(moves["decode_ms_per_token"])


def test_compare_tells_what_appeared_and_vanished(make_record):
    old, new = make_record(), make_record()
    new.measurements = new.measurements[1:]
    new.measure("other", "fast", "m", "ms", [1.0])
    assert [str(move).split(": ")[1] for move in compare(new, old)] == ["vanished", "appeared"]


def test_saving_over_a_record_reports_the_moves(make_record, tmp_path):
    assert make_record().save(tmp_path).moves == []
    assert {move.provider for move in make_record(scale=3).save(tmp_path).moves} == {"fast"}


def test_where_records_go(tmp_path):
    assert folder("full", "nvidia-h200") == record.FIGURES / "nvidia-h200"
    assert folder("smoke", "nvidia-h200") == record.SCRATCH / "nvidia-h200"
    assert folder("full", "cpu", tmp_path) == tmp_path / "cpu"
    with pytest.raises(VlmoptError, match="needs a GPU"):
        folder("full", "cpu")
    with pytest.raises(VlmoptError, match="unknown profile 'quick'"):
        folder("quick", "cpu")
