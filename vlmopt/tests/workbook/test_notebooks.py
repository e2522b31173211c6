"""The notebooks: their anatomy holds in every file, and one shared smoke run shows that all of them work."""

import ast
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from vlmopt.tests import house
from vlmopt.workbook import batch, figures, record, report, series, show

FIRST = ["00", "10", "11", "12", "13", "61", "90"]
MAX_CELLS = 40
MAX_CELL_LINES = 22
MAX_BYTES = 4_000_000
WITHOUT_RECORD = ("00_start_here", "90_report")

ENTRIES = series.entries()
MEASURING = [entry for entry in ENTRIES if entry.slug not in WITHOUT_RECORD]
every_notebook = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.slug)
every_measuring_notebook = pytest.mark.parametrize("entry", MEASURING, ids=lambda entry: entry.slug)


def anatomy_faults(notebook: nbformat.NotebookNode) -> list[str]:
    """What a notebook lacks of the parts that each one has."""
    cells = notebook.cells
    faults = []
    if len(cells) > MAX_CELLS:
        faults.append(f"{len(cells)} cells, at most {MAX_CELLS}")
    faults += [f"cell {i} is longer than {MAX_CELL_LINES} lines" for i, c in enumerate(cells) if _long(c)]
    if not cells[0].source.startswith("# ") or "**Question.** " not in cells[0].source:
        faults.append("the first cell holds no title and question")
    if len(cells) < 2 or series.ANSWER_TAG not in cells[1].metadata.get("tags", []):
        faults.append("the second cell is not the answer")
    about = cells[2].source if len(cells) > 2 else ""
    faults += [
        f"the third cell does not say {word}" for word in ("Reads", "Writes", "Needs", "Takes") if word not in about
    ]
    try:
        if list(series.parameters(notebook)) != ["PROFILE", "SEED", "INTERACTIVE", "OUTPUT_DIR"]:
            faults.append("other parameters than PROFILE, SEED, INTERACTIVE, OUTPUT_DIR")
    except batch.VlmoptError as error:
        faults.append(str(error))
    return faults


def _long(cell: nbformat.NotebookNode) -> bool:
    return len(cell.source.splitlines()) > MAX_CELL_LINES


def order_faults(notebook: nbformat.NotebookNode) -> list[str]:
    """Predicted before checked, checked before measured, measured before settled and saved; a panel at the end."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    wanted = (
        "rec.predict(",
        "rec.check(|check_answers(",
        "rec.measure(|measure_",
        "rec.settle(|.settle(",
        "rec.save(",
        "show.panel(",
    )
    places = [next((i for i, source in enumerate(code) if _has(source, mark)), -1) for mark in wanted]
    faults = [f"no cell holds {mark}" for mark, place in zip(wanted, places, strict=True) if place < 0]
    if not faults and places != sorted(places):
        faults.append(f"out of order: {dict(zip(wanted, places, strict=True))}")
    return faults


def _has(source: str, marks: str) -> bool:
    return any(mark in source for mark in marks.split("|"))


def definitions(notebook: nbformat.NotebookNode) -> list[str]:
    """Functions and classes that a notebook defines itself instead of importing them from the package."""
    trees = [ast.parse(cell.source) for cell in notebook.cells if cell.cell_type == "code"]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]


def test_the_first_notebooks_are_there():
    assert set(FIRST) <= {entry.slug[:2] for entry in ENTRIES}
    assert len({entry.number for entry in ENTRIES}) == len(ENTRIES)


@every_notebook
def test_anatomy(entry):
    assert anatomy_faults(series.read(entry.path)) == []


@every_measuring_notebook
def test_prediction_check_and_measurement_come_in_order(entry):
    assert order_faults(series.read(entry.path)) == []


@every_notebook
def test_nothing_is_redefined(entry):
    assert definitions(series.read(entry.path)) == []


@every_notebook
def test_each_notebook_uses_its_own_slug(entry):
    code = "\n".join(cell.source for cell in series.read(entry.path).cells if cell.cell_type == "code")
    others = [other.slug for other in ENTRIES if other.slug != entry.slug and f'"{other.slug}' in code]
    assert others == []
    assert entry.slug in WITHOUT_RECORD or f'series.begin("{entry.slug}"' in code


@every_notebook
def test_committed_outputs_come_from_a_clean_batch_run(entry):
    notebook = series.read(entry.path)
    assert notebook.metadata["vlmopt"]["profile"] in record.PROFILES
    before = nbformat.writes(notebook)
    assert nbformat.writes(batch.clean(notebook, notebook.metadata["vlmopt"]["profile"])) == before
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in code)
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]


@every_measuring_notebook
def test_a_full_notebook_tells_the_answer_of_a_tracked_record(entry):
    answer = series.tagged(series.read(entry.path), series.ANSWER_TAG)[0].source
    full = list(record.FIGURES.glob(f"*/{entry.slug}.json"))
    assert answer.startswith("**Answer** (")
    assert not full or any(record.load(path).answer in answer for path in full)


def test_notebooks_and_figures_stay_small():
    files = [path for folder in (series.NOTEBOOKS, record.FIGURES) for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_BYTES


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda n: n.cells.extend([new_code_cell("1")] * 40), "44 cells, at most 40"),
        (lambda n: n.cells.append(new_code_cell("x = 1\n" * 23)), "longer than 22 lines"),
        (lambda n: n.cells[0].update(source="# title"), "no title and question"),
        (lambda n: n.cells[1].metadata.clear(), "not the answer"),
        (lambda n: n.cells[2].update(source="Reads, Writes, Needs"), "does not say Takes"),
        (lambda n: n.cells[3].update(source="PROFILE = 1"), "other parameters"),
        (lambda n: n.cells[3].update(source="import os"), "only NAME = literal"),
    ],
)
def test_the_anatomy_rejects(change, fault):
    notebook = good()
    assert anatomy_faults(notebook) == []
    change(notebook)
    assert fault in "; ".join(anatomy_faults(notebook))


def good() -> nbformat.NotebookNode:
    return new_notebook(
        cells=[
            new_markdown_cell("# title\n\n**Question.** Does it?"),
            new_markdown_cell("**Answer.** It does.", metadata={"tags": ["answer"]}),
            new_markdown_cell("**Reads** a · **Writes** b · **Needs** c · **Takes** d"),
            new_code_cell(
                'PROFILE = "smoke"\nSEED = 0\nINTERACTIVE = True\nOUTPUT_DIR = ""', metadata={"tags": ["parameters"]}
            ),
        ]
    )


def test_the_order_rejects_measuring_before_the_check():
    steps = ["rec.predict(1)", "rec.check(1)", "rec.measure(1)", "rec.settle(1)", "rec.save(1)", "show.panel(1)"]
    notebook = new_notebook(cells=[new_code_cell(step) for step in steps])
    assert order_faults(notebook) == []
    notebook.cells[1], notebook.cells[2] = notebook.cells[2], notebook.cells[1]
    assert "out of order" in order_faults(notebook)[0]
    notebook.cells.pop()
    assert order_faults(notebook) == ["no cell holds show.panel("]


def test_a_redefinition_is_seen():
    assert definitions(new_notebook(cells=[new_code_cell("if True:\n    def rms_norm(x): return x")])) == ["rms_norm"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> tuple[Path, list[batch.Outcome], bool]:
    """Every notebook run once in the smoke profile into a folder of its own; whether a tracked file was written."""
    output = tmp_path_factory.mktemp("smoke")
    before = stamps()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # beside other work two threads wait for each other more than they compute
        outcomes = batch.run(ENTRIES, batch.Batch(output=str(output)))
    return output, outcomes, stamps() != before


def stamps() -> dict[Path, int]:
    """When each notebook and each file of the figures, report and README was last written."""
    files = [*series.NOTEBOOKS.rglob("*"), *record.FIGURES.rglob("*"), report.README]
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.timeout(1200)  # all of them, one after the other
def test_every_notebook_runs_in_the_smoke_profile(smoke):
    _, outcomes, _ = smoke
    assert [f"{outcome.slug}: {outcome.error}" for outcome in outcomes if outcome.error] == []


def test_every_measuring_notebook_leaves_a_record_that_answers_its_question(smoke):
    output, _, _ = smoke
    records = {made.slug: made for made in record.load_all(output)}
    assert set(records) == {entry.slug for entry in MEASURING}
    for entry in MEASURING:
        made = records[entry.slug]
        assert made.question == entry.question
        assert made.profile == "smoke"
        assert made.checks
        assert made.measurements
        answer = series.tagged(series.read(output / "notebooks" / entry.path.name), series.ANSWER_TAG)[0].source
        assert made.answer in answer


def test_the_report_of_the_smoke_run_shows_every_record_and_its_figures(smoke):
    output, _, _ = smoke
    text = (output / "REPORT.md").read_text()
    assert text == report.assemble([output], output)
    for made in record.load_all(output):
        assert made.answer in text
        assert all((output / "cpu" / f"{stem}.svg").is_file() for stem in figures.of(made))


def test_the_comparison_holds_what_later_work_relies_on(smoke):
    output, _, _ = smoke
    made = record.load(output / "cpu" / "61_end_to_end.json")
    case = made.measurements[0]["case"]
    for metric in ("ttft_ms", "ttft_with_preprocessing_ms", "decode_ms_per_token", "tokens_per_s"):
        assert {"stock", "exact"} <= {row["provider"] for row in made.find(metric, case=case)}
    assert made.find("ids_equal", "exact")[0]["p50"] == 1
    assert any(entry["what"].startswith("preset fast") for entry in made.skipped)
    assert made.config["providers"]["exact"]["class"] == "exact"


def test_nothing_tracked_is_written_by_a_smoke_run(smoke):
    output, outcomes, written = smoke
    assert not written
    assert all(outcome.path.is_relative_to(output) for outcome in outcomes)


def test_smoke_outputs_name_no_path_of_this_machine(smoke):
    output, _, _ = smoke
    notebooks = sorted((output / "notebooks").glob("*.ipynb"))
    assert len(notebooks) == len(ENTRIES)
    for path in notebooks:
        text = path.read_text()
        assert str(output) not in text
        assert str(record.ROOT) not in text
        assert sys.prefix not in text
    assert [fault for entry in ENTRIES for fault in house.foreign_text(entry.path)] == []


def test_the_map_lists_every_notebook_with_its_question():
    rows = show.series_rows()
    assert [row["question"] for row in rows] == [entry.question for entry in ENTRIES]
