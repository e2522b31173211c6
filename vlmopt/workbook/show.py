"""What a notebook displays: environment card, tables, figures, a function's source, a panel to play with."""

import inspect
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import PIL.Image
from IPython.display import Image, Markdown, display
from matplotlib.figure import Figure

from vlmopt.workbook import plots, series
from vlmopt.workbook.record import FIGURES, ROOT, SCRATCH, Record, Saved, load_all

_CARD = (
    ("device", "GPU", "gpu_name"),
    ("device", "CPU", "cpu_model"),
    ("device", "threads", "threads"),
    ("state", "clock, MHz", "clock_mhz"),
    ("state", "power, W", "power_w"),
    ("state", "temperature, °C", "temperature_c"),
    ("software", "python", "python"),
    ("software", "torch", "torch"),
    ("software", "triton", "triton"),
    ("software", "transformers", "transformers"),
    ("software", "vllm", "vllm"),
    ("code", "commit", "commit"),
    ("code", "uncommitted changes", "dirty"),
)


def card(record: Record) -> Markdown:
    """The environment card: machine with clocks, power and temperature, software, commit, profile, weights."""
    environment = record.environment
    lines = [f"**profile** {record.profile} · **weights** {record.weights} · **device** `{environment['device']}`"]
    for group in dict.fromkeys(group for group, _, _ in _CARD):
        known = [(label, environment.get(key)) for g, label, key in _CARD if g == group]
        lines.append(" · ".join(f"**{label}** {_cell(value)}" for label, value in known if value is not None))
    return Markdown("  \n".join(line for line in lines if line))


def table(rows: Iterable[dict[str, Any]], columns: Sequence[str] | None = None) -> Markdown:
    """Rows of a mapping each as a Markdown table; numbers with three significant digits, None as a dash."""
    return Markdown(markdown_table(rows, columns))


def markdown_table(rows: Iterable[dict[str, Any]], columns: Sequence[str] | None = None) -> str:
    """The same as text; an empty table says that there is nothing."""
    rows = list(rows)
    if not rows:
        return "*(nothing)*"
    columns = columns or list(dict.fromkeys(key for row in rows for key in row))
    values = {c: [row[c] for row in rows if row.get(c) is not None] for c in columns}
    numeric = [bool(values[c]) and all(isinstance(v, int | float) for v in values[c]) for c in columns]
    lines = ["| " + " | ".join(columns) + " |"]
    lines.append("|" + "|".join("---:" if right else "---" for right in numeric) + "|")
    lines += ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return plots.number(value)
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|").replace("\n", " ")


def measurements(record: Record, *metrics: str) -> Markdown:
    """The record's measurements, of the given metrics or all, as a table."""
    chosen = [row for row in record.measurements if not metrics or row["metric"] in metrics]
    return table(measurement_rows({**row, "provider": record.label(row["provider"])} for row in chosen))


def measurement_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measurements as display rows: p50 with its spread, number of samples, share of the roofline in percent."""
    return [
        {
            "case": row["case"],
            "provider": row["provider"],
            "metric": row["metric"],
            "p50": float(row["p50"]),
            "p20–p80": f"{plots.number(row['p20'])}–{plots.number(row['p80'])}",
            "unit": row["unit"],
            "n": row["n"],
            "% of roofline": None if row["roofline_share"] is None else round(100 * row["roofline_share"], 1),
        }
        for row in rows
    ]


def line(row: dict[str, Any]) -> Markdown:
    """One measurement in a line: latency and share of the roofline, as a panel shows it."""
    share = "" if row["roofline_share"] is None else f", {100 * row['roofline_share']:.0f} % of the roofline"
    return Markdown(f"{row['case']}: **{plots.number(row['p50'])} {row['unit']}**{share}")


def predictions(record: Record) -> Markdown:
    """Each prediction beside what was measured; a dash until it is."""
    return table(prediction_rows(record))


def prediction_rows(record: Record) -> list[dict[str, Any]]:
    """Predictions with the ratio of measured to predicted."""
    rows = []
    for entry in record.predictions:
        known = entry["measured"] is not None and entry["predicted"]
        ratio = entry["measured"] / entry["predicted"] if known else None
        rows.append({**{key: entry[key] for key in ("what", "predicted", "measured", "unit")}, "ratio": ratio})
    return rows


def checks(record: Record) -> Markdown:
    """The checks with class, measured value and bound."""
    return table(record.checks, ("name", "class", "measured", "bound", "passed"))


def figure(drawn: Figure) -> Image:
    """A figure as a small PNG."""
    return Image(data=plots.png(drawn), format="png")


def pictures(
    items: Sequence[tuple[PIL.Image.Image, str]], columns: int = 3, cell: tuple[int, int] = (200, 160)
) -> None:
    """Images side by side in one JPEG, their captions numbered below."""
    rows = -(-len(items) // columns)
    sheet = PIL.Image.new("RGB", (columns * cell[0], rows * cell[1]), "white")
    for i, (image, _) in enumerate(items):
        small = image.convert("RGB")
        small.thumbnail((cell[0] - 8, cell[1] - 8))
        sheet.paste(small, (i % columns * cell[0], i // columns * cell[1]))
    buffer = io.BytesIO()
    sheet.save(buffer, "JPEG", quality=80)
    captions = "\n".join(f"{i + 1}. {caption}" for i, (_, caption) in enumerate(items))
    display(Image(data=buffer.getvalue(), format="jpeg"), Markdown(captions))


def text(markdown: str) -> Markdown:
    """Markdown as it is."""
    return Markdown(markdown)


def skipped(record: Record) -> Markdown:
    """What was not run, and why."""
    return table(record.skipped, ("what", "reason"))


def source(obj: Any) -> Markdown:
    """The source of a function or class as it is in the package, never a copy."""
    return Markdown(f"```python\n{inspect.getsource(obj)}```")


def saved(result: Saved) -> Markdown:
    """Where the record went, and what moved against the last one by more than the spread."""
    path = result.path.resolve()
    inside = path.is_relative_to(ROOT)
    place = path.relative_to(ROOT) if inside else f"{path.parent.name}/{path.name}"
    moves = "".join(f"\n- {move}" for move in result.moves) or " nothing"
    return Markdown(f"Record written to `{place}`. Moved by more than the spread:{moves}")


def series_rows(output_dir: str = "") -> list[dict[str, Any]]:
    """The map: every notebook with its question and, where a record exists, its answer and device.

    A recorded full run goes before a smoke run; the latter is read from `output_dir`, or the scratch folder.
    """
    answers: dict[str, Record] = {}
    for record in (*load_all(FIGURES), *load_all(output_dir or SCRATCH)):
        answers.setdefault(record.slug, record)
    rows = []
    for entry in series.entries():
        record = answers.get(entry.slug)
        rows.append(
            {
                "notebook": f"[{entry.slug}]({entry.path.name})",
                "question": entry.question,
                "answer": record.answer if record else None,
                "measured on": f"{record.environment['device']}, {record.profile}" if record else None,
            }
        )
    return rows


def panel(interactive: bool, show: Callable[..., Any], **choices: Any) -> None:
    """Widgets that call `show` with a choice of each list or range; in a batch run one line of text instead.

    Args:
        interactive: the notebook's INTERACTIVE parameter.
        show: called with one value a choice; what it returns is displayed.
        choices: as `ipywidgets.interact` takes them (a list gives a menu, a (low, high, step) tuple a slider).
    """
    if not interactive:
        names = ", ".join(choices)
        display(Markdown(f"*Set `INTERACTIVE = True` and run this cell for a panel over {names}.*"))
        return
    import ipywidgets

    ipywidgets.interact(show, **choices)
