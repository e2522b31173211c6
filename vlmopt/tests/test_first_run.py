"""The main job: what it chooses, what it shows, and that a failing part is said and costs nothing that was done."""

import io
import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path

import datasets
import pytest
from rich.console import Console

import benchmark
from vlmopt import first_run
from vlmopt.bench import models, protocol, result
from vlmopt.bench.models import TINY
from vlmopt.config import Settings
from vlmopt.errors import VlmoptError
from vlmopt.tests.test_fetch import textvqa
from vlmopt.workbook import batch

PLAN = {
    "class": "near",
    "parts": [
        {"name": "text", "state": "on", "reason": "prefill and decode over one static KV cache", "cls": "exact"},
        {"name": "decode_graph", "state": "skipped", "reason": "needs a CUDA device", "cls": "near"},
        {"name": "kernels", "state": "off", "reason": "not asked for", "cls": "near"},
    ],
}


def made_up_result(options: protocol.Options, samples: int = 4, failing: bool = False) -> dict:
    """A result file's content as the benchmark builds it, from rows that were never measured."""
    scored = options.model_path != models.RANDOM_2B

    def row(index: int, name: str, ttft: float, calls: dict) -> dict:
        measured = protocol.SampleResult(index, f"answer {index}", ttft, 5.0, 1000 / ttft, 128, 3 if scored else None)
        if failing:
            measured = protocol.SampleResult.failed(index, RuntimeError("no"))
        accuracy = (0.0 if failing else 0.75) if scored else None
        return asdict(measured) | {"accuracy": accuracy, "calls": calls}

    ours = {"stages": 3, "kernels": 2, "stock": 1, "reason: a hook is registered": 1}
    rows = [
        {"index": n, "question_id": n, "stock": row(n, "stock", 40.0, {}), "ours": row(n, "ours", 10.0, ours)}
        for n in range(samples)
    ]
    facts = {
        "system_info": {},
        "environment": {"device": "cpu", "gpu_name": None, "cpu_model": "Made-up CPU"},
        "answers_given": scored,
        "plan": PLAN,
    }
    return result.build(rows, names=["stock", "ours"], settings={"preset": "fast"}, facts=facts)


class House:
    """The first run's surroundings, replaced: where weights and data lie, the benchmark, the notebooks, the GPU."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.settings = Settings(model_dir=folder / "weights", data_dir=folder / "textvqa")
        self.options: list[protocol.Options] = []
        self.batches: list[tuple[list[str], batch.Batch]] = []
        self.failing_samples = False
        self.error: BaseException | None = None
        self.notebook_error = ""
        self.screen = io.StringIO()

    def measure(self, options: protocol.Options, wrapper) -> dict:
        assert wrapper.__name__ == "VLMModel"
        self.options.append(options)
        if self.error:
            raise self.error
        content = made_up_result(options, failing=self.failing_samples)
        Path(options.output).write_text(json.dumps(content))
        return content

    def run_notebooks(self, chosen, settings: batch.Batch) -> list[batch.Outcome]:
        slugs = [entry.slug for entry in chosen]
        self.batches.append((slugs, settings))
        place = self.root / "results" / settings.profile / "cpu"
        place.mkdir(parents=True)
        (place / f"{slugs[0]}.svg").write_text("<svg/>")
        (place / "REPORT.md").write_text("# Report")
        return [
            batch.Outcome(slugs[0], place / "a.ipynb"),
            batch.Outcome(slugs[1], place / "b.ipynb", self.notebook_error),
        ]

    def weights(self, size: int = 3) -> Path:
        folder = self.settings.model_dir
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        with open(folder / "model.safetensors", "wb") as file:
            file.truncate(size)
        return folder

    def run(self) -> int:
        return first_run.run(Console(file=self.screen, width=100))

    @property
    def shown(self) -> str:
        return self.screen.getvalue()


@pytest.fixture
def house(tmp_path, monkeypatch) -> House:
    stand_in = House(tmp_path)
    monkeypatch.setattr(first_run, "ROOT", tmp_path)
    monkeypatch.setattr(first_run, "RESULT", tmp_path / "result.json")
    monkeypatch.setattr(first_run, "RESULT_RANDOM", tmp_path / "result-random-2b.json")
    monkeypatch.setattr(first_run, "settings", lambda: stand_in.settings)
    monkeypatch.setattr(protocol, "run", stand_in.measure)
    monkeypatch.setattr(batch, "run", stand_in.run_notebooks)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return stand_in


def test_a_bare_cpu_scores_60_samples_of_the_embedded_model(house):
    assert house.run() == 0
    [options] = house.options
    assert Path(options.model_path) == TINY
    assert Path(options.dataset_path) == first_run.EMBEDDED_DATA
    assert (options.num_samples, options.mode) == (60, "compare")
    [(slugs, settings)] = house.batches
    assert [slug[:2] for slug in slugs] == ["61", "90"] and settings.profile == "smoke" and not settings.in_place
    assert "the embedded model" in house.shown and "no weights in" in house.shown


def test_the_table_shows_every_number_of_both_and_where_the_files_are(house):
    house.run()
    cells = {
        row[1].strip(): [cell.strip() for cell in row[2:4]]
        for row in (line.split("│") for line in house.shown.splitlines())
        if len(row) == 5
    }
    assert cells["TTFT, ms"] == ["40.00", "10.00"]
    assert cells["TTFT with preprocessing, ms"] == ["45.00", "15.00"]
    assert cells["tokens/s, prefill included"] == ["25.00", "100.00"]
    assert cells["accuracy"] == ["0.7500", "0.7500"]
    assert cells["score, contest baseline"] == ["0.2864", "0.8080"]
    assert cells["score, stock as baseline"] == ["–", "1.4250"]
    assert cells["calls served by stages"] == ["–", "12"]
    assert cells["calls served by kernels"] == ["–", "8"]
    assert cells["calls handed to stock"] == ["–", "4"]
    assert cells["same answer as stock"] == ["–", "4 of 4"]
    for line in (
        "ours is near: text",
        "not run here: decode_graph, needs a CUDA device",
        "handed to stock 4 times: a hook is registered",
        "result: result.json",
        "figure: results/smoke/cpu/61_end_to_end.svg",
        "report: results/smoke/cpu/REPORT.md",
    ):
        assert line in house.shown


def test_a_gpu_without_weights_measures_answers_and_speed(house, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert house.run() == 0
    assert [options.model_path for options in house.options] == [str(TINY), "random-2b"]
    assert len({options.output for options in house.options}) == 2
    [(_, settings)] = house.batches
    assert settings.profile == "full"
    assert Path(settings.output) == house.root / "results" / "full", "a first run changes no tracked record"
    assert "random weights" in house.shown


@pytest.mark.parametrize(
    ("on_gpu", "size", "samples"), [(True, 2 * 10**9, 100), (False, 2 * 10**9, 3), (False, 10**6, 60)]
)
def test_real_weights_are_taken_where_they_are(house, monkeypatch, on_gpu, size, samples):
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_gpu)
    folder = house.weights(size)
    textvqa().save_to_disk(house.settings.data_dir)
    assert house.run() == 0
    [options] = house.options
    assert (options.model_path, options.dataset_path) == (str(folder), str(house.settings.data_dir))
    assert options.num_samples == samples
    assert "the real weights" in house.shown


def test_real_weights_without_their_data_answer_the_embedded_questions(house):
    house.weights()
    house.run()
    assert Path(house.options[0].dataset_path) == first_run.EMBEDDED_DATA


@pytest.mark.parametrize("name", ["model_dir", "data_dir"])
def test_an_incomplete_folder_is_said_and_not_passed_over(house, name):
    folder = getattr(house.settings, name)
    folder.mkdir()
    with pytest.raises(VlmoptError, match=r"run \./run\.sh fetch to complete it"):
        house.run()
    assert house.options == []


def test_a_failing_notebook_is_said_and_the_results_are_still_shown(house, capsys):
    house.notebook_error = "cell 3 (x): ValueError: y"
    assert house.run() == 1
    assert "TTFT, ms" in house.shown
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: notebook 90_report failed in cell 3 (x): ValueError: y; see ")


def test_a_benchmark_whose_samples_all_failed_ends_with_1(house):
    house.failing_samples = True
    assert house.run() == 1
    assert "failed samples" in house.shown


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (VlmoptError("the disk is full; make room"), 2, "error: the disk is full; make room"),
        (KeyboardInterrupt(), 130, "stopped; what is measured is kept, go on with: ./run.sh bench --compare"),
    ],
)
def test_an_error_is_one_sentence_without_traceback(house, capsys, error, status, says):
    house.error = error
    assert first_run.main() == status
    err = capsys.readouterr().err.strip()
    assert err.startswith(says) and "\n" not in err


def test_the_resume_command_is_one_that_the_benchmark_understands(house):
    [job] = first_run.choose_jobs(house.settings, on_gpu=False)
    door, command, *flags = shlex.split(first_run.resume_command(job))
    assert (door, command) == ("./run.sh", "bench")
    parsed = benchmark.parser().parse_args(flags)
    assert parsed.resume and parsed.compare and parsed.num_samples == 60
    assert (parsed.model_path, parsed.dataset_path, parsed.output) == (job.model, str(job.data), str(job.output))


def test_files_from_before_the_run_are_not_shown_as_its_own(tmp_path):
    old, new = tmp_path / "old.svg", tmp_path / "new.svg"
    for path, when in ((old, 100), (new, 300)):
        path.write_text("x")
        os.utime(path, (when, when))
    assert first_run.written_since(200, [tmp_path]) == [new]


def test_the_real_benchmark_feeds_the_real_table(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "ANSWER_TOKENS", 8)
    datasets.load_from_disk(first_run.EMBEDDED_DATA).select([0]).save_to_disk(tmp_path / "one")
    job = first_run.Job("one sample", str(TINY), tmp_path / "one", 1, tmp_path / "result.json", "this is a test")
    content = first_run.benchmark(job)
    assert json.loads(job.output.read_text())["accuracy"] == content["accuracy"]
    screen = io.StringIO()
    Console(file=screen, width=120).print(first_run.results_table(job, content))
    assert "1 samples of one" in screen.getvalue()
    assert content["calls"]["stages"] == 3, "three calls a sample, all served"
    assert first_run.notes(job, content)[0].startswith("ours is ")
