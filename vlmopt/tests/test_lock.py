"""The lock files: they hold every pin and all that these need in turn, with hashes, and pip refuses any other file."""

import hashlib
import re
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vlmopt.tests.made_up_pip import ROOT, House, errors
from vlmopt.tests.test_house import pins

LOCKS = ["requirements.lock", "requirements-dev.lock"]
MAX_BYTES = 400_000


def read_lock(text: str) -> dict[str, dict[str, int]]:
    """For each package its locked versions (one for some Pythons, another for others), and how many hashes each has."""
    entries: dict[str, dict[str, int]] = {}
    versions: dict[str, int] = {}
    for line in text.splitlines():
        if start := re.match(r"([a-z0-9-]+)==([0-9][0-9a-z.]*) ", line):
            versions = entries.setdefault(start[1], {})
            versions[version := start[2]] = 0
        elif re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}( \\)?", line):
            versions[version] += 1
        else:
            assert re.fullmatch(r"#.*| +#.*|--only-binary :all:|", line), f"what is this in a lock: {line}"
    return entries


def locked(*names: str) -> dict[str, dict[str, int]]:
    return {package: entry for name in names for package, entry in read_lock((ROOT / name).read_text()).items()}


@pytest.mark.parametrize(("requirements", "lock"), [("requirements.txt", LOCKS[0]), ("requirements-dev.txt", LOCKS[1])])
def test_every_pin_is_locked_in_its_version(requirements, lock):
    entries = locked(lock)
    assert {name: list(entries[canonicalize_name(name)]) for name in pins(requirements)} == {
        name: [version] for name, version in pins(requirements).items()
    }


def test_every_locked_package_has_hashes_and_stands_in_one_lock():
    runtime, dev = locked(LOCKS[0]), locked(LOCKS[1])
    assert not runtime.keys() & dev.keys()
    assert len(runtime) > 100 and len(dev) > 5
    assert not [name for name, versions in (runtime | dev).items() if not all(versions.values())]


@pytest.mark.parametrize("text", ["a==1.0 \\\n    --hash=md5:0\n", "--index-url x\n", "a>=1 \\\n", "a @ file:b\n"])
def test_another_line_in_a_lock_is_found(text):
    with pytest.raises(AssertionError, match="what is this"):
        read_lock(text)


def test_an_entry_without_a_hash_is_found():
    assert read_lock("a==1.0 \\\n    # via b\n") == {"a": {"1.0": 0}}


@pytest.mark.parametrize("names", [LOCKS[:1], LOCKS])
def test_what_a_locked_package_needs_is_locked_too(names):
    entries = locked(*names)
    missing, seen = [], 0
    for package in entries:
        try:
            needs = metadata.requires(package) or []
        except metadata.PackageNotFoundError:  # for another platform or Python
            continue
        for need in map(Requirement, needs):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                seen += 1
                versions = entries.get(canonicalize_name(need.name), {})
                if not any(need.specifier.contains(version, prereleases=True) for version in versions):
                    missing.append(f"{package} needs {need}")
    assert not missing
    assert seen > 200


def test_the_locks_are_small_and_name_no_index():
    texts = [(ROOT / name).read_text() for name in LOCKS]
    assert sum(map(len, texts)) < MAX_BYTES
    assert not any("://" in text for text in texts)


def test_each_lock_says_how_it_is_written():
    for name, source in zip(LOCKS, ("requirements.txt", "requirements-dev.txt"), strict=True):
        command = (ROOT / name).read_text().splitlines()[1]
        assert "uv pip compile --universal" in command and f" {source} -o {name}" in command


def test_the_image_is_made_from_the_lock():
    text = (ROOT / "Dockerfile").read_text()
    assert "COPY requirements.lock ./" in text
    assert re.findall(r"pip install .*", text) == [
        "pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements.lock"
    ]


def test_a_changed_file_is_refused_in_one_sentence_and_the_right_one_is_taken_then(tmp_path):
    """With this machine's Python and its pip, and a package that lies in the folder."""
    house = House(tmp_path)
    python = f"{sys.base_prefix}/bin/python3.{sys.version_info.minor}"
    house.script(house.bin / "python3.11", f'#!/usr/bin/env bash\nexec {python} "$@"\n')
    (house.root / "benchmark.py").write_text("import tiny\n\nprint(tiny.WORD)\n")
    (house.root / "requirements.txt").write_text("tiny==1.0\n")
    hash_of_asked = write_wheel(house.root, "asked")
    lock = f"--no-index\n--find-links .\ntiny==1.0 \\\n    --hash=sha256:{hash_of_asked}\n"
    (house.root / "requirements.lock").write_text(lock)

    write_wheel(house.root, "changed")
    status, out, err = house.run("bench")
    assert (status, out, len(errors(err))) == (1, "", 1)
    assert "is not the one whose hash the lock holds, so nothing was installed" in errors(err)[0]
    assert "tiny==1.0" in err and hash_of_asked in err, "pip names the package, and the hash that was asked for"
    assert not (house.root / ".venv" / ".pins").exists()

    write_wheel(house.root, "asked")
    status, out, err = house.run("bench")
    assert (status, out) == (0, "asked\n"), err


def write_wheel(folder: Path, word: str) -> str:
    """Write the wheel of a package `tiny`, the same bytes for the same word; returns its SHA-256."""
    info = "tiny-1.0.dist-info"
    files = {
        "tiny.py": f"WORD = {word!r}\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"tiny.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
    }
    path = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(zipfile.ZipInfo(name), text)
    return hashlib.sha256(path.read_bytes()).hexdigest()
