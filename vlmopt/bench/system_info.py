"""What a measurement ran on: the `system_info` of result.json and the `environment` of a record."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from vlmopt.config import settings

ROOT = Path(__file__).resolve().parents[2]
CPUINFO = Path("/proc/cpuinfo")


def system_info() -> dict:
    """The machine as the contest's harness reports it; a value is None where the machine does not tell."""
    return {
        "timestamp": _now(),
        "python_version": sys.version.split()[0],
        "torch_version": torch.__version__,
        "transformers_version": _version("transformers"),
        "triton_version": _version("triton"),
        **_gpu_info(),
        **_cpu_info(),
        "platform_system": platform.system(),
        "platform_release": platform.release(),
        "platform_version": platform.version(),
        "platform_machine": platform.machine(),
        "platform_architecture": platform.architecture()[0],
        **_ppu_info(),
    }


def environment(
    device: torch.device | str | None = None, *, commit: str | None = None, dirty: bool | None = None
) -> dict:
    """A record's environment: what ran, on which chip, at which clock, from which commit.

    `commit` and `dirty` are asked of git where this is a checkout, and else of the settings, where a host without git
    is told (`VLMOPT_GIT_COMMIT`, `VLMOPT_GIT_DIRTY`); pass them to override both. Clock in MHz, power in watts,
    temperature in degrees Celsius, None on a CPU or where nvidia-smi does not answer.
    """
    device = _device(device)
    found_commit, found_dirty = git_state()
    return {
        "device": device_slug(device),
        "gpu_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu_model": _cpu_info()["cpu_model"],
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "python": sys.version.split()[0],
        "commit": found_commit if commit is None else commit,
        "dirty": found_dirty if dirty is None else dirty,
        **gpu_state(device),
        "threads": torch.get_num_threads(),
        "timestamp": _now(),
    }


def device_slug(device: torch.device | str | None = None) -> str:
    """The folder name of a device: "nvidia-h200" for an "NVIDIA H200", "cpu" for any CPU."""
    device = _device(device)
    if device.type != "cuda":
        return device.type
    return slug(torch.cuda.get_device_name(device))


def slug(name: str) -> str:
    """Lower case letters and digits, joined by single hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def git_state() -> tuple[str | None, bool | None]:
    """(commit, whether the working tree differs from it): what the settings say, else git; None where neither knows.

    A host that got a copy of the tree may hold an older repository around it, so what is handed to the run comes first.
    """
    if settings().git_commit is not None:
        return settings().git_commit, settings().git_dirty
    top = _output(["git", "-C", str(ROOT), "rev-parse", "--show-toplevel"])
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    if commit and top and Path(top).resolve() == ROOT:
        return commit, bool(_output(["git", "-C", str(ROOT), "status", "--porcelain"]))
    return None, None


def gpu_state(device: torch.device | str) -> dict:
    """Present SM clock (MHz), power (W) and temperature (°C) of a CUDA device, through nvidia-smi."""
    values: list[float | None] = [None] * 3
    device = torch.device(device)
    if device.type == "cuda":
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        query = ["nvidia-smi", f"--id={uuid}", "--query-gpu=clocks.sm,power.draw,temperature.gpu"]
        answer = _output([*query, "--format=csv,noheader,nounits"]) or ""
        fields = [_number(field) for field in answer.split(",")]
        values = fields if len(fields) == 3 else values
    return dict(zip(("clock_mhz", "power_w", "temperature_c"), values, strict=True))


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def _gpu_info() -> dict:
    if not torch.cuda.is_available():
        absent = ("cuda_version", "gpu_name", "gpu_memory_gb", "gpu_compute_capability")
        return dict.fromkeys(absent) | {"gpu_count": 0}
    gpu = torch.cuda.get_device_properties(0)
    return {
        "cuda_version": torch.version.cuda,
        "gpu_name": gpu.name,
        "gpu_memory_gb": round(gpu.total_memory / 2**30, 2),
        "gpu_compute_capability": f"{gpu.major}.{gpu.minor}",
        "gpu_count": torch.cuda.device_count(),
    }


def _cpu_info(cpuinfo: Path = CPUINFO) -> dict:
    blocks = _cpuinfo_blocks(cpuinfo)
    cores = {(b["physical id"], b["core id"]) for b in blocks if "physical id" in b and "core id" in b}
    clocks = [float(b["cpu MHz"]) for b in blocks if "cpu MHz" in b]
    return {
        "cpu_model": next((b["model name"] for b in blocks if "model name" in b), platform.processor() or None),
        "cpu_count_physical": len(cores) or None,
        "cpu_count_logical": os.cpu_count(),
        "cpu_freq_mhz": round(sum(clocks) / len(clocks), 1) if clocks else None,
    }


def _cpuinfo_blocks(path: Path) -> list[dict[str, str]]:
    """One mapping per logical CPU; none where the system has no such file."""
    if not path.exists():
        return []
    blocks = path.read_text().strip().split("\n\n")
    lines = ([line.split(":", 1) for line in block.splitlines() if ":" in line] for block in blocks)
    return [{key.strip(): value.strip() for key, value in block} for block in lines]


def _ppu_info() -> dict:
    tool = shutil.which("ppu-smi")
    return {"ppu_available": tool is not None, "ppu_info": _output([tool]) if tool else None}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str | None:
    """What a command prints, None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
