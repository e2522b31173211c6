"""Processes of the serving environment, for tests that need a real engine: a tiny model and how they are started."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vlmopt.tests.serving.tiny_llama import make_model

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-serving" / "bin" / "python"
ASSETS = ROOT / "vlmopt" / "assets" / "tiny"
NEEDS_ENGINE = pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-serving; run.sh makes it")

# A cache of 24 blocks, so that what is tested can happen with few requests.
ENGINE = {
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": 32,
    "num_gpu_blocks_override": 25,
    "max_model_len": 768,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
}


def environment(**more: str) -> dict[str, str]:
    """Of a process with an engine on this machine."""
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **more,
    }


def start(folder: Path, *command: str, **more: str) -> subprocess.Popen:
    """Start Python of the serving environment in `folder`; what it says goes to `log` there."""
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [str(PYTHON), *command], cwd=folder, env=environment(**more), stdout=log, stderr=log, start_new_session=True
        )


def make_text_model(folder: Path) -> Path:
    """A folder with a tiny Llama of random weights and a tokenizer of bytes with a chat template."""
    make_model(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ASSETS / name, folder)
    return folder


def write_models(path: Path, **entries: dict[str, Any]) -> Path:
    """A models.json of entries that share ENGINE."""
    path.write_text(json.dumps({n: {**e, "engine": {**ENGINE, **e.get("engine", {})}} for n, e in entries.items()}))
    return path
