"""The notebooks as files: where they are, what they ask, and which parameters they take."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from vlmopt.bench.system_info import environment
from vlmopt.errors import VlmoptError
from vlmopt.workbook import record

NOTEBOOKS = record.ROOT / "notebooks"
PARAMETERS_TAG = "parameters"
ANSWER_TAG = "answer"


@dataclass(frozen=True)
class Entry:
    """One notebook of the series; `measures` says whether it writes a record."""

    slug: str
    title: str
    question: str
    path: Path
    measures: bool = True

    @property
    def number(self) -> int:
        """The two digits that order the series."""
        return int(self.slug[:2])


def entries(folder: Path = NOTEBOOKS) -> list[Entry]:
    """Every `NN_slug.ipynb` in `folder`, in order."""
    return [read_entry(path) for path in sorted(Path(folder).glob("[0-9][0-9]_*.ipynb"))]


def read_entry(path: Path) -> Entry:
    """Title and question from the notebook's first cell: a `# ` heading, then a `**Question.** ` paragraph.

    Raises:
        VlmoptError: the file is no notebook, or its first cell lacks one of the two.
    """
    notebook = read(path)
    first = notebook.cells[0].source
    title = next((line[2:] for line in first.splitlines() if line.startswith("# ")), "")
    _, mark, question = first.partition("**Question.** ")
    if not title or not mark:
        raise VlmoptError(f"{path}: the first cell must hold a '# ' title and a '**Question.** ' paragraph")
    measures = any("series.begin(" in cell.source for cell in notebook.cells if cell.cell_type == "code")
    return Entry(path.stem, title, " ".join(question.split()), path, measures)


def read(path: Path) -> nbformat.NotebookNode:
    """The notebook in `path`, as nbformat 4.

    Raises:
        VlmoptError: it is missing, no notebook, or empty.
    """
    try:
        notebook = nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        raise VlmoptError(f"cannot read the notebook {path} ({error.__class__.__name__})") from error
    if not notebook.cells:
        raise VlmoptError(f"the notebook {path} has no cells")
    return notebook


def begin(
    slug: str,
    profile: str,
    output_dir: str,
    weights: str,
    config: dict[str, Any] | None = None,
    machine: dict[str, Any] | None = None,
) -> record.Record:
    """A new record for the notebook `slug`, with its question and the environment of `machine` (None: this one).

    Raises:
        VlmoptError: an unknown profile, or `full` on a machine without a GPU and no output folder named.
    """
    machine = machine or environment()
    record.folder(profile, machine["device"], output_dir)
    question = read_entry(NOTEBOOKS / f"{slug}.ipynb").question
    return record.Record(slug, question, profile, weights, machine, config=dict(config or {}))


def tagged(notebook: nbformat.NotebookNode, tag: str) -> list[nbformat.NotebookNode]:
    """The cells that carry `tag`."""
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def parameters(notebook: nbformat.NotebookNode) -> dict[str, Any]:
    """Names and default values from the one cell tagged `parameters`.

    Raises:
        VlmoptError: there is not exactly one such cell, or it holds anything but `NAME = literal`.
    """
    cells = tagged(notebook, PARAMETERS_TAG)
    if len(cells) != 1:
        raise VlmoptError(f"a notebook needs one cell tagged {PARAMETERS_TAG!r}, this one has {len(cells)}")
    values = {}
    for statement in ast.parse(cells[0].source).body:
        try:
            (target,) = statement.targets
            values[target.id] = ast.literal_eval(statement.value)
        except (AttributeError, ValueError) as error:
            line = ast.unparse(statement)
            raise VlmoptError(f"the parameters cell may hold only NAME = literal, not {line!r}") from error
    return values


def select(text: str, available: list[Entry]) -> list[Entry]:
    """The notebooks that a range names: `61`, `11,12,61`, `20-29` or a mixture; an empty text names all.

    Raises:
        VlmoptError: the text is no range, or a part of it names no notebook.
    """
    if not text:
        return list(available)
    wanted: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise VlmoptError(f"cannot read the range {text!r}; write 61, 11,12,61 or 20-29")
        numbers = range(int(low), int(high or low) + 1)
        found = {entry.number for entry in available} & set(numbers)
        if not found:
            known = ", ".join(f"{entry.number:02d}" for entry in available) or "none"
            raise VlmoptError(f"no notebook is numbered {part.strip()}; there are {known}")
        wanted |= found
    return [entry for entry in available if entry.number in wanted]
