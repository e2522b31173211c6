"""Preprocessing on the model's device: the stock processor, whose still images a kernel resizes, normalises and cuts.

`on_device` makes it from a loaded processor. Grids and pixels are those of stock on the CPU, bit by bit; the bytes of
an image go to the GPU from pinned memory, and what the model reads is made there. Ids, masks and grids stay on the CPU,
as stock leaves them. It prepares pixels and tokens and runs no part of the model. What it does not cover (videos,
tensors, arrays, paths, options of one's own) goes to the stock code, counted by its reason. Both classes bear the names
of those that they extend, so that all that is saved, printed or looked up by a class's name is stock's.
"""

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import numpy as np
import PIL.Image
import pyarrow
import torch
from torch import Tensor
from transformers import BatchFeature
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import make_flat_list_of_images
from transformers.models.qwen2_vl import image_processing_qwen2_vl as stock_images
from transformers.models.qwen3_vl import processing_qwen3_vl as stock

from vlmopt.errors import PartFailed
from vlmopt.kernels.patchify import launch, taps

logger = logging.getLogger("vlmopt")

PART = "preprocessing"
_AS_ARRAY = {"return_numpy": True} if "return_numpy" in inspect.signature(convert_to_rgb).parameters else {}
"""Newer releases of transformers deprecate a picture as `convert_to_rgb`'s result, the oldest give nothing else."""
COVERED = {"return_tensors": "pt"}
"""The options of a call that the kernel serves: what `apply_chat_template` passes on for a contest's harness."""
LENGTHS = {"padding", "truncation", "max_length"}
"""A tokenizer that has one of these for every call must see the whole prompt."""
EDGES = ("shortest_edge", "longest_edge")
STEPS = ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize")
OURS = ("pixels_on", "kernel", "calls")
"""What an image processor of ours has beside stock's options; nothing of it is saved."""
TRIAL = (47, 33)
"""Height and width of the picture by which a new processor is checked."""
KEPT_TABLES = 256
STAGING = range(16, 25)
"""Pinned memory comes in powers of two, kept for the next image: made ready for any image of up to 4 million pixels."""
BAND = 1 << 22
"""Bytes of an image that are read at a time where Pillow's memory is not in one piece."""


class Qwen2VLImageProcessor(stock_images.Qwen2VLImageProcessor):
    """The stock image processor, made by `of`, whose PIL images become pixels on the device `pixels_on`.

    `calls` counts the calls that were served there, under "device", and those left to stock, under their reasons.
    """

    pixels_on: torch.device
    kernel: Callable[..., Tensor]
    calls: Counter

    @classmethod
    def of(
        cls, images: stock_images.Qwen2VLImageProcessor, device: torch.device, kernel: Callable[..., Tensor] = launch
    ) -> "Qwen2VLImageProcessor":
        """A copy of `images`, all its options included; `kernel` is patchify's, or its reference, on `device`."""
        made = cls.__new__(cls)
        made.__dict__.update(copy.deepcopy(images.__dict__), pixels_on=device, kernel=kernel, calls=Counter())
        return made

    def preprocess(self, images: Any, **kwargs: Any) -> BatchFeature:
        """As stock: `pixel_values` [patches, values] fp32, on the device where the kernel serves, `image_grid_thw`."""
        reason = self.refusal(images, kwargs)
        self.calls[reason or "device"] += 1
        if reason is None:
            return self._pixels(make_flat_list_of_images(images))
        if self.calls[reason] == 1:
            logger.info("preprocessing is left to stock: %s", reason)
        return super().preprocess(images, **kwargs)

    def refusal(self, images: Any, options: dict[str, Any]) -> str | None:
        """Why stock must prepare these images under these options of a call, or None."""
        if options != COVERED:
            return "options other than return_tensors='pt' are given"
        leaves = list(_leaves(images))
        if not leaves or not all(isinstance(leaf, PIL.Image.Image) for leaf in leaves):
            return "not all images are PIL images"
        if not all(getattr(self, step) for step in STEPS) or self.device is not None:
            return "the image processor leaves out a step or has a device of its own"
        if self.resample != PIL.Image.Resampling.BICUBIC or not all(map(self.size.get, EDGES)):
            return "the image processor resizes in another way"
        if not all(np.size(values) == 3 for values in (self.image_mean, self.image_std)):
            return "the image processor's mean or deviation is not one of three colours"
        return None

    def to_dict(self) -> dict[str, Any]:
        """The stock image processor's options and nothing of ours."""
        return {name: value for name, value in super().to_dict().items() if name not in OURS}

    def _pixels(self, images: list[PIL.Image.Image]) -> BatchFeature:
        sizes = [self.resized(image) for image in images]
        with torch.cuda.device(self.pixels_on if self.pixels_on.type == "cuda" else -1):
            parts = [self._patches(image, *size) for image, size in zip(images, sizes, strict=True)]
        pixels = parts[0] if len(parts) == 1 else torch.cat(parts)
        grids = [[1, height // self.patch_size, width // self.patch_size] for height, width in sizes]
        return BatchFeature({"pixel_values": pixels, "image_grid_thw": torch.tensor(grids, dtype=torch.long)})

    def resized(self, image: PIL.Image.Image) -> tuple[int, int]:
        """Height and width that stock gives the image, or stock's `ValueError` for one that is too long."""
        factor, least, most = self.patch_size * self.merge_size, *map(self.size.get, EDGES)
        return stock_images.smart_resize(image.height, image.width, factor, min_pixels=least, max_pixels=most)

    def _patches(self, image: PIL.Image.Image, height: int, width: int) -> Tensor:
        device = self.pixels_on
        pixels = upload(rgb(image), device)
        tables = _table(image.width, width), _table(image.height, height)
        (columns, column_bits), (rows, row_bits) = ((t.to(device, non_blocking=True), bits) for t, bits in tables)
        levels = _levels(tuple(self.image_mean), tuple(self.image_std), self.rescale_factor, device)
        cut = self.patch_size, self.merge_size, self.temporal_patch_size
        return self.kernel(pixels, columns, column_bits, rows, row_bits, levels, *cut)


def _leaves(images: Any) -> Iterator[Any]:
    if isinstance(images, list | tuple):
        for item in images:
            yield from _leaves(item)
    else:
        yield images


def rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """The image as stock makes it RGB: transparency laid on white, any other mode as Pillow converts it."""
    if image.mode == "RGB" and image.info.get("transparency") is None:
        image.load()  # some formats know their mode only then
        return image if image.mode == "RGB" else image.convert("RGB")
    return PIL.Image.fromarray(np.asarray(convert_to_rgb(image, **_AS_ARRAY)))


def upload(image: PIL.Image.Image, device: torch.device) -> Tensor:
    """An RGB image as Pillow keeps it, [H, W, 4] uint8, on `device`; to a GPU from pinned memory, without waiting."""
    staging = torch.empty(image.height, image.width, 4, dtype=torch.uint8, pin_memory=device.type == "cuda")
    lines, top = staging.numpy(), 0
    for band in _bands(image):
        lines[top : top + len(band)] = band
        top += len(band)
    return staging.to(device, non_blocking=True)


def _bands(image: PIL.Image.Image) -> Iterator[np.ndarray]:
    """Pillow's own memory, to be read only: all of a small image, band after band of one that is not in one piece."""
    try:
        yield _shared(image)
    except ValueError:
        lines = max(1, BAND // (4 * image.width))
        for top in range(0, image.height, lines):
            yield _shared(image.crop((0, top, image.width, min(top + lines, image.height))))


def _shared(image: PIL.Image.Image) -> np.ndarray:
    return pyarrow.array(image).values.to_numpy().reshape(image.height, image.width, 4)


_table = lru_cache(KEPT_TABLES)(taps)


@lru_cache(8)
def _levels(mean: tuple[float, ...], std: tuple[float, ...], factor: float, device: torch.device) -> Tensor:
    """What stock makes of every grey level of every colour, [3, 256] fp32."""
    every = torch.arange(256, dtype=torch.uint8).expand(3, -1)[..., None].contiguous()
    normalised = stock_images.Qwen2VLImageProcessor().rescale_and_normalize(every, True, factor, True, mean, std)
    return normalised[..., 0].contiguous().to(device)


_EXPAND_LATER: ContextVar[bool] = ContextVar("expand_later", default=False)


class Qwen3VLProcessor(stock.Qwen3VLProcessor):
    """The stock processor that repeats an image's token after tokenising one of it, instead of tokenising hundreds.

    Only for one prompt under no option but `return_tensors="pt"`; any other call is stock's.
    """

    def __call__(self, images: Any = None, text: Any = None, videos: Any = None, audio: Any = None, **kwargs: Any):
        """As stock: ids, masks, `pixel_values` and `image_grid_thw` in a `BatchFeature`."""
        single = isinstance(text, str) or (isinstance(text, list) and len(text) == 1)
        later = single and images is not None and videos is None and audio is None and kwargs == COVERED
        if not later or LENGTHS & self.tokenizer.init_kwargs.keys():
            return super().__call__(images=images, text=text, videos=videos, audio=audio, **kwargs)
        with _expanding_later():
            output = super().__call__(images=images, text=text, **kwargs)
        return self._expanded(output)

    def replace_image_token(self, image_inputs: dict, image_idx: int, **kwargs: Any) -> str:
        """What stands for one image in the text that is tokenised."""
        if _EXPAND_LATER.get():
            return self.image_token
        return super().replace_image_token(image_inputs, image_idx, **kwargs)

    def _expanded(self, output: BatchFeature) -> BatchFeature:
        visual = output["input_ids"][0] == self.image_token_id
        repeats = torch.ones_like(output["input_ids"][0])
        repeats[visual] = output["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2
        for name in output.keys() - set(self.image_processor.model_input_names):
            output[name] = output[name].repeat_interleave(repeats, dim=1)
        return output


@contextmanager
def _expanding_later() -> Iterator[None]:
    before = _EXPAND_LATER.set(True)
    try:
        yield
    finally:
        _EXPAND_LATER.reset(before)


def on_device(processor: Any, device: torch.device | str) -> Any:
    """A processor like `processor` that prepares still images on `device`; on a CPU `processor` itself.

    Tokenizer and video processor are shared, the image processor's options copied. A small image is prepared at once,
    which compiles the kernel, and compared with stock's.

    Raises:
        PartFailed: another kind of processor, or the kernel does not work here.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return processor
    _require(processor, stock.Qwen3VLProcessor)
    _require(processor.image_processor, stock_images.Qwen2VLImageProcessor)
    images = Qwen2VLImageProcessor.of(processor.image_processor, device)
    check(images, processor.image_processor)
    for bits in STAGING:
        torch.empty(1 << bits, dtype=torch.uint8, pin_memory=True)
    return with_images(processor, images)


def with_images(processor: stock.Qwen3VLProcessor, images: Qwen2VLImageProcessor) -> Qwen3VLProcessor:
    """A processor with `images` in the place of that of `processor`, whose other parts it shares."""
    parts = images, processor.tokenizer, processor.video_processor
    return Qwen3VLProcessor(*parts, chat_template=processor.chat_template)


def _require(part: Any, kind: type) -> None:
    if type(part) is not kind:
        raise PartFailed(PART, f"it extends {kind.__name__}, and this is a {type(part).__name__}; use it as it is")


def check(images: Qwen2VLImageProcessor, plain: stock_images.Qwen2VLImageProcessor) -> None:
    """Prepare a small picture by both image processors and compare; it is not counted among the calls.

    Raises:
        PartFailed: `images` leave the picture to stock, fail, or give other pixels than `plain`.
    """
    picture = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (*TRIAL, 3), dtype=np.uint8))
    try:
        ours, expected = (each(picture, return_tensors="pt")["pixel_values"].cpu() for each in (images, plain))
    except Exception as error:  # a compiler's errors share no base class
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise PartFailed(PART, f"its kernel does not work here ({reason[0]}); leave preprocessing out") from error
    if not images.calls["device"]:
        raise PartFailed(PART, f"{next(iter(images.calls))}; leave preprocessing out")
    if not torch.equal(ours, expected):
        raise PartFailed(PART, "its kernel gives other pixels than stock; leave preprocessing out")
    images.calls.clear()
