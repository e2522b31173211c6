import contextlib
import json

import pytest

from vlmopt.bench.journal import Journal, journal_path
from vlmopt.errors import VlmoptError

SETTINGS = {"model": "tiny", "mode": "ours", "seed": 1}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "result.json"


def rows(count):
    return [{"index": index, "ours": {"prediction": "é" * index}} for index in range(count)]


def killed(output, count, settings=SETTINGS):
    """What a run leaves that was killed after `count` samples."""
    journal = Journal(output, settings)
    journal.start(resume=False)
    for row in rows(count):
        journal.append(row)
    journal.close()
    return journal


def test_rows_of_a_killed_run_come_back_and_go_on(output):
    killed(output, 3)
    journal = Journal(output, SETTINGS)
    assert journal.start(resume=True) == rows(3)
    journal.append(rows(4)[3])
    journal.close()
    assert Journal(output, SETTINGS).start(resume=True) == rows(4)


def test_each_row_is_on_disk_before_the_next_sample(output):
    journal = Journal(output, SETTINGS)
    journal.start(resume=False)
    for row in rows(2):
        journal.append(row)
        assert json.loads(journal.path.read_text().splitlines()[-1]) == row
    journal.close()


@pytest.mark.parametrize("torn", [b'{"index": 3, "ours": {"pred', b'{"index": 3', b"\xc3"])
def test_a_torn_last_line_is_left_out_and_overwritten(output, torn):
    path = killed(output, 3).path
    with path.open("ab") as stream:
        stream.write(torn)
    journal = Journal(output, SETTINGS)
    assert journal.start(resume=True) == rows(3)
    journal.append(rows(4)[3])
    journal.close()
    assert [json.loads(line) for line in path.read_text().splitlines()][1:] == rows(4)


@pytest.mark.parametrize("content", [b"", b'{"settings": {"mo'])
def test_a_journal_torn_in_its_first_line_holds_nothing(output, content):
    journal_path(output).write_bytes(content)
    assert Journal(output, SETTINGS).start(resume=True) == []


def test_damage_in_the_middle_is_refused(output):
    path = killed(output, 3).path
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1][:5], *lines[2:]]))
    with pytest.raises(VlmoptError, match=r"line 2 of .* is damaged"):
        Journal(output, SETTINGS).start(resume=True)


def test_missing_or_doubled_samples_are_refused(output):
    path = killed(output, 3).path
    lines = path.read_text().splitlines()
    for kept in ([0, 2, 3], [0, 1, 1, 2]):
        path.write_text("".join(lines[i] + "\n" for i in kept))
        with pytest.raises(VlmoptError, match="missing or doubled"):
            Journal(output, SETTINGS).start(resume=True)


@pytest.mark.parametrize("name, value", [("model", "other"), ("mode", "stock"), ("seed", 2)])
def test_other_settings_are_refused_and_named(output, name, value):
    path = killed(output, 2).path
    before = path.read_bytes()
    with pytest.raises(VlmoptError, match=f"made with {name} ") as caught:
        Journal(output, SETTINGS | {name: value}).start(resume=True)
    assert repr(value) in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_a_fresh_start_moves_a_killed_runs_rows_aside(output):
    path = killed(output, 2).path
    kept = path.read_bytes()
    assert Journal(output, SETTINGS).start(resume=False) == []
    assert path.with_name(path.name + ".old").read_bytes() == kept


def test_a_finished_result_is_gone_on_with(output):
    output.write_text(json.dumps({"settings": SETTINGS, "samples": rows(2)}))
    assert Journal(output, SETTINGS).start(resume=True) == rows(2)
    journal_path(output).unlink()
    with pytest.raises(VlmoptError, match="seed 1 instead of 5"):
        Journal(output, SETTINGS | {"seed": 5}).start(resume=True)


@pytest.mark.parametrize("content", ["[]", "{}", "not json", '{"settings": 3, "samples": []}'])
def test_a_result_of_something_else_is_refused(output, content):
    output.write_text(content)
    with pytest.raises(VlmoptError, match="was not made by this benchmark"):
        Journal(output, SETTINGS).start(resume=True)
    assert output.read_text() == content


def test_nothing_to_resume_starts_at_the_first_sample(output):
    assert Journal(output, SETTINGS).start(resume=True) == []


def test_remove_leaves_no_file(output):
    journal = killed(output, 1)
    journal.remove()
    assert not journal.path.exists()


def test_a_full_disk_says_how_to_go_on(output):
    journal = killed(output, 1)
    journal._stream = full = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(VlmoptError, match="go on with --resume"):
        journal.append(rows(1)[0])
    with contextlib.suppress(OSError):
        full.close()
