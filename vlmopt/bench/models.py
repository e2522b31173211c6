"""The three models at hand: a folder with weights, the embedded tiny one, and the 2B shapes with random weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlmopt.errors import VlmoptError

TINY = Path(__file__).parents[1] / "assets" / "tiny"
RANDOM_2B = "random-2b"


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode on `device`, with its processor; `name` goes into records."""

    model: nn.Module
    processor: Any
    device: torch.device
    name: str


def default_device() -> str:
    """The first GPU, else the CPU."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def resolve_device(device: str | torch.device | None) -> torch.device:
    """`device`, or the CPU where a CUDA device is asked for and none exists.

    Raises:
        VlmoptError: the device's name is not known to torch, or its index does not exist.
    """
    try:
        chosen = torch.device(device if device is not None else default_device())
    except RuntimeError as error:
        raise VlmoptError(f"unknown device {device!r}; use cuda:0 or cpu") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        return torch.device("cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise VlmoptError(f"there is no {chosen}; this machine has {torch.cuda.device_count()} CUDA device(s)")
    return chosen


def load(model_path: str | Path, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> Loaded:
    """Load a Qwen3-VL folder (or `random-2b`) without touching the network.

    Args:
        device: a CUDA device falls back to the CPU where there is none.
        dtype: None keeps the checkpoint's own.

    Raises:
        VlmoptError: the folder is missing, incomplete or not a Qwen3-VL.
    """
    chosen = resolve_device(device)
    if str(model_path) == RANDOM_2B:
        return random_2b(chosen, dtype or torch.bfloat16)
    path = Path(model_path)
    if not path.is_dir():
        raise VlmoptError(f"there is no model folder {path}; run ./run.sh fetch, or use {_relative(TINY)}")
    if not (path / "config.json").is_file():
        raise VlmoptError(f"{path} has no config.json, so it is not a model folder; run ./run.sh fetch again")
    from transformers import AutoProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    try:
        config = Qwen3VLConfig.from_pretrained(path, local_files_only=True)
        if config.architectures != ["Qwen3VLForConditionalGeneration"]:
            raise VlmoptError(f"{path} holds {config.architectures}, not a Qwen3VLForConditionalGeneration")
        processor = AutoProcessor.from_pretrained(path, local_files_only=True)
        model, missing = Qwen3VLForConditionalGeneration.from_pretrained(
            path, dtype=dtype or "auto", local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except VlmoptError:
        raise
    except Exception as error:  # safetensors, JSON and hub errors share no base class
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise VlmoptError(f"the model folder {path} cannot be loaded ({reason[0]}); fetch it again") from error
    if missing["missing_keys"]:
        raise VlmoptError(f"{path} lacks {len(missing['missing_keys'])} weights; fetch it again")
    name = "tiny" if path.resolve() == TINY.resolve() else path.resolve().name
    return Loaded(model.to(chosen).eval().requires_grad_(False), processor, chosen, name)


def prompt(processor: Any, image: Any, question: str) -> Any:
    """The processor's output for one user message with one PIL image and one question, as the contest asks."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )


def random_2b(device: str | torch.device | None = None, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Loaded:
    """The exact shapes of Qwen3-VL-2B-Instruct with random weights, driven by the tiny model's processor.

    Speed, memory and numerical error on it are honest; its answers mean nothing. It has no end-of-sequence id, so a
    call always gives `max_new_tokens`.
    """
    from transformers import AutoProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    chosen = resolve_device(device)
    processor = AutoProcessor.from_pretrained(TINY, local_files_only=True)
    processor.image_processor.size = {"shortest_edge": 65536, "longest_edge": 16777216}
    config = Qwen3VLConfig(**config_2b(Qwen3VLConfig.from_pretrained(TINY, local_files_only=True)))
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with chosen:
            model = Qwen3VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    return Loaded(model.eval().requires_grad_(False), processor, chosen, RANDOM_2B)


def config_2b(tokens: Any) -> dict[str, Any]:
    """Keyword arguments of the 2B configuration (its published config.json), with the special ids of `tokens`."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    vision = {
        "depth": 24,
        "hidden_size": 1024,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4096,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    }
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    special = {name: getattr(tokens, name) for name in names}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": True, **special}


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
