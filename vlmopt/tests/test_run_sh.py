"""run.sh with a made-up Python and pip on a closed PATH: every path of the set-up, and nothing is really installed."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from vlmopt.tests.made_up_pip import VENV_PYTHON, House, errors

RUNTIME = "pip --require-hashes --requirement requirements.lock"
DEV = f"{RUNTIME} --requirement requirements-dev.lock"


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_the_first_call_sets_up_and_runs_the_main_job(house):
    house.python()
    status, _, err = house.run()
    assert status == 0, err
    job = f"job <-m> <vlmopt.first_run> in {house.root}"
    assert house.calls == ["venv", RUNTIME, "unpack torch", job]
    assert "installing requirements.lock" in err and "torch" in err, "the set-up says what it does"


def test_a_second_call_installs_nothing_and_is_quick(house):
    house.python()
    house.run()
    before, times = house.calls, []
    for _ in range(5):
        start = time.perf_counter()
        assert house.run()[0] == 0
        times.append(time.perf_counter() - start)
    assert house.calls == before + [before[-1]] * 5
    assert min(times) < 0.3


@pytest.mark.parametrize(
    ("arguments", "job"),
    [
        (["bench", "--output", "a b.json"], "job <benchmark.py> <--output> <a b.json>"),
        (["workbook", "20-29", "--profile", "full"], "job <-m> <vlmopt.workbook> <20-29> <--profile> <full>"),
        (["lab"], "job <-m> <jupyterlab> <--notebook-dir=notebooks>"),
        (["fetch", "--data-only"], "job <-m> <vlmopt.fetch> <--data-only>"),
        (["test", "-k", "x y"], "job <-m> <pytest> <-k> <x y>"),
    ],
)
def test_each_command_hands_its_arguments_on(house, arguments, job):
    house.python()
    assert house.run(*arguments)[0] == 0
    assert house.calls[-1] == f"{job} in {house.root}"


def test_the_status_of_the_job_is_the_status_of_the_door(house):
    house.python()
    (house.root / "job_status").write_text("7")
    assert house.run("bench")[0] == 7


def test_it_works_from_another_folder_and_through_a_link(house, tmp_path):
    house.python()
    link = tmp_path / "door"
    link.symlink_to(house.root / "run.sh")
    assert house.run("bench", script=link, cwd=tmp_path)[0] == 0
    assert house.calls[-1] == f"job <benchmark.py> in {house.root}"


def test_the_tests_install_more_and_the_main_job_is_content_with_it(house):
    house.python()
    house.run("bench")
    house.run("test")
    house.run("bench")
    assert [call for call in house.calls if call.startswith("pip")] == [RUNTIME, DEV]


def test_changed_pins_are_installed(house):
    house.python()
    house.run("test")
    for name, line in [("requirements.txt", "One_more==1.0\n"), ("requirements.lock", "one-more==1.0 \\\n")]:
        with open(house.root / name, "a") as file:
            file.write(line)
    house.run("bench")
    assert house.calls.count(RUNTIME) == 1
    house.run("test")
    assert house.calls.count(DEV) == 2
    assert house.calls.count("venv") == 1


@pytest.mark.parametrize("line", ["one-more==1.0", "torch==2.14.2", "one-more>=1.0", "triton"])
def test_a_pin_that_the_lock_does_not_hold_is_named_and_nothing_is_installed(house, line):
    house.python()
    with open(house.root / "requirements.txt", "a") as file:
        file.write(f"{line}\n")
    for command in ("bench", "test"):
        status, _, err = house.run(command)
        assert (status, len(errors(err))) == (1, 1)
        assert f"do not hold {line}; write them anew" in errors(err)[0]
    assert house.calls == ["venv"]


@pytest.mark.parametrize("other", ["Linux aarch64", "Darwin arm64", "a newer Python"])
def test_where_the_lock_was_not_tried_the_pins_are_installed_and_that_is_said(house, other):
    house.python()
    if other == "a newer Python":
        (house.root / "too_new").touch()
    else:
        house.uname(other)
    status, _, err = house.run("test")
    assert status == 0
    assert house.calls[1] == "pip --requirement requirements.txt --requirement requirements-dev.txt"
    (said,) = [line for line in err.splitlines() if "hashes" in line]
    assert "Linux on x86-64 with Python 3.11 to 3.14" in said


def test_a_killed_pip_is_taken_up_again(house):
    house.python()
    (house.root / "slow").write_text("30")
    process = house.start()
    wait_for(house.root / "started")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (house.root / "slow").unlink()
    put_aside = house.root / ".venv/lib/python3.11/site-packages/~etuptools"
    put_aside.mkdir()
    assert not (house.root / ".venv" / ".pins").exists()

    assert house.run()[0] == 0
    assert house.calls.count("venv") == 1, "the environment itself was whole"
    assert house.calls.count("unpack torch") == 2, "the half-installed package is installed again"
    assert not put_aside.exists()
    assert house.calls[-1].startswith("job")


@pytest.mark.parametrize("left", ["an empty folder", "a python without pip", "a pip that was not finished"])
def test_a_half_made_environment_is_made_again(house, left):
    house.python()
    venv = house.root / ".venv"
    if left == "an empty folder":
        venv.mkdir()
    else:
        house.run()
        (venv / ".pins").unlink()
        info = venv / "lib/python3.11/site-packages/pip-1.dist-info"
        shutil.rmtree(info) if left == "a python without pip" else (info / "INSTALLER").unlink()
        (house.root / "calls").unlink()
    assert house.run()[0] == 0
    assert house.calls[0] == "venv" and house.calls[-1].startswith("job")


def test_a_ready_environment_without_its_python_is_made_again(house):
    house.python()
    house.run()
    (house.root / ".venv" / "bin" / "python").unlink()
    assert house.run()[0] == 0
    assert house.calls.count("venv") == 2


def test_a_failing_pip_gets_one_sentence_and_the_next_call_goes_on(house):
    house.python()
    (house.root / "broken").touch()
    status, _, err = house.run()
    assert status == 1 and len(errors(err)) == 1 and "could not install requirements.lock" in errors(err)[0]
    assert "ERROR: no network" in err, "pip's own words are shown"
    assert not any(call.startswith("job") for call in house.calls)
    (house.root / "broken").unlink()
    assert house.run()[0] == 0
    assert house.calls.count("venv") == 1


def test_two_calls_at_once_set_up_once(house):
    house.python()
    (house.root / "slow").write_text("1")
    first = house.start("bench")
    wait_for(house.root / "started")
    second = house.start("bench")
    results = [process.communicate(timeout=30) for process in (first, second)]
    assert first.returncode == second.returncode == 0
    assert [house.calls.count(call) for call in ("venv", RUNTIME)] == [1, 1]
    assert sum(call.startswith("job") for call in house.calls) == 2
    assert "waiting" in results[1][1]


def test_a_job_does_not_hold_the_lock(house):
    house.python()
    house.run()
    takes_lock = VENV_PYTHON.replace("printf 'job'", "flock -n .venv.lock touch took || exit 3; printf 'job'")
    house.script(house.root / ".venv/bin/python", takes_lock)
    (house.root / "requirements.txt").write_text("# other pins\n")
    assert house.run("bench")[0] == 0, "the job could take the lock that the set-up had held"


def test_without_a_python_one_sentence_says_what_to_install(house):
    status, _, err = house.run()
    assert (status, len(errors(err))) == (1, 1)
    assert "no Python 3.11 or newer" in err


def test_a_python_that_is_too_old_is_passed_over(house):
    house.python("python3", "too_old")
    status, _, err = house.run()
    assert (status, len(errors(err))) == (1, 1)
    assert "no Python 3.11 or newer" in err and not (house.root / ".venv").exists()
    newer = house.python("python3.12", folder="bin2")
    status, _, err = house.run()
    assert status == 0 and str(newer) in err


def test_a_python_without_venv_gets_one_sentence_unless_another_has_it(house):
    poor = house.python("python3.11", "no_venv")
    status, _, err = house.run()
    assert (status, len(errors(err))) == (1, 1)
    assert f"{poor} has no venv module" in err and "python3-venv" in err
    rich = house.python("python3.11", folder="bin2")
    status, _, err = house.run()
    assert status == 0 and str(rich) in err


@pytest.mark.parametrize(("free_kb", "fits"), [(8_900_000, False), (9_500_000, True)])
def test_too_little_disk_is_said_before_anything_is_made(house, free_kb, fits):
    house.python()
    (house.bin / "df").unlink()
    house.script(house.bin / "df", f"#!/usr/bin/env bash\necho head\necho /dev/x 99999999 1 {free_kb} 1% /\n")
    status, _, err = house.run()
    assert (status == 0) == fits
    assert ("9 GB of free disk" in err) == (not fits)
    assert (house.root / ".venv").exists() == fits


def test_help_needs_no_set_up(house):
    status, out, _ = house.run("help")
    assert status == 0 and "usage: ./run.sh" in out
    assert all(command in out for command in ("bench", "workbook", "lab", "fetch", "test", "drift", "help"))
    assert not (house.root / ".venv").exists()


def test_what_is_not_a_command_ends_with_2(house):
    house.python()
    status, _, err = house.run("frobnicate")
    assert status == 2 and "no command 'frobnicate'" in errors(err)[0]
    assert house.calls == []


def test_ci_runs_the_tests_from_any_folder(house, tmp_path):
    house.python()
    assert house.run(script=house.root / ".ci" / "run", cwd=tmp_path)[0] == 0
    assert house.calls[-1] == f"job <-m> <pytest> in {house.root}"
    (house.root / "job_status").write_text("1")
    assert house.run(script=house.root / ".ci" / "run", cwd=tmp_path)[0] == 1


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
