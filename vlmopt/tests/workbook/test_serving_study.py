"""The serving study: what its numbers mean, its figures, and the real engine's result files beside the simulator."""

import json
import re
from dataclasses import replace

import pytest

from vlmopt.errors import VlmoptError
from vlmopt.serving import shapes, steptime
from vlmopt.serving.replica import Engine, StepTime
from vlmopt.workbook import serving_plots, serving_runs
from vlmopt.workbook import serving_study as study
from vlmopt.workbook.record import Record
from vlmopt.workbook.serving_study import FCFS, Contender, Site

STEP = StepTime(base=6e-3, prefill=30e-6, running=20e-6, kv=40e-9)
WIDE = Site("8B", Engine(STEP, blocks=100_000), saturation=30.0, unloaded=dict.fromkeys(study.MIX, 1.0))
TIGHT = replace(WIDE, engine=Engine(STEP, blocks=600, ask_every=8))


def record() -> Record:
    environment = {"device": "cpu", "torch": "0", "transformers": "0", "commit": "0", "dirty": False}
    made = Record("50_serving_baseline", "?", "smoke", "8B shape", environment)
    made.check("ready", "exact", 0, 0)
    return made


@pytest.fixture(scope="module")
def calibrated() -> Site:
    return study.site("8B", steptime.Shape.of(shapes.CONFIGS["8B"]), STEP)


def test_an_engine_half_as_fast_has_half_the_saturation_and_twice_the_latency(calibrated):
    slow = StepTime(2 * STEP.base, 2 * STEP.prefill, 2 * STEP.running, 2 * STEP.kv)
    half = study.site("8B", steptime.Shape.of(shapes.CONFIGS["8B"]), slow)
    assert half.saturation == pytest.approx(calibrated.saturation / 2, rel=1e-6)
    assert half.unloaded == pytest.approx({kind: 2 * s for kind, s in calibrated.unloaded.items()})


def test_saturation_is_what_plain_vllm_finishes_when_the_queue_never_empties(calibrated):
    made = study.run(calibrated, FCFS, calibrated.trace(3.0, seed=5, count=600))
    ends = sorted(time.end for time in made.times)
    assert 360 / (ends[-120] - ends[120]) == pytest.approx(calibrated.saturation, rel=0.1)


def test_a_trace_has_the_rate_of_its_load_and_the_objectives_of_its_kind():
    trace = WIDE.trace(0.5, seed=1, count=2000)
    assert 2000 / trace.requests[-1].arrival == pytest.approx(15.0, rel=0.1)
    assert {request.slo for request in trace.requests} == {3.0}


def test_the_best_setting_is_the_one_that_attains_more():
    narrow, wide = Contender("one seat", "fcfs", seats=1), Contender("many", "fcfs")
    assert study.best(WIDE, [narrow, wide], [0], load=0.2) is wide
    assert study.best(WIDE, [wide, replace(wide, name="the same")], [0], load=0.2) is wide


def test_overload_in_the_record_one_sample_a_trace_and_every_preemption_in_its_course():
    rec = record()
    (run, _) = study.measure_runs(rec, TIGHT, FCFS, 1.0, (0, 1), count=200)
    study.measure_course(rec, TIGHT, FCFS, 1.0, run)
    case = "8B load 1"
    assert rec.find("mean_latency_s", "fcfs", case)[0]["n"] == 2
    assert rec.find("latency_s", "fcfs", case)[0]["n"] == 400
    counts = rec.find("preemptions_in_stretch", "fcfs", case)[0]["samples"]
    assert sum(counts) == run.result.preemptions > 0
    held = rec.find("kv_occupancy", "fcfs", case)[0]["samples"]
    assert len(held) == len(counts) == study.STRETCHES and 0.9 < max(held) <= 1
    (row,) = study.rows(rec, case)
    assert row["policy"] == "fcfs" and row["preemptions"] == rec.value("preemptions", "fcfs", case)


def test_the_knee_lies_between_the_two_loads_around_it():
    rec = record()
    for load, rate in ((1.1, 0.8), (0.5, 1.0), (0.9, 0.95)):
        rec.measure(f"8B load {load}", "fcfs", "slo_attainment_rate", "share", [rate])
    assert study.knee(rec, "fcfs") == pytest.approx(0.9 + 0.2 * (0.95 - 0.9) / 0.15)
    assert study.knee(rec, "fcfs", level=0.1) == 1.1


def test_a_clock_that_goes_wrong_is_found_out(monkeypatch):
    assert study.error_alone(WIDE) < 1e-9
    wrong = study.run_requests(study.with_step(WIDE, "", replace(STEP, base=7e-3)), FCFS, [(0.0, 100, 50, "chat")])
    monkeypatch.setattr(study, "run_requests", lambda *asked: wrong)
    assert study.error_alone(WIDE) > 0.1


def test_a_policy_that_preempts_against_its_bound_is_found_out(monkeypatch):
    assert study.preemptions_under_bound(TIGHT, 0) == 0
    monkeypatch.setattr(study.Most, "expected", lambda self, kind, output_so_far=0: output_so_far + 1)
    assert study.preemptions_under_bound(TIGHT, 0) > 0


def test_the_gain_is_paired_and_in_points():
    rec = record()
    study.measure_gain(rec, TIGHT, FCFS, 1.0, [0, 1], count=100)
    assert rec.find("attainment_gain")[0]["samples"] == [0.0, 0.0]
    study.measure_gain(rec, TIGHT, study.reserve(TIGHT), 1.0, [0, 1], count=200)
    assert rec.value("attainment_gain", "reserve") > 5


def test_an_fp8_cache_keeps_the_load_and_doubles_the_pool(calibrated):
    fp8 = study.with_fp8(calibrated, "fp8", shapes.CONFIGS["8B"])
    assert (fp8.saturation, fp8.unloaded) == (calibrated.saturation, calibrated.unloaded)
    assert fp8.engine.blocks == pytest.approx(2 * calibrated.engine.blocks, abs=1)
    assert fp8.engine.step == replace(STEP, kv=STEP.kv / 2)


def filled() -> Record:
    rec = record()
    for load in (0.5, 1.0):
        for contender in (FCFS, study.reserve(TIGHT)):
            runs = study.measure_runs(rec, TIGHT, contender, load, (0, 1), count=150)
            study.measure_course(rec, TIGHT, contender, load, runs[0])
    return rec


def test_figures_draw_each_policy_over_load_time_and_latency_with_plain_vllm_grey():
    rec = filled()
    panels = [("slo_attainment_rate", "share"), ("preemptions", "number")]
    over = serving_plots.over_load(rec, panels, ("fcfs", "reserve"))
    assert [len(axes.lines) for axes in over.axes] == [2, 2]
    assert list(over.axes[0].lines[0].get_xdata()) == [0.5, 1.0]
    assert over.axes[0].lines[0].get_color() == serving_plots.GREY
    course = serving_plots.course(rec, "8B load 1")
    assert [len(axes.lines) for axes in course.axes] == [2, 2]
    told = sum(rec.find("preemptions_in_stretch", "fcfs", "8B load 1")[0]["samples"])
    assert course.axes[1].lines[0].get_ydata()[-1] == told
    spread = serving_plots.distribution(rec, ["8B load 0.5", "8B load 1", "8B load 9"], ("fcfs",))
    assert [len(axes.lines) for axes in spread.axes] == [1, 1]
    assert max(spread.axes[0].lines[0].get_ydata()) == 1


def test_the_contest_puts_the_best_on_top_and_cuts_what_would_hide_the_others():
    rec = record()
    for name, rate, mean in (("fcfs", 0.5, 2.0), ("batch 8", 0.1, 900.0), ("reserve", 0.9, 1.0)):
        rec.measure("8B load 1", name, "slo_attainment_rate", "share", [rate])
        rec.measure("8B load 1", name, "mean_latency_s", "s", [mean])
    drawn = serving_plots.contest(rec, [("slo_attainment_rate", "share"), ("mean_latency_s", "s")], "8B load 1")
    assert [label.get_text() for label in drawn.axes[0].get_yticklabels()] == ["reserve", "fcfs", "batch 8"]
    widths = [bar.get_width() for bar in drawn.axes[1].patches]
    assert widths[:2] == [1.0, 2.0] and widths[2] < 5
    assert "900" in [text.get_text() for text in drawn.axes[1].texts]


def result(policy: dict, load: float, seed: int = 0, where: Site = WIDE) -> dict:
    """A result file as an evaluation of an engine of the step time STEP would write it."""
    admission = {"settings": {"quantile": policy.get("quantile", 0.7)}}
    contender = serving_runs.contender_of({"config": {"policy": policy, "load": load}, "admission": admission})
    trace = where.trace(load, seed, 150)
    made = study.run(where, contender, trace)
    rows = [
        {"kind": t.kind, "outcome": "finished", "arrival": t.arrival, "first_token": t.first_token, "end": t.end,
         "prompt_tokens": r.prompt_tokens, "output_tokens": t.output_tokens, "slo": t.slo}
        for t, r in zip(made.times, trace.requests, strict=True)
    ]  # fmt: skip
    return {
        "model": "8B",
        "started": load,
        "mode": f"{policy['policy']}-load{load:g}",
        "outcome": "finished",
        "config": {"policy": policy, "load": load, "repeat": 0},
        "admission": admission,
        "metrics": made.numbers(),
        "requests": rows,
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(serving_runs, "RESULTS", tmp_path)
    monkeypatch.setattr(serving_runs, "PYTHON", tmp_path / "python")
    return tmp_path


def write(folder, **results) -> None:
    for name, content in results.items():
        (folder / f"eval_8B_{name}.json").write_text(json.dumps(content))


def test_runs_that_are_there_are_read_and_the_step_time_is_fitted_to_them(folder):
    write(folder, a=result({"policy": "vllm"}, 0.2), b=result({"policy": "vllm"}, 0.8, seed=1))
    write(folder, c={**result({"policy": "vllm"}, 0.5), "outcome": "interrupted"}, d=result({"policy": "fcfs"}, 0.2))
    runs = serving_runs.results("8B", ["vllm"], (0.2, 0.8))
    assert [run["config"]["load"] for run in runs] == [0.2, 0.8]
    step = serving_runs.fitted(runs)
    assert step.base == pytest.approx(STEP.base, rel=0.05)
    rec, where = record(), study.with_step(WIDE, "8B", step)
    replays = serving_runs.replay(where, runs)
    serving_runs.check_results(rec, replays)
    assert len(rec.checks) == 3
    again = record()
    serving_runs.check_results(again, [*replays, replays[0]])
    assert len(again.checks) == 3, "repeats count as one"
    assert re.search(r"lies within \d+% of the measured one\.$", serving_runs.single_runs(replays))
    assert serving_runs.single_runs([]) == ""
    slow = study.with_step(WIDE, "8B", replace(step, base=2 * step.base))
    with pytest.raises(VlmoptError, match=r"simulated mean latency of 8B vllm-load0\.2"):
        serving_runs.check_results(record(), serving_runs.replay(slow, runs))
    serving_runs.measure_results(rec, "8B", runs)
    measured = rec.value("mean_latency_s", "vllm", "8B in vLLM load 0.2")
    assert measured == pytest.approx(runs[0]["metrics"]["avg_latency"], rel=1e-6)
    said, mean = serving_runs.measured(rec, "8B", 0.2), runs[0]["metrics"]["avg_latency"]
    assert said.startswith("Measured at load 0.2 with 8B: vllm ") and f"at a mean of {mean:.2f} s. " in said
    assert serving_runs.measured(rec, "8B", 0.3) == ""


def test_without_runs_the_step_time_stays_assumed():
    assert serving_runs.fitted([]) is None


def test_a_policy_is_named_and_simulated_as_the_command_line_writes_it(folder):
    written = {"policy": "reserve", "predict": "most", "ageing": 15, "order": False}
    write(folder, a=result(written, 0.2))
    (run,) = serving_runs.results("8B", ["reserve:predict=most,ageing=15,order=false"], (0.2,))
    contender = serving_runs.contender_of(run)
    assert (contender.policy, contender.quantile) == ("reserve", None)
    assert (contender.options.ageing, contender.options.order) == (15, False)
    plain = serving_runs.contender_of(result({"policy": "vllm"}, 0.2))
    assert (plain.name, plain.policy, plain.quantile) == ("vllm", "fcfs", 0.7)


def test_without_runs_or_vllm_the_command_is_named(folder):
    with pytest.raises(VlmoptError, match=r"no runs of 8B.*evaluate --models-to-test 8B --policy vllm --load 0.9"):
        serving_runs.results("8B", ["vllm"], (0.9,))


def test_runs_that_need_no_vllm_are_taken_or_said_to_be_missing(folder):
    write(folder, a=result({"policy": "vllm"}, 0.2))
    rec = record()
    assert len(serving_runs.present(rec, "8B", ["vllm"], (0.2,))) == 1 and not rec.skipped
    assert serving_runs.present(rec, "8B", ["vllm"], (0.5,)) == []
    assert rec.skipped == [{"what": "8B in vLLM", "reason": "there are no runs of it in results/serving"}]


def test_the_environment_is_that_of_the_runs_and_of_one_sitting():
    environment = {"device": "nvidia-h200", "gpu_name": "H200", "vllm": "0.26.0", "torch": "2.11", "commit": "c0ffee"}
    runs = [{"environment": {**environment, "clock_mhz": clock}} for clock in (1980, 1965)]
    assert serving_runs.machine([]) is None
    assert serving_runs.machine(runs) == {**environment, "clock_mhz": 1980}
    with pytest.raises(VlmoptError, match=r"differ in vllm: 0\.26\.0, 0\.32\.0"):
        serving_runs.machine([*runs, {"environment": {**environment, "vllm": "0.32.0"}}])


def test_one_request_at_a_time_keeps_the_best_settings_and_shows_all(folder):
    rec = record()
    rec.check("clock", "exact", 0, 0)
    assert serving_runs.measure_alone(rec) == []
    shared = {"case": "c", "settings": {"dtype": "bfloat16"}, "prompt_tokens": 798, "tokens": 11, "ttft_ms": [20.0]}
    slow = {**shared, "in_process": False, "async_scheduling": True, "total_ms": [60.0]}
    fast = {**shared, "in_process": True, "async_scheduling": True, "total_ms": [50.0, 40.0], "gpu_ms_per_token": 2.0}
    for name, content in (("a", slow), ("b", fast)):
        (folder / f"alone_{name}.json").write_text(json.dumps(content))
    rows = serving_runs.measure_alone(rec)
    assert [row["a token, ms"] for row in rows] == [4.0, 2.5]
    assert rec.find("decode_ms_per_token", "vllm", "c")[0]["samples"] == [3.0, 2.0]
    assert (rec.value("gpu_ms_per_token", "vllm"), rec.config["vllm alone"]["in_process"]) == (2.0, True)


def test_a_duel_is_in_points_and_ratios():
    rec = record()
    rec.check("clock", "exact", 0, 0)
    for load, name, mean, preemptions, kept in (
        (1.3, "a", 2, 1, 0.9),
        (1.3, "b", 4, 50, 0.5),
        (0.5, "a", 1, 0, 1),
        (0.5, "b", 1, 0, 1),
    ):
        metrics = {
            "mean_latency_s": mean,
            "p99_latency_s": mean,
            "preemptions": preemptions,
            "slo_attainment_rate": kept,
        }
        for metric, value in metrics.items():
            rec.measure(f"s load {load:g}", name, metric, "", [value])
    found = study.duel(rec, "s", "a", "b")
    assert found == pytest.approx({"points": 40, "mean": 0.5, "p99": 0.5, "preemptions": 0.02, "calm": 1})


def test_missing_runs_are_made_by_the_serving_environment(folder):
    (folder / "made.json").write_text(json.dumps(result({"policy": "vllm"}, 0.9)))
    python = folder / "python"
    other = folder / "eval_other_vllm.json"
    other.write_text("{}")
    python.write_text(f'#!/bin/sh\ncp {folder}/made.json {folder}/eval_8B_made.json\necho "$@" > {folder}/asked\n')
    python.chmod(0o755)
    assert len(serving_runs.results("8B", ["vllm"], (0.9,), like="other")) == 1
    asked = (folder / "asked").read_text()
    assert "-m vlmopt.serving" in asked and "--policy vllm --load 0.9" in asked and f"--calibration {other}" in asked
    assert (folder / "shapes" / "8B" / "config.json").exists()
    python.write_text("#!/bin/sh\necho some >&2\necho out of memory >&2\nexit 1\n")
    with pytest.raises(VlmoptError, match="ended with 1: out of memory"):
        serving_runs.results("8B", ["fcfs"], (0.9,))
