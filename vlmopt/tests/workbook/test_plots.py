"""Figures: what they show is in the axes, and the same record gives the same bytes."""

import re

import pytest

from vlmopt.workbook import figures, plots
from vlmopt.workbook.record import Record


def decode_panel(record: Record):
    figure = plots.metrics(record, [("decode_ms_per_token", "decode")], "random-2b 768x1024")
    return figure.axes[0]


def test_latency_starts_at_zero_with_its_unit(make_record):
    axes = decode_panel(make_record())
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylabel() == "ms"
    assert axes.get_ylim()[1] > 2.0


def test_the_baseline_alone_is_grey_and_bars_are_medians(make_record):
    record = make_record()
    axes = decode_panel(record)
    names = [label.get_text() for label in axes.get_xticklabels()]
    bars = dict(zip(names, axes.patches, strict=True))
    grey = plots.matplotlib.colors.to_rgba(plots.GREY)
    assert {name: bar.get_facecolor() == grey for name, bar in bars.items()} == {"stock": True, "fast\n(near)": False}
    assert bars["fast\n(near)"].get_height() == record.value("decode_ms_per_token", "fast")


def test_the_roofline_is_dashed_and_no_bar(make_record):
    axes = decode_panel(make_record())
    assert [(line.get_linestyle(), line.get_ydata()[0]) for line in axes.lines if len(line.get_ydata()) == 2] == [
        ("--", 0.5)
    ]
    assert "floor 0.5" in [text.get_text() for text in axes.texts]


def test_metrics_that_were_not_measured_get_no_panel(make_record):
    wanted = [("decode_ms_per_token", "decode"), ("nothing", "nothing"), ("ttft_ms", "first token")]
    figure = plots.metrics(make_record(), wanted, "random-2b 768x1024")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["decode", "first token"]


def test_a_kernel_figure_has_latency_and_share_from_zero(make_record):
    record = make_record(slug="23_gemv")
    left, right = plots.latency_and_share(record, "decode_ms_per_token").axes
    assert left.get_ylim()[0] == right.get_ylim()[0] == 0
    assert (left.get_ylabel(), right.get_ylabel()) == ("ms", "% of the roofline")
    assert [line.get_ydata()[0] for line in right.lines if line.get_linestyle() == "--"] == [100]
    fast = record.find("decode_ms_per_token", "fast")[0]
    assert 100 * fast["roofline_share"] in [line.get_ydata()[0] for line in right.lines if len(line.get_ydata()) == 1]


def test_stacked_parts_add_up(make_record):
    record = make_record()
    record.measure("c", "stock", "a", "ms", [1.0])
    record.measure("c", "stock", "b", "ms", [2.0])
    axes = plots.stacked(record, [("whole", [("a", "first"), ("b", "second")])], "stock", "c").axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 1), (1, 2)]
    assert "3 ms" in [text.get_text() for text in axes.texts]


def test_shares_are_of_a_hundred(make_record):
    record = make_record()
    for part, value in (("a", 30), ("b", 10)):
        record.measure("c", part, "parameters", "parameters", [value])
    axes = plots.shares(record, [("parameters", "parameters")]).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [75, 25]


def test_ceilings_are_dashed_lines_above_the_bars(make_record):
    record = make_record()
    for case, provider, rate in (("copy", "torch", 40), ("read", "torch", 41), ("qkv 4x2", "vendor", 24)):
        record.measure(case, provider, "bandwidth", "GB/s", [rate])
    axes = plots.ceilings(record, "bandwidth", ceiling="torch").axes[0]
    assert [(line.get_linestyle(), line.get_ydata()[0]) for line in axes.lines] == [("--", 40), ("--", 41)]
    assert [bar.get_height() for bar in axes.patches] == [24]
    assert {"copy 40", "read 41"} <= {text.get_text() for text in axes.texts}
    assert axes.get_ylim()[0] == 0


def test_a_ranking_begins_with_the_longest_and_ends_at_its_limit(make_record):
    record = make_record()
    for i in range(20):
        record.measure("c", f"kernel {i}", "kernel_ms", "ms", [i])
    axes = plots.ranking(record, "kernel_ms", "c", "kernels", top=5).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"kernel {i}" for i in (19, 18, 17, 16, 15)]
    assert axes.get_xlim()[0] == 0


def test_the_same_record_gives_the_same_bytes_and_no_date(make_record, tmp_path):
    first = plots.save(figures.of(make_record())["61_end_to_end"], tmp_path / "a")
    second = plots.save(figures.of(make_record())["61_end_to_end"], tmp_path / "b")
    assert [path.suffix for path in first] == [".svg", ".png"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert not re.search(r"20\d\d-\d\d-\d\d", first[0].read_text())
    assert first[1].stat().st_size < 60_000


def test_another_record_gives_other_bytes(make_record, tmp_path):
    pngs = [plots.png(figures.of(make_record(scale=scale))["61_end_to_end"]) for scale in (1.0, 1.5)]
    assert pngs[0] != pngs[1]


def test_figures_leave_matplotlibs_settings_alone(make_record):
    before = dict(plots.matplotlib.rcParams)
    plots.png(decode_panel(make_record()).figure)
    assert dict(plots.matplotlib.rcParams) == before


def test_every_record_has_a_figure_without_asking(make_record, tmp_path):
    record = make_record(slug="29_new_kernel")
    assert list(figures.of(record)) == ["29_new_kernel"]
    assert [path.name for path in figures.draw(record, tmp_path)] == ["29_new_kernel.svg", "29_new_kernel.png"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.81234, "0.812"),
        (8.2, "8.2"),
        (27.54, "27.5"),
        (798, "798"),
        (2647.4, "2,647"),
        (5.27e12, "5.27e+12"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert plots.number(value) == text


def test_values_in_order_end_with_the_largest(make_record):
    record = make_record()
    for name, values in (("stock", [5.0, 3.0, 4.0, 9.0]), ("ours", [2.0, 1.0, 1.5, 1.2])):
        record.measure("four sizes", name, "unseen_ms", "ms", values)
    (axes,) = plots.ordered(record, "unseen_ms", "first calls", "ms").axes
    found = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert found["stock"] == ([25, 50, 75, 100], [3, 4, 5, 9])
    assert found["ours"][1] == [1, 1.2, 1.5, 2] and axes.get_ylim()[0] == 0
