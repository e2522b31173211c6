"""One model in memory at a time: loads it by its name in `models.json`, and proves the memory free before the next."""

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from vlmopt.config import settings
from vlmopt.errors import VlmoptError
from vlmopt.serving.models import ModelEntry

PATIENCE = 60.0  # seconds in which an engine's processes must have ended, and their memory be free
SLACK = 256 * 2**20  # bytes of device memory that may remain: drivers round, and other programs move a little


class Stoppable(Protocol):
    """An engine as the controller sees it."""

    def stop(self) -> None: ...


Start = Callable[[str, ModelEntry], Any]


@dataclass(frozen=True)
class Unloaded:
    """How the memory of a model became free; bytes.

    Attributes:
        processes: that the engine had, all of which have ended.
        resident: memory of these processes before.
        device_before, device_loaded, device_after: in use on the visible GPUs before the model was loaded, just before
            it was unloaded, and after; None where there is no GPU.
    """

    model: str
    processes: int
    resident: int
    device_before: int | None
    device_loaded: int | None
    device_after: int | None

    def __str__(self) -> str:
        said = f"{self.model} is unloaded: its {self.processes} processes, {self.resident / 1e9:.2f} GB, have ended"
        if self.device_before is None:
            return said
        numbers = (self.device_before, self.device_loaded, self.device_after)
        return said + "; GPU memory was {:.2f} GB before, {:.2f} loaded, {:.2f} now".format(*(n / 1e9 for n in numbers))


class ModelController:
    """Loads, switches and unloads models; a context manager that leaves nothing behind.

    Args:
        models: entries by name, whose folders are there.
        start: makes the engine of an entry.
    """

    def __init__(self, models: Mapping[str, ModelEntry], start: Start):
        self.models, self._start = models, start
        self.name: str | None = None
        self.engine: Any = None
        self.unloaded: list[Unloaded] = []
        self._processes: list[psutil.Process] = []
        self._device_before: int | None = None

    def __enter__(self) -> "ModelController":
        return self

    def __exit__(self, *error: object) -> None:
        self.unload()

    def load(self, name: str) -> Any:
        """The engine of the model `name`; another that is loaded is unloaded first.

        Raises:
            VlmoptError: an unknown name, an engine that does not start, or memory that does not become free.
        """
        if name not in self.models:
            raise VlmoptError(f"there is no model {name!r}; there are {', '.join(self.models)}")
        if name == self.name:
            return self.engine
        self.unload()
        before = set(_children())
        self._device_before = device_memory()
        self.name = name
        try:
            self.engine = self._start(name, self.models[name])
        finally:
            self._processes = [process for process in _children() if process not in before]
            if self.engine is None:
                self._prove_free(0)
        return self.engine

    def unload(self) -> Unloaded | None:
        """End the loaded model's engine; how its memory became free, or None if no model is loaded.

        Raises:
            VlmoptError: processes remain, or device memory does.
        """
        if self.name is None:
            return None
        self._processes += [process for process in _children() if process not in self._processes]
        resident = sum(map(_resident, self._processes))
        self.engine.stop()
        unloaded = self._prove_free(resident)
        self.unloaded.append(unloaded)
        return unloaded

    def _prove_free(self, resident: int) -> Unloaded:
        name, processes, loaded = self.name, self._processes, device_memory()
        self.name, self.engine, self._processes = None, None, []
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
        if alive:
            ids = ", ".join(str(process.pid) for process in alive)
            raise VlmoptError(
                f"{name}: the processes {ids} run on {PATIENCE:g} s after the engine was stopped; end them"
            )
        return Unloaded(name, len(processes), resident, self._device_before, loaded, self._device_free(name))

    def _device_free(self, name: str | None) -> int | None:
        deadline = time.monotonic() + PATIENCE
        while (now := device_memory()) is not None and now > self._device_before + SLACK:
            if time.monotonic() > deadline:
                held = (now - self._device_before) / 1e9
                raise VlmoptError(
                    f"{name}: {held:.2f} GB of GPU memory are not free {PATIENCE:g} s after the engine's processes "
                    "ended; look with nvidia-smi who holds them"
                )
            time.sleep(0.5)
        return now


def device_memory() -> int | None:
    """Bytes in use on the visible GPUs together, by the driver's own count; None where there is none."""
    visible = settings().visible_gpus
    if shutil.which("nvidia-smi") is None or visible == "":
        return None
    chosen = [] if visible is None else [f"--id={visible}"]
    command = ["nvidia-smi", *chosen, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return sum(int(line) for line in done.stdout.split()) * 2**20
    except (subprocess.SubprocessError, ValueError) as error:
        raise VlmoptError(
            f"nvidia-smi does not say how much memory is in use ({error}); put the driver right"
        ) from error


def _children() -> list[psutil.Process]:
    """Processes below this one, without the tracker that Python keeps for all of them until it ends itself."""
    return [process for process in psutil.Process().children(recursive=True) if not _is_tracker(process)]


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0
