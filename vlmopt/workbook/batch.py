"""Runs notebooks in order through papermill: parameters checked first, outputs cleaned, good files never lost."""

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from papermill.exceptions import PapermillExecutionError
from tqdm.auto import tqdm

from vlmopt.bench.system_info import device_slug
from vlmopt.errors import VlmoptError
from vlmopt.files import require_writable, write_atomic
from vlmopt.workbook import record, series

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NATIVE_LOG = re.compile(r"^\w+:\d{4}-\d\d-\d\d [\d:]+ \d+:\d+ \w+\.cpp:\d+\].*\n?", re.MULTILINE)
_WIDGET = "application/vnd.jupyter.widget-view+json"


class RunningInterpreter(AsyncKernelManager):
    """Starts the interpreter that runs this process, whatever kernels are registered on the machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """A `python3` kernel of this environment; no `ipykernel install` is needed."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


@dataclass(frozen=True)
class Outcome:
    """What became of one notebook: the file written, or the cell that failed and the error's last line.

    `moves` is what left the spread of the record that was there before.
    """

    slug: str
    path: Path
    error: str = ""
    note: str = ""
    moves: tuple[record.Move, ...] = ()


@dataclass(frozen=True)
class Batch:
    """How to run a series.

    Attributes:
        profile: `smoke` or `full`.
        output: folder for records and executed notebooks; empty means where the profile puts them.
        in_place: replace the notebooks themselves; without it they go to `notebooks/` in the output folder.
        extra: further parameters, by name.
        device: whose records the notebooks write, where they read what another machine measured; empty: this one's.
        root: the folder that notebooks run in, so that they import this package.
    """

    profile: str = "smoke"
    output: str = ""
    in_place: bool = False
    extra: dict[str, Any] | None = None
    device: str = ""
    root: Path = record.ROOT

    def values(self) -> dict[str, Any]:
        """The parameters that every notebook gets."""
        output = str(Path(self.output).resolve()) if self.output else ""
        return {"PROFILE": self.profile, "INTERACTIVE": False, "OUTPUT_DIR": output, **(self.extra or {})}

    def record_path(self, entry: series.Entry) -> Path | None:
        """Where the notebook's record goes, None for one that measures nothing.

        Raises:
            VlmoptError: an unknown profile, or `full` on a machine without a GPU and no output folder named.
        """
        if not entry.measures:
            return None
        return record.folder(self.profile, self.device or device_slug(), self.output) / f"{entry.slug}.json"

    def aside(self, entry: series.Entry) -> Path:
        """Where the executed notebook goes when it does not replace the notebook itself."""
        base = Path(self.output) if self.output else record.ROOT / "results" / self.profile
        return base / "notebooks" / entry.path.name

    def target(self, entry: series.Entry) -> tuple[Path, str]:
        """Where the executed notebook goes, and a note where that is not what was asked for."""
        if not self.in_place:
            return self.aside(entry), ""
        if self.profile == "smoke" and list(record.FIGURES.glob(f"*/{entry.slug}.json")):
            return self.aside(entry), "the notebook holds the outputs of a recorded run, so this one was put aside"
        return entry.path, ""


def run(chosen: list[series.Entry], batch: Batch) -> list[Outcome]:
    """Checks every notebook's parameters, then runs them in order; one that fails does not stop the others.

    Raises:
        VlmoptError: a parameter that a notebook does not take, or of another type, a notebook that measures in the
            full profile on a machine without a GPU, or an output folder that cannot be written; nothing has run then.
    """
    for entry in chosen:
        batch.record_path(entry)
        require_writable(batch.target(entry)[0])
        check_parameters(entry, batch.values())
    outcomes = []
    with tqdm(chosen, unit="notebook", file=sys.stderr) as bar:
        for entry in bar:
            bar.set_description(entry.slug)
            outcomes.append(run_one(entry, batch))
    return outcomes


def check_parameters(entry: series.Entry, values: dict[str, Any]) -> None:
    """Holds `values` against the notebook's own parameters; papermill would only warn.

    Raises:
        VlmoptError: an unknown name, or a value of another type than the default.
    """
    known = series.parameters(series.read(entry.path))
    for name, value in values.items():
        if name not in known:
            raise VlmoptError(f"{entry.slug} takes no parameter {name}; it takes {', '.join(known)}")
        if type(value) is not type(known[name]):
            kind = type(known[name]).__name__
            raise VlmoptError(f"{entry.slug}: parameter {name} is a {kind}, and {value!r} is not")


def run_one(entry: series.Entry, batch: Batch) -> Outcome:
    """Executes one notebook; only a successful run replaces the file at its target."""
    target, note = batch.target(entry)
    record_path = batch.record_path(entry)
    before = _record_at(record_path)
    with tempfile.TemporaryDirectory() as scratch:
        executed = Path(scratch) / entry.path.name
        try:
            _execute(entry, batch, executed)
        except Exception as error:  # whatever a notebook raises is its own failure, and the next one still runs
            failed = batch.aside(entry).with_suffix(".failed.ipynb")
            if executed.exists():
                write_atomic(failed, executed.read_bytes())
            return Outcome(entry.slug, failed, describe(error))
        notebook = clean(series.read(executed), batch.profile)
    after, moves = _record_at(record_path), []
    if after and after != before:
        fill_answer(notebook, after)
        moves = record.compare(after, before) if before else []
    write_atomic(target, nbformat.writes(notebook) + "\n")
    return Outcome(entry.slug, target, note=note, moves=tuple(moves))


def _record_at(path: Path | None) -> record.Record | None:
    """The record there, None where there is none that can be read."""
    try:
        return record.load(path) if path else None
    except VlmoptError:
        return None


def _execute(entry: series.Entry, batch: Batch, executed: Path) -> None:
    papermill.execute_notebook(
        entry.path,
        executed,
        parameters=batch.values(),
        kernel_name="python3",
        language="python",
        cwd=batch.root,
        progress_bar={"desc": entry.slug, "position": 1, "leave": False, "file": sys.stderr},
        kernel_manager_class=RunningInterpreter,
    )


def describe(error: Exception) -> str:
    """One line about a failure: the cell, its first line, and the error's last line."""
    if not isinstance(error, PapermillExecutionError):
        text = str(error).strip()
        return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
    first = next((line for line in error.source.splitlines() if line.strip()), "")
    last = _ANSI.sub("", f"{error.ename}: {error.evalue}").strip().splitlines()[-1]
    return f"cell {error.cell_index} ({first.strip()[:60]}): {last}"


def clean(notebook: nbformat.NotebookNode, profile: str) -> nbformat.NotebookNode:
    """The notebook without what changes from run to run: injected cell, timings, progress bars, widgets, dated logs."""
    notebook.cells = [c for c in notebook.cells if "injected-parameters" not in c.metadata.get("tags", [])]
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            "vlmopt": {"profile": profile},
        }
    )
    count = 0
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                output.text = _NATIVE_LOG.sub("", output.text)
        cell.outputs = [output for output in cell.outputs if not _passing(output)]
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
    return notebook


def _passing(output: nbformat.NotebookNode) -> bool:
    """Whether an output is empty, a progress bar or a widget, of which a stored notebook shows nothing."""
    if output.output_type == "stream":
        return not output.text or (output.name == "stderr" and ("\r" in output.text or "it/s]" in output.text))
    return _WIDGET in output.get("data", {})


def fill_answer(notebook: nbformat.NotebookNode, source: record.Record) -> None:
    """Writes the record's answer into the cell tagged `answer`."""
    environment = source.environment
    where = environment.get("gpu_name") or environment.get("cpu_model") or environment["device"]
    for cell in series.tagged(notebook, series.ANSWER_TAG):
        cell.source = f"**Answer** ({where}, {source.profile} profile, {source.weights}). {source.answer}"
