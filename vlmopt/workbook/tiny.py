"""The embedded tiny model: a real Qwen3-VL of 9.3 M parameters that reads signs, made from nothing.

Here: its configuration, its byte tokenizer and processor, the model folder, and the accuracy over a data set. The signs
are in `signs.py`, the training in `tiny_train.py`, the 500 held-out samples in `tiny_data.py`.

    python -m vlmopt.workbook.tiny init                        an untrained model folder
    python -m vlmopt.workbook.tiny train --checkpoint DIR      train, or go on with a checkpoint (wants a GPU)
    python -m vlmopt.workbook.tiny export --checkpoint DIR     the checkpoint's weights as a model folder
    python -m vlmopt.workbook.tiny join-parts --parts DIR      the same from the pieces that a training host sent back
    python -m vlmopt.workbook.tiny data --output data          the 500 samples, bit for bit
    python -m vlmopt.workbook.tiny evaluate                    exact accuracy over them, free-running
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors.torch
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from vlmopt.bench.dataset import open_samples
from vlmopt.bench.models import TINY, load, prompt
from vlmopt.errors import VlmoptError
from vlmopt.files import write_atomic

PART_BYTES = 15 * 2**20
WEIGHTS = "model.safetensors"
LOG = "train_log.json"
FOLDER = TINY

# Qwen's own names in Qwen's own order; ids 0..255 are the bytes themselves, these follow.
CONTROL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
PLAIN_TOKENS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
TOKEN_ID = {token: 256 + i for i, token in enumerate(CONTROL_TOKENS + PLAIN_TOKENS)}
VOCABULARY = 320  # 282 in use, padded to a multiple of 64 as Qwen pads its own

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for content in message.content %}
            {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif content.type == 'video' or 'video' in content %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in content %}
                {{- content.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def config() -> Qwen3VLConfig:
    """The architecture: every part of Qwen3-VL-2B (DeepStack, interleaved mRoPE, GQA, tied head), small."""
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
        "bos_token_id": TOKEN_ID["<|endoftext|>"],
        "eos_token_id": TOKEN_ID["<|im_end|>"],
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 6,
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_heads": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 256,
        "num_position_embeddings": 400,
        "deepstack_visual_indexes": [1, 3, 4],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=TOKEN_ID["<|image_pad|>"],
        video_token_id=TOKEN_ID["<|video_pad|>"],
        vision_start_token_id=TOKEN_ID["<|vision_start|>"],
        vision_end_token_id=TOKEN_ID["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte 0..255 in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that any text goes in and comes back; Qwen's special tokens by name."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    bytes_only.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[token for token in CONTROL_TOKENS if token not in ("<|im_end|>", "<|endoftext|>")],
        model_max_length=262144,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def processor() -> Qwen3VLProcessor:
    """Qwen3-VL's processor around the byte tokenizer; the sizes of `signs.SIZES` pass its resize unchanged."""
    common = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    images = Qwen2VLImageProcessor(size={"shortest_edge": 16384, "longest_edge": 16777216}, **common)
    videos = Qwen3VLVideoProcessor(size={"shortest_edge": 4096, "longest_edge": 25165824}, **common)
    return Qwen3VLProcessor(images, tokenizer(), videos, chat_template=CHAT_TEMPLATE)


def untrained(seed: int = 0) -> Qwen3VLForConditionalGeneration:
    """The fp32 model before training."""
    torch.manual_seed(seed)
    return Qwen3VLForConditionalGeneration(config()).eval()


def write_folder(model: Qwen3VLForConditionalGeneration, folder: str | Path, log: str | None = None) -> Path:
    """Write the bf16 model with all its files, ready for `AutoProcessor` and `AutoModelForImageTextToText`.

    Args:
        model: it becomes bf16.
        log: the training's log in JSON, kept beside the weights.
    """
    folder = Path(folder)
    stop = [TOKEN_ID["<|im_end|>"], TOKEN_ID["<|endoftext|>"]]
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=stop[1], do_sample=False)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / WEIGHTS).chmod(0o644)  # safetensors lets only the owner read
    processor().save_pretrained(folder)
    if log is not None:
        write_atomic(folder / LOG, log)
    return folder


def write_parts(model: Qwen3VLForConditionalGeneration, folder: str | Path) -> list[Path]:
    """Write the bf16 weights as `model.safetensors.part0`, ... of at most 15 MiB, for hosts that send small files."""
    folder = Path(folder)
    with tempfile.TemporaryDirectory() as scratch:
        model.to(torch.bfloat16).save_pretrained(scratch)
        whole = (Path(scratch) / WEIGHTS).read_bytes()
    pieces = [whole[start : start + PART_BYTES] for start in range(0, len(whole), PART_BYTES)]
    return [write_atomic(folder / f"{WEIGHTS}.part{number}", piece) for number, piece in enumerate(pieces)]


def join_parts(parts: str | Path) -> Qwen3VLForConditionalGeneration:
    """The model whose weights `write_parts` left in a folder.

    Raises:
        VlmoptError: a part is missing or the pieces are not this model.
    """
    found = sorted(Path(parts).glob(f"{WEIGHTS}.part*"))
    try:
        tensors = safetensors.torch.load(b"".join(part.read_bytes() for part in found))
    except (safetensors.SafetensorError, OSError) as error:
        raise VlmoptError(f"{parts} does not hold all pieces of {WEIGHTS}; fetch them again") from error
    return with_weights(tensors)


def with_weights(tensors: Mapping[str, torch.Tensor]) -> Qwen3VLForConditionalGeneration:
    """The model with these parameters, by name (the tied head has none of its own).

    Raises:
        VlmoptError: the names or shapes are another model's.
    """
    model = untrained()
    own = dict(model.named_parameters())
    if {name: p.shape for name, p in own.items()} != {name: t.shape for name, t in tensors.items()}:
        raise VlmoptError("these weights belong to another configuration of the tiny model; train again")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])
    return model


def right_answer(answers: Iterable[str]) -> str:
    """The right answer of a sample of the embedded data set: the most frequent string, letter for letter."""
    return Counter(answers).most_common(1)[0][0]


@torch.no_grad()
def ask(model, processor, image, question: str, max_new_tokens: int = 80) -> str:
    """The greedy answer to one question about one PIL image, through the processor and `generate`."""
    inputs = prompt(processor, image, question).to(model.device)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def evaluate(model, processor, samples: Iterable[Mapping], max_new_tokens: int = 80, progress=True) -> dict[str, float]:
    """Free-running accuracy: the share of answers equal, letter for letter, to the right one.

    Args:
        samples: rows of the embedded data set (`image`, `question`, `answers`, `kind`).

    Returns:
        The share for each kind of question and, under "all", for all samples.
    """
    samples = tqdm(samples, desc="questions", disable=not progress)
    return accuracy((row, ask(model, processor, row["image"], row["question"], max_new_tokens)) for row in samples)


def accuracy(answered: Iterable[tuple[Mapping, str]]) -> dict[str, float]:
    """Of rows (`answers`, `kind`) with the answers given: the share that is right by kind and, under "all", of all."""
    hits: dict[str, list[bool]] = {}
    for row, answer in answered:
        hits.setdefault(row["kind"], []).append(answer == right_answer(row["answers"]))
    hits["all"] = [hit for each in hits.values() for hit in each]
    return {kind: sum(each) / len(each) for kind, each in hits.items()}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m vlmopt.workbook.tiny", description=__doc__.splitlines()[0])
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("init", help="write an untrained model folder")
    train = commands.add_parser("train", help="train from nothing, or go on with the checkpoint")
    train.add_argument("--checkpoint", type=Path, required=True, help="folder of the checkpoint and the log")
    train.add_argument("--seconds", type=float, default=490, help="end this call after so long, set-up included")
    train.add_argument("--total-seconds", type=float, default=980, help="length of the schedule over all calls")
    train.add_argument("--batch", type=int, default=256)
    train.add_argument("--strips", type=int, default=150_000, help="how many strings to draw")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--no-graph", action="store_true", help="launch every kernel instead of replaying CUDA graphs")
    train.add_argument("--export-parts", type=Path, help="also write the weights and the log here in small files")
    export = commands.add_parser("export", help="write a checkpoint's weights as a model folder")
    export.add_argument("--checkpoint", type=Path, required=True)
    join = commands.add_parser("join-parts", help="write the weights that --export-parts left as a model folder")
    join.add_argument("--parts", type=Path, required=True)
    for command in (commands.choices["init"], export, join):
        command.add_argument("--output", type=Path, default=FOLDER)
    commands.add_parser("data", help="build the 500 samples").add_argument("--output", type=Path, default=Path("data"))
    check = commands.add_parser("evaluate", help="exact accuracy of a model folder over the data set")
    check.add_argument("--model-path", type=Path, default=FOLDER)
    check.add_argument("--dataset-path", type=Path, default=Path("data"))
    return top


def run(options: argparse.Namespace) -> None:
    """Do what the command line asks. The modules imported here import this one."""
    if options.command == "init":
        print(write_folder(untrained(), options.output))
    elif options.command == "join-parts":
        log = options.parts / LOG
        print(write_folder(join_parts(options.parts), options.output, log.read_text() if log.exists() else None))
    elif options.command == "evaluate":
        samples, loaded = open_samples(options.dataset_path), load(options.model_path)
        shares = evaluate(loaded.model, loaded.processor, [samples[i] for i in range(len(samples))])
        print(json.dumps(shares, indent=1))
    elif options.command == "data":
        from vlmopt.workbook import tiny_data

        print(tiny_data.write(options.output))
    else:
        from vlmopt.workbook import tiny_train

        if options.command == "export":
            weights, log = tiny_train.result(options.checkpoint)
            print(write_folder(with_weights(weights), options.output, log))
        else:
            settings = {key: value for key, value in vars(options).items() if key != "command"}
            tiny_train.train(tiny_train.Settings(**settings))


def main(arguments: list[str] | None = None) -> int:
    """The command-line door: 0, or 2 after one sentence about what to put right."""
    try:
        run(parser().parse_args(arguments))
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
