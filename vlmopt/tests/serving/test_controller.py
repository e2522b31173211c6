"""Loading, switching and unloading, with engines that are real processes and hold real memory."""

import subprocess
import sys
import time

import psutil
import pytest

from vlmopt.config import settings
from vlmopt.errors import VlmoptError
from vlmopt.serving import controller as module
from vlmopt.serving.controller import ModelController
from vlmopt.serving.models import ModelEntry

MODELS = {name: ModelEntry(model_path=name) for name in ("small", "large")}
HOLDS = (
    "import time; held = bytearray(20_000_000); held[:] = b'x' * len(held); print('there', flush=True); time.sleep(60)"
)


class Processes:
    """An engine of one process."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE)
        assert self.process.stdout.readline() == b"there\n"

    def stop(self):
        self.process.kill()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(module, "device_memory", lambda: None)


@pytest.fixture
def started():
    """The engines that a test starts; none outlives it."""
    engines: list[Processes] = []
    yield engines
    for engine in engines:
        engine.process.kill()
        engine.process.wait()


@pytest.fixture
def controller(started):
    def start(name: str, entry: ModelEntry) -> Processes:
        assert entry is MODELS[name]
        started.append(Processes())
        return started[-1]

    return ModelController(MODELS, start)


def test_a_switch_unloads_first_and_says_how_the_memory_became_free(controller, started):
    small = controller.load("small")
    assert controller.load("small") is small, "what is loaded is not loaded again"
    controller.load("large")
    assert not psutil.pid_exists(small.process.pid)
    assert started[1].process.poll() is None and controller.name == "large"
    (said,) = controller.unloaded
    assert (said.model, said.processes) == ("small", 1)
    assert said.resident > 20_000_000 and said.device_after is None
    assert "1 processes" in str(said)


def test_nothing_is_left_after_the_block_even_if_it_fails(controller, started):
    with pytest.raises(ZeroDivisionError), controller:
        controller.load("small")
        _ = 1 / 0
    assert not psutil.pid_exists(started[0].process.pid)
    assert controller.unload() is None


def test_an_engine_that_had_died_is_unloaded_like_another(controller, started):
    controller.load("small")
    started[0].process.kill()
    started[0].process.wait()
    assert controller.unload().model == "small"


def test_processes_that_remain_are_named(controller, started, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    engine = controller.load("small")
    monkeypatch.setattr(engine, "stop", lambda: None)
    with pytest.raises(VlmoptError, match=str(engine.process.pid)):
        controller.load("large")
    assert len(started) == 1, "the next model is not loaded beside it"


def test_an_unknown_model_and_one_that_does_not_start(started):
    def start(name: str, entry: ModelEntry):
        started.append(Processes())
        started[-1].stop()
        raise VlmoptError("no room")

    controller = ModelController(MODELS, start)
    with pytest.raises(VlmoptError, match="there are small, large"):
        controller.load("medium")
    with pytest.raises(VlmoptError, match="no room"):
        controller.load("small")
    assert controller.name is None and controller.unload() is None


def test_device_memory_is_waited_for_and_reported(controller, monkeypatch):
    used = iter([1e9, 9e9, 9e9, 1e9])
    monkeypatch.setattr(module, "device_memory", lambda: int(next(used)))
    controller.load("small")
    started = time.monotonic()
    said = controller.unload()
    assert (said.device_before, said.device_loaded, said.device_after) == (1e9, 9e9, 1e9)
    assert time.monotonic() - started >= 0.5
    assert "1.00 GB before, 9.00 loaded, 1.00 now" in str(said)


def test_device_memory_that_stays_is_an_error(controller, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    used = iter([1e9])
    monkeypatch.setattr(module, "device_memory", lambda: int(next(used, 5e9)))
    controller.load("small")
    with pytest.raises(VlmoptError, match=r"4\.00 GB of GPU memory are not free"):
        controller.unload()


@pytest.fixture
def fresh_settings():
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.mark.parametrize(("visible", "counted"), [(None, 128), ("1", 28), ("", None)])
def test_the_drivers_count_is_over_the_visible_gpus(tmp_path, monkeypatch, fresh_settings, visible, counted):
    monkeypatch.undo()
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$1" = --id=1 ] || echo 100\necho 28\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert module.device_memory() == (None if counted is None else counted * 2**20)


def test_a_driver_that_does_not_answer_is_said(tmp_path, monkeypatch):
    monkeypatch.undo()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(VlmoptError, match="nvidia-smi does not say"):
        module.device_memory()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert module.device_memory() is None
