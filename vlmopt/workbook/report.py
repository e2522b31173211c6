"""Assembles figures/REPORT.md and the README's generated tables, and says when they differ from their sources.

python -m vlmopt.workbook.report            draw every figure and write both
python -m vlmopt.workbook.report --check    exit 1 when either differs, or a figure is missing
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm.auto import tqdm

from vlmopt.errors import VlmoptError
from vlmopt.files import write_atomic
from vlmopt.runtime import contract
from vlmopt.workbook import contract_study, drift_study, figures, plots, series, soak_study
from vlmopt.workbook.record import FIGURES, ROOT, SCRATCH, Record, higher_is_better, key, load, load_all
from vlmopt.workbook.show import markdown_table, prediction_rows

README = ROOT / "README.md"
MARKERS = {name: (f"<!-- {name}:begin -->", f"<!-- {name}:end -->") for name in ("headline", "contract")}
"""What stands around each generated part of the README."""
HEADLINE = "61_end_to_end"
BASELINE = "stock"
MISSED = 1.25
_MOST_ROWS, _MOST_COLUMNS = 40, 6
_METRICS = {
    "ttft_ms": "first token, ms",
    "ttft_with_preprocessing_ms": "with preprocessing, ms",
    "decode_ms_per_token": "decode, ms a token",
    "tokens_per_s": "tokens/s",
    "peak_memory_gb": "peak memory, GB",
}


def assemble(roots: Sequence[Path], beside: Path) -> str:
    """The report over every record under `roots`, with links relative to the folder `beside`.

    The same records give the same text. Raises `VlmoptError` for a record that breaks the schema.
    """
    found = [(path, load(path)) for root in roots for path in sorted(Path(root).glob("*/[0-9][0-9]_*.json"))]
    parts = [
        "# Report",
        "Assembled from the records by `python -m vlmopt.workbook.report`; not written by hand. Values are medians; "
        "the range beside one runs from the 20th to the 80th percentile.",
    ]
    if not found:
        run = "`python -m vlmopt.workbook --profile full` on a machine with a GPU"
        return "\n\n".join([*parts, f"There is no record yet: run {run}."]) + "\n"
    for device in sorted({record.environment["device"] for _, record in found}):
        parts += _device_section(device, [(p, r) for p, r in found if r.environment["device"] == device], beside)
    parts += _drift_section([pair for root in roots for pair in drift_study.load_all(Path(root))], beside)
    parts += _lost_section([record for _, record in found])
    return "\n\n".join(parts) + "\n"


def _device_section(device: str, found: list[tuple[Path, Record]], beside: Path) -> list[str]:
    environment = found[0][1].environment
    name = environment.get("gpu_name") or environment.get("cpu_model") or device
    parts = [f"## {device}: {name}"]
    for path, record in sorted(found, key=lambda pair: (pair[1].slug, pair[1].profile)):
        parts += _record_section(path, record, beside)
    for title, study in (("The contract", contract_study), ("The soak", soak_study)):
        parts += _study_section(title, study, found[0][0].with_name(study.FILE), beside)
    return parts


def _study_section(title: str, study: ModuleType, path: Path, beside: Path) -> list[str]:
    """What `study.told` says of its record at `path`, where there is one."""
    if not path.is_file():
        return []
    lead, rows, notes = study.told(study.read(path))
    return [f"### {title}", f"{lead} *[record]({_link(path, beside)})*", markdown_table(rows), *notes]


def _drift_section(found: list[tuple[Path, dict[str, Any]]], beside: Path) -> list[str]:
    """The tests of the model against several transformers, where they have been run."""
    if not found:
        return []
    rows = [
        {
            **content["packages"],
            **{name: content["environment"][name] for name in ("torch", "device")},
            **{name: content[name] for name in drift_study.COUNTS},
            "record": f"[{_commit(content['environment'])}]({_link(path, beside)})",
        }
        for path, content in found
    ]
    failures = [
        f"Failed with transformers {content['packages']['transformers']}: {', '.join(content['failures'])}."
        for _, content in found
        if content["failures"]
    ]
    lead = "What the tests of the model say against each transformers, by `./run.sh drift VERSION --output figures`."
    return ["## Versions of transformers", lead, markdown_table(rows), *failures]


def _record_section(path: Path, record: Record, beside: Path) -> list[str]:
    parts = [
        f"### {record.slug}",
        f"**{record.question}**",
        record.answer,
        _provenance(path, record, beside),
        *_tables(record),
    ]
    for stem in figures.stems(record):
        links = [_link(path.parent / f"{stem}.{form}", beside) for form in ("png", "svg")]
        parts.append(f"[![{stem}]({links[0]})]({links[1]})")
    if record.skipped:
        parts.append("Not run: " + "; ".join(f"{entry['what']} ({entry['reason']})" for entry in record.skipped) + ".")
    return [*parts, f"**Verdict.** {record.verdict}"]


def _provenance(path: Path, record: Record, beside: Path) -> str:
    e = record.environment
    software = f"torch {e['torch']}, transformers {e['transformers']}"
    links = [f"[record]({_link(path, beside)})"]
    notebook = series.NOTEBOOKS / f"{record.slug}.ipynb"
    if notebook.exists() and beside.resolve().is_relative_to(ROOT):
        links.append(f"[notebook]({_link(notebook, beside)})")
    clock = f", {plots.number(float(e['clock_mhz']))} MHz" if e.get("clock_mhz") else ""
    return f"*{record.profile} profile, {record.weights}; {software}{clock}; {_commit(e)}; {', '.join(links)}*"


def _commit(environment: dict[str, Any]) -> str:
    return f"commit {str(environment['commit'])[:12]}" + (" with uncommitted changes" if environment["dirty"] else "")


def _link(path: Path, beside: Path) -> str:
    return Path(os.path.relpath(path.resolve(), beside.resolve())).as_posix()


def _tables(record: Record) -> Iterable[str]:
    if record.predictions:
        yield "Predicted and measured:"
        yield markdown_table(prediction_rows(record))
    if record.checks:
        yield "Checks: " + "; ".join(
            f"{c['name']} ({c['class']}) {plots.number(c['measured'])} ≤ {plots.number(c['bound'])}"
            for c in record.checks
        )
    measured = [m for m in record.measurements if not m["metric"].startswith("draft")]
    if measured:  # drafts stand in the notebook, and among what did not work
        rows = pivot(replace(record, measurements=measured))
        yield markdown_table(rows[:_MOST_ROWS])
        if len(rows) > _MOST_ROWS:
            yield f"{len(rows) - _MOST_ROWS} further rows are in the record."


def pivot(record: Record) -> list[dict[str, Any]]:
    """One row a case and metric, one column a provider; where there are many providers, one row each instead."""
    providers = list(dict.fromkeys(record.label(m["provider"]) for m in record.measurements))
    metrics = list(dict.fromkeys((m["metric"], m["unit"]) for m in record.measurements))
    if len(providers) <= _MOST_COLUMNS:
        rows = _spread(record, ("case", "metric", "unit"), lambda m: record.label(m["provider"]), with_unit=False)
        return [{**dict.fromkeys(("case", "metric", "unit", *providers)), **row} for row in rows]
    if len(metrics) <= _MOST_COLUMNS:
        columns = [f"{metric}, {unit}" for metric, unit in metrics]
        rows = _spread(record, ("case", "provider"), lambda m: f"{m['metric']}, {m['unit']}", with_unit=False)
        return [{**dict.fromkeys(("case", "provider", *columns)), **row} for row in rows]
    return _spread(record, ("case", "provider", "metric"), lambda m: "measured", with_unit=True)


def _spread(
    record: Record, keys: tuple[str, ...], column: Callable[[dict[str, Any]], str], with_unit: bool
) -> list[dict[str, Any]]:
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for m in record.measurements:
        named = {**m, "provider": record.label(m["provider"])}
        row = rows.setdefault(tuple(m[k] for k in keys), {k: named[k] for k in keys})
        row[column(m)] = _value(m, with_unit)
    return list(rows.values())


def _value(m: dict[str, Any], with_unit: bool) -> str:
    text = plots.number(m["p50"]) + (f" {m['unit']}" if with_unit else "")
    spread = f" ({plots.number(m['p20'])}–{plots.number(m['p80'])})" if m["n"] > 1 else ""
    share = f", {100 * m['roofline_share']:.0f} % of the roofline" if m["roofline_share"] is not None else ""
    return text + spread + share


def _lost_section(records: list[Record]) -> list[str]:
    """What did not work: drafts that lost, providers behind the baseline, predictions that were missed."""
    lines = [f"- {record.slug}: {e['what']}. {e['lesson']}" for record in records for e in record.lost]
    lines += [line for record in records for line in slower_than_baseline(record)]
    lines += [line for record in records for line in missed_predictions(record)]
    return ["## Where we lose", "\n".join(lines) or "No draft lost, no provider is behind stock, no prediction missed."]


def slower_than_baseline(record: Record) -> list[str]:
    """A line for every measurement that is worse than stock's by more than the larger spread."""
    stock = {(m["case"], m["metric"]): m for m in record.measurements if m["provider"] == BASELINE}
    lines = []
    for m in record.measurements:
        base = stock.get((m["case"], m["metric"]))
        if base is None or m["provider"] in (BASELINE, "floor"):
            continue
        behind = m["p50"] - base["p50"] if not higher_is_better(m) else base["p50"] - m["p50"]
        if behind > max(m["p80"] - m["p20"], base["p80"] - base["p20"]):
            numbers = f"{plots.number(m['p50'])} {m['unit']} against {plots.number(base['p50'])}"
            where = f"{record.slug}, {record.environment['device']} ({record.profile})"
            named = {**m, "provider": record.label(m["provider"])}
            lines.append(f"- {where}: {' · '.join(key(named))} is behind stock, {numbers}.")
    return lines


def missed_predictions(record: Record) -> list[str]:
    """A line for every prediction that is off by more than a quarter of itself, either way."""
    lines = []
    for row in prediction_rows(record):
        if row["ratio"] is None or not 1 / MISSED <= row["ratio"] <= MISSED:
            numbers = f"{plots.number(row['predicted'])} → {plots.number(row['measured'])} {row['unit']}"
            where = f"{record.slug}, {record.environment['device']} ({record.profile})"
            lines.append(f"- {where}: prediction missed, {row['what']} {numbers}.")
    return lines


def headline(root: Path = FIGURES) -> str:
    """The README's table from the end-to-end record: of a GPU where there is one, else of the CPU."""
    records = [record for record in load_all(root) if record.slug == HEADLINE]
    if not records:
        return (
            f"*There is no recorded end-to-end run yet: `python -m vlmopt.workbook {HEADLINE[:2]} --profile full` "
            "on a machine with a GPU writes it, and `python -m vlmopt.workbook.report` fills this table.*"
        )
    return "\n\n".join(_headline_of(record) for record in sorted(records, key=_gpu_first))


def _gpu_first(record: Record) -> tuple[bool, str]:
    return record.environment["device"] == "cpu", record.environment["device"]


def _headline_of(record: Record) -> str:
    case = plots.main_case(record)
    own = [m for m in record.measurements if m["case"] == case]
    metrics = [metric for metric in _METRICS if any(m["metric"] == metric for m in own)]
    rows = []
    for provider in dict.fromkeys(m["provider"] for m in own):
        cls = "baseline" if provider == BASELINE else record.class_of(provider)
        row: dict[str, Any] = {"": provider, "class": cls}
        for metric in metrics:
            value = record.find(metric, provider, case)
            row[_METRICS[metric]] = plots.number(value[0]["p50"]) if value else None
        rows.append(row)
    e = record.environment
    where = e.get("gpu_name") or e.get("cpu_model") or e["device"]
    first = f"{where}, `{case}`, batch 1, torch {e['torch']}, {record.profile} profile. {record.answer}"
    below = "The floor is that of the checkpoint's own bytes, of which a lossy preset's decode steps read fewer."
    notes = [below] if any(row["class"] == "lossy" for row in rows) else []
    return "\n\n".join([first, markdown_table(rows), *notes])


def filled(readme: str, table: str) -> str:
    """`readme` with the headline `table` and the contract of `generate` between their markers.

    Raises:
        VlmoptError: a marker is missing.
    """
    for name, text in {"headline": table, "contract": markdown_table(contract.as_rows())}.items():
        begin, end = MARKERS[name]
        before, found, rest = readme.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise VlmoptError(f"README.md lacks the markers {begin} and {end}; put them where the table belongs")
        readme = f"{before}{begin}\n{text}\n{end}{after}"
    return readme


def outputs(root: Path, readme: Path | None) -> dict[Path, str]:
    """What the report's files should hold; a README that is None is left out.

    Raises:
        VlmoptError: the README is missing or has no markers, or a record breaks the schema.
    """
    wanted = {root / "REPORT.md": assemble([root], root)}
    if readme is not None:
        if not readme.is_file():
            every = " ".join(marker for pair in MARKERS.values() for marker in pair)
            raise VlmoptError(f"there is no {readme}; write it with the markers {every}")
        wanted[readme] = filled(readme.read_text(encoding="utf-8"), headline(root))
    return wanted


@dataclass(frozen=True)
class Built:
    """What `rebuild` wrote: figures and report, the report's text and the headline table."""

    files: list[Path]
    roots: list[Path]
    beside: Path
    text: str
    headline: str

    @property
    def names(self) -> list[str]:
        """The files by their paths relative to the report."""
        return [_link(path, self.beside) for path in self.files]

    def require_stable(self) -> None:
        """Assembles again and compares.

        Raises:
            VlmoptError: the same records gave another text.
        """
        if assemble(self.roots, self.beside) != self.text:
            raise VlmoptError("the same records gave another report; something else is writing records")

    @property
    def prose(self) -> str:
        """The text for a notebook: without pictures, whose links lead nowhere there, and without tables."""
        return "\n".join(line for line in self.text.splitlines() if not line.startswith(("[![", "|")))


def rebuild(profile: str, output_dir: str = "") -> Built:
    """Draws every record's figures beside it and assembles the report of a profile.

    `full` works on `figures/` and fills the README's table too; `smoke` draws in the scratch folder and shows the
    tracked records after its own, untouched; a named output folder stands alone.

    Raises:
        VlmoptError: an unknown profile, a record that breaks the schema, or a README without the markers.
    """
    base = Path(output_dir) if output_dir else {"smoke": SCRATCH, "full": FIGURES}.get(profile)
    if base is None:
        raise VlmoptError(f"unknown profile {profile!r}; choose smoke or full")
    roots = [base, FIGURES] if base == SCRATCH else [base]
    files = draw_all(base)
    text = assemble(roots, base)
    table = headline(base)
    files.append(write_atomic(base / "REPORT.md", text))
    if base == FIGURES and README.is_file():
        files.append(write_atomic(README, filled(README.read_text(encoding="utf-8"), table)))
    return Built(files, roots, base, text, table)


def draw_all(root: Path) -> list[Path]:
    """Draws the figures of every record under `root`, each beside its record."""
    sources = tqdm(sorted(Path(root).glob("*/[0-9][0-9]_*.json")), desc="figures", leave=False)
    return [path for source in sources for path in figures.draw(load(source), source.parent)]


def missing_figures(root: Path) -> list[Path]:
    """Figure files that the report shows and that are not there."""
    sources = sorted(Path(root).glob("*/[0-9][0-9]_*.json"))
    wanted = [source.parent / stem for source in sources for stem in figures.stems(load(source))]
    files = [path.with_name(f"{path.name}.{form}") for path in wanted for form in ("svg", "png")]
    return [path for path in files if not path.is_file()]


def differing(wanted: dict[Path, str]) -> list[Path]:
    """The files that do not hold what they should."""
    return [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


def main(argv: list[str] | None = None) -> int:
    """0 when the files are written (or agree, under --check), 1 when --check finds a difference, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m vlmopt.workbook.report", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file differs")
    parser.add_argument("--figures", type=Path, default=FIGURES, metavar="DIR", help="folder of the records")
    parser.add_argument("--readme", type=Path, default=README, metavar="FILE", help="file with the headline markers")
    options = parser.parse_args(argv)
    try:
        wanted = outputs(options.figures, options.readme)
        changed = differing(wanted)
        if options.check:
            changed += missing_figures(options.figures)
            for path in changed:
                print(f"{path} differs from the records; run python -m vlmopt.workbook.report", file=sys.stderr)
            return 1 if changed else 0
        for path in [*draw_all(options.figures), *(write_atomic(path, wanted[path]) for path in changed)]:
            print(path)
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
