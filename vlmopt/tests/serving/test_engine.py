"""The policies in a real vLLM engine on the CPU, in the serving environment (`.venv-serving`, made by run.sh).

A cache of 24 blocks of 32 tokens serves a burst of 40 requests of up to 210 tokens, so that plain vLLM preempts.
"""

import json
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vlmopt.tests.serving.engines import NEEDS_ENGINE, PYTHON, environment

# The synchronous class in one process, where the run can reach into it; the asynchronous one as servers have it.
ENGINES = {"PolicyScheduler": "0", "PolicyAsyncScheduler": "1"}
BURST = ("vllm", "fcfs", "batch", "brakes", "reserve", "reserve_most")

pytestmark = NEEDS_ENGINE


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What engine_run.py finds with a scheduler class; each runs once."""

    @cache
    def run(scheduler: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("engine")
        script = Path(__file__).with_name("engine_run.py")
        command = [str(PYTHON), str(script), scheduler, str(folder / "model"), str(folder / "found.json")]
        done = subprocess.run(
            command,
            env=environment(VLLM_ENABLE_V1_MULTIPROCESSING=ENGINES[scheduler]),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return json.loads((folder / "found.json").read_text())

    return run


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest, found: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return found(request.param)


@pytest.fixture
def inside(found: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """The engine in one process: all requests are there before the first step."""
    return found("PolicyScheduler")


@pytest.mark.parametrize("name", BURST)
def test_every_request_ends_at_its_own_length(engine, name):
    run = engine[name]
    assert [len(tokens) for tokens in run["tokens"]] == run["wanted"]
    assert run["counts"]["started"] == run["counts"]["finished"] == len(run["wanted"])


@pytest.mark.parametrize("name", BURST[1:])
def test_tokens_are_those_of_plain_vllm(engine, name):
    assert engine[name]["tokens"] == engine["vllm"]["tokens"]


def test_the_tokens_are_rich_enough_to_tell_a_mistake(engine):
    answers = engine["vllm"]["tokens"]
    assert len({tuple(tokens[:10]) for tokens in answers}) == len(answers)
    assert all(len(set(tokens)) > 0.5 * len(tokens) for tokens in answers)


@pytest.mark.parametrize("name", ["vllm", "fcfs"])
def test_plain_admission_preempts_under_this_load(engine, name):
    assert engine[name]["preemptions"] > 10


@pytest.mark.parametrize("name", ["reserve", "reserve_most", "batch"])
def test_reservation_and_small_batches_preempt_nobody(engine, name):
    assert engine[name]["preemptions"] == 0


def test_learning_the_lengths_holds_back_less_than_full_reservation(engine):
    assert engine["reserve"]["counts"]["steps"] < engine["reserve_most"]["counts"]["steps"]


def test_brakes_hold_back_with_both_levels(engine):
    held = engine["brakes"]["counts"]["held"]
    assert held["hard brake"] > 0 and held["soft brake"] > 0
    assert engine["brakes"]["preemptions"] < engine["fcfs"]["preemptions"]


@pytest.mark.parametrize("name", BURST)
def test_our_count_of_preemptions_is_that_of_vllm(engine, name):
    assert engine[name]["counts"]["preempted"] == engine[name]["preemptions"] == engine[name]["counts"]["resumed"]


def test_fcfs_takes_the_steps_of_plain_vllm(inside):
    same = ("steps", "started", "resumed", "preempted")
    assert [inside["fcfs"]["counts"][key] for key in same] == [inside["vllm"]["counts"][key] for key in same]
    assert inside["fcfs"]["counts"]["decisions"] > 0 == inside["vllm"]["counts"]["decisions"]


@pytest.mark.parametrize("name", ["batch", "reserve"])
def test_a_policy_is_asked_again_when_somebody_came_or_went_and_every_eighth_step(engine, name):
    counts = engine[name]["counts"]
    assert counts["decisions"] <= counts["steps"] / 8 + 2 * (counts["started"] + counts["finished"]) < counts["steps"]


def test_the_policy_is_switched_in_the_running_engine(engine):
    assert (engine["start"]["policy"], engine["start"]["control"]) == ("vllm", True)
    assert (engine["settings"]["policy"], engine["settings"]["predict"]) == ("reserve", "most")


def test_the_nearest_deadline_starts_first(inside):
    times = inside["deadlines"]["scheduled"]
    assert len(set(times)) >= 3
    assert times == sorted(times, reverse=True)


def test_a_request_that_names_no_objective_has_that_of_the_settings(inside):
    assert inside["objectives"] == [[7.0, None], [5.0, 7.0]]


def test_a_refused_request_reads_the_reason_and_the_others_finish(inside):
    odd = inside["odd"]
    assert odd["finish"] == ["length", "abort", "length", "length"]
    assert (odd["tokens"][1], odd["stop"][1]) == ([], "can never fit")
    assert odd["counts"]["refused"] == {"can never fit": 1}


def test_malformed_entries_are_counted_and_harm_nobody(engine):
    assert engine["odd"]["counts"]["faults"] == 2
    assert len(engine["odd"]["tokens"][2]) == 8


def test_a_bad_message_is_answered_and_changes_nothing(engine):
    unknown, policy, kind, nonsense = engine["errors"]
    assert "'policy'" in unknown and "'reserve'" in policy and "float" in kind and "JSON object" in nonsense
    assert engine["after_errors"]["policy"] == "fcfs"
