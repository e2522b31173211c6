"""Random conversations for comparing two models: images of odd sizes and modes, videos, batches, chats, options."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MODES = ("RGB", "RGB", "RGB", "L", "LA", "P", "RGBA", "1", "CMYK", "YCbCr", "I", "F")
PLAIN = "image and text"
"""The kind whose calls the stages are meant to serve: one prompt, greedy, images in any place."""
ALPHABET = "abc XYZ 0123456789.,?!\n\täßñ中文字🙂<|>"
LONGEST_SIDE = 90  # a longer one would add patches, not kinds of shapes
SEQUENCES = ("input_ids", "attention_mask", "mm_token_type_ids")
VISUAL = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


@dataclass(frozen=True)
class Case:
    """One call: `chats` in the form of transformers' chat templates, several for a batch; options of `generate`."""

    kind: str
    chats: list[list[dict[str, Any]]]
    options: dict[str, Any]


def draw(rng: Random, sampling: bool) -> Case:
    """A case that `rng` alone decides; `sampling` says whether options may draw tokens at random."""
    kind = rng.choices(list(KINDS), WEIGHTS)[0]
    chats, options = KINDS[kind](rng, sampling)
    return Case(kind, chats, {"max_new_tokens": rng.randint(1, 4), "do_sample": False, **options})


def _plain(rng: Random, sampling: bool) -> tuple:
    return [[_user(_images_and_text(rng))]], {}


def _options(rng: Random, sampling: bool) -> tuple:
    return [[_user(_images_and_text(rng))]], _some_options(rng, sampling)


def _batch(rng: Random, sampling: bool) -> tuple:
    chats = [[_user(_images_and_text(rng))] for _ in range(rng.randint(2, 4))]
    return chats, _some_options(rng, sampling) if rng.random() < 0.3 else {}


def _video(rng: Random, sampling: bool) -> tuple:
    # the processor refuses a video of one frame
    shape = rng.randint(2, 4), rng.randint(4, LONGEST_SIDE), rng.randint(4, LONGEST_SIDE), 3
    pieces = [*_images_and_text(rng), {"type": "video", "video": _pixels(rng, shape)}]
    rng.shuffle(pieces)
    return [[_user(pieces)]], {}


def _chat(rng: Random, sampling: bool) -> tuple:
    answer = {"role": "assistant", "content": [_text(rng)]}
    return [[_user(_images_and_text(rng)), answer, _user(_images_and_text(rng))]], {}


KINDS: dict[str, Callable[[Random, bool], tuple]] = {
    PLAIN: _plain,
    "options": _options,
    "batch": _batch,
    "chat": _chat,
    "video": _video,
}
WEIGHTS = (4, 3, 2, 1, 1)
"""How often each kind comes, in the order of `KINDS`; a video goes to stock, so it teaches least."""


def _user(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": pieces}


def _images_and_text(rng: Random) -> list[dict[str, Any]]:
    pieces = [_image(rng) for _ in range(rng.choice((0, 0, 1, 1, 1, 1, 2, 2, 3, 4)))]
    for _ in range(rng.randint(0 if pieces else 1, 3)):
        pieces.insert(rng.randint(0, len(pieces)), _text(rng))
    return pieces


def _text(rng: Random) -> dict[str, Any]:
    length = rng.choice((0, 1, 5, 20, 40))
    return {"type": "text", "text": "".join(rng.choice(ALPHABET) for _ in range(length))}


def _image(rng: Random) -> dict[str, Any]:
    shape = rng.randint(1, LONGEST_SIDE), rng.randint(1, LONGEST_SIDE), 3
    return {"type": "image", "image": Image.fromarray(_pixels(rng, shape)).convert(rng.choice(MODES))}


def _pixels(rng: Random, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(rng.randint(0, 2**31)).integers(0, 256, shape, dtype=np.uint8)


def _some_options(rng: Random, sampling: bool) -> dict[str, Any]:
    menu: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: rng.choice((0.7, 1.1, 1.8)),
        "no_repeat_ngram_size": lambda: rng.randint(0, 3),
        "suppress_tokens": lambda: [rng.randint(0, 250) for _ in range(5)],
        "eos_token_id": lambda: [rng.randint(60, 125) for _ in range(9)],
        "min_new_tokens": lambda: rng.randint(1, 4),
        "num_beams": lambda: rng.randint(1, 2),
        "use_cache": lambda: rng.random() < 0.5,
        "max_new_tokens": lambda: rng.randint(0, 8),
        "bad_words_ids": lambda: [[rng.randint(0, 250)]],
        "temperature": lambda: rng.choice((0.0, 0.3, 1.0, 4.0)),
        "top_k": lambda: rng.randint(0, 60),
        "top_p": lambda: rng.choice((0.1, 0.9, 1.0, 1.5)),
        "no_such_option": lambda: 1,
    }
    names = rng.sample(sorted(menu), rng.randint(1, 4))
    if "no_such_option" in names and rng.random() < 0.8:
        names.remove("no_such_option")
    return {"do_sample": sampling and rng.random() < 0.5, **{name: menu[name]() for name in names}}


def prepare(processor: Any, case: Case, device: torch.device) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """What `generate` gets for the case, and the same for each chat alone."""
    alone = [
        processor.apply_chat_template(
            chat, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(device)
        for chat in case.chats
    ]
    alone = [dict(inputs) for inputs in alone]
    return alone[0] if len(alone) == 1 else padded(alone, processor.tokenizer.pad_token_id), alone


def padded(prompts: Sequence[dict[str, Tensor]], pad: int, side: str = "left") -> dict[str, Tensor]:
    """Several prompts as one batch, their images in the same order."""
    longest = max(inputs["input_ids"].shape[1] for inputs in prompts)
    out = {}
    for name in SEQUENCES:
        rows = [(inputs[name], longest - inputs[name].shape[1]) for inputs in prompts]
        sides = [(row, (missing, 0) if side == "left" else (0, missing)) for row, missing in rows]
        fill = pad if name == "input_ids" else 0
        out[name] = torch.cat([torch.nn.functional.pad(row, where, value=fill) for row, where in sides])
    for name in VISUAL:
        if found := [inputs[name] for inputs in prompts if name in inputs]:
            out[name] = torch.cat(found)
    return out
