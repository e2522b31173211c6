"""Signs to read: random strings drawn once as strips of text, placed as coloured signs on a smooth background.

A scene is planned on the CPU as a few integers (`plan`) and painted on any device (`paint`), so that training paints
whole batches on the GPU and the data set paints the very same layouts, exactly, on the CPU: every value is a whole
number below 2**24 in fp32, hence free of rounding, hence equal on every device. Signs never share a pixel row,
which makes "from top to bottom" unambiguous and painting a single pass: a pixel row belongs to at most one sign.

A string is held out of training when its CRC-32 is a multiple of 16; the 500 samples of the data set use only those.
"""

import random
import zlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

# Height and width in pixels, multiples of 32: 32 to 80 visual tokens.
SIZES = (
    *((128, 256), (160, 320), (192, 192), (192, 256), (192, 320)),
    *((224, 224), (224, 288), (256, 192), (256, 256), (256, 320)),
)
COLOURS = {
    "red": (200, 40, 40),
    "green": (40, 150, 60),
    "blue": (40, 70, 190),
    "yellow": (225, 205, 50),
    "black": (25, 25, 25),
    "white": (240, 240, 240),
    "orange": (235, 135, 40),
    "purple": (125, 60, 150),
}
NAMES = tuple(COLOURS)
MAX_SIGNS = 6
FONT_SIZES = (18, 28)
STRIP_HEIGHT, STRIP_WIDTH = 34, 208  # the last row and column stay empty: a clamped read there finds no ink
MARGIN = 24  # pixels of an image's width that the text itself leaves free

QUESTIONS = {
    "colour": ("what is written on the {colour} sign?", "what does the {colour} sign say?"),
    "top": ("what does the top sign say?", "what is written on the top sign?"),
    "bottom": ("what does the bottom sign say?", "what is written on the bottom sign?"),
    "count": ("how many signs are there?", "how many signs can you see?"),
    "which_colour": ("what color is the sign that says {text}?", "which color is the sign with the text {text}?"),
    "read_all": ("read all signs.", "read all signs from top to bottom."),
}
KINDS = tuple(QUESTIONS)
KNOTS = (4, 6)  # rows and columns of a background's colours; between them it is smooth
LIGHT, TINT, HUE = (60, 190), 30, 20  # brightness of a knot, the image's tint, a knot's own colour
LONGEST_ANSWER = 60  # characters of a "read all" answer
ARTICLES = ("a", "an", "the")  # an answer normalised for scoring loses them, so no sign says just that

CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"
ENDINGS = ("", "n", "r", "s", "t", "l", "ck", "m", "x")


def held_out(text: str) -> bool:
    """Whether `text` is kept for evaluation: one string in sixteen, by a hash that no seed changes."""
    return zlib.crc32(text.encode()) % 16 == 0


def random_text(rng: random.Random, is_held_out: bool) -> str:
    """A number of 1-6 digits (35 %), a made-up word of 1-3 syllables (50 %) or 2-6 letters (15 %)."""
    while True:
        kind = rng.random()
        if kind < 0.35:
            text = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 6)))
        elif kind < 0.85:
            syllables = (rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 3)))
            text = "".join(syllables) + rng.choice(ENDINGS)
        else:
            text = "".join(rng.choice(CONSONANTS + VOWELS) for _ in range(rng.randint(2, 6)))
        if held_out(text) == is_held_out and text not in ARTICLES:
            return text


@cache
def font_files() -> tuple[str, ...]:
    """The twelve DejaVu faces that matplotlib ships (Sans, Mono and Serif; regular, bold, oblique)."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return tuple(str(path) for path in sorted(folder.glob("DejaVu*.ttf")) if "Display" not in path.name)


@cache
def font(path: str, size: int) -> ImageFont.FreeTypeFont:
    """A font at a size; the basic layout engine, because the other is not in every Pillow."""
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


def draw_strip(rng: random.Random, text: str) -> np.ndarray:
    """Coverage (uint8, cropped to the ink's box) of `text` in a random face and size; upper case in 40 %."""
    shown = text.upper() if rng.random() < 0.4 else text
    path, size = rng.choice(font_files()), rng.randint(*FONT_SIZES)
    while True:
        left, top, right, bottom = font(path, size).getbbox(shown)
        width, height = int(right - left), int(bottom - top)
        if width < STRIP_WIDTH and height < STRIP_HEIGHT:
            break
        size -= 1
    image = Image.new("L", (width, height))
    ImageDraw.Draw(image).text((-left, -top), shown, font=font(path, size), fill=255)
    return np.asarray(image)


@dataclass(frozen=True)
class Strips:
    """Drawn strings, narrow ones first, so that those which fit an image are a prefix.

    `pixels`: uint8 [count, STRIP_HEIGHT, STRIP_WIDTH], zero outside each text.
    """

    texts: list[str]
    widths: list[int]
    heights: list[int]
    pixels: torch.Tensor

    def pick(self, rng: random.Random, limit: int) -> int:
        """The index of a random strip at most `limit` pixels wide."""
        return rng.randrange(bisect_right(self.widths, limit))


def draw_some(job: tuple[int, int, bool]) -> list[tuple[str, np.ndarray]]:
    """`count` strips from `seed`: one job of a process pool."""
    seed, count, is_held_out = job
    rng = random.Random(seed)
    texts = [random_text(rng, is_held_out) for _ in range(count)]
    return [(text, draw_strip(rng, text)) for text in texts]


def draw_strips(seed: int, count: int, is_held_out: bool, map_jobs: Callable = map) -> Strips:
    """`count` strips, the same for the same seed; `map_jobs` may be the `imap` of a process pool."""
    jobs = [(seed * 1_000_003 + first, min(500, count - first), is_held_out) for first in range(0, count, 500)]
    drawn = [strip for job in map_jobs(draw_some, jobs) for strip in job]
    drawn.sort(key=lambda strip: strip[1].shape[1])
    pixels = np.zeros((count, STRIP_HEIGHT, STRIP_WIDTH), np.uint8)
    for canvas, (_, ink) in zip(pixels, drawn, strict=True):
        canvas[: ink.shape[0], : ink.shape[1]] = ink
    sizes = [ink.shape for _, ink in drawn]
    texts = [text for text, _ in drawn]
    return Strips(texts, [w for _, w in sizes], [h for h, _ in sizes], torch.from_numpy(pixels))


@dataclass(frozen=True)
class Scene:
    """One question about one picture: what `paint` needs, what is asked, and the right answer.

    `signs`: one row of integers per sign, top first; columns as in SIGN_COLUMNS.
    """

    size: tuple[int, int]
    signs: list[tuple[int, ...]]
    texts: list[str]
    colours: list[str]
    kind: str
    question: str
    answer: str


SIGN_COLUMNS = ("strip", "red", "green", "blue", "ink", "x", "y", "width", "height", "text_x", "text_y")


def place(rng: random.Random, strips: Strips, size: tuple[int, int], count: int) -> tuple | None:
    """`count` signs with distinct texts and colours at random places, or None when they do not fit."""
    height, width = size
    picked = [strips.pick(rng, width - MARGIN) for _ in range(count)]
    if len({strips.texts[i] for i in picked}) < count:
        return None
    pads = [(rng.randint(4, 10), rng.randint(3, 6)) for _ in picked]
    boxes = [(strips.widths[i] + 2 * x, strips.heights[i] + 2 * y) for i, (x, y) in zip(picked, pads, strict=True)]
    free = height - sum(box_height + 2 for _, box_height in boxes)
    if free < 0:
        return None
    gaps = sorted(rng.randint(0, free) for _ in picked)
    colours = rng.sample(NAMES, count)
    signs, y = [], 0
    for i, (strip, (pad_x, pad_y), (box_width, box_height)) in enumerate(zip(picked, pads, boxes, strict=True)):
        base = COLOURS[colours[i]]
        paint = [min(255, max(0, channel + rng.randint(-12, 12))) for channel in base]
        ink = 250 if sum(base) < 420 else 10
        top = y + gaps[i] + 1
        signs.append((strip, *paint, ink, rng.randint(0, width - box_width), top, box_width, box_height, pad_x, pad_y))
        y += box_height + 2
    return signs, [strips.texts[i] for i in picked], colours


def plan(rng: random.Random, strips: Strips, size: tuple[int, int], count: int, kind: str) -> Scene:
    """A scene of `count` signs with a question of `kind`; draws again until the signs fit."""
    while (placed := place(rng, strips, size, count)) is None:
        pass
    signs, texts, colours = placed
    i = rng.randrange(count)
    answer = {
        "colour": texts[i],
        "top": texts[0],
        "bottom": texts[-1],
        "count": str(count),
        "which_colour": colours[i],
        "read_all": ", ".join(texts),
    }[kind]
    question = rng.choice(QUESTIONS[kind]).format(colour=colours[i], text=texts[i])
    return Scene(size, signs, texts, colours, kind, question, answer)


def sign_table(scenes: list[Scene]) -> torch.Tensor:
    """The signs of scenes as int32 [B, MAX_SIGNS, len(SIGN_COLUMNS)], padded with rows of zeros."""
    table = torch.zeros(len(scenes), MAX_SIGNS, len(SIGN_COLUMNS), dtype=torch.int32)
    for row, scene in zip(table, scenes, strict=True):
        row[: len(scene.signs)] = torch.tensor(scene.signs)
    return table


def most_signs(size: tuple[int, int]) -> int:
    """How many signs an image of this size holds with room to spare (3 to 6)."""
    return min(MAX_SIGNS, size[0] // 40)


def ramp(cells: int, pixels: int, device: torch.device | str) -> torch.Tensor:
    """Linear interpolation from `cells` knots to `pixels` positions as whole 64ths, fp32 [pixels, cells]."""
    position = torch.arange(pixels, device=device) * (64 * (cells - 1)) // (pixels - 1)
    distance = (position[:, None] - 64 * torch.arange(cells, device=device)).abs()
    return (64 - distance).clamp(min=0).float()


def paint(signs: torch.Tensor, pixels: torch.Tensor, knots: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Paint scenes of one size.

    Args:
        signs: int [B, MAX_SIGNS, len(SIGN_COLUMNS)], rows of zeros where there is no sign.
        pixels: the strips, uint8 [count, STRIP_HEIGHT, STRIP_WIDTH].
        knots: the background's colours, fp32 [B, 3, rows, columns], whole numbers 0..255.
        size: height and width in pixels.

    Returns:
        fp32 [B, 3, height, width], whole numbers 0..255.
    """
    height, width = size
    device = signs.device
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    vertical, horizontal = ramp(knots.shape[2], height, device), ramp(knots.shape[3], width, device)
    image = torch.floor(vertical @ knots @ horizontal.T / 4096)

    # The one sign of each pixel row: its eleven numbers, int64 [B, height] each.
    first, size_y = signs[:, :, 6, None], signs[:, :, 8, None]
    covers = (rows >= first) & (rows < first + size_y)
    owner = covers.int().argmax(1).long()
    row = signs.long().gather(1, owner[..., None].expand(-1, -1, signs.shape[2])).unbind(2)
    strip, red, green, blue, ink, x, y, box_width, _, text_x, text_y = row

    inside = covers.any(1)[..., None] & (columns >= x[..., None]) & (columns < (x + box_width)[..., None])
    colour = torch.stack([red, green, blue], 1)[..., None].float()
    image = torch.where(inside[:, None], colour, image)

    strip_y = rows - y - text_y
    strip_y = strip_y.masked_fill((strip_y < 0) | (strip_y >= STRIP_HEIGHT), STRIP_HEIGHT - 1)
    strip_x = columns - (x + text_x)[..., None]
    strip_x = strip_x.masked_fill((strip_x < 0) | (strip_x >= STRIP_WIDTH), STRIP_WIDTH - 1)
    start = (strip * STRIP_HEIGHT + strip_y) * STRIP_WIDTH
    coverage = pixels.view(-1)[start[..., None] + strip_x].float() * inside
    return image + torch.round((ink[:, None, :, None].float() - image) * coverage[:, None] / 255)


QUANTISATION = (  # the JPEG standard's luminance table
    *(16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56),
    *(14, 17, 22, 29, 51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92),
    *(49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99),
)


@cache
def jpeg_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The orthonormal cosine transform of an 8x8 block, fp32 [64, 64], and the quantisation steps at quality 50."""
    n = torch.arange(8)
    basis = torch.cos((2 * n + 1) * n[:, None] * torch.pi / 16) / 2
    basis[0] = 8**-0.5
    return torch.kron(basis, basis).to(device), torch.tensor(QUANTISATION, dtype=torch.float32).to(device)


def jpeg_like(image: torch.Tensor, quality: torch.Tensor) -> torch.Tensor:
    """What JPEG does to an image: quantised 8x8 cosine transform of the luma, chroma at half resolution.

    Args:
        image: fp32 [B, 3, H, W], 0..255; H and W multiples of 8.
        quality: fp32 [B], 50..100, as Pillow counts it.
    """
    batch, _, height, width = image.shape
    transform, table = jpeg_tables(image.device)
    steps = (table * (2 - quality[:, None, None] / 50)).round().clamp(min=1)

    luma = (0.299 * image[:, 0] + 0.587 * image[:, 1] + 0.114 * image[:, 2])[:, None]
    chroma = F.interpolate(F.avg_pool2d(image - luma, 2), scale_factor=2, mode="bilinear")
    blocks = (luma - 128).view(batch, height // 8, 8, width // 8, 8).transpose(2, 3).reshape(batch, -1, 64)
    blocks = (torch.round(blocks @ transform.T / steps) * steps) @ transform
    luma = blocks.view(batch, height // 8, width // 8, 8, 8).transpose(2, 3).reshape(batch, 1, height, width) + 128
    return (luma + chroma).round().clamp(0, 255)
