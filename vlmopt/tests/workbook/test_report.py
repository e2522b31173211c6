"""Report and headline: generated from records alone, the same each time, and told apart when a record changes."""

from pathlib import Path

import pytest

from vlmopt.errors import VlmoptError
from vlmopt.workbook import report

(BEGIN, END), CONTRACT = report.MARKERS["headline"], "".join(report.MARKERS["contract"])
README = f"# Project\n\nby hand\n{BEGIN}\nwas here\n{END}\n{CONTRACT}\nmore by hand\n"


@pytest.fixture
def tree(tmp_path, make_record) -> Path:
    """A figures folder with one record, and a README with markers beside it."""
    make_record().save(tmp_path / "figures")
    (tmp_path / "README.md").write_text(README)
    return tmp_path


def run(tree: Path, *flags: str) -> int:
    return report.main([*flags, "--figures", str(tree / "figures"), "--readme", str(tree / "README.md")])


def test_the_tracked_report_and_readme_agree_with_the_records(capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().err


def test_check_passes_after_writing_and_fails_when_a_record_changes(tree, make_record, capsys):
    assert run(tree, "--check") == 1
    assert capsys.readouterr().err.count("differs from the records") == 4
    assert run(tree) == 0
    assert run(tree, "--check") == 0
    make_record(scale=1.5).save(tree / "figures")
    assert run(tree, "--check") == 1


def test_check_misses_a_figure_that_the_report_shows(tree, capsys):
    assert run(tree) == 0
    figure = tree / "figures" / "test-gpu" / "61_end_to_end.svg"
    assert figure.is_file()
    figure.unlink()
    assert run(tree, "--check") == 1
    assert str(figure) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["README.md", "figures/REPORT.md"])
def test_check_writes_nothing_and_sees_an_edit_by_hand(tree, name):
    assert run(tree) == 0
    path = tree / name
    edited = path.read_text().replace("Twice as fast", "Ten times as fast")
    path.write_text(edited)
    assert run(tree, "--check") == 1
    assert path.read_text() == edited


def test_the_readme_keeps_what_was_written_by_hand(tree):
    run(tree)
    text = (tree / "README.md").read_text()
    assert text.startswith("# Project\n\nby hand\n")
    assert text.endswith("\nmore by hand\n")
    assert "was here" not in text


@pytest.mark.parametrize("readme", ["no markers", BEGIN, f"{END}{BEGIN}", BEGIN + END])
def test_a_readme_without_markers_is_refused_in_one_sentence(tree, capsys, readme):
    (tree / "README.md").write_text(readme)
    assert run(tree) == 2
    assert capsys.readouterr().err.startswith("error: README.md lacks the markers")


def test_a_missing_readme_is_refused(tree, capsys):
    (tree / "README.md").unlink()
    assert run(tree) == 2
    assert "README.md" in capsys.readouterr().err


def test_the_headline_has_a_row_a_provider_with_its_class_and_medians(make_record, tmp_path):
    make_record().save(tmp_path)
    text = report.headline(tmp_path)
    assert "| stock | baseline | 20.4 | 2.04 | 49 |" in text
    assert "| fast | near | 10.2 | 1.02 | 98 |" in text
    assert "Test GPU, `random-2b 768x1024`, batch 1" in text
    assert "first token, ms | decode, ms a token | tokens/s" in text


def test_the_headline_says_why_a_lossy_preset_may_be_below_the_floor(make_record, tmp_path):
    made = make_record()
    made.config["providers"]["fast8"] = {"class": "lossy"}
    made.measure(made.measurements[0]["case"], "fast8", "decode_ms_per_token", "ms", [0.4])
    made.save(tmp_path / "lossy")
    make_record().save(tmp_path / "near")
    text = report.headline(tmp_path / "lossy")
    assert "| fast8 | lossy | – | 0.4 | – |" in text and text.endswith("a lossy preset's decode steps read fewer.")
    assert "lossy" not in report.headline(tmp_path / "near")


def test_the_headline_puts_gpus_before_the_cpu(make_record, tmp_path):
    for device, gpu in (("cpu", None), ("test-gpu", "Test GPU")):
        record = make_record()
        record.environment.update(device=device, gpu_name=gpu)
        record.save(tmp_path)
    text = report.headline(tmp_path)
    assert text.index("Test GPU,") < text.index("Test CPU,")


def test_without_records_both_say_so(tmp_path):
    assert "no record yet" in report.assemble([tmp_path], tmp_path)
    assert "no recorded end-to-end run yet" in report.headline(tmp_path)


def test_the_report_tells_everything_of_a_record(make_record, tmp_path):
    record = make_record()
    record.environment["dirty"] = True
    record.save(tmp_path)
    text = report.assemble([tmp_path], tmp_path)
    for part in (
        "## test-gpu: Test GPU",
        "### 61_end_to_end",
        "**How much faster?**",
        "Twice as fast.",
        "commit 0123456789ab with uncommitted changes",
        "| decode ratio | 2 | 2.1 | × | 1.05 |",
        "answers with other ids (near) 0 ≤ 0",
        "| case | metric | unit | stock | fast (near) | floor |",
        "| decode_ms_per_token | ms | 2.04 (2.02–2.06), 25 % of the roofline | 1.02 (1.01–1.03), 49 % of the roofline",
        "[![61_end_to_end](test-gpu/61_end_to_end.png)](test-gpu/61_end_to_end.svg)",
        "Not run: fast8 (it does not exist yet).",
        "**Verdict.** Worth it.",
        "- 61_end_to_end: one block a row. Too few loads in flight.",
    ):
        assert part in text


def test_the_report_does_not_depend_on_when_or_where_it_is_made(make_record, tmp_path):
    texts = []
    for name in ("a", "b"):
        make_record().save(tmp_path / name)
        texts.append(report.assemble([tmp_path / name], tmp_path / name))
    assert texts[0].replace("a/", "b/") == texts[1].replace("a/", "b/")
    assert str(tmp_path) not in texts[0]


def test_a_provider_behind_stock_is_a_loss(make_record, tmp_path):
    slow = make_record(scale=3.0)
    lines = report.slower_than_baseline(slow)
    assert len(lines) == 3
    assert "fast (near) · decode_ms_per_token is behind stock, 3.06 ms against 2.04" in "".join(lines)
    assert "fast (near) · tokens_per_s is behind stock, 32.7 tokens/s against 49" in "".join(lines)
    assert report.slower_than_baseline(make_record()) == []
    slow.save(tmp_path)
    assert lines[0] in report.assemble([tmp_path], tmp_path)


def test_a_missed_prediction_is_a_loss_either_way(make_record):
    record = make_record()
    assert report.missed_predictions(record) == []
    for measured, missed in ((2.6, 1), (1.5, 1), (2.4, 0), (1.7, 0)):
        record.settle("decode ratio", measured)
        assert len(report.missed_predictions(record)) == missed


def test_many_providers_become_rows_and_their_metrics_columns(make_record):
    made = make_record()
    for i in range(7):
        made.measure("c", f"kernel {i}", "kernel_ms", "ms", [i + 1])
    assert [row["provider"] for row in report.pivot(made)[:2]] == ["stock", "fast (near)"]
    row = report.pivot(made)[-1]
    assert row == {
        "case": "c",
        "provider": "kernel 6",
        "ttft_ms, ms": None,
        "decode_ms_per_token, ms": None,
        "tokens_per_s, tokens/s": None,
        "kernel_ms, ms": "7",
    }
    for metric in "abcd":
        made.measure("c", "stock", metric, "us", [1.0, 2.0])
    row = report.pivot(made)[-1]
    assert row == {"case": "c", "provider": "stock", "metric": "d", "measured": "1.5 us (1.2–1.8)"}
    assert len(report.pivot(made)) == len(made.measurements)


def test_a_long_table_ends_with_how_much_is_in_the_record(make_record, tmp_path):
    made = make_record()
    for i in range(50):
        made.measure("c", f"kernel {i}", "kernel_ms", "ms", [i + 1])
    made.save(tmp_path)
    text = report.assemble([tmp_path], tmp_path)
    assert "| c | kernel 36 |" in text
    assert "| c | kernel 37 |" not in text
    assert "13 further rows are in the record." in text


def test_rebuilding_draws_the_figures_and_writes_the_report(make_record, tmp_path):
    make_record().save(tmp_path)
    built = report.rebuild("full", str(tmp_path))
    assert {path.name for path in built.files} == {"61_end_to_end.svg", "61_end_to_end.png", "REPORT.md"}
    assert (tmp_path / "REPORT.md").read_text() == built.text
    built.require_stable()
    assert "[![" in built.text and "\n|" in built.text
    assert "[![" not in built.prose and "\n|" not in built.prose and "**Verdict.**" in built.prose
    make_record(scale=2.0).save(tmp_path)
    with pytest.raises(VlmoptError, match="gave another report"):
        built.require_stable()


def test_rebuilding_an_unknown_profile_is_refused():
    with pytest.raises(VlmoptError, match="unknown profile 'quick'"):
        report.rebuild("quick")


def test_a_broken_record_is_named(tree, capsys):
    (tree / "figures" / "test-gpu" / "61_end_to_end.json").write_text("{}")
    assert run(tree) == 2
    assert "61_end_to_end.json: not a valid record: schema is missing" in capsys.readouterr().err
