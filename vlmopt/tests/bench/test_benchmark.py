"""benchmark.py as its users call it: its exit codes, its sentences, and what a kill leaves."""

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vlmopt.bench import protocol
from vlmopt.bench.journal import journal_path
from vlmopt.tests.bench.fakes import fake_entrant

ROOT = Path(__file__).resolve().parents[3]
BENCHMARK = ROOT / "benchmark.py"

# Runs benchmark.main with fakes for models, and kills the process ahead of generate call number `at` of one of them.
WITH_FAKES = """
import os, sys
sys.path.insert(0, {root!r})
import benchmark
from vlmopt.bench import protocol
from vlmopt.tests.bench.fakes import fake_entrant

def before(number):
    if number == {at}:
        os.kill(os.getpid(), 9)

protocol.enter = lambda names, *arguments: [fake_entrant(name, before) for name in names]
sys.exit(benchmark.main(sys.argv[1:]))
"""
NEVER = -1


def in_a_process(tmp_path, *flags, at):
    script = tmp_path / "with_fakes.py"
    script.write_text(WITH_FAKES.format(root=str(ROOT), at=at))
    return subprocess.run([sys.executable, script, *map(str, flags)], cwd=tmp_path, capture_output=True, text=True)


def call(*flags, cwd=ROOT):
    return subprocess.run([sys.executable, BENCHMARK, *map(str, flags)], cwd=cwd, capture_output=True, text=True)


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def main(benchmark, monkeypatch, tmp_path, dataset_path):
    """`benchmark.main` on fakes and a small data set; `before` is called ahead of each generate call."""

    def main(*flags, before=lambda number: None):
        monkeypatch.setattr(protocol, "enter", lambda names, *_: [fake_entrant(name, before) for name in names])
        defaults = ["--dataset-path", dataset_path, "--num-samples", 6, "--output", tmp_path / "r.json"]
        return benchmark.main([str(flag) for flag in [*defaults, *flags]])

    return main


def test_help_loads_nothing_heavy():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import benchmark; benchmark.parser().format_help(); "
    done = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_flags_of_the_contest_and_their_defaults(benchmark):
    flags = vars(benchmark.parser().parse_args([]))
    assert flags["model_path"] == "./Qwen3-VL-2B-Instruct"
    assert flags["dataset_path"] == "./data"
    assert flags["output"] == "result.json"
    assert {"num_samples", "random_seed", "stock", "compare", "resume", "preset", "device"} <= set(flags)


def test_killed_run_resumes_where_it_was_with_every_sample_once(tmp_path, make_dataset):
    data = ["--dataset-path", make_dataset(count=30), "--num-samples", 30, "--output", "out/result.json", "--compare"]
    killed = in_a_process(tmp_path, *data, at=10 + 3 * 20 + 2)  # inside the 21st sample
    assert killed.returncode == -signal.SIGKILL
    output = tmp_path / "out" / "result.json"
    journal = journal_path(output)
    first = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    assert [row["index"] for row in first] == list(range(20))

    with journal.open("a") as stream:
        stream.write('{"index": 20, "ou')  # as if the kill had come in the middle of a write
    done = in_a_process(tmp_path, *data, "--resume", at=NEVER)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert [answer["question_id"] for answer in result["answers"]] == list(range(1000, 1030))
    assert result["samples"][:20] == first
    assert result["accuracy"] == 1.0 and result["complete"]
    assert "20 samples are already measured" in done.stdout
    assert [path.name for path in output.parent.iterdir()] == ["result.json"]


def test_interrupt_says_in_one_sentence_how_to_go_on(main, tmp_path, capsys):
    def before(number):
        if number == 6 + 3 * 2 + 1:
            raise KeyboardInterrupt

    assert main(before=before) == 130
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("interrupted") and last.endswith("--resume")
    assert len(journal_path(tmp_path / "r.json").read_text().splitlines()) == 1 + 2
    assert main("--resume") == 0
    assert "2 samples are already measured" in capsys.readouterr().out


def test_summary_is_printed_and_the_result_written_into_a_new_folder(main, tmp_path, capsys):
    output = tmp_path / "deep" / "er" / "r.json"
    assert main("--compare", "--output", output) == 0
    text = capsys.readouterr().out
    for words in ("time to first token", "with preprocessing", "tokens/s", "accuracy", "against the contest baseline"):
        assert words in text
    assert str(output) in text and output.exists()


def test_all_failed_is_told_by_the_exit_code(main, make_dataset, tmp_path):
    assert main("--dataset-path", make_dataset(count=2, damaged=[0, 1])) == 1
    assert json.loads((tmp_path / "r.json").read_text())["performance"]["avg_ttft_ms"] is None


@pytest.mark.parametrize(
    "model, flags, sentence",
    [
        ("absent", [], "model folder"),
        ("absent", ["--stock"], "model folder"),
        ("broken", [], "cannot be loaded"),
        ("broken", ["--compare"], "cannot be loaded"),
        ("absent", ["--preset", "fats"], "unknown preset 'fats'; did you mean 'fast'?"),
        ("absent", ["--num-samples", "0"], "--num-samples 0"),
        ("absent", ["--dataset-path", "nowhere"], "data set folder nowhere does not exist"),
    ],
)
def test_errors_are_one_sentence_and_exit_code_2(benchmark, tmp_path, dataset_path, capsys, model, flags, sentence):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{ not json")
    paths = ["--model-path", tmp_path / model, "--dataset-path", dataset_path, "--output", tmp_path / "r.json"]
    assert benchmark.main([*map(str, paths), *flags]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and sentence in last


def test_an_error_in_a_process_shows_no_traceback(tmp_path, dataset_path):
    done = call("--model-path", "absent", "--dataset-path", dataset_path, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "absent" in done.stderr


@pytest.mark.parametrize("flags", [["--stock", "--compare"], ["--stock", "--preset", "fast"], ["--num-samples", "x"]])
def test_flags_that_contradict_are_refused(benchmark, flags):
    with pytest.raises(SystemExit) as caught:
        benchmark.main(flags)
    assert caught.value.code == 2


def test_the_embedded_model_is_measured_end_to_end_from_any_folder(tmp_path):
    """Stock and ours on the real tiny model: same answers, and every contest key."""
    flags = ["--model-path", ROOT / "vlmopt" / "assets" / "tiny", "--dataset-path", ROOT / "data", "--num-samples", 2]
    done = call(*flags, "--compare", "--output", tmp_path / "r.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["same_predictions"] == result["compared_samples"] == 2
    assert result["performance"]["avg_ttft_ms"] > 0
    assert result["plan"]["active"] is True
    assert sum(result["calls"].values()) > 0
    assert "temperature" not in done.stderr
