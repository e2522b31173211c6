"""One probe of what this process can use: device, toolchain, optional packages."""

import importlib.metadata
import importlib.util
import shutil
from dataclasses import asdict, dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Capabilities:
    """What was found; versions are None where the thing is absent."""

    torch: str
    cuda: str | None
    gpu_name: str | None
    compute_capability: tuple[int, int] | None
    triton: str | None
    nvcc: str | None
    cxx: str | None
    peft: bool

    def to_dict(self) -> dict:
        return asdict(self)


@cache
def probe() -> Capabilities:
    """Look once; the answer holds for the process."""
    has_gpu = torch.cuda.is_available()
    return Capabilities(
        torch=torch.__version__,
        cuda=torch.version.cuda if has_gpu else None,
        gpu_name=torch.cuda.get_device_name(0) if has_gpu else None,
        compute_capability=torch.cuda.get_device_capability(0) if has_gpu else None,
        triton=_version("triton"),
        nvcc=shutil.which("nvcc"),
        cxx=shutil.which("c++") or shutil.which("g++"),
        peft=importlib.util.find_spec("peft") is not None,
    )


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    return importlib.metadata.version(package)
