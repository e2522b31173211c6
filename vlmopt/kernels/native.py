"""CUDA C++ kernels: `<stem>.cu` beside this file is compiled once to a shared library and called through ctypes.

The sources know nothing of torch: a launch function is `extern "C"`, takes raw pointers, numbers and a stream, and
returns a null pointer or a sentence (`const char*`) that says what went wrong. A library's file name holds a hash of
its sources, of the compiler and of the options, so an old one is never taken for a new one.
"""

import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from tqdm.auto import tqdm

from vlmopt.errors import VlmoptError

logger = logging.getLogger("vlmopt")

SOURCES = Path(__file__).parent
TOOLKIT = Path("/usr/local/cuda/bin/nvcc")
"""The compiler of a default installation, which need not be on the search path."""
CAPABILITY = (9, 0)
OPTIONS = (
    *("-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-lineinfo", "--expt-relaxed-constexpr"),
    *("-shared", "-Xcompiler=-fPIC", "-cudart=static"),
)


def libraries_folder() -> Path:
    """Where compiled libraries are kept; anything in it can be deleted. Temporary for a user without a home."""
    try:
        return Path.home() / ".cache" / "vlmopt"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "vlmopt"


@cache
def compiler() -> Path | None:
    """nvcc, or None."""
    found = shutil.which("nvcc") or (str(TOOLKIT) if TOOLKIT.exists() else None)
    return None if found is None else Path(found)


def refusal(device: torch.device) -> str | None:
    """Why no kernel compiled here can run on `device`, or None."""
    if device.type != "cuda":
        return f"a tensor is on {device}; the kernel needs a CUDA device"
    found = torch.cuda.get_device_capability(device)
    if found != CAPABILITY:
        return f"the GPU has compute capability {found[0]}.{found[1]}; the kernel uses instructions of 9.0 (Hopper)"
    if compiler() is None:
        return "the kernel is compiled on its first use and nvcc was not found; install the CUDA toolkit"
    return None


def sources(stem: str, folder: Path = SOURCES) -> list[Path]:
    """`<stem>.cu` and every file of the same folder that it includes, directly or not."""
    found = [folder / f"{stem}.cu"]
    for path in found:
        included = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), flags=re.MULTILINE)
        found += [folder / name for name in included if folder / name not in found]
    return found


def library_path(stem: str, folder: Path = SOURCES, libraries: Path | None = None) -> Path:
    """Where the library of the sources as they are now lies, or will.

    Raises:
        VlmoptError: there is no compiler.
    """
    digest = hashlib.sha256(repr((OPTIONS, _version(_required_compiler()))).encode())
    for path in sorted(sources(stem, folder)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return (libraries_folder() if libraries is None else libraries) / f"{stem}-{digest.hexdigest()[:16]}.so"


def build(stem: str, folder: Path = SOURCES, libraries: Path | None = None) -> Path:
    """The compiled library; compiles it where it is missing, which takes some seconds.

    Raises:
        VlmoptError: no compiler, or it fails; the message holds its first error.
    """
    path = library_path(stem, folder, libraries)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:  # processes that build at once do not meet
            made = Path(scratch) / path.name
            command = [str(_required_compiler()), *OPTIONS, "-o", str(made), str(folder / f"{stem}.cu")]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise VlmoptError(f"nvcc could not compile {stem}.cu: {first_error(done.stderr + done.stdout)}")
            os.replace(made, path)
    except OSError as error:
        raise VlmoptError(f"{stem}.cu cannot be compiled into {path.parent}: {error.strerror or error}") from error
    return path


@cache
def library(stem: str) -> ctypes.CDLL:
    """The loaded library of `<stem>.cu`.

    Raises:
        VlmoptError: it cannot be compiled or loaded.
    """
    path = build(stem)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise VlmoptError(f"{path} cannot be loaded ({error}); delete it, and it is compiled anew") from error


@cache
def function(stem: str, name: str, *arguments: type) -> Callable[..., None]:
    """The launch function `name` of `<stem>.cu`, which takes `arguments` (ctypes types).

    The function raises a `VlmoptError` with the sentence that the launcher gives back.
    """
    found = getattr(library(stem), name)
    found.argtypes = arguments
    found.restype = ctypes.c_char_p
    found.errcheck = _check
    return found


@cache
def works(stem: str, index: int, instead: str) -> bool:
    """Whether `<stem>.cu` can run on the GPU `index`; compiles it where that has not been done yet.

    Where it should run but cannot be compiled or loaded, a warning names what takes its place `instead`.
    """
    if refusal(torch.device("cuda", index)) is not None:
        return False
    try:
        library(stem)
    except VlmoptError as error:
        logger.warning("%s takes the place of a faster kernel: %s", instead, error)
        return False
    return True


def address(tensor: torch.Tensor | None) -> int | None:
    """What a launch function takes as a `void*`: a null pointer for an absent tensor."""
    return None if tensor is None else tensor.data_ptr()


def stream(device: torch.device) -> int:
    """The current stream of `device`, as a launch function takes it."""
    return torch.cuda.current_stream(device).cuda_stream


def _check(result: bytes | None, called: Callable, _: Sequence) -> None:
    if result is not None:
        raise VlmoptError(f"{called.__name__}: {result.decode()}")


def _required_compiler() -> Path:
    found = compiler()
    if found is None:
        raise VlmoptError("nvcc was not found; install the CUDA toolkit, or leave out the kernels written in CUDA C++")
    return found


@cache
def _version(nvcc: Path) -> str:
    try:
        return subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise VlmoptError(f"{nvcc} does not run ({error}); mend the CUDA toolkit or take it off the path") from error


def first_error(output: str) -> str:
    """The first line of a compiler's output that tells of an error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it gave no reason")


def main() -> None:
    """Compile every kernel of the package, as an image does when it is built."""
    for source in tqdm(sorted(SOURCES.glob("*.cu")), desc="compiling"):
        build(source.stem)
