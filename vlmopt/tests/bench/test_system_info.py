import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from vlmopt.bench import system_info as info

HARNESS_KEYS = """timestamp python_version torch_version cuda_version gpu_name gpu_memory_gb gpu_compute_capability
cpu_model cpu_count_physical cpu_count_logical cpu_freq_mhz ppu_available ppu_info platform_system"""


def test_every_key_of_the_harness_is_there_and_is_json():
    found = info.system_info()
    assert set(HARNESS_KEYS.split()) <= set(found)
    assert json.loads(json.dumps(found)) == found
    assert found["torch_version"] == torch.__version__
    assert found["cpu_count_logical"] >= 1


def test_environment_says_what_runs_and_takes_a_commit_that_it_is_handed():
    found = info.environment("cpu", commit="abc", dirty=True)
    assert (found["device"], found["commit"], found["dirty"]) == ("cpu", "abc", True)
    assert found["clock_mhz"] is None and found["gpu_name"] is None
    assert found["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    "name, expected",
    [("NVIDIA H200", "nvidia-h200"), ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"), ("GPU (x)", "gpu-x")],
)
def test_slug(name, expected):
    assert info.slug(name) == expected


def test_device_slug_of_a_gpu_comes_from_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert info.device_slug("cuda:0") == "nvidia-h200"
    assert info.device_slug("cpu") == "cpu"


def _git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_commit_and_dirty_flag_come_from_git(tmp_path, monkeypatch):
    _git(tmp_path, "init")
    (tmp_path / "file").write_text("one")
    _git(tmp_path, "add", "file")
    _git(tmp_path, "commit", "-m", "first")
    monkeypatch.setattr(info, "ROOT", tmp_path.resolve())
    commit, dirty = info.git_state()
    assert len(commit) == 40 and dirty is False
    (tmp_path / "file").write_text("two")
    assert info.git_state() == (commit, True)


def test_what_is_handed_to_the_run_comes_before_git(tmp_path, monkeypatch):
    """The repository around a copied tree may be older than the tree."""
    monkeypatch.setattr(info, "ROOT", tmp_path.resolve())
    monkeypatch.setattr(info, "settings", lambda: SimpleNamespace(git_commit="cafe", git_dirty=False))
    assert info.git_state() == ("cafe", False)
    _git(tmp_path, "init")
    _git(tmp_path, "commit", "--allow-empty", "-m", "older")
    assert info.git_state() == ("cafe", False)


def test_a_checkout_around_an_installed_package_is_not_taken_for_ours(tmp_path, monkeypatch):
    _git(tmp_path, "init")
    _git(tmp_path, "commit", "--allow-empty", "-m", "somebody else's")
    inner = tmp_path / "site-packages"
    inner.mkdir()
    monkeypatch.setattr(info, "ROOT", inner)
    monkeypatch.setattr(info, "settings", lambda: SimpleNamespace(git_commit=None, git_dirty=None))
    assert info.git_state() == (None, None)


CPUINFO = """processor\t: 0
model name\t: Some CPU
cpu MHz\t\t: 2000.0
physical id\t: 0
core id\t\t: 0

processor\t: 1
model name\t: Some CPU
cpu MHz\t\t: 3000.0
physical id\t: 0
core id\t\t: 0
"""


def test_two_threads_of_one_core_are_one_physical_core(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO)
    found = info._cpu_info(path)
    assert (found["cpu_model"], found["cpu_count_physical"], found["cpu_freq_mhz"]) == ("Some CPU", 1, 2500.0)


def test_a_system_without_cpuinfo_says_nothing_it_does_not_know(tmp_path):
    found = info._cpu_info(tmp_path / "absent")
    assert found["cpu_count_physical"] is None and found["cpu_freq_mhz"] is None


@pytest.mark.parametrize(
    "answer, expected",
    [("1980, 412.5, 45", (1980.0, 412.5, 45.0)), ("1980, [N/A], 45", (1980.0, None, 45.0)), (None, (None,) * 3)],
)
def test_gpu_state_is_read_from_nvidia_smi(monkeypatch, answer, expected):
    commands = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(info, "_output", lambda command: commands.append(command) or answer)
    assert tuple(info.gpu_state("cuda:0").values()) == expected
    assert "--id=GPU-1234" in commands[0]


def test_a_missing_tool_is_no_answer():
    assert info._output(["no-such-program-here"]) is None
    assert info._output(["false"]) is None
