"""Strings, strips, scenes and their painting."""

import io
import random

import numpy as np
import pytest
import torch
from PIL import Image

from vlmopt.workbook import signs


@pytest.fixture(scope="module")
def strips() -> signs.Strips:
    return signs.draw_strips(7, 600, is_held_out=False)


def scenes(strips: signs.Strips, count: int, kind: str = "read_all") -> list[signs.Scene]:
    rng = random.Random(kind)
    sizes = [signs.SIZES[i % len(signs.SIZES)] for i in range(count)]
    return [signs.plan(rng, strips, size, rng.randint(1, signs.most_signs(size)), kind) for size in sizes]


def paint_by_hand(scene: signs.Scene, strips: signs.Strips, knots: np.ndarray) -> np.ndarray:
    """The same picture, sign by sign and pixel by pixel: float64 [H, W, 3]."""
    height, width = scene.size
    image = np.empty((height, width, 3))
    for y in range(height):
        for x in range(width):
            v, u = 64 * 3 * y // (height - 1), 64 * 5 * x // (width - 1)
            i, j, fv, fu = min(v // 64, 2), min(u // 64, 4), v, u
            fv, fu = fv - 64 * i, fu - 64 * j
            upper = (64 - fu) * knots[:, i, j] + fu * knots[:, i, j + 1]
            lower = (64 - fu) * knots[:, i + 1, j] + fu * knots[:, i + 1, j + 1]
            image[y, x] = ((64 - fv) * upper + fv * lower) // 4096
    for strip, red, green, blue, ink, x, y, box_width, box_height, text_x, text_y in scene.signs:
        image[y : y + box_height, x : x + box_width] = (red, green, blue)
        coverage = strips.pixels[strip].numpy()[: strips.heights[strip], : strips.widths[strip], None].astype(float)
        top, left = y + text_y, x + text_x
        patch = image[top : top + coverage.shape[0], left : left + coverage.shape[1]]
        patch += np.round((ink - patch) * coverage / 255)
    return image


def test_a_string_is_held_out_by_its_crc_alone():
    """Known values: no seed, and no later version, may move a string from one side to the other."""
    assert [text for text in map(str, range(100)) if signs.held_out(text)] == ["28", "37", "49", "56", "61", "94"]


def test_training_strings_and_held_out_strings_never_meet():
    rng = random.Random(0)
    seen = {signs.random_text(rng, False) for _ in range(2000)}
    kept = {signs.random_text(rng, True) for _ in range(500)}
    assert not any(map(signs.held_out, seen)) and all(map(signs.held_out, kept))
    assert not seen & kept and not (seen | kept) & set(signs.ARTICLES)
    assert all(text.isalnum() and text == text.lower() and 1 <= len(text) <= 8 for text in seen | kept)


def test_strips_are_the_same_for_the_same_seed_and_sorted_by_width(strips):
    again = signs.draw_strips(7, 600, is_held_out=False)
    other = signs.draw_strips(8, 600, is_held_out=False)
    assert again.texts == strips.texts and torch.equal(again.pixels, strips.pixels)
    assert other.texts != strips.texts
    assert strips.widths == sorted(strips.widths)


def test_a_strip_holds_ink_in_its_box_and_nowhere_else(strips):
    for pixels, width, height in zip(strips.pixels, strips.widths, strips.heights, strict=True):
        assert pixels[:height, :width].max() > 128
        assert pixels[height:].sum() == 0 and pixels[:, width:].sum() == 0
    assert strips.pixels[:, -1].sum() == 0 and strips.pixels[:, :, -1].sum() == 0


def test_there_are_at_least_eight_sizes_of_whole_visual_tokens():
    assert len(set(signs.SIZES)) >= 8
    assert all(height % 32 == 0 and width % 32 == 0 and height * width <= 80 * 1024 for height, width in signs.SIZES)


def test_signs_lie_inside_the_image_and_share_no_row(strips):
    for scene in scenes(strips, 200):
        height, width = scene.size
        below = 0
        for _, _, _, _, _, x, y, box_width, box_height, _, _ in scene.signs:
            assert below <= y and y + box_height <= height
            assert x >= 0 and x + box_width <= width
            below = y + box_height
        assert len(set(scene.texts)) == len(set(scene.colours)) == len(scene.signs)


@pytest.mark.parametrize("kind", signs.KINDS)
def test_the_answer_is_what_the_picture_shows(strips, kind):
    for scene in scenes(strips, 60, kind):
        assert [strips.texts[sign[0]] for sign in scene.signs] == scene.texts
        colours = dict(zip(scene.colours, scene.texts, strict=True))
        right = {
            "top": scene.texts[0],
            "bottom": scene.texts[-1],
            "count": str(len(scene.signs)),
            "read_all": ", ".join(scene.texts),
            "colour": next((text for name, text in colours.items() if name in scene.question.split()), None),
            "which_colour": next((c for c, text in colours.items() if scene.question.endswith(f" {text}?")), None),
        }
        assert scene.answer == right[kind]
        for (_, red, green, blue, *_), name in zip(scene.signs, scene.colours, strict=True):
            assert np.abs(np.array(signs.COLOURS[name]) - (red, green, blue)).max() <= 12


def test_painting_equals_painting_by_hand(strips):
    for scene in scenes(strips, 4):
        knots = torch.randint(0, 256, (1, 3, *signs.KNOTS)).float()
        painted = signs.paint(signs.sign_table([scene]), strips.pixels, knots, scene.size)[0].permute(1, 2, 0)
        expected = paint_by_hand(scene, strips, knots[0].numpy())
        assert np.array_equal(painted.numpy(), expected)
        signs_moved = signs.sign_table([scene])
        signs_moved[0, 0, 9] += 1
        moved = signs.paint(signs_moved, strips.pixels, knots, scene.size)[0].permute(1, 2, 0)
        assert not np.array_equal(moved.numpy(), expected)


def test_a_batch_is_painted_as_each_scene_alone(strips):
    size = (192, 256)
    rng = random.Random(3)
    batch = [signs.plan(rng, strips, size, count, "count") for count in (1, 4, 2)]
    knots = torch.randint(0, 256, (3, 3, *signs.KNOTS)).float()
    together = signs.paint(signs.sign_table(batch), strips.pixels, knots, size)
    for i, scene in enumerate(batch):
        alone = signs.paint(signs.sign_table([scene]), strips.pixels, knots[i : i + 1], size)
        assert torch.equal(together[i : i + 1], alone)


@pytest.mark.parametrize("quality", [60, 85, 95])
def test_the_codec_on_the_gpu_does_to_grey_what_pillow_does(strips, quality):
    """Grey, because chroma is only halved, not quantised; Pillow's transform is in whole numbers, so not quite ours."""
    scene = scenes(strips, 1)[0]
    image = signs.paint(signs.sign_table([scene]), strips.pixels, torch.full((1, 3, *signs.KNOTS), 120.0), scene.size)
    grey = (image.mean(1) + 3 * torch.randn(1, *scene.size)).round().clamp(0, 255)
    stream = io.BytesIO()
    Image.fromarray(grey[0].to(torch.uint8).numpy()).save(stream, "JPEG", quality=quality)
    real = torch.from_numpy(np.array(Image.open(stream))).float()[None]
    image = grey[:, None].expand(-1, 3, -1, -1)
    ours, other = (signs.jpeg_like(image, torch.tensor([float(q)])) for q in (quality, quality - 10))
    damage = (real - image).square().mean().sqrt()
    assert damage > 0.5
    assert (ours - real).square().mean().sqrt() < 0.4 * damage
    assert (other - real).square().mean().sqrt() > 0.7 * damage
