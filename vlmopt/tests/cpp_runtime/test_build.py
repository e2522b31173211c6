"""build: compiling the library once, loading only what fits, and one sentence for everything that goes wrong."""

from pathlib import Path

import pytest

import vlmopt
from vlmopt.config import Settings
from vlmopt.cpp_runtime import build
from vlmopt.errors import VlmoptError

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler is installed")
PARTS = {"vision": True, "connector": True, "text": True, "packed": True, "cpp_runtime": True}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Sources that take no time; a module of the library's name, though an empty one."""
    (tmp_path / "answer.h").write_text("#define ANSWER 42\n")
    (tmp_path / "bridge.cpp").write_text(
        '#include <Python.h>\n#include "answer.h"\n'
        'static PyModuleDef definition{PyModuleDef_HEAD_INIT, "vlmopt_cpp_runtime", nullptr, ANSWER, nullptr};\n'
        'extern "C" __attribute__((visibility("default"))) PyObject* PyInit_vlmopt_cpp_runtime() {\n'
        "  return PyModule_Create(&definition);\n}\n"
    )
    return tmp_path


@needs_compiler
def test_builds_once_and_loads(folder):
    path = build.build(folder, folder / "made")
    made = path.stat().st_mtime_ns
    assert build.load_file(path).__name__ == build.MODULE
    assert build.build(folder, folder / "made") == path and path.stat().st_mtime_ns == made
    assert list(path.parent.iterdir()) == [path], "the build left something behind"


@needs_compiler
def test_force_builds_anew(folder):
    path = build.build(folder, folder / "made")
    path.write_bytes(b"of another time")
    build.build(folder, folder / "made", force=True)
    build.load_file(path)


def test_the_switch_that_forces_keeps_its_name(monkeypatch):
    assert not Settings().cpp_runtime_force_rebuild
    monkeypatch.setenv("AICAS_CPP_RUNTIME_FORCE_REBUILD", "1")
    assert Settings().cpp_runtime_force_rebuild


@pytest.mark.parametrize("forced", [False, True])
def test_loading_heeds_the_switch(monkeypatch, tmp_path, forced):
    asked = []
    monkeypatch.setattr(build, "settings", lambda: Settings(AICAS_CPP_RUNTIME_FORCE_REBUILD=forced))
    monkeypatch.setattr(build, "build", lambda force: asked.append(force) or tmp_path / "nothing.so")
    with pytest.raises(VlmoptError, match="cannot be loaded"):
        build.load.__wrapped__()
    assert asked == [forced]


@needs_compiler
@pytest.mark.parametrize("what", ["source", "torch", "options", "machine", "compiler"])
def test_a_library_of_anything_else_is_not_taken(folder, monkeypatch, what):
    old = build.library_path(folder)
    if what == "source":
        (folder / "answer.h").write_text("#define ANSWER 43\n")
    elif what == "torch":
        monkeypatch.setattr(build.torch, "__version__", "1.0")
    elif what == "options":
        monkeypatch.setattr(build, "OPTIONS", ("-O3",))
    elif what == "machine":
        monkeypatch.setattr(build.platform, "machine", lambda: "another")
    else:
        monkeypatch.setattr(build, "_version", lambda program: "another compiler")
    assert build.library_path(folder) != old


@needs_compiler
def test_a_failed_build_names_the_first_error(folder):
    (folder / "answer.h").write_text("#define ANSWER unknown_name\n")
    with pytest.raises(VlmoptError, match=r"could not be compiled \(bridge\.cpp\): .*unknown_name"):
        build.build(folder, folder / "made")
    assert not list((folder / "made").iterdir())


@needs_compiler
def test_without_the_cuda_headers_only_a_cpu_is_built_for(monkeypatch):
    every = {path.name for path in build.SOURCES.glob("*.cpp")}
    monkeypatch.setattr(build, "cuda_headers", lambda: ())
    names = {path.name for path in build.sources()}
    assert {"bridge.cpp", "cpu_device.cpp", "grid.cpp", "vision.cpp", "prefill.cpp"} == names < every
    assert "-DVLMOPT_CUDA" not in build.options()


def test_a_compiler_that_does_not_run_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "compiler", lambda: tmp_path / "g++")
    with pytest.raises(VlmoptError, match="does not run"):
        build.library_path()


@needs_compiler
def test_a_folder_that_cannot_be_written_is_one_sentence(folder):
    (folder / "file").write_text("")
    with pytest.raises(VlmoptError, match="cannot be compiled into"):
        build.build(folder, folder / "file" / "made")


def test_a_broken_library_is_named(tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"nothing that loads")
    with pytest.raises(VlmoptError, match=r"broken\.so cannot be loaded .* delete it"):
        build.load_file(broken)


@pytest.fixture
def no_compiler(monkeypatch):
    build.load.cache_clear()
    monkeypatch.setattr(build, "compiler", lambda: None)
    yield
    build.load.cache_clear()


def test_without_a_compiler_the_python_path_serves_and_says_why(tiny, prompt, no_compiler):
    vlmopt.optimize(tiny.model, vlmopt.OptimizeConfig(**PARTS, strict=False))
    part = next(part for part in vlmopt.status(tiny.model).parts if part.name == "cpp_runtime")
    assert part.state == "skipped" and "no C++ compiler was found" in part.reason
    inputs = prompt((64, 64), "read")
    ids = tiny.model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert vlmopt.status(tiny.model).calls["stages"] == 1
    vlmopt.revert(tiny.model)
    assert ids.equal(tiny.model.generate(**inputs, max_new_tokens=4, do_sample=False))


def test_without_a_compiler_strict_raises_and_leaves_the_model_alone(tiny, no_compiler):
    with pytest.raises(VlmoptError, match="no C\\+\\+ compiler was found"):
        vlmopt.optimize(tiny.model, vlmopt.OptimizeConfig(**PARTS))
    assert not vlmopt.status(tiny.model).active


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"packed": False}, "packed"), ({"vision": False}, "vision"), ({"kernels": "all"}, "needs a CUDA device")],
)
def test_what_it_needs_is_said_before_anything_is_built(reference, no_compiler, changes, words):
    parts = vlmopt.plan(reference.model, vlmopt.OptimizeConfig(**{**PARTS, **changes})).parts
    part = next(part for part in parts if part.name == "cpp_runtime")
    assert part.state == "skipped" and words in part.reason
