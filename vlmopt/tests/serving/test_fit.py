"""Step times: what is assumed, and what comes back out of runs whose step time is known."""

import json
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoProcessor, Qwen3VLConfig

from vlmopt.errors import VlmoptError
from vlmopt.serving import fit, shapes, steptime
from vlmopt.serving.models import load_models
from vlmopt.serving.simulate import Engine, StepTime, simulate
from vlmopt.serving.workload import OUTPUT_TOKENS, poisson, trace_of_lengths

TRUE = StepTime(base=6e-3, prefill=30e-6, running=20e-6, kv=40e-9)
WIDE = Engine(TRUE, blocks=100_000)


@cache
def result(rate: float, mode: str = "reserve", seed: int = 0) -> dict:
    """A result file of an engine of the step time TRUE, as an evaluation writes it."""
    trace = trace_of_lengths(dict.fromkeys(OUTPUT_TOKENS, 1.0), poisson(rate, seed), 300, seed=seed)
    asked = [(r.arrival, r.prompt_tokens, r.output_tokens, r.kind, r.arrival + 30.0) for r in trace.requests]
    ran = simulate(asked, WIDE, "fcfs")
    rows = [
        {"kind": r.kind, "outcome": "finished", "arrival": r.arrival, "first_token": o.first, "end": o.end,
         "prompt_tokens": r.prompt_tokens, "output_tokens": r.output_tokens, "slo": 30.0}
        for r, o in zip(trace.requests, ran.outcomes, strict=True)
    ]  # fmt: skip
    return {"mode": mode, "metrics": {"preemptions": ran.preemptions}, "requests": rows}


def works(*rates: float) -> list[fit.Work]:
    return [work for rate in rates for work in fit.work_of(fit.answers_of(result(rate)))]


def test_one_request_alone_is_counted_exactly():
    decode, first = fit.work_of([fit.Answer(arrival=1.5, first=2.0, end=5.0, prompt=10, output=4)])
    assert decode == pytest.approx(fit.Work(steps=3, prefill=0, running=3, kv=3 * (10 + 1 + 1.5), seconds=3.0))
    assert first == pytest.approx(fit.Work(steps=1, prefill=10, running=1, kv=10, seconds=0.5))


def test_who_ran_beside_it_counts_for_as_long_and_prompts_that_were_computed_meanwhile():
    one = fit.Answer(arrival=-1.0, first=0.0, end=10.0, prompt=100, output=11)
    other = fit.Answer(arrival=4.0, first=5.0, end=15.0, prompt=30, output=11)
    first, second, _, start = fit.work_of([one, other])
    assert first.running == pytest.approx(10 + 5) and first.prefill == 30
    assert first.kv == pytest.approx(10 * (101 + 5) + 5 * (31 + 2.5))
    assert second.prefill == 0 and second.running == pytest.approx(10 + 5)
    assert start == pytest.approx(fit.Work(steps=1.5, prefill=30, running=2.5, kv=1.5 * 106 + 30, seconds=1.0))


def test_who_had_to_queue_says_nothing_of_its_prompt():
    queued = [fit.Answer(0.0, 3.0, 3.0, 10, 1), fit.Answer(1.0, 4.0, 4.0, 10, 1), fit.Answer(5.0, 6.0, 6.0, 7, 1)]
    (only,) = fit.work_of(queued)
    assert (only.prefill, only.seconds) == (7, 1.0)


def test_the_step_time_comes_back_from_runs_at_several_loads():
    found = fit.fit(works(0.5, 8.0, 25.0))
    assert found.base == pytest.approx(TRUE.base, rel=0.02)
    assert found.prefill == pytest.approx(TRUE.prefill, rel=0.1)
    assert found.running + 300 * found.kv == pytest.approx(TRUE.running + 300 * TRUE.kv, rel=0.15)


def test_a_simulated_run_with_the_fitted_step_time_agrees_on_a_load_that_was_not_fitted():
    fitted = Engine(fit.fit(works(0.5, 25.0)), blocks=WIDE.blocks)
    measured = result(15.0, seed=1)
    latencies = [row["end"] - row["arrival"] for row in measured["requests"]]
    asked = fit.requests_of(measured)

    def error(engine: Engine) -> float:
        ran = simulate(asked, engine, "fcfs")
        return fit.mean_error(latencies, [o.end - r.arrival for r, o in zip(asked, ran.outcomes, strict=True)])

    assert error(fitted) < 0.03
    slow = StepTime(1.3 * TRUE.base, 1.3 * TRUE.prefill, 1.3 * TRUE.running, 1.3 * TRUE.kv)
    assert error(Engine(slow, blocks=WIDE.blocks)) > fit.WITHIN


def test_no_coefficient_is_negative():
    found = fit.fit([fit.Work(1, 0, running, 0, 1.0 - 0.01 * running) for running in range(1, 9)])
    assert found.running == 0 and found.base == pytest.approx(sum(1 - 0.01 * r for r in range(1, 9)) / 8)


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(VlmoptError, match="3 answers"):
        fit.fit(works(0.5)[:3])
    with pytest.raises(VlmoptError, match="no time of its own"):
        fit.fit([fit.Work(1, 0, 1, 0, 0.0)] * 4)
    preempted = {**result(0.5), "metrics": {"preemptions": 7}}
    with pytest.raises(VlmoptError, match="preempted 7 times"):
        fit.answers_of(preempted)
    lengthless = {**result(0.5), "requests": [{"outcome": "finished", "end": 1.0}]}
    for read in (fit.answers_of, fit.requests_of):
        with pytest.raises(VlmoptError, match="known prompt lengths"):
            read(lengthless)
    with pytest.raises(VlmoptError, match="1 simulated latencies"):
        fit.mean_error([1.0, 2.0], [1.0])


def test_the_assumed_step_time_follows_from_the_shape():
    shape = steptime.Shape.of(shapes.CONFIGS["8B"])
    assert shape.weights == pytest.approx(2 * (8.19e9 - 151936 * 4096), rel=0.001)
    step = steptime.assumed(shape, steptime.Chip(1e12, 1e14, step=1e-3, request=1e-5))
    assert step == StepTime(shape.weights / 1e12 + 1e-3, shape.flops / 1e14, 1e-5, 147456 / 1e12)


def test_an_fp8_cache_halves_the_bytes_and_doubles_the_blocks():
    full, half = (shapes.kv_bytes(shapes.CONFIGS["8B"], width) for width in (2, 1))
    assert steptime.Shape.of(shapes.CONFIGS["8B"], kv_width=1).kv == half == full / 2
    assert shapes.blocks_in(4e9, half) == pytest.approx(2 * shapes.blocks_in(4e9, full), abs=1)
    with pytest.raises(VlmoptError, match="hold no block"):
        shapes.blocks_in(1e6, full)


def test_shapes_are_written_as_an_evaluation_takes_them(tmp_path):
    path = shapes.write_shapes(tmp_path)
    models = json.loads(path.read_text())
    assert models.keys() == load_models(path).keys() == {"8B", "8B-fp8", "3B", "3B-fp8", "2B-VL"}
    for entry in models.values():
        config = json.loads((Path(entry["model_path"]) / "config.json").read_text())
        config = config.get("text_config", config)
        width = 1 if entry.get("kv_cache_dtype") == "fp8" else 2
        tokens = (entry["engine"]["num_gpu_blocks_override"] - 1) * entry["engine"]["block_size"]
        assert tokens * shapes.kv_bytes(config, width) == pytest.approx(shapes.POOL, rel=0.001)


def test_the_shape_that_reads_images_opens_with_a_processor(tmp_path):
    folder = Path(json.loads(shapes.write_shapes(tmp_path).read_text())["2B-VL"]["model_path"])
    config = Qwen3VLConfig.from_pretrained(folder, local_files_only=True)
    assert (config.text_config.hidden_size, config.vision_config.depth) == (2048, 24)
    assert config.image_token_id == AutoProcessor.from_pretrained(folder, local_files_only=True).image_token_id


def test_speculation_shares_a_step_among_its_tokens():
    assert steptime.speculative(TRUE, tokens=3.0, cost=1.5) == StepTime(
        TRUE.base / 2, TRUE.prefill, TRUE.running / 2, TRUE.kv / 2
    )
    with pytest.raises(VlmoptError, match="1 or more"):
        steptime.speculative(TRUE, tokens=0.5, cost=1.0)
