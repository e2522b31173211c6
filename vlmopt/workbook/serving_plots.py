"""Figures of serving under load, as functions of a record that `serving_study` or `serving_runs` filled."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vlmopt.workbook.plots import COLOURS, GREY, canvas, head, number, styled
from vlmopt.workbook.record import Record

PLAIN = ("fcfs", "vllm")
CUT = 2.5  # times plain vLLM's value: bars beyond would hide the others


@styled
def distribution(record: Record, cases: Sequence[str], policies: Sequence[str]) -> Figure:
    """The share of requests that ended within so many seconds: a panel a measured case, a line a policy."""
    cases = [case for case in cases if record.find("latency_s", case=case)]
    figure, axes = canvas(1.0 + 3.0 * len(cases), 2.8, len(cases))
    for panel, case in zip(axes, cases, strict=True):
        rows = [row for row in record.find("latency_s", case=case) if row["provider"] in policies]
        colour = _colours([row["provider"] for row in rows])
        for row in rows:
            values = sorted(row["samples"])
            shares = [(i + 1) / len(values) for i in range(len(values))]
            panel.plot(values[::-2], shares[::-2], color=colour[row["provider"]], label=row["provider"], lw=1.2)
        panel.set_xlabel("latency, s")
        panel.set_xlim(left=0)
        panel.set_ylim(0, 1.02)
        panel.set_title(case)
    axes[0].set_ylabel("share of the requests")
    axes[0].legend(loc="lower right")
    head(figure, "latency of the requests that finished", record)
    return figure


@styled
def course(record: Record, case: str) -> Figure:
    """Share of the KV blocks in use, and preemptions so far, over the time of one run: a line a policy."""
    figure, (left, right) = canvas(8.4, 2.8, 2)
    rows = record.find("kv_occupancy", case=case)
    colour = _colours([row["provider"] for row in rows])
    for row in rows:
        name = row["provider"]
        width = record.config["stretch_s"][f"{name}, load {case.split()[-1]}"]
        times = [width * (i + 0.5) for i in range(len(row["samples"]))]
        left.plot(times, row["samples"], color=colour[name], label=name, lw=1.2)
        for counts in record.find("preemptions_in_stretch", name, case):
            so_far = [sum(counts["samples"][: i + 1]) for i in range(len(times))]
            right.plot(times, so_far, color=colour[name], lw=1.2)
    left.set_ylim(0, 1.05)
    for axes, label in ((left, "share of the KV blocks in use"), (right, "preemptions so far")):
        axes.set_xlabel("s")
        axes.set_ylabel(label)
        axes.set_xlim(left=0)
    right.set_ylim(bottom=0)
    left.legend(loc="lower right")
    head(figure, case, record)
    return figure


@styled
def over_load(record: Record, panels: Sequence[tuple[str, str]], policies: Sequence[str]) -> Figure:
    """Medians over the load that ends each case's name: a panel a (metric, label), a line a policy and site."""
    figure, axes = canvas(1.0 + 3.6 * len(panels), 2.9, len(panels))
    for panel, (metric, label) in zip(axes, panels, strict=True):
        rows = [row for row in record.find(metric) if row["provider"] in policies]
        sites = list(dict.fromkeys(_site(row["case"]) for row in rows))
        lines: dict[str, list[tuple[float, dict]]] = {}
        for row in rows:
            name = row["provider"] if len(sites) == 1 else f"{_site(row['case'])}, {row['provider']}"
            lines.setdefault(name, []).append((float(row["case"].split()[-1]), row))
        colour = _colours(list(lines))
        for name, points in lines.items():
            _line(panel, sorted(points, key=lambda point: point[0]), colour[name], name)
        panel.set_xlabel("load, of plain vLLM's saturation")
        panel.set_ylabel(label)
        if all(row["p20"] >= 0 for row in rows):
            panel.set_ylim(bottom=0)
    axes[0].legend()
    head(figure, record.weights, record)
    return figure


@styled
def contest(record: Record, panels: Sequence[tuple[str, str]], case: str) -> Figure:
    """Horizontal bars of one case, the best attainment on top: a panel a (metric, label), a bar a policy."""
    names = [row["provider"] for row in sorted(record.find("slo_attainment_rate", case=case), key=lambda r: -r["p50"])]
    colour = {name: GREY if name in PLAIN else COLOURS[name.startswith("reserve")] for name in names}
    figure, axes = canvas(2.0 + 2.4 * len(panels), 0.9 + 0.22 * len(names), len(panels))
    for panel, (metric, label) in zip(axes, panels, strict=True):
        rows = {row["provider"]: row for row in record.find(metric, case=case)}
        limit = 1.1 * max(row["p50"] for row in rows.values() if row["p50"] < CUT * rows["fcfs"]["p50"])
        for y, name in enumerate(names):
            value = rows[name]["p50"]
            panel.barh(y, min(value, limit), 0.7, color=colour[name])
            place = {"textcoords": "offset points", "va": "center", "fontsize": 7.5}
            panel.annotate(number(value), (min(value, limit), y), (-3 if value > limit else 3, 0),
                           ha="right" if value > limit else "left", **place)  # fmt: skip
        panel.set_xlim(0, 1.15 * limit)
        panel.set_yticks(range(len(names)), names if panel is axes[0] else [""] * len(names))
        panel.invert_yaxis()
        panel.set_xlabel(label)
    head(figure, f"{case}; bars beyond the edge are cut", record)
    return figure


def _line(panel: Axes, points: Sequence[tuple[float, dict]], colour: str, name: str) -> None:
    loads = [load for load, _ in points]
    panel.plot(loads, [row["p50"] for _, row in points], "o-", ms=3, color=colour, label=name, lw=1.2)
    panel.fill_between(loads, *([row[q] for _, row in points] for q in ("p20", "p80")), color=colour, alpha=0.15, lw=0)


def _site(case: str) -> str:
    return case.rsplit(" load ", 1)[0]


def _colours(names: Sequence[str]) -> dict[str, str]:
    """Plain vLLM's line is grey."""
    others = iter(COLOURS * (1 + len(names) // len(COLOURS)))
    return {name: GREY if name in PLAIN else next(others) for name in names}
