"""The package where something that it is built on is not installed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = "import sys; sys.modules['{}'] = None; sys.path.insert(0, {!r}); import vlmopt"


def run(program: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("absent", ["triton", "transformers"])
def test_serving_s_environment_imports_the_package_and_is_told_what_optimising_needs(absent):
    program = WITHOUT.format(absent, str(ROOT)) + "; print(vlmopt.OptimizeConfig.preset('exact').name); vlmopt.plan"
    done = run(program)
    assert done.stdout.strip() == "exact"
    assert f"VlmoptError: vlmopt.plan needs {absent}, which is not installed" in done.stderr.splitlines()[-1]


def test_anything_else_that_is_missing_is_said_at_once():
    done = run(WITHOUT.format("tqdm", str(ROOT)))
    assert done.returncode and "tqdm" in done.stderr.splitlines()[-1]
