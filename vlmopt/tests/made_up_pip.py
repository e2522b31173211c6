"""A copy of run.sh with made-up Pythons and pips on a closed PATH, where nothing is really installed."""

import shutil
import subprocess
from pathlib import Path

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
  "-m venv .venv-drift-"*)
    echo "drift venv ${3#.venv-drift-}" >>calls
    mkdir -p "$3/bin"
    cp drift_python "$3/bin/python" ;;
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
# The same for another transformers; its pip keeps a copy of what it was asked for.
DRIFT_PYTHON = SERVING_PYTHON.replace("serving", "drift").replace(
    "[[ ! -e broken ]]", 'cp "$7" asked; [[ ! -e broken ]]'
)
REQUIREMENTS = [f"requirements{name}" for name in (".txt", "-dev.txt", "-serving.txt", ".lock", "-dev.lock")]
SERVING_PINS = (ROOT / "requirements-serving.txt").read_text().splitlines()

# Stands for the Python in .venv. Its pip installs a file `torch`, slowly when there is a file `slow`.
VENV_PYTHON = """#!/usr/bin/env bash
site=.venv/lib/python3.11/site-packages
case "$*" in
  *"import pip"*) [[ -d $site/pip-1.dist-info ]] ;;
  *"< (3, 15)"*) [[ ! -e too_new ]] ;;
  "-m pip install"*)
    echo "pip ${*:8}" >>calls
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
        for name in ["run.sh", *REQUIREMENTS]:
            shutil.copy(ROOT / name, self.root)
        (self.root / ".ci").mkdir()
        shutil.copy(ROOT / ".ci" / "run", self.root / ".ci")
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.uname("Linux x86_64")
        self.script(self.root / "venv_python", VENV_PYTHON)
        self.script(self.root / "serving_python", SERVING_PYTHON)
        self.script(self.root / "drift_python", DRIFT_PYTHON)

    def script(self, path: Path, text: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def uname(self, answer: str) -> None:
        self.script(self.bin / "uname", f"#!/usr/bin/env bash\necho {answer}\n")

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


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]
