"""The models that a run measures: ours through `evaluation_wrapper.VLMModel`, stock as transformers ships it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlmopt.bench.models import default_device
from vlmopt.errors import VlmoptError

STOCK, OURS = "stock", "ours"


@dataclass(frozen=True)
class Entrant:
    """One measured model: `target` has `.processor`, `.model` and `.device`, as the contest's harness reads them.

    `status()` is what `vlmopt.status(model).to_dict()` says of it, an empty mapping for a stock model.
    """

    name: str
    target: Any
    status: Callable[[], dict] = dict

    def counts(self) -> Counter:
        """Calls served so far by stages and kernels or handed to stock, and the reasons for the latter."""
        status = self.status()
        reasons = {f"reason: {reason}": count for reason, count in status.get("stock_reasons", {}).items()}
        return Counter({**status.get("calls", {}), **reasons})


def find_device(name: str | None) -> str:
    """The device to measure on: `name` checked, or the first GPU where there is one, else the CPU.

    Raises:
        VlmoptError: no such device here.
    """
    if name is None:
        return default_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise VlmoptError(f"unknown device {name!r}; pass --device cpu or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise VlmoptError(f"device {name!r} is not supported; pass --device cpu or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise VlmoptError(f"device {name!r} is not here ({count} CUDA devices found); pass --device cpu or cuda:N")
    return "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"


def enter(
    names: Sequence[str], model_path: str, device: str, preset: str | None, wrapper: Callable[..., Any]
) -> list[Entrant]:
    """Load the entrants `names`, each with a model of its own; `preset` None leaves the choice to the wrapper.

    Raises:
        VlmoptError: the model folder is missing or broken, does not fit into memory, or the preset cannot run.
    """
    build = {STOCK: lambda: _stock(model_path, device), OURS: lambda: _ours(model_path, device, preset, wrapper)}
    try:
        return [build[name]() for name in names]
    except torch.OutOfMemoryError as error:
        advice = "free some, or measure --stock and ours in two runs"
        raise VlmoptError(f"the model does not fit into the memory of {device}; {advice}") from error


def _stock(model_path: str, device: str) -> Entrant:
    from vlmopt.bench.models import load

    return Entrant(STOCK, load(model_path, device))


def _ours(model_path: str, device: str, preset: str | None, wrapper: Callable[..., Any]) -> Entrant:
    import vlmopt

    chosen = {} if preset is None else {"preset": preset}
    target = wrapper(model_path, device=device, **chosen)
    return Entrant(OURS, target, lambda: vlmopt.status(target.model).to_dict())
