"""Models of which only the shape matters: random weights are as fast as trained ones, and their answers mean nothing.

    python -m vlmopt.serving.shapes FOLDER      # writes FOLDER/models.json and a folder a shape

An evaluation takes them with `--models FOLDER/models.json`. Their KV pool is what a card of 24 GB keeps beside the 8B
model, so that a burst fills it on a larger card too. The numbers are those of the models' published configurations;
Qwen3-VL-2B reads images, with the tokenizer of the embedded model.
"""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vlmopt.bench.models import TINY, config_2b
from vlmopt.errors import VlmoptError
from vlmopt.files import write_atomic

POOL = 4e9  # bytes
BLOCK_SIZE = 16  # tokens
SEATS, BUDGET = 256, 8192  # running requests, and prompt tokens in a step, at most: as in the simulator
VISION = "2B-VL"
TIMES_UNLOADED = 3.0  # the objective
_SHARED = {
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "8B": {
        **_SHARED,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "3B": {
        **_SHARED,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}


def kv_bytes(config: dict[str, Any], width: int = 2) -> int:
    """Bytes that a token takes in the cache, with elements of `width` bytes."""
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * width


def blocks_in(memory: float, token: float) -> int:
    """Blocks of BLOCK_SIZE tokens of `token` bytes each in `memory` bytes.

    Raises:
        VlmoptError: not one fits.
    """
    blocks = int(memory // (token * BLOCK_SIZE))
    if blocks < 1:
        raise VlmoptError(f"{memory:g} bytes hold no block of {BLOCK_SIZE} tokens; give more memory")
    return blocks


def write_shapes(folder: str | Path) -> Path:
    """Write a folder a shape and a `models.json` that names them; returns its path.

    Each shape stands there with a bf16 and an fp8 KV cache (`8B`, `8B-fp8`) in the same bytes.
    """
    folder = Path(folder)
    models = {}
    for name, config in CONFIGS.items():
        write_atomic(folder / name / "config.json", json.dumps(config, indent=1) + "\n")
        models[name] = _entry(folder / name, blocks_in(POOL, kv_bytes(config)))
        models[f"{name}-fp8"] = {
            **_entry(folder / name, blocks_in(POOL, kv_bytes(config, width=1))),
            "kv_cache_dtype": "fp8",
        }
    config = _write_vision(folder / VISION)
    entry = _entry(folder / VISION, blocks_in(POOL, kv_bytes(config["text_config"])))
    of_images = {"skip_tokenizer_init": False, "mm_processor_cache_gb": 0}  # nothing is kept from image to image
    models[VISION] = {**entry, "engine": {**entry["engine"], **of_images}}
    return write_atomic(folder / "models.json", json.dumps(models, indent=1) + "\n")


def _write_vision(folder: Path) -> dict[str, Any]:
    """Qwen3-VL-2B's shape with the tokenizer and processor of the embedded model; its configuration."""
    own = json.loads((TINY / "config.json").read_bytes())
    types = {"text_config": "qwen3_vl_text", "vision_config": "qwen3_vl_vision"}
    config = {**own, **config_2b(SimpleNamespace(**own))}
    config |= {part: {**config[part], "model_type": name} for part, name in types.items()}
    write_atomic(folder / "config.json", json.dumps(config, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(TINY / name, folder / name)
    processor = json.loads((TINY / "processor_config.json").read_bytes())
    processor["image_processor"]["size"]["shortest_edge"] = 65536  # the 2B model's
    write_atomic(folder / "processor_config.json", json.dumps(processor, indent=1) + "\n")
    return config


def _entry(folder: Path, blocks: int) -> dict[str, Any]:
    return {
        "model_path": str(folder),
        "load_format": "dummy",
        "slo": {"times_unloaded": TIMES_UNLOADED},
        "engine": {
            "skip_tokenizer_init": True,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": blocks + 1,  # one is vLLM's placeholder
            "max_model_len": 8192,
            "max_num_seqs": SEATS,
            "max_num_batched_tokens": BUDGET,
        },
    }


if __name__ == "__main__":
    print(write_shapes(sys.argv[1]))
