"""What a run has measured so far, one line a sample, so that a killed run goes on where it was.

`result.json.partial.jsonl` lies beside `result.json` while a run is under way: a first line with the settings, then one
line per finished sample, flushed before the next sample starts. It is removed when the run is complete.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmopt.errors import VlmoptError
from vlmopt.files import write_atomic

Row = dict[str, Any]


class Journal:
    """The journal of the run that writes `output`, made with `settings` (a flat mapping of JSON values)."""

    def __init__(self, output: str | Path, settings: Mapping[str, Any]):
        self.output = Path(output)
        self.path = journal_path(output)
        self._settings = dict(settings)
        self._stream = None

    def start(self, resume: bool) -> list[Row]:
        """Open for appending and return the rows that are already there (none unless `resume`).

        Without `resume` a journal that a killed run left is moved aside to `….old`, not thrown away.

        Raises:
            VlmoptError: the run to resume was made with other settings, or its file is damaged; or nothing can be
                written here.
        """
        rows = self._recorded() if resume else []
        if not resume and self.path.exists():
            os.replace(self.path, f"{self.path}.old")
        lines = [json.dumps({"settings": self._settings}), *(json.dumps(row) for row in rows)]
        write_atomic(self.path, "".join(f"{line}\n" for line in lines))
        self._stream = self.path.open("a")
        return rows

    def append(self, row: Row) -> None:
        """Add one finished sample and hand it to the operating system, so that a kill does not lose it."""
        try:
            self._stream.write(json.dumps(row) + "\n")
            self._stream.flush()
        except OSError as error:
            raise VlmoptError(
                f"cannot write {self.path} ({error.strerror or error}); make room and go on with --resume"
            ) from error

    def close(self) -> None:
        """Stop writing and leave the file for a later `--resume`."""
        if self._stream is not None:
            self._stream.close()

    def remove(self) -> None:
        """The run is complete and its result is written: the journal has served."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _recorded(self) -> list[Row]:
        if self.path.exists():
            settings, rows = _read_journal(self.path)
            source = self.path
        elif self.output.exists():
            settings, rows = _read_result(self.output)
            source = self.output
        else:
            return []
        if rows or settings is not None:
            self._refuse_other_settings(settings, source)
        if [row.get("index") for row in rows] != list(range(len(rows))):
            raise VlmoptError(f"{source} is damaged (samples are missing or doubled); start again without --resume")
        return rows

    def _refuse_other_settings(self, found: Mapping[str, Any] | None, source: Path) -> None:
        if not isinstance(found, Mapping):
            raise VlmoptError(f"{source} was not made by this benchmark; pass another --output or leave out --resume")
        differing = [name for name in self._settings if found.get(name) != self._settings[name]]
        if differing:
            changes = ", ".join(f"{name} {found.get(name)!r} instead of {self._settings[name]!r}" for name in differing)
            raise VlmoptError(f"{source} was made with {changes}; pass another --output or leave out --resume")


def journal_path(output: str | Path) -> Path:
    """Where the journal of a run that writes `output` lies."""
    output = Path(output)
    return output.with_name(f"{output.name}.partial.jsonl")


def _read_journal(path: Path) -> tuple[Any, list[Row]]:
    """(settings, rows); a last line torn by a kill is left out, a torn first line means that nothing was recorded."""
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if any(lines[number + 1 :]):
                raise VlmoptError(f"line {number + 1} of {path} is damaged; start again without --resume") from error
            break
    if not records:
        return None, []
    return records[0].get("settings"), records[1:]


def _read_result(path: Path) -> tuple[Any, list[Row]]:
    try:
        result = json.loads(path.read_bytes())
        return result["settings"], result["samples"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VlmoptError(
            f"{path} was not made by this benchmark; pass another --output or leave out --resume"
        ) from error
