"""The batch runner on notebooks made for the tests: one run over a good, a failing and another good one, shared."""

import json
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from papermill.exceptions import PapermillExecutionError

from vlmopt.errors import VlmoptError
from vlmopt.workbook import __main__ as command
from vlmopt.workbook import batch, record, series

PARAMETERS = 'PROFILE = "smoke"\nSEED = 0\nINTERACTIVE = True\nOUTPUT_DIR = ""'


def write(folder: Path, slug: str, *cells: str, parameters: str = PARAMETERS) -> series.Entry:
    notebook = new_notebook()
    notebook.cells = [
        new_markdown_cell(f"# {slug}\n\n**Question.** Does {slug} run?"),
        new_markdown_cell("**Answer.** *not yet*", metadata={"tags": ["answer"]}),
        new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        *(new_code_cell(source) for source in cells),
    ]
    path = folder / f"{slug}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    return series.read_entry(path)


def outputs(path: Path) -> str:
    return "".join(
        "".join(output.get("text", "")) for cell in series.read(path).cells for output in cell.get("outputs", [])
    )


WORKING = """
import sys
import vlmopt
print(PROFILE, INTERACTIVE, bool(OUTPUT_DIR), sys.executable)
print("\\r50%|#####     | 1/2 [00:01<00:01, 1.0it/s]", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, list[batch.Outcome]]:
    """Notebooks 01, 02 (fails in its second code cell) and 03, run in place, and what became of them."""
    root = tmp_path_factory.mktemp("batch")
    entries = [
        write(root / "nb", "01_good", WORKING),
        write(
            root / "nb", "02_bad", "print('before')", "def f():\n    raise ValueError('first line\\nlast line')\nf()"
        ),
        write(root / "nb", "03_good", "print('still running')"),
    ]
    return root, batch.run(entries, batch.Batch(output=str(root / "out"), in_place=True))


def test_a_good_notebook_keeps_its_outputs_and_got_its_parameters(ran):
    root, outcomes = ran
    assert outcomes[0] == batch.Outcome("01_good", root / "nb" / "01_good.ipynb")
    assert f"smoke False True {sys.executable}" in outputs(outcomes[0].path)


def test_a_failure_is_told_with_its_cell_and_last_line(ran):
    _, outcomes = ran
    assert outcomes[1].error == "cell 5 (def f():): last line"


def test_a_failed_notebook_does_not_replace_the_good_one_but_can_be_looked_at(ran):
    root, outcomes = ran
    assert outputs(root / "nb" / "02_bad.ipynb") == ""
    assert outcomes[1].path == root / "out" / "notebooks" / "02_bad.failed.ipynb"
    assert "before" in outputs(outcomes[1].path)


def test_the_others_go_on(ran):
    _, outcomes = ran
    assert not outcomes[2].error
    assert "still running" in outputs(outcomes[2].path)


def test_what_changes_from_run_to_run_is_stripped(ran):
    _, outcomes = ran
    text = outcomes[0].path.read_text()
    notebook = json.loads(text)
    assert "papermill" not in text
    assert "injected-parameters" not in text
    assert set(notebook["metadata"]) == {"kernelspec", "language_info", "vlmopt"}
    assert notebook["metadata"]["vlmopt"] == {"profile": "smoke"}
    assert [cell["metadata"] for cell in notebook["cells"]] == [{}, {"tags": ["answer"]}, {"tags": ["parameters"]}, {}]
    assert [cell["execution_count"] for cell in notebook["cells"][2:]] == [1, 2]
    assert "it/s]" not in outputs(outcomes[0].path)


def test_cleaning_is_idempotent_and_keeps_other_outputs():
    notebook = new_notebook(cells=[new_code_cell("1")])
    bar = new_output("stream", name="stderr", text="\r 10%|#  | 1/10 [00:01<00:09, 1.0it/s]")
    widget = new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "HBox"})
    warning = new_output("stream", name="stderr", text="UserWarning: look here\n")
    result = new_output("execute_result", {"text/plain": "1"}, execution_count=7)
    native = "ERROR:2026-01-02 03:04:05 67:89 DeviceProperties.cpp:56] gpuGetDeviceCount failed with code 35\n"
    warning.text = native + warning.text
    dated = new_output("stream", name="stderr", text=native)
    notebook.cells[0].outputs = [bar, widget, warning, dated, result]
    notebook.cells[0].metadata = nbformat.from_dict({"execution": {"iopub.status.idle": "now"}})
    once = nbformat.writes(batch.clean(notebook, "full"))
    assert nbformat.writes(batch.clean(nbformat.reads(once, 4), "full")) == once
    kept = json.loads(once)["cells"][0]["outputs"]
    assert [output["output_type"] for output in kept] == ["stream", "execute_result"]
    assert "".join(kept[0]["text"]) == "UserWarning: look here\n"
    assert kept[1]["execution_count"] == 1


def test_an_unknown_parameter_is_refused_before_anything_runs(tmp_path):
    good = write(tmp_path, "01_good", f"open({str(tmp_path / 'ran')!r}, 'w')")
    other = write(tmp_path, "02_other", parameters='PROFILE = "smoke"\nINTERACTIVE = True\nOUTPUT_DIR = ""')
    with pytest.raises(
        VlmoptError, match="02_other takes no parameter SEED; it takes PROFILE, INTERACTIVE, OUTPUT_DIR"
    ):
        batch.run([good, other], batch.Batch(output=str(tmp_path / "out"), extra={"SEED": 1}))
    assert not (tmp_path / "ran").exists()


def test_a_parameter_of_another_type_is_refused(tmp_path):
    entry = write(tmp_path, "01_good")
    with pytest.raises(VlmoptError, match="parameter SEED is a int, and '1' is not"):
        batch.check_parameters(entry, {"SEED": "1"})
    batch.check_parameters(entry, {"SEED": 1})


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("SEED = 1 + 1", "only NAME = literal, not 'SEED = 1 "),
        ("import os", "not 'import os'"),
        ("SEED = None\nprint(SEED)", "not 'print"),
        ("a = b = 1", "not 'a = b = 1'"),
    ],
)
def test_a_parameters_cell_holds_literals_only(tmp_path, source, fault):
    entry = write(tmp_path, "01_x", parameters=source)
    with pytest.raises(VlmoptError, match=fault.replace("+", r"\+")):
        series.parameters(series.read(entry.path))


def test_a_notebook_needs_one_parameters_cell():
    with pytest.raises(VlmoptError, match="this one has 0"):
        series.parameters(new_notebook(cells=[new_code_cell("SEED = 0")]))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("61", [61]),
        ("11,12,61", [11, 12, 61]),
        ("20-29", [20, 24]),
        ("61,10-12", [11, 12, 61]),
        ("", [11, 12, 20, 24, 61]),
    ],
)
def test_ranges(tmp_path, text, numbers):
    entries = [write(tmp_path, f"{number}_x") for number in (11, 12, 20, 24, 61)]
    assert [entry.number for entry in series.select(text, entries)] == numbers


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("sixty", "cannot read the range"),
        ("20-", "cannot read"),
        ("-20", "cannot read"),
        ("62", "numbered 62; there are 61"),
    ],
)
def test_ranges_that_name_nothing(tmp_path, text, fault):
    entries = [write(tmp_path, "61_x")]
    with pytest.raises(VlmoptError, match=fault):
        series.select(text, entries)


def test_entries_are_read_in_order_with_title_and_question(tmp_path):
    for slug in ("61_x", "07_y"):
        write(tmp_path, slug)
    (tmp_path / "draft.ipynb").write_text("not a notebook")
    found = series.entries(tmp_path)
    assert [(entry.slug, entry.title, entry.question) for entry in found] == [
        ("07_y", "07_y", "Does 07_y run?"),
        ("61_x", "61_x", "Does 61_x run?"),
    ]


@pytest.mark.parametrize("content", ["", "{}", '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'])
def test_a_file_that_is_no_notebook_is_named(tmp_path, content):
    path = tmp_path / "10_x.ipynb"
    path.write_text(content)
    with pytest.raises(VlmoptError, match=r"10_x\.ipynb"):
        series.entries(tmp_path)


def test_the_answer_comes_from_the_record(make_record):
    notebook = new_notebook(cells=[new_markdown_cell("old", metadata={"tags": ["answer"]}), new_markdown_cell("text")])
    batch.fill_answer(notebook, make_record())
    assert [cell.source for cell in notebook.cells] == [
        "**Answer** (Test GPU, full profile, random-2b). Twice as fast.",
        "text",
    ]
    made = make_record()
    made.environment["gpu_name"] = None
    batch.fill_answer(notebook, made)
    assert notebook.cells[0].source.startswith("**Answer** (Test CPU, full")


def test_a_run_fills_in_the_answer_and_tells_what_moved(tmp_path, monkeypatch, make_record):
    entry = write(tmp_path / "nb", "61_end_to_end", "rec = series.begin('61_end_to_end')")
    run = batch.Batch(output=str(tmp_path / "out"))
    monkeypatch.setattr(batch, "device_slug", lambda: "test-gpu")

    def execute(scale):
        def pretend(entry, settings, executed):
            executed.write_bytes(entry.path.read_bytes())
            make_record(scale=scale).save(tmp_path / "out")

        return pretend

    monkeypatch.setattr(batch, "_execute", execute(1.0))
    assert batch.run_one(entry, run).moves == ()
    monkeypatch.setattr(batch, "_execute", execute(2.0))
    outcome = batch.run_one(entry, run)
    assert {move.metric for move in outcome.moves} == {"ttft_ms", "decode_ms_per_token", "tokens_per_s"}
    assert "Twice as fast." in series.tagged(series.read(outcome.path), "answer")[0].source


def test_a_smoke_run_does_not_replace_the_outputs_of_a_recorded_run(tmp_path, monkeypatch, make_record):
    entry = write(tmp_path, "61_end_to_end")
    monkeypatch.setattr(record, "FIGURES", tmp_path / "figures")
    smoke = batch.Batch(output=str(tmp_path / "out"), in_place=True)
    assert smoke.target(entry) == (entry.path, "")
    make_record().save(tmp_path / "figures")
    path, note = smoke.target(entry)
    assert path == tmp_path / "out" / "notebooks" / entry.path.name
    assert "put aside" in note
    assert batch.Batch(profile="full", in_place=True).target(entry) == (entry.path, "")


def test_failures_without_a_cell_are_described_too():
    assert batch.describe(RuntimeError("Kernel died\nmore")) == "RuntimeError: Kernel died"
    assert batch.describe(RuntimeError()) == "RuntimeError: no message"
    error = PapermillExecutionError(3, 2, "\nrec.check()", "VlmoptError", "\x1b[31mbad\x1b[0m", [])
    assert batch.describe(error) == "cell 3 (rec.check()): VlmoptError: bad"


def test_the_command_ends_with_1_when_a_notebook_failed_and_says_where(monkeypatch, capsys, tmp_path):
    move = record.Move("case", "fast", "ttft_ms", "ms", 10.0, 12.0, better=False)
    outcomes = [
        batch.Outcome("10_x", tmp_path / "10_x.ipynb", moves=(move,) * 10),
        batch.Outcome("11_y", tmp_path / "y", "cell 3: bad"),
    ]
    seen = []
    monkeypatch.setattr(series, "entries", lambda: [write(tmp_path, "10_x"), write(tmp_path, "11_y")])
    monkeypatch.setattr(batch, "run", lambda chosen, settings: seen.append((chosen, settings)) or outcomes)
    assert command.main(["10-19", "--profile", "full", "--set", "SEED=3", "--set", "NAME=x"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED in cell 3: bad" in printed
    assert printed.count("moved: case · fast · ttft_ms: 10 → 12 ms (worse)") == command.MOST_MOVES == 8
    assert "and 2 more" in printed
    assert [entry.slug for entry in seen[0][0]] == ["10_x", "11_y"]
    assert seen[0][1] == batch.Batch("full", "", False, {"SEED": 3, "NAME": "x"})
    outcomes.pop()
    assert command.main([]) == 0


def test_the_command_ends_with_2_and_one_sentence_for_bad_input(capsys):
    assert command.main(["99"]) == 2
    assert capsys.readouterr().err.startswith("error: no notebook is numbered 99; there are ")


def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(VlmoptError, match=r"file.* cannot be written \(.*\); choose another output path"):
        batch.run([write(tmp_path, "10_x", "raise SystemError")], batch.Batch(output=str(tmp_path / "file")))


def test_the_full_profile_on_a_cpu_is_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(batch, "device_slug", lambda: "cpu")
    measuring = write(tmp_path, "10_x", "rec = series.begin('10_x')")
    with pytest.raises(VlmoptError, match="needs a GPU"):
        batch.run([measuring], batch.Batch("full"))
    assert batch.Batch("full").record_path(write(tmp_path, "90_x", "1")) is None
    assert batch.Batch("full", str(tmp_path)).record_path(measuring) == tmp_path / "cpu" / "10_x.json"
    there = batch.Batch("full", device="test-gpu").record_path(measuring)
    assert there == batch.record.FIGURES / "test-gpu" / "10_x.json", "another machine measured"
