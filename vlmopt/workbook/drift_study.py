"""The tests of the model against this environment's transformers, and a record of what came out.

./run.sh drift 5.17.0 --output figures    writes figures/<device>/transformers_5.17.0.json, which the report shows
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from vlmopt.bench.system_info import environment
from vlmopt.errors import VlmoptError
from vlmopt.files import require_writable, write_atomic
from vlmopt.workbook.record import ROOT, SCRATCH

TESTS = ("bench", "contract", "runtime", "stages", "kernels/test_references.py")
TESTS += ("test_guard.py", "test_optimize.py", "test_processor.py", "test_wrapper.py")
"""What holds our stages, loop and doors to stock, below vlmopt/tests."""
LEFT_OUT = "runtime/test_speculate.py::test_all_500_answers_are_the_plain_ones"
"""500 answers by our decoding against 500 by our decoding take minutes and say nothing of another stock."""
COUNTS = ("passed", "failed", "skipped")
CHOSEN = ("transformers", "tokenizers", "huggingface_hub")
"""Packages whose versions differ between these environments."""


def run(tests: list[str]) -> dict[str, Any]:
    """Runs pytest over `tests` (paths) in a process of its own: `COUNTS`, the failures by name, the reasons of skips.

    A file that cannot be imported is one failure.

    Raises:
        VlmoptError: pytest did not come to an end, or ran nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            f"--junitxml={report}",
            "--continue-on-collection-errors",
            *tests,
        ]
        status = subprocess.run(command, cwd=ROOT).returncode
        if status not in (0, 1):
            raise VlmoptError(f"pytest ended with status {status}; what it said stands above")
        return outcomes(ElementTree.parse(report).getroot())


def outcomes(report: ElementTree.Element) -> dict[str, Any]:
    """What pytest's JUnit report tells, in `run`'s form; a test whose clean-up fails is in it twice and fails once."""
    failures, skips, seen = set(), Counter(), set()
    for case in report.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        seen.add(name)
        if case.find("failure") is not None or case.find("error") is not None:
            failures.add(name)
        elif (skipped := case.find("skipped")) is not None:
            skips[skipped.get("message")] += 1
    passed = len(seen) - len(failures) - skips.total()
    counts = dict(zip(COUNTS, (passed, len(failures), skips.total()), strict=True))
    return {**counts, "failures": sorted(failures), "skips": dict(skips)}


def read(path: Path) -> dict[str, Any]:
    """The record at `path`.

    Raises:
        VlmoptError: it is none, or its counts are not those of its lists.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        whole = content["failed"] == len(content["failures"]) and content["skipped"] == sum(content["skips"].values())
        whole = whole and isinstance(content["passed"], int) and content["environment"]["transformers"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise VlmoptError(f"cannot read the record {path} ({error!r}); run ./run.sh drift again") from error
    if not whole:
        raise VlmoptError(f"the counts of {path} are not those of its lists; run ./run.sh drift again")
    return content


def load_all(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Every record below `root` with its path, the oldest transformers first."""
    found = [(path, read(path)) for path in root.glob("*/transformers_*.json")]
    return sorted(found, key=lambda pair: [int(n) for n in re.findall(r"\d+", pair[0].stem)])


def main(argv: list[str] | None = None) -> int:
    """0 when all tests passed, 1 when one failed (the record is written all the same), 2 for bad input."""
    parser = argparse.ArgumentParser(prog="./run.sh drift [VERSION]", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=SCRATCH, metavar="DIR", help="folder for the record")
    options = parser.parse_args(argv)
    machine = environment()
    path = options.output / machine["device"] / f"transformers_{machine['transformers']}.json"
    try:
        require_writable(path)
        found = run([f"vlmopt/tests/{name}" for name in TESTS])
        packages = {name: version(name) for name in CHOSEN}
        content = {"schema": 1, "tests": TESTS, **found, "packages": packages, "environment": machine}
        print(write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n"))
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
