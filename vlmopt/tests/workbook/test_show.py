"""What notebooks display."""

import io

import PIL.Image
import pytest

from vlmopt.workbook import record, series, show
from vlmopt.workbook.record import Saved


def test_a_table_aligns_numbers_and_marks_what_is_missing():
    rows = [{"name": "a|b", "ms": 1.23456, "n": 1000, "ok": True}, {"name": "c", "ms": None, "n": 2, "ok": False}]
    assert show.markdown_table(rows).splitlines() == [
        "| name | ms | n | ok |",
        "|---|---:|---:|---:|",
        "| a\\|b | 1.23 | 1,000 | yes |",
        "| c | – | 2 | no |",
    ]
    assert show.markdown_table([]) == "*(nothing)*"
    assert show.markdown_table([{"a": None}]).splitlines()[1] == "|---|"
    assert show.markdown_table(rows, ["n"]).splitlines()[-1] == "| 2 |"


def test_the_card_tells_machine_state_software_and_commit(make_record):
    text = show.card(make_record()).data
    for part in ("Test GPU", "**clock, MHz** 1,980", "**power, W** 300", "**temperature, °C** 40", "**torch** 2.0"):
        assert part in text
    assert "**commit** 0123456789abcdef · **uncommitted changes** no" in text
    assert "triton" not in text


def test_measurements_and_predictions_as_tables(make_record):
    made = make_record()
    assert "| fast (near) | decode_ms_per_token | 1.02 | 1.01–1.03 | ms | 5 | 49 |" in show.measurements(made).data
    assert "ttft_ms" not in show.measurements(made, "tokens_per_s").data
    made.predict("open", 2.0, "ms")
    assert "| open | 2 | – | ms | – |" in show.predictions(made).data
    assert "| decode ratio | 2 | 2.1 | × | 1.05 |" in show.predictions(made).data
    assert "| answers with other ids | near | 0 | 0 | yes |" in show.checks(made).data
    assert "| fast8 | it does not exist yet |" in show.skipped(made).data


def test_one_measurement_in_a_line(make_record):
    row = make_record().find("decode_ms_per_token", "fast")[0]
    assert show.line(row).data == "random-2b 768x1024: **1.02 ms**, 49 % of the roofline"
    assert "roofline" not in show.line({**row, "roofline_share": None}).data


def test_source_is_the_packages_own():
    assert "def thin(values" in show.source(record.thin).data


def test_saving_says_where_and_what_moved(make_record, tmp_path):
    saved = make_record().save(tmp_path)
    assert show.saved(saved).data == (
        "Record written to `test-gpu/61_end_to_end.json`. Moved by more than the spread: nothing"
    )
    inside = Saved(record.ROOT / "figures" / "x.json", [])
    assert "`figures/x.json`" in show.saved(inside).data
    assert "\n- random-2b 768x1024 · fast · ttft_ms: " in show.saved(make_record(scale=2).save(tmp_path)).data


def test_pictures_become_one_small_jpeg_with_captions(monkeypatch):
    shown = []
    monkeypatch.setattr(show, "display", lambda *items: shown.extend(items))
    image = PIL.Image.new("RGB", (320, 256), "red")
    show.pictures([(image, "one"), (image, "two"), (image, "three"), (image, "four")])
    sheet, captions = shown
    assert PIL.Image.open(io.BytesIO(sheet.data)).size == (600, 320)
    assert captions.data.splitlines()[3] == "4. four"


def test_the_map_prefers_a_recorded_run(make_record, tmp_path, monkeypatch):
    slug = series.entries()[1].slug
    monkeypatch.setattr(show, "FIGURES", tmp_path / "figures")
    make_record(slug=slug, profile="smoke", answer="In smoke.").save(tmp_path / "scratch")
    assert [row["answer"] for row in show.series_rows(str(tmp_path / "scratch"))][1] == "In smoke."
    make_record(slug=slug, answer="In full.").save(tmp_path / "figures")
    row = show.series_rows(str(tmp_path / "scratch"))[1]
    assert (row["answer"], row["measured on"]) == ("In full.", "test-gpu, full")
    assert show.series_rows(str(tmp_path))[0]["answer"] is None


@pytest.mark.parametrize("interactive", [False, True])
def test_a_panel_runs_only_when_asked(interactive, capsys):
    calls = []
    show.panel(interactive, lambda side: calls.append(side), side=[3, 4])
    assert calls == ([3] if interactive else [])
