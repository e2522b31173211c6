"""The tests against another transformers: what pytest said, counted, written, read and shown in the report."""

import json
from types import SimpleNamespace

import pytest

from vlmopt.errors import VlmoptError
from vlmopt.workbook import drift_study, report

MIXED = """
import pytest

@pytest.fixture
def breaks_after():
    yield
    assert False

def test_passes(): pass
def test_fails(): assert False
def test_fails_and_breaks_after(breaks_after): assert False
def test_breaks_after(breaks_after): pass
@pytest.mark.parametrize("n", [1, 2])
def test_is_skipped(n): pytest.skip("no GPU here")
"""


def test_each_test_is_counted_once_and_failures_and_skips_have_names(tmp_path):
    (tmp_path / "test_mixed.py").write_text(MIXED)
    (tmp_path / "test_absent.py").write_text("import a_module_that_is_nowhere")
    found = drift_study.run([str(tmp_path / "test_absent.py"), str(tmp_path / "test_mixed.py")])
    assert {name: found[name] for name in drift_study.COUNTS} == {"passed": 1, "failed": 4, "skipped": 2}
    names = [name.split("::")[1].rpartition(".")[2] for name in found["failures"]]
    assert names == ["test_absent", "test_breaks_after", "test_fails", "test_fails_and_breaks_after"]
    assert found["skips"] == {"no GPU here": 2}


def test_a_run_that_did_not_come_to_an_end_is_no_result(monkeypatch):
    monkeypatch.setattr(drift_study.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=5))
    with pytest.raises(VlmoptError, match="pytest ended with status 5"):
        drift_study.run(["test_missing.py"])


def test_every_chosen_test_is_there():
    folder = drift_study.ROOT / "vlmopt" / "tests"
    assert [name for name in drift_study.TESTS if not (folder / name).exists()] == []
    file, _, name = drift_study.LEFT_OUT.partition("::")
    assert f"def {name}(" in (folder / file).read_text(), "what is left out is there too"


@pytest.fixture
def failing(monkeypatch):
    """A run in which one test of four failed."""
    found = {"passed": 2, "failed": 1, "skipped": 1, "failures": ["a::b"], "skips": {"no GPU here": 1}}
    monkeypatch.setattr(drift_study, "run", lambda tests: found)
    return found


def test_a_failure_is_written_and_makes_the_status_1(failing, tmp_path, capsys):
    assert drift_study.main(["--output", str(tmp_path)]) == 1
    ((path, content),) = drift_study.load_all(tmp_path)
    assert capsys.readouterr().out.strip() == str(path)
    assert content["failures"] == ["a::b"] and content["packages"]["transformers"] in path.name
    failing.update(passed=3, failed=0, failures=[])
    assert drift_study.main(["--output", str(tmp_path)]) == 0


def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(drift_study, "run", lambda tests: pytest.fail("it ran"))
    (tmp_path / "file").touch()
    assert drift_study.main(["--output", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"failed": 0}, {"skips": {}}, {"passed": "all"}, {"environment": {}}, None])
def test_a_record_that_does_not_add_up_is_refused(failing, tmp_path, change):
    drift_study.main(["--output", str(tmp_path)])
    ((path, content),) = drift_study.load_all(tmp_path)
    path.write_text("" if change is None else json.dumps({**content, **change}))
    with pytest.raises(VlmoptError, match=r"run \./run\.sh drift again"):
        drift_study.read(path)


def test_the_report_shows_every_version_the_oldest_first_and_names_what_failed(failing, make_record, tmp_path):
    make_record().save(tmp_path)
    assert "Versions of transformers" not in report.assemble([tmp_path], tmp_path)
    drift_study.main(["--output", str(tmp_path)])
    ((path, content),) = drift_study.load_all(tmp_path)
    content["environment"] |= {"commit": "0123456789abcdef", "dirty": True}
    for version in ("5.9.1", "5.17.0"):
        content["packages"] |= dict.fromkeys(drift_study.CHOSEN, version)
        path.with_name(f"transformers_{version}.json").write_text(json.dumps(content))
    path.unlink()
    text = report.assemble([tmp_path], tmp_path)
    shown = [line for line in text.splitlines() if line.startswith(("| 5.9.1", "| 5.17.0"))]
    assert [line.split(" | ")[0] for line in shown] == ["| 5.9.1", "| 5.17.0"]
    assert " | 2 | 1 | 1 | [commit 0123456789ab with uncommitted changes](" in shown[0]
    assert "Failed with transformers 5.9.1: a::b." in text
