"""Images of every size, shape, mode and orientation, alone and together."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import load_image

from vlmopt.tests.contract.compare import both, same, served

GREEDY = {"do_sample": False, "max_new_tokens": 4}
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "I;16", "F")
ORIENTATION = 0x0112


def picture(height, width, mode="RGB"):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    if mode == "I;16":
        return Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    return Image.fromarray(pixels).convert(mode)


def ask(processor, *content):
    parts = [part if isinstance(part, dict) else {"type": "image", "image": part} for part in content]
    return processor.apply_chat_template(
        [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )


def agree(ours, stock, inputs):
    mine, theirs = both(ours, stock, inputs, **GREEDY)
    return same(mine, theirs) and torch.is_tensor(mine)


@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (1, 2), (2, 1), (3, 3), (28, 26), (27, 332), (300, 30), (1, 200), (200, 1)]
)
def test_very_small_and_very_long_images(ours, stock, reference, height, width):
    inputs = ask(reference.processor, picture(height, width))
    assert agree(ours, stock, inputs)
    assert served(ours) == {"stages": 1}


@pytest.mark.parametrize("shape", [(3, 3), (3, 3, 3), (3, 5, 7), (5, 7, 3), (1, 9, 9), (9, 9, 1)])
def test_arrays_whose_channel_axis_must_be_guessed(ours, stock, reference, shape):
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    assert agree(ours, stock, ask(reference.processor, array))
    assert served(ours) == {"stages": 1}


@pytest.mark.parametrize(("height", "width"), [(1, 201), (2276, 10)])
def test_beyond_a_ratio_of_200_the_processor_refuses_by_name(reference, height, width):
    with pytest.raises(ValueError, match="aspect ratio"):
        ask(reference.processor, picture(height, width))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_pillows(ours, stock, reference, mode):
    assert agree(ours, stock, ask(reference.processor, picture(47, 61, mode)))
    assert served(ours) == {"stages": 1}


def test_a_turned_photo_is_turned_only_by_load_image(ours, stock, reference, tmp_path):
    """A trap of stock's: an opened file and a path are read as stored, `load_image` heeds the camera's mark."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    kept = io.BytesIO()
    picture(100, 200).save(kept, "JPEG", exif=exif)
    path = tmp_path / "photo.jpg"
    path.write_bytes(kept.getvalue())
    stored, turned = (ask(reference.processor, image) for image in (Image.open(path), load_image(str(path))))
    assert stored["image_grid_thw"][0].tolist() == turned["image_grid_thw"][0][[0, 2, 1]].tolist()
    assert stored["image_grid_thw"][0, 1] < stored["image_grid_thw"][0, 2]
    for inputs in (stored, turned):
        assert agree(ours, stock, inputs)
    assert served(ours) == {"stages": 2}


@pytest.mark.parametrize("before", ["", "x", "t" * 200])
@pytest.mark.parametrize("between", ["", "and"])
def test_three_images_of_different_sizes(ours, stock, prompt, before, between):
    """DeepStack features must land on their own rows, wherever the runs of image tokens begin."""
    assert agree(ours, stock, prompt(before, (64, 64), between, (32, 96), between, (96, 32), "last"))
    assert served(ours) == {"stages": 1}


def test_a_still_video_and_a_mixed_prompt_are_stocks(ours, stock, reference):
    frames = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    for content in ([{"type": "video", "video": frames}], [picture(32, 64), {"type": "video", "video": frames}]):
        assert agree(ours, stock, ask(reference.processor, *content))
    assert served(ours) == {"stock": 2}
