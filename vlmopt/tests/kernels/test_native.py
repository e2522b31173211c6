"""native: compiling, keeping and loading CUDA C++."""

import ctypes
from pathlib import Path

import pytest
import torch

from vlmopt.errors import VlmoptError
from vlmopt.kernels import native

needs_nvcc = pytest.mark.skipif(native.compiler() is None, reason="nvcc is not installed")

SOURCE = """
#include "answer.cuh"
extern "C" const char* answer(int wanted) { return wanted == ANSWER ? nullptr : "another answer was wanted"; }
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sample.cu").write_text(SOURCE)
    (tmp_path / "answer.cuh").write_text("#pragma once\n#define ANSWER 42\n")
    return tmp_path


def test_sources_are_followed_through_includes(folder):
    (folder / "answer.cuh").write_text('#include "deeper.cuh"\n#include <cstdint>\n')
    (folder / "deeper.cuh").write_text('#include "answer.cuh"\n')
    assert [path.name for path in native.sources("sample", folder)] == ["sample.cu", "answer.cuh", "deeper.cuh"]


@needs_nvcc
def test_a_changed_include_is_another_library(folder):
    first = native.library_path("sample", folder)
    assert native.library_path("sample", folder) == first
    (folder / "answer.cuh").write_text("#define ANSWER 43\n")
    assert native.library_path("sample", folder) != first


@needs_nvcc
def test_builds_once_and_calls(folder, monkeypatch):
    monkeypatch.setattr(native, "SOURCES", folder)
    path = native.build("sample", folder, folder / "made")
    made = path.stat().st_mtime_ns
    assert native.build("sample", folder, folder / "made") == path and path.stat().st_mtime_ns == made
    assert list(path.parent.iterdir()) == [path], "the build left something behind"
    monkeypatch.setattr(native, "library", lambda stem: ctypes.CDLL(str(path)))
    answer = native.function("sample", "answer", ctypes.c_int)
    assert answer(42) is None
    with pytest.raises(VlmoptError, match="answer: another answer was wanted"):
        answer(41)
    native.function.cache_clear()


@needs_nvcc
def test_a_failed_build_names_the_first_error(folder):
    (folder / "answer.cuh").write_text("int x = unknown_name;\n")
    with pytest.raises(VlmoptError, match=r"could not compile sample\.cu: .*unknown_name"):
        native.build("sample", folder, folder / "made")
    assert not list((folder / "made").iterdir())


def test_without_a_compiler_one_sentence_says_so(folder, monkeypatch):
    monkeypatch.setattr(native, "compiler", lambda: None)
    with pytest.raises(VlmoptError, match="nvcc was not found"):
        native.build("sample", folder, folder / "made")


@needs_nvcc
def test_a_broken_library_is_named(tmp_path, monkeypatch):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"nothing that loads")
    monkeypatch.setattr(native, "build", lambda stem: broken)
    with pytest.raises(VlmoptError, match=r"broken\.so cannot be loaded"):
        native.library("broken")


@pytest.mark.parametrize(
    ("capability", "nvcc", "words"),
    [((8, 9), Path("nvcc"), "8.9"), ((10, 0), Path("nvcc"), "10.0"), ((9, 0), None, "nvcc was not found")],
)
def test_refuses_devices_it_cannot_serve(monkeypatch, capability, nvcc, words):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(native, "compiler", lambda: nvcc)
    assert words in native.refusal(torch.device("cuda"))
    assert "needs a CUDA device" in native.refusal(torch.device("cpu"))


def test_serves_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(native, "compiler", lambda: Path("nvcc"))
    assert native.refusal(torch.device("cuda")) is None


def test_what_cannot_be_compiled_does_not_work_and_says_what_takes_its_place(monkeypatch, caplog):
    def fails(stem):
        raise VlmoptError(f"nvcc could not compile {stem}.cu: no host compiler")

    works = native.works.__wrapped__
    monkeypatch.setattr(native, "library", fails)
    monkeypatch.setattr(native, "refusal", lambda device: "another generation")
    assert not works("sample", 0, "another") and not caplog.text
    monkeypatch.setattr(native, "refusal", lambda device: None)
    assert not works("sample", 0, "another")
    assert "another takes the place" in caplog.text and "no host compiler" in caplog.text
    monkeypatch.setattr(native, "library", lambda stem: None)
    assert works("sample", 0, "another")


@needs_nvcc
def test_a_folder_that_cannot_be_written_is_one_sentence(folder):
    (folder / "file").write_text("")
    with pytest.raises(VlmoptError, match="cannot be compiled into"):
        native.build("sample", folder, folder / "file" / "made")


def test_a_user_without_a_home_gets_a_temporary_folder(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(native.Path, "home", homeless)
    assert native.libraries_folder().name == "vlmopt"
    assert native.libraries_folder().is_relative_to(native.tempfile.gettempdir())


def test_a_compiler_that_does_not_run_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "compiler", lambda: tmp_path / "nvcc")
    with pytest.raises(VlmoptError, match="does not run"):
        native.library_path("gemv_ring")
