"""Figures as pure functions of a record: baseline grey, roofline dashed, units on the axes, latency from zero.

No global state of matplotlib is touched, and a figure saved twice gives the same bytes.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.patches
import PIL.Image
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vlmopt.files import write_atomic
from vlmopt.workbook.record import Record

BASELINE = "stock"
FLOOR = "floor"
GREY = "#9a9a9a"
COLOURS = (
    *("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b7791f", "#97266d"),
    *("#285e61", "#742a2a", "#4299e1", "#d69e2e", "#319795", "#e53e3e"),
)
DPI, SHADES = 90, 32
"""Of a PNG: dots an inch, and the colours of its palette."""
_STYLE = {
    "svg.hashsalt": "vlmopt",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Writes `path` with the suffixes .svg and .png; the bytes depend on the figure alone."""
    path = Path(path)
    return [
        write_atomic(path.with_suffix(".svg"), _svg(figure)),
        write_atomic(path.with_suffix(".png"), png(figure)),
    ]


def _svg(figure: Figure) -> bytes:
    """The figure as SVG in half the bytes: coordinates in hundredths of a point, no comments, no indentation."""
    drawn = _render(figure, "svg", {"Date": None, "Creator": None}).decode()
    drawn = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"(\.\d\d)\d+", r"\1", drawn)
    return re.sub(r" *\n *", "\n", re.sub(r" *\n(?! *<)", " ", drawn)).encode()


def png(figure: Figure) -> bytes:
    """The figure as PNG, small enough for a notebook's output."""
    drawn = PIL.Image.open(io.BytesIO(_render(figure, "png", {"Software": None})))
    small = io.BytesIO()
    # a palette takes a third of the bytes; a drawing has few colours, and the rest are shades at the letters' edges
    drawn.convert("RGB").quantize(SHADES, dither=PIL.Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def _render(figure: Figure, form: str, metadata: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format=form, dpi=DPI, metadata=metadata)
    return buffer.getvalue()


def canvas(width: float, height: float, columns: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """An empty figure of this many inches and its axes side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Runs a figure function under the project's style, whatever the caller's is."""

    def inner(*args: Any, **kwargs: Any) -> Figure:
        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    inner.__name__, inner.__doc__ = draw.__name__, draw.__doc__
    return inner


def colours(providers: Sequence[str]) -> dict[str, str]:
    """One colour a provider, in order; the baseline is grey."""
    others = iter(COLOURS * (len(providers) // len(COLOURS) + 1))
    return {provider: GREY if provider == BASELINE else next(others) for provider in providers}


def main_case(record: Record) -> str:
    """The case that the record is about: the first one measured."""
    return record.measurements[0]["case"]


def caption(record: Record) -> str:
    """Where the numbers come from, for the corner of a figure."""
    environment = record.environment
    where = environment.get("gpu_name") or environment.get("cpu_model") or environment["device"]
    return f"{where} · {record.profile} · torch {environment['torch']}"


def draw_bars(axes: Axes, rows: Sequence[dict[str, Any]], title: str, colour: dict[str, str] | None = None) -> None:
    """Vertical bars of p50 by provider with p20 to p80 whiskers, from zero; a provider `floor` is a dashed line."""
    floors = [row for row in rows if row["provider"] == FLOOR]
    rows = [row for row in rows if row["provider"] != FLOOR]
    colour = colour or colours([row["provider"] for row in rows])
    for i, row in enumerate(rows):
        whisker = [[row["p50"] - row["p20"]], [row["p80"] - row["p50"]]]
        axes.bar(i, row["p50"], 0.68, color=colour[row["provider"]], yerr=whisker, error_kw={"lw": 0.9, "capsize": 2})
        axes.annotate(number(row["p50"]), (i, row["p80"]), (0, 2), textcoords="offset points", ha="center")
    for row in floors:
        axes.axhline(row["p50"], ls="--", lw=1, color="black")
        place = {"textcoords": "offset points", "fontsize": 7.5}
        axes.annotate(f"floor {number(row['p50'])}", (-0.34, row["p50"]), (1, 2), **place)
    axes.set_xticks(range(len(rows)), [row.get("label", row["provider"]) for row in rows])
    axes.set_ylim(0, 1.18 * max([row["p80"] for row in (*rows, *floors)] or [1]))
    axes.set_ylabel(rows[0]["unit"] if rows else "")
    axes.set_title(title)


_RIGHT = {"textcoords": "offset points", "ha": "right", "fontsize": 7.5}


def number(value: float) -> str:
    """Three significant digits (all before the point), without an exponent from 0.001 to a million."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    text = f"{value:,.{max(0, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@styled
def metrics(record: Record, names: Sequence[tuple[str, str]], case: str) -> Figure:
    """One panel of bars a metric: `names` are (metric, title) pairs, all of one case."""
    panels = [(title, record.find(metric, case=case)) for metric, title in names]
    panels = [(title, rows) for title, rows in panels if rows]
    most = max((len(rows) for _, rows in panels), default=0)
    figure, axes = canvas(1.2 + max(1.9, 0.5 * most) * len(panels), 2.6, len(panels) or 1)
    for panel, (title, rows) in zip(axes, panels, strict=False):
        labels = [record.label(row["provider"]).replace(" (", "\n(") for row in rows]
        draw_bars(panel, [{**row, "label": label} for row, label in zip(rows, labels, strict=True)], title)
    head(figure, case, record)
    return figure


def head(figure: Figure, title: str, record: Record) -> None:
    """The line above a figure: what it shows and where it was measured."""
    figure.suptitle(f"{title}   ({caption(record)})", fontsize=8.5, x=0.01, ha="left")


@styled
def pairs(record: Record, groups: Sequence[tuple[str, Sequence[tuple[str, str]]]], provider: str, case: str) -> Figure:
    """One panel a group, one bar a metric in it, the first in the baseline's grey: (title, [(metric, label)])."""
    figure, axes = canvas(1.2 + 2.4 * len(groups), 2.6, len(groups))
    for panel, (title, bars) in zip(axes, groups, strict=True):
        rows = [{**row, "provider": label} for metric, label in bars for row in record.find(metric, provider, case)]
        draw_bars(panel, rows, title, colour=dict(zip([label for _, label in bars], (GREY, *COLOURS), strict=False)))
    head(figure, case, record)
    return figure


@styled
def stacked(
    record: Record, groups: Sequence[tuple[str, Sequence[tuple[str, str]]]], provider: str, case: str
) -> Figure:
    """One horizontal stacked bar a group: (label, [(metric, part's name)]); the parts add up to the whole."""
    figure, (axes,) = canvas(7.2, 0.9 + 0.55 * len(groups))
    names = list(dict.fromkeys(name for _, parts in groups for _, name in parts))
    colour = dict(zip(names, COLOURS, strict=False))
    unit = ""
    for y, (_, parts) in enumerate(groups):
        left = 0.0
        for metric, name in parts:
            for row in record.find(metric, provider, case):
                axes.barh(y, row["p50"], 0.6, left=left, color=colour[name])
                left, unit = left + row["p50"], row["unit"]
        axes.annotate(f"{number(left)} {unit}", (left, y), (3, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(groups)), [label for label, _ in groups])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    axes.set_xlabel(unit)
    handles = [matplotlib.patches.Patch(color=colour[name], label=name) for name in names]
    axes.legend(handles=handles, ncols=min(4, len(names)), loc="lower left", bbox_to_anchor=(0, 1.0))
    head(figure, case, record)
    return figure


@styled
def ranking(record: Record, metric: str, case: str | None, title: str, top: int = 12) -> Figure:
    """Horizontal bars of the `top` largest providers of a metric, the largest first."""
    rows = sorted(record.find(metric, case=case), key=lambda row: -row["p50"])[:top]
    figure, (axes,) = canvas(7.2, 0.8 + 0.22 * max(1, len(rows)))
    axes.barh(range(len(rows)), [row["p50"] for row in rows], 0.7, color=COLOURS[0])
    for y, row in enumerate(rows):
        axes.annotate(number(row["p50"]), (row["p50"], y), (3, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [record.label(row["provider"]) for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlim(left=min(0.0, *(1.1 * row["p50"] for row in rows), 0.0))
    axes.set_xlabel(rows[0]["unit"] if rows else "")
    head(figure, title, record)
    return figure


LABEL_SHARE = 0.12
"""Of a scatter's width: dots that are closer have names that would meet."""


@styled
def scatter(record: Record, x: tuple[str, str], y: tuple[str, str], title: str) -> Figure:
    """A dot for each provider that has both metrics; `x` and `y` are (metric, label) pairs, x from zero."""
    figure, (axes,) = canvas(7.2, 3.4)
    pairs = [
        (a["p50"], b["p50"], a["provider"])
        for a in record.find(x[0])
        for b in record.find(y[0], a["provider"], a["case"])
    ]
    near = max((dot[0] for dot in pairs), default=0) * LABEL_SHARE
    before, rung = -near, 0
    for across, up, name in sorted(pairs):
        # names of neighbours stand one above the other
        rung = rung + 1 if across - before < near else 0
        before = across
        axes.plot(across, up, "o", color=COLOURS[0])
        axes.annotate(name, (across, up), (4, 4 + 11 * rung), textcoords="offset points", fontsize="small")
    axes.set_xlim(left=0)
    axes.margins(x=0.15, y=0.15)
    axes.set_xlabel(x[1])
    axes.set_ylabel(y[1])
    head(figure, title, record)
    return figure


@styled
def ceilings(record: Record, metric: str, ceiling: str) -> Figure:
    """Bars of one rate by case under dashed lines at those measured by the provider `ceiling`."""
    marks = [(row["case"], row["p50"]) for row in record.find(metric, ceiling)]
    rows = [row for row in record.find(metric) if row["provider"] != ceiling]
    figure, (axes,) = canvas(7.2, 2.8)
    axes.bar(range(len(rows)), [row["p50"] for row in rows], 0.66, color=GREY)
    for x, row in enumerate(rows):
        axes.annotate(number(row["p50"]), (x, row["p50"]), (0, 2), textcoords="offset points", ha="center")
    for i, (name, value) in enumerate(marks):
        axes.axhline(value, ls="--", lw=1, color=COLOURS[i])
        axes.annotate(f"{name} {number(value)}", (len(rows) + 0.3, value), (0, 2), color=COLOURS[i], **_RIGHT)
    axes.set_xticks(range(len(rows)), [row["case"].replace(" ", "\n", 1) for row in rows])
    axes.set_xlim(-0.6, len(rows) + 0.35)
    axes.set_ylim(0, 1.15 * max([value for _, value in marks] + [row["p50"] for row in rows]))
    axes.set_ylabel(record.find(metric)[0]["unit"])
    head(figure, "matrix-vector products under the measured ceilings", record)
    return figure


@styled
def shares(record: Record, names: Sequence[tuple[str, str]]) -> Figure:
    """How each metric divides among providers, as one stacked bar of 100 % a metric; `names` as in `metrics`."""
    figure, (axes,) = canvas(7.2, 1.3 + 0.5 * len(names))
    providers = list(dict.fromkeys(row["provider"] for metric, _ in names for row in record.find(metric)))
    colour = dict(zip(providers, COLOURS, strict=False))
    for y, (metric, _) in enumerate(names):
        rows = record.find(metric)
        total, left = sum(row["p50"] for row in rows) or 1.0, 0.0
        for row in rows:
            width = 100 * row["p50"] / total
            axes.barh(y, width, 0.62, left=left, color=colour[row["provider"]])
            if width > 6:
                axes.annotate(f"{width:.0f}", (left + width / 2, y), ha="center", va="center", color="white")
            left += width
    axes.set_yticks(range(len(names)), [title for _, title in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("%")
    handles = [matplotlib.patches.Patch(color=colour[p], label=p) for p in providers]
    axes.legend(handles=handles, ncols=4, loc="lower left", bbox_to_anchor=(-0.2, 1.0))
    head(figure, main_case(record), record)
    return figure


@styled
def latency_and_share(record: Record, metric: str) -> Figure:
    """Latency over cases beside the share of the roofline, one line a provider: the figure of a kernel's notebook."""
    rows = record.find(metric)
    cases = list(dict.fromkeys(row["case"] for row in rows))
    colour = colours(list(dict.fromkeys(row["provider"] for row in rows)))
    figure, (left, right) = canvas(8.4, 3.0, 2)
    for provider, shade in colour.items():
        own = {row["case"]: row for row in rows if row["provider"] == provider}
        known = [case for case in cases if case in own]
        x = [cases.index(case) for case in known]
        left.plot(x, [own[case]["p50"] for case in known], "o-", ms=3, color=shade, label=provider)
        left.fill_between(x, *([own[c][q] for c in known] for q in ("p20", "p80")), color=shade, alpha=0.2, lw=0)
        shared = [(i, own[case]["roofline_share"]) for i, case in zip(x, known, strict=True)]
        shared = [(i, share) for i, share in shared if share is not None]
        right.plot([i for i, _ in shared], [100 * share for _, share in shared], "o-", ms=3, color=shade)
    right.axhline(100, ls="--", lw=1, color="black")
    for axes, label in ((left, rows[0]["unit"] if rows else ""), (right, "% of the roofline")):
        axes.set_xticks(range(len(cases)), cases, rotation=30, ha="right")
        axes.set_ylim(bottom=0)
        axes.set_ylabel(label)
    left.legend()
    head(figure, metric, record)
    return figure


@styled
def curve(record: Record, panels: Sequence[tuple[str, str]], x_label: str) -> Figure:
    """One line a panel over the number that ends each case's name; `panels` are (metric, y label) pairs."""
    figure, axes = canvas(7.2, 2.6, len(panels))
    for panel, (metric, label) in zip(axes, panels, strict=True):
        rows = record.find(metric)
        panel.plot([float(row["case"].split()[-1]) for row in rows], [row["p50"] for row in rows], color=COLOURS[0])
        panel.set_xlabel(x_label)
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
    head(figure, record.weights, record)
    return figure


@styled
def ordered(record: Record, metric: str, title: str, unit: str) -> Figure:
    """Every provider's values of a metric in rising order, over the share of them: medians, tails and all between."""
    rows = record.find(metric)
    figure, (axes,) = canvas(6.4, 3.0)
    for row, colour in zip(rows, colours([row["provider"] for row in rows]).values(), strict=True):
        values = sorted(row["samples"])
        shares = [100 * (i + 1) / len(values) for i in range(len(values))]
        axes.plot(shares, values, color=colour, label=record.label(row["provider"]))
    axes.set(xlabel="% of the sizes take at most", ylabel=unit, ylim=(0, None))
    axes.legend()
    head(figure, title, record)
    return figure


@styled
def ladder(record: Record, metric: str, case: str, predicted: Callable[[str, str], str], title: str) -> Figure:
    """Horizontal bars of one metric, a rung each in the order measured, with the share of the roofline; a black mark
    stands where `predicted(provider, case)`, the name of a prediction, said that the bar would end."""
    rows = record.find(metric, case=case)
    said = {entry["what"]: entry["predicted"] for entry in record.predictions}
    figure, (axes,) = canvas(7.2, 0.9 + 0.26 * len(rows))
    for y, row in enumerate(rows):
        axes.barh(y, row["p50"], 0.62, color=GREY if y == 0 else COLOURS[0])
        share = "" if row["roofline_share"] is None else f" · {100 * row['roofline_share']:.0f} %"
        axes.annotate(number(row["p50"]) + share, (row["p50"], y), (3, 0), textcoords="offset points", va="center")
        mark = said.get(predicted(row["provider"], case))
        if mark is not None:
            axes.plot([mark, mark], [y - 0.4, y + 0.4], color="black", lw=1.2)
    axes.set_yticks(range(len(rows)), [record.label(row["provider"]) for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{rows[0]['unit']}, share of the roofline; black: predicted")
    head(figure, title, record)
    return figure


@styled
def timeline(record: Record, spans: Sequence[tuple[str, float, float]], title: str) -> Figure:
    """Launches over time, one line a name: `spans` are (name, start, end) in µs."""
    names = list(dict.fromkeys(name for name, _, _ in spans))
    figure, (axes,) = canvas(8.4, 0.9 + 0.22 * len(names))
    for i, (name, start, end) in enumerate(spans):
        axes.barh(names.index(name), end - start, 0.7, left=start, color=COLOURS[i % 2], lw=0)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("µs")
    head(figure, title, record)
    return figure
