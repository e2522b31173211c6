"""The command lines: what they refuse before anything starts, and what they hand on."""

import json
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from vlmopt.errors import VlmoptError
from vlmopt.serving import __main__ as command
from vlmopt.serving import serve
from vlmopt.serving.evaluate import ALONE
from vlmopt.serving.models import SCHEDULER
from vlmopt.tests.serving.fakes import FakeEngine, model_folder


@pytest.fixture
def models(tmp_path) -> Path:
    entries = {name: {"model_path": str(model_folder(tmp_path / name))} for name in ("one", "two")}
    entries["two"]["speculative_decoding"] = {"method": "ngram", "num_speculative_tokens": 4}
    path = tmp_path / "models.json"
    path.write_text(json.dumps(entries))
    return path


@pytest.fixture
def engines(monkeypatch) -> dict[str, FakeEngine]:
    """Engines by model, in place of vLLM's."""
    made: dict[str, FakeEngine] = {}

    def start(arguments: dict, max_tokens: int, hidden: bool) -> FakeEngine:
        name = Path(arguments["model"]).name
        made[name] = FakeEngine()
        made[name].arguments = arguments
        return made[name]

    fake = types.SimpleNamespace(Engine=start, check_arguments=lambda arguments: None)
    monkeypatch.setattr(command, "_vllm", lambda: fake)
    return made


def quick(models: Path, saturation: float = 500.0) -> list[str]:
    """Flags of a short run on short prompts."""
    case = {"id": "a", "kind": "question", "language": "zh", "text": "月亮自己会发光吗？", "reference": "不会。"}
    cases = models.parent / "cases.json"
    cases.write_text(json.dumps([case]))
    flags = {"--models": models, "--saturation": saturation, "--output": models.parent / "results"}
    return [str(word) for pair in {**flags, "--test_cases_path": cases}.items() for word in pair]


def run(models: Path, *flags: str) -> int:
    return command.main([*quick(models), "--requests", "6", *flags])


def results(models: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((models.parent / "results").glob("eval_*.json"))]


def modes(models: Path) -> list[tuple[str, str]]:
    return [(found["model"], found["mode"]) for found in results(models)]


def test_all_models_of_the_file_by_default_in_naive_mode_with_their_speculation(models, engines, capsys):
    assert run(models) == 0
    assert modes(models) == [("one", "batch-load0.9"), ("two", "batch-load0.9-spec")]
    assert engines["one"].stopped and engines["two"].stopped
    shown = capsys.readouterr().out
    assert "batch-load0.9-spec" in shown and str(models.parent / "results") in shown
    assert all(found["unloaded"]["model"] == found["model"] for found in results(models))


def test_the_seeds_options(models, engines):
    flags = ["--models-to-test", "two", "--use-slo-aware-policy", "--disable-spec-decoding"]
    assert run(models, *flags, "--attention_backend", "flashinfer") == 0
    assert modes(models) == [("two", "reserve-load0.9")]
    arguments = engines["two"].arguments
    assert arguments["attention_backend"] == "FLASHINFER" and "speculative_config" not in arguments
    assert arguments["enable_prefix_caching"] is False


def test_policy_wins_and_several_experiments_run_in_one_call(models, engines):
    flags = ["--models-to-test", "one", "--use-slo-aware-policy", "--policy", "fcfs", "brakes:soft=0.5"]
    assert run(models, *flags, "--load", "0.5", "1.3", "--repeats", "2") == 0
    assert len(modes(models)) == 8
    assert set(modes(models)) == {
        ("one", f"{policy}-load{load}") for policy in ("fcfs", "brakes-soft=0.5") for load in ("0.5", "1.3")
    }


def test_test_cases_are_sent(models, engines):
    assert run(models, "--models-to-test", "one") == 0
    assert {request.prompt for request in engines["one"].asked} == {"月亮自己会发光吗？"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--models-to-test", "on"], "nearest is 'one'"),
        (["--policy", "reserv"], "nearest is 'reserve'"),
        (["--policy", "reserve:quantil=1"], "nearest is 'quantile'"),
        (["--policy", "reserve:quantile"], "is no change"),
        (["--load", "0"], "above 0"),
        (["--saturation", "-1"], "above 0"),
        (["--requests", "0"], "1 or more"),
        (["--test_cases_path", "none.json"], "cannot read the prompts"),
        (["--models", "none.json"], "none.json"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_sentence_before_anything_starts(models, engines, capsys, flags, says):
    assert run(models, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error
    assert not engines and not (models.parent / "results").exists()


def test_malformed_test_cases_and_a_missing_model_cost_nothing_either(models, engines, capsys, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text('[{"id": 1}]')
    assert run(models, "--test_cases_path", str(bad)) == 2
    assert "prompt 0 of" in capsys.readouterr().err
    (tmp_path / "two" / "config.json").unlink()
    assert run(models) == 2
    assert "two (of two)" in capsys.readouterr().err
    assert not engines


def test_a_calibration_comes_from_a_result_file(models, engines, capsys):
    assert run(models, "--models-to-test", "one", "--policy", "vllm") == 0
    (path,) = (models.parent / "results").glob("eval_one_*.json")
    assert run(models, "--models-to-test", "two", "--policy", "vllm", "--calibration", str(path)) == 0
    first, second = results(models)
    assert second["calibration"] == {**first["calibration"], "measured": False}
    assert run(models, "--calibration", str(models)) == 2
    assert "cannot take a calibration from" in capsys.readouterr().err


def test_finished_runs_are_left_out_on_demand(models, engines):
    flags = ["--models-to-test", "one", "--load", "0.5", "0.9", "--requests", "6", "5"]
    assert run(models, *flags) == 0
    assert run(models, *flags, "--resume") == 0
    assert len(results(models)) == 2


def test_an_unknown_option_ends_with_2(models, capsys):
    with pytest.raises(SystemExit) as ended:
        run(models, "--polici", "fcfs")
    assert ended.value.code == 2 and "--polici" in capsys.readouterr().err


def test_without_vllm_one_sentence_says_what_to_do(models, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "vlmopt.serving.engine", raising=False)
    assert run(models) == 2
    assert "./run.sh evaluate" in capsys.readouterr().err


def test_a_model_that_does_not_start_does_not_keep_the_next_from_running(models, engines, monkeypatch, capsys):
    start = command._vllm().Engine

    def only_two(arguments: dict, max_tokens: int, hidden: bool) -> FakeEngine:
        if arguments["model"].endswith("one"):
            raise VlmoptError("vLLM did not start the engine: no room")
        return start(arguments, max_tokens, hidden)

    monkeypatch.setattr(command._vllm(), "Engine", only_two)
    assert run(models) == 1
    assert modes(models) == [("two", "batch-load0.9-spec")]
    assert "error: one: vLLM did not start the engine: no room" in capsys.readouterr().err


@pytest.fixture
def interruptible():
    """A shell ignores interrupts for what it runs in the background, and Python then does too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_evaluation_keeps_what_had_finished_and_ends_with_130(models, engines, capsys, interruptible, by):
    def stop_soon() -> None:
        while not (models.parent / "results").exists() or engines["one"].answered < 1 + ALONE + 3:
            time.sleep(0.01)
        os.kill(os.getpid(), by)

    stopper = threading.Thread(target=stop_soon)
    stopper.start()
    assert command.main(quick(models, 20.0)) == 130
    stopper.join()
    assert "stopped" in capsys.readouterr().err
    (found,) = results(models)
    assert found["model"] == "one" and found["outcome"] == "interrupted"
    assert found["metrics"]["requests_finished"] >= 3 and found["metrics"]["requests_unfinished"] > 200
    assert engines["one"].stopped


def flags_of(*arguments: str) -> list[str]:
    options, others = serve._parser().parse_known_args(arguments)
    return serve.server_flags(options, others)


def value(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_the_server_gets_our_scheduler_and_everything_else_as_it_stands(models):
    others = ["--port", "81", "--tensor-parallel-size", "2", "--data-parallel-size", "4"]
    others += ["--distributed-executor-backend", "ray"]
    flags = flags_of("two", "--models", str(models), "--policy", "reserve:order=false", *others)
    assert flags[-len(others) :] == others
    assert value(flags, "--scheduler-cls") == SCHEDULER
    admission = {"vlmopt": {"slo": 30.0, "policy": "reserve", "order": False}}
    assert json.loads(value(flags, "--additional-config")) == admission
    assert json.loads(value(flags, "--speculative-config"))["method"] == "ngram"
    assert value(flags, "--served-model-name") == "two"
    assert "--speculative-config" not in flags_of("two", "--models", str(models), "--disable-spec-decoding")


def test_a_folder_can_be_served_without_an_entry(models, tmp_path):
    flags = flags_of(str(model_folder(tmp_path / "mine")), "--models", str(models))
    assert (value(flags, "--model"), value(flags, "--served-model-name")) == (str(tmp_path / "mine"), "mine")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["three"], "no model 'three'"),
        (["one", "--policy", "reserv"], "nearest is 'reserve'"),
        (["one", "--scheduler_cls", "x"], "leave it out"),
        (["one", "--additional-config={}"], "leave it out"),
    ],
)
def test_the_server_is_not_started_on_nonsense(models, capsys, flags, says):
    assert serve.main([*flags, "--models", str(models)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error
