"""A model small enough to start in seconds, for tests of what runs in vLLM; needs nothing of vLLM itself."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY, WIDTH, HEADS, LAYERS, INNER = 512, 64, 2, 2, 128


def make_model(folder: Path) -> None:
    """A Llama of random weights, large enough that every token depends on those before it."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    shapes = {"model.embed_tokens": (VOCABULARY, WIDTH), "lm_head": (VOCABULARY, WIDTH)}
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        shapes |= {f"{layer}.self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj": (INNER, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (WIDTH, INNER)}
    torch.manual_seed(0)
    weights = {f"{name}.weight": torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    norms = [f"model.layers.{i}.{name}_layernorm" for i in range(LAYERS) for name in ("input", "post_attention")]
    weights |= {f"{name}.weight": torch.ones(WIDTH) for name in [*norms, "model.norm"]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})
