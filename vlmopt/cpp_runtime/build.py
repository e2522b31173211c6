"""Compiling the C++ runtime once, and loading what fits.

A library's file name holds a hash of the sources, the compiler, the options, torch's and Python's version and the
machine's architecture, so a library made of anything else is never loaded: it is built anew beside it.
"""

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from tqdm.auto import tqdm

from vlmopt.config import settings
from vlmopt.errors import VlmoptError
from vlmopt.kernels import native

SOURCES = Path(__file__).parent
MODULE = "vlmopt_cpp_runtime"
OPTIONS = ("-O1", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
"""The time of a call goes to the libraries; optimising the glue further only lengthens the build. What little is
computed here rounds as PyTorch does, so nothing may be fused."""
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-ldl")
CUDA_HEADERS = ("cuda.h", "cublasLt.h", "crt/host_defines.h")
JOBS = 4
"""Files compiled at a time; each takes up to 1 GB."""


def compiler() -> Path | None:
    """The C++ compiler, or None."""
    found = shutil.which("c++") or shutil.which("g++")
    return None if found is None else Path(found)


@cache
def cuda_headers() -> tuple[Path, ...]:
    """The folders of the CUDA headers, those that came with torch before the toolkit's; none where one is missing."""
    packages = Path(torch.__file__).parents[1] / "nvidia"
    folders = *sorted(packages.glob("cu*/include")), native.TOOLKIT.parents[1] / "include"
    found = all(any((folder / name).is_file() for folder in folders) for name in CUDA_HEADERS)
    return tuple(folder for folder in folders if folder.is_dir()) if found else ()


def sources(folder: Path = SOURCES) -> list[Path]:
    """Every file to compile; without the CUDA headers only what a CPU needs."""
    found = sorted(folder.glob("*.cpp"))
    return found if cuda_headers() else [path for path in found if not path.name.startswith(("cuda_", "flash_"))]


def options() -> tuple[str, ...]:
    """The compiler's options on this machine."""
    torch_headers = Path(torch.__file__).parent / "include"
    python_headers = Path(sysconfig.get_paths()["include"])
    folders = torch_headers, torch_headers / "torch/csrc/api/include", python_headers, *cuda_headers()
    included = [part for folder in folders for part in ("-isystem", str(folder))]
    return (*OPTIONS, *included, *(("-DVLMOPT_CUDA",) if cuda_headers() else ()))


def library_path(folder: Path = SOURCES, libraries: Path | None = None) -> Path:
    """Where the library of the sources as they are now lies, or will.

    Raises:
        VlmoptError: there is no compiler.
    """
    # where a header lies does not matter, which one it is follows from torch's version
    machine = torch.__version__, sysconfig.get_config_var("SOABI"), platform.machine()
    digest = hashlib.sha256(repr((OPTIONS, LIBRARIES, bool(cuda_headers()), machine)).encode())
    digest.update(_version(_required_compiler()).encode())
    for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return (native.libraries_folder() if libraries is None else libraries) / f"cpp_runtime-{digest.hexdigest()[:16]}.so"


def build(folder: Path = SOURCES, libraries: Path | None = None, force: bool = False) -> Path:
    """The compiled library; compiles it where it is missing or `force` says so, which takes about half a minute.

    Raises:
        VlmoptError: no compiler, or it fails; the message holds its first error.
    """
    path = library_path(folder, libraries)
    if path.exists() and not force:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:  # processes that build at once do not meet
            made = Path(scratch) / path.name
            _compile(sources(folder), Path(scratch), made)
            os.replace(made, path)
    except OSError as error:
        message = f"the C++ runtime cannot be compiled into {path.parent}: {error.strerror or error}"
        raise VlmoptError(message) from error
    return path


@cache
def load() -> ModuleType:
    """The loaded library of the sources as they are now; built first where needed, or asked for by a switch.

    Raises:
        VlmoptError: it cannot be compiled or loaded.
    """
    return load_file(build(force=settings().cpp_runtime_force_rebuild))


def load_file(path: Path) -> ModuleType:
    """The module in the library at `path`.

    Raises:
        VlmoptError: it cannot be loaded.
    """
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    try:
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(MODULE, loader))
        loader.exec_module(module)
    except ImportError as error:
        raise VlmoptError(f"{path} cannot be loaded ({error}); delete it, and it is compiled anew") from error
    return module


def _compile(files: Sequence[Path], scratch: Path, made: Path) -> None:
    objects = [scratch / f"{path.stem}.o" for path in files]
    waiting = list(zip(files, objects, strict=True))
    running: list[tuple[Path, subprocess.Popen]] = []
    with tqdm(total=len(files) + 1, desc="compiling the C++ runtime", leave=False) as progress:
        try:
            while waiting or running:
                while waiting and len(running) < min(JOBS, os.cpu_count() or 1):
                    path, target = waiting.pop(0)
                    running.append((path, _start("-c", *options(), "-o", str(target), str(path))))
                path, process = running.pop(0)
                _finish(path.name, process)
                progress.update()
        finally:
            for _, process in running:
                process.kill()
                process.wait()
        folder = Path(torch.__file__).parent / "lib"
        linked = _start("-shared", "-o", str(made), *map(str, objects), f"-L{folder}", *LIBRARIES)
        _finish(made.name, linked)
        progress.update()


def _start(*arguments: str) -> subprocess.Popen:
    command = [str(_required_compiler()), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(name: str, process: subprocess.Popen) -> None:
    output, _ = process.communicate()
    if process.returncode:
        raise VlmoptError(f"the C++ runtime could not be compiled ({name}): {native.first_error(output)}")


def _required_compiler() -> Path:
    found = compiler()
    if found is None:
        raise VlmoptError("no C++ compiler was found; install g++, or leave out the C++ runtime")
    return found


@cache
def _version(program: Path) -> str:
    try:
        return subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise VlmoptError(f"{program} does not run ({error}); mend the compiler or take it off the path") from error


def main() -> None:
    """Compile the library, as an image does when it is built."""
    build()
