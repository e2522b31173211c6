"""The rules of the house hold in every file, and each rule is shown a file that breaks it."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vlmopt.config import Settings
from vlmopt.tests import house

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vlmopt"


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("this copy of the project is not a git repository, so what is tracked is not known")
    return house.tracked_files(ROOT)


def package_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "tests" not in path.relative_to(PACKAGE).parts]


def faults_of(check, paths) -> str:
    return "\n".join(fault for path in paths for fault in check(path))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def tool(name: str, *arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    beside = Path(sys.executable).parent / name
    program = str(beside) if beside.exists() else shutil.which(name)
    assert program, f"{name} is not installed; requirements-dev.txt brings it"
    return subprocess.run([program, *map(str, arguments)], cwd=cwd, capture_output=True, text=True)


def test_imports_point_one_way():
    files = package_files()
    assert len(files) > 10
    assert not faults_of(lambda path: house.import_faults(path, PACKAGE), files)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("kernels/swiglu.py", "import transformers"),
        ("kernels/swiglu.py", "from vlmopt import ops"),
        ("kernels/swiglu.py", "from ..stages import decode"),
        ("ops.py", "from transformers.models import qwen3_vl"),
        ("stages/decode.py", "from vlmopt.kernels.swiglu import swiglu"),
        ("stages/decode.py", "def step():\n    from vlmopt.runtime import cache\n"),
        ("runtime/cache.py", "import transformers"),
        ("runtime/graphs.py", "import vlmopt"),
        ("bench/protocol.py", "import importlib\nrecord = importlib.import_module('vlmopt.workbook.record')"),
        ("bench/protocol.py", "from vlmopt.workbook import record"),
        ("optimize.py", "from vlmopt.bench import models"),
        ("workbook/report.py", "import notebooks"),
        ("bench/protocol.py", "from evaluation_wrapper import VLMModel"),
        ("newcomer/thing.py", "import json"),
    ],
)
def test_the_import_rule_rejects(tmp_path, file, source):
    for module in ("ops.py", "stages/decode.py", "runtime/cache.py", "bench/models.py", "workbook/record.py"):
        write(tmp_path / "vlmopt" / module, "")
    path = write(tmp_path / "vlmopt" / file, source)
    assert len(house.import_faults(path, tmp_path / "vlmopt")) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("stages/decode.py", "from vlmopt.ops import Ops\nfrom vlmopt.stages.layer import mlp_block\nimport torch"),
        ("runtime/stock.py", "from transformers.generation import utils"),
        ("workbook/report.py", "import vlmopt\nfrom vlmopt.bench import timing"),
        ("__init__.py", "from vlmopt.optimize import optimize"),
        ("first_run.py", "from evaluation_wrapper import VLMModel"),
    ],
)
def test_the_import_rule_accepts(tmp_path, file, source):
    path = write(tmp_path / "vlmopt" / file, source)
    assert house.import_faults(path, tmp_path / "vlmopt") == []


def test_no_pickle_is_loaded():
    doors = [ROOT / "benchmark.py", ROOT / "evaluation_wrapper.py"]
    assert not faults_of(house.pickle_faults, package_files() + doors)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import os, cloudpickle.compat",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_the_pickle_rule_rejects(tmp_path, source):
    assert len(house.pickle_faults(write(tmp_path / "a.py", source))) == 1


@pytest.mark.parametrize(
    "source",
    ["import torch\ntorch.load('x', weights_only=True)", "import json\njson.load(f)", "import numpy\nnumpy.load('x')"],
)
def test_the_pickle_rule_accepts(tmp_path, source):
    assert house.pickle_faults(write(tmp_path / "a.py", source)) == []


def test_environment_variables_are_read_in_one_place():
    doors = [ROOT / "benchmark.py", ROOT / "evaluation_wrapper.py"]
    files = [path for path in package_files() + doors if path != PACKAGE / "config.py"]
    assert not faults_of(house.environment_reads, files)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['X']",
        "import os\nx = os.getenv('X')",
        "from os import environ",
        "from os import path, getenv",
        "import os as system\nsystem.environ.get('X')",
    ],
)
def test_the_environment_rule_rejects(tmp_path, source):
    assert len(house.environment_reads(write(tmp_path / "a.py", source))) == 1


def test_the_environment_rule_accepts_the_rest_of_os(tmp_path):
    assert house.environment_reads(write(tmp_path / "a.py", "import os\nos.replace('a', 'b')")) == []


def test_no_file_is_too_long(tracked):
    code = [path for path in tracked if house.is_code(path)]
    assert {"run.sh", "Dockerfile", "README.md", "config.py", "run"} <= {path.name for path in code}
    assert not faults_of(house.too_long, [path for path in code if path.name not in house.GENERATED])


def test_the_length_rule_rejects_the_401st_line(tmp_path):
    path = write(tmp_path / "a.py", "x = 1\n" * house.MAX_LINES)
    assert house.too_long(path) == []
    assert len(house.too_long(write(path, "x = 1\n" * (house.MAX_LINES + 1)))) == 1


def test_what_is_tracked_stays_small(tracked):
    assert not house.too_heavy(tracked)


def test_the_size_rule_rejects_a_heavy_tree_and_sees_new_files_but_not_ignored_ones(tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    write(tmp_path / ".gitignore", "ignored\n")
    write(tmp_path / "ignored", "x" * 1000)
    write(tmp_path / "new", "x" * 90)
    files = house.tracked_files(tmp_path)
    assert [path.name for path in files] == [".gitignore", "new"]
    assert house.too_heavy(files, limit=99) == []
    assert "new 90" in house.too_heavy(files, limit=98)[0]


def test_tracked_text_speaks_of_the_project_alone(tracked):
    assert not faults_of(house.foreign_text, tracked)


@pytest.mark.parametrize(
    "parts",
    [
        ("see /ho", "me/someone/x"),
        ("/ro", "ot/.cache"),
        ("cd /wo", "rk/main"),
        ("C:", "\\Users\\x"),
        ("https://py", "pi.org/simple"),
        ("pip install --ex", "tra-index-url x"),
        ("as DES", "IGN.md says"),
    ],
)
def test_the_text_rule_rejects(tmp_path, parts):
    assert len(house.foreign_text(write(tmp_path / "a.md", "fine\n" + "".join(parts)))) == 1


def test_the_text_rule_accepts_relative_paths_and_binary_files(tmp_path):
    assert house.foreign_text(write(tmp_path / "a.md", "./data, network/x, README.md, at home")) == []
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe/ho" + b"me/someone")
    assert house.foreign_text(tmp_path / "a.bin") == []


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")])
def test_ruff_is_content(arguments):
    result = tool("ruff", *arguments, "--no-cache", ".")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("arguments", "source"), [(("check",), "import os\n"), (("format", "--check"), "x = [ 1,2 ]\n")]
)
def test_ruff_rejects(tmp_path, arguments, source):
    config = ("--config", ROOT / "pyproject.toml")
    assert tool("ruff", *arguments, "--no-cache", *config, write(tmp_path / "a.py", source)).returncode == 1


def test_hadolint_is_content_without_being_told_to_look_away():
    result = tool("hadolint", "--no-color", ROOT / "Dockerfile")
    assert result.returncode == 0, result.stdout
    assert "hadolint" not in (ROOT / "Dockerfile").read_text()
    assert not list(ROOT.glob(".hadolint*"))


def test_hadolint_rejects(tmp_path):
    path = write(tmp_path / "Dockerfile", "FROM ubuntu\nRUN apt-get install curl\n")
    assert tool("hadolint", path, cwd=tmp_path).returncode == 1


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith(("#", "-r "))]
    found = {line: re.fullmatch(r"([A-Za-z0-9_.-]+)==([0-9][0-9a-z.]*)", line) for line in lines}
    assert all(found.values()), f"{name}: no exact pin: {[line for line, match in found.items() if not match]}"
    return {match[1]: match[2] for match in found.values()}


def test_requirements_are_exact_and_name_each_package_once():
    runtime, dev = pins("requirements.txt"), pins("requirements-dev.txt")
    assert {"torch", "triton", "transformers", "datasets", "papermill", "jupyterlab"} <= runtime.keys()
    assert not runtime.keys() & dev.keys()
    assert "-r requirements.txt" in (ROOT / "requirements-dev.txt").read_text().splitlines()


def test_the_package_asks_for_the_python_that_run_sh_looks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == ">=3.11"
    assert "(3, 11)" in (ROOT / "run.sh").read_text()
    assert project["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_readme_lists_every_switch_with_its_default_and_meaning():
    rows = [
        f"| `{field.validation_alias or Settings.model_config['env_prefix'] + name.upper()}` | "
        f"{'none' if field.default is None else f'`{field.default}`'} | {field.description} |"
        for name, field in Settings.model_fields.items()
    ]
    lines = (ROOT / "README.md").read_text().splitlines()
    listed = [line for line in lines if line.startswith(("| `VLMOPT_", "| `AICAS_", "| `CUDA_"))]
    assert listed == rows


def test_the_readme_names_no_file_that_is_not_there():
    text = (ROOT / "README.md").read_text()
    named = re.findall(
        r"`((?:vlmopt/|notebooks|figures|data/|run\.sh|benchmark\.py|evaluation_wrapper\.py)[\w/.]*)`", text
    )
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).exists()] == []
