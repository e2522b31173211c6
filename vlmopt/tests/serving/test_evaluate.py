"""Experiments and their result files, on an engine that answers from a clock."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tqdm import tqdm

from vlmopt.errors import VlmoptError
from vlmopt.serving import evaluate as module
from vlmopt.serving import metrics
from vlmopt.serving.admission import Settings
from vlmopt.serving.drive import EngineDied, Fate
from vlmopt.serving.evaluate import Plan, calibrate, evaluate, make_trace
from vlmopt.serving.models import ModelEntry
from vlmopt.serving.results import Record, quality, table
from vlmopt.serving.workload import Request
from vlmopt.tests.serving.fakes import PROMPTS, STEP, FakeEngine

ENTRY = ModelEntry(model_path="m")


def run(plan: Plan, engine: FakeEngine | None = None, entry: ModelEntry = ENTRY) -> list[Record]:
    records: list[Record] = []
    asyncio.run(evaluate(engine or FakeEngine(), "tiny", entry, plan, records))
    return records


def plan_of(folder: Path, **more: object) -> Plan:
    return Plan(**{"requests": 12, "saturation": 200.0, "prompts": PROMPTS, "output": folder, **more})


def written(record: Record) -> dict:
    return json.loads(record.path.read_text())


def test_every_policy_gets_the_same_trace_and_a_file_of_its_own(tmp_path):
    engine = FakeEngine()
    records = run(plan_of(tmp_path, policies=["vllm", "reserve:quantile=0.8"], loads=[0.5, 1.0], repeats=2), engine)
    assert len({record.path for record in records}) == len(records) == 8
    for first, second in zip(records[::2], records[1::2], strict=True):
        one, other = ([(r["id"], r["arrival"]) for r in written(record)["requests"]] for record in (first, second))
        assert one == other
    arrivals = [written(record)["requests"][0]["arrival"] for record in records[::2]]
    assert len(set(arrivals)) == 4, "another load and another repeat are another trace"
    assert [settings.policy for settings in engine.settings[2:4]] == ["vllm", "reserve"]


def test_a_load_given_again_gets_another_trace_and_each_load_its_own_number_of_requests(tmp_path):
    plan = plan_of(tmp_path, loads=[1.0, 0.5, 1.0], requests=(8, 6, 7))
    contents = [written(record) for record in run(plan)]
    assert [(c["config"]["load"], c["config"]["repeat"]) for c in contents] == [(1.0, 0), (0.5, 0), (1.0, 1)]
    assert [len(c["requests"]) for c in contents] == [8, 6, 7]
    assert contents[0]["requests"][0]["arrival"] != contents[2]["requests"][0]["arrival"]


def test_what_has_finished_is_not_run_again_and_its_calibration_holds(tmp_path):
    plan = plan_of(tmp_path, policies=["vllm", "fcfs"], loads=[1.0, 1.0], saturation=None)
    first, second, *_ = run(plan)
    second.end("interrupted")
    (again,) = run(replace(plan, resume=True))
    assert (again.content["config"], again.content["calibration"]) == (
        second.content["config"],
        first.content["calibration"],
    )
    assert len(run(replace(plan, resume=True, loads=[1.0, 0.5]))) == 2, "another load is new"
    assert len(run(replace(plan, loads=[1.0]))) == 2, "without `resume` everything is run"


def test_the_calibration_of_other_runs_is_taken_unmeasured(tmp_path):
    engine = FakeEngine()
    calibration = {"saturation": 100.0, "measured": False, "unloaded": {"question": 0.5, "explain": 1.0}}
    entry = ModelEntry(model_path="m", slo={"times_unloaded": 2.0})
    (record,) = run(plan_of(tmp_path, saturation=None, calibration=calibration, loads=[1.0]), engine, entry)
    assert (len(engine.asked), written(record)["calibration"]) == (12, calibration)
    assert written(record)["config"]["trace"]["slo"] == {"question": 1.0, "explain": 2.0}


def test_no_setting_is_left_over_from_the_run_before(tmp_path):
    changed, plain = run(plan_of(tmp_path, policies=["reserve:quantile=0.8,order=false", "reserve"]))
    before, after = (written(record)["admission"]["settings"] for record in (changed, plain))
    assert (before["quantile"], before["order"]) == (0.8, False)
    assert after == Settings.make({"policy": "reserve"}).as_dict()


def test_the_file_holds_what_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "rouge_l", lambda answers, references: metrics.Quality(float(answers == references)))
    (record,) = run(plan_of(tmp_path, arguments={"speculative_config": {}, "model": "m"}))
    content = written(record)
    assert record.path.name == f"eval_tiny_batch-load0.9-spec_{content['started']}.json"
    assert content["outcome"] == "finished" and content["error"] is None
    assert content["metrics"].keys() == metrics.UNITS.keys() == content["units"].keys()
    assert content["metrics"]["requests_finished"] == 12
    assert content["metrics"]["peak_memory"] == 12345
    assert content["metrics"]["preemptions"] == 12, "what the engine counted since the run began"
    assert content["metrics"]["slo_attainment_rate"] == 1.0
    assert content["slo_attainment"]["absolute"] == {"30.0": 1.0}
    assert content["admission"]["settings"]["policy"] == "batch"
    assert content["series"][0]["kv_cache_usage"] == 0.5 and content["series"][0]["preemptions"] == 0
    assert content["quality"]["rouge_l"] == {"value": 1.0, "note": ""}, "every answer is its reference"
    assert content["quality"]["bert_score"]["value"] is None and content["quality"]["bert_score"]["note"]
    assert content["config"]["trace"]["rate"] == pytest.approx(0.9 * 200)
    assert {row["outcome"] for row in content["requests"]} == {"finished"}


def test_objectives_are_relative_where_the_entry_says_so(tmp_path):
    (record,) = run(plan_of(tmp_path), entry=ModelEntry(model_path="m", slo={"times_unloaded": 3}))
    content = written(record)
    unloaded = content["calibration"]["unloaded"]
    assert unloaded["question"] < unloaded["explain"]
    assert {row["slo"] for row in content["requests"]} == {3 * seconds for seconds in unloaded.values()}


def test_saturation_is_measured_by_plain_vllm_where_it_is_not_known(tmp_path):
    engine = FakeEngine()
    plan = plan_of(tmp_path, saturation=None, requests=40)
    with tqdm(disable=True) as bar:
        found = asyncio.run(calibrate(engine, ENTRY, plan, bar))
    assert [settings.policy for settings in engine.settings[1:]] == ["vllm"]
    assert found["measured"] and found["saturation"] > 0
    assert found["unloaded"]["explain"] >= 24 * STEP
    burst, run_trace = engine.asked[-40:], make_trace(ENTRY, plan, 1.0, plan.seed, 40).requests
    assert [r.prompt for r in burst] != [r.prompt for r in run_trace], "saturation is tuned on another trace"


def test_an_idle_engine_that_refuses_is_said_at_once(tmp_path):
    with pytest.raises(VlmoptError, match="refused, can never fit"):
        run(plan_of(tmp_path), FakeEngine(refuses="explain"))
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_dies_leaves_a_file_with_what_finished(tmp_path):
    warm_up = 1 + 2 * module.ALONE
    records: list[Record] = []
    with pytest.raises(EngineDied):
        plan = plan_of(tmp_path, policies=["vllm", "fcfs"])
        asyncio.run(evaluate(FakeEngine(dies_after=warm_up + 5), "tiny", ENTRY, plan, records))
    assert len(records) == 1, "no file claims a run that did not begin"
    content = written(records[0])
    assert (content["outcome"], content["error"]) == ("failed", "the engine died")
    assert content["metrics"]["requests_finished"] == 5
    assert content["metrics"]["requests_failed"] >= 1
    assert content["metrics"]["requests"] == 12
    assert content["metrics"]["slo_attainment_rate"] == pytest.approx(5 / 12)
    assert content["metrics"]["peak_memory"] is None


def test_a_run_that_is_stopped_leaves_a_file_with_what_finished(tmp_path):
    records: list[Record] = []

    async def stop_after_some() -> None:
        engine = FakeEngine()
        work = asyncio.ensure_future(evaluate(engine, "tiny", ENTRY, plan_of(tmp_path, loads=[0.02]), records))
        while not records or engine.answered < 1 + 2 * module.ALONE + 3:
            await asyncio.sleep(0.01)
        work.cancel()
        await work

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stop_after_some())
    content = written(records[0])
    assert content["outcome"] == "interrupted"
    assert 0 < content["metrics"]["requests_finished"] < 12
    assert content["metrics"]["requests_unfinished"] > 0


def test_a_run_that_is_killed_leaves_a_file_with_what_had_finished_by_the_last_look(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SNAPSHOT", 0.05)
    monkeypatch.setattr(module, "SAMPLE", 0.02)
    seen = []

    class Watched(FakeEngine):
        def versions(self):
            for path in tmp_path.glob("eval_*.json"):
                seen.append(json.loads(path.read_text()))
            return super().versions()

    run(plan_of(tmp_path, loads=[0.2]), Watched())
    assert {content["outcome"] for content in seen} == {"running"}
    assert 0 < seen[-1]["metrics"]["requests_finished"] <= 12


def test_random_weights_get_lengths_and_no_score_of_their_answers():
    entry = ModelEntry(model_path="m", load_format="dummy")
    requests = make_trace(entry, Plan(), 1.0, 7, 20).requests
    assert all(request.prompt is None and request.prompt_tokens for request in requests)
    done = [Fate(Request("a", 0.0, "chat", 1, reference="x"), outcome="finished", text="x")]
    scores = quality(done, True, None)
    assert all(score["value"] is None and "random" in score["note"] for score in scores.values())


def test_without_prompts_the_embedded_ones_are_sent():
    requests = make_trace(ENTRY, Plan(), 1.0, 7, 20).requests
    assert all(request.prompt and request.reference for request in requests)


def test_the_table_has_a_line_for_each_run(tmp_path):
    records = run(plan_of(tmp_path, policies=["vllm", "fcfs"]))
    head, *lines = table(records).splitlines()
    assert "in SLO" in head and len(lines) == 2
    assert "12/12" in lines[0] and "100.0%" in lines[1]
