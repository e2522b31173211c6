"""From a PIL image and a question to the model's inputs: where stock's time goes, and what the processor of ours takes.

On a machine without a GPU our processor stays stock's. There its image processor is held against stock with the
kernel's reference in the kernel's place, and what is timed is its host part: all but the kernel.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from vlmopt import processor as own
from vlmopt.bench import models
from vlmopt.bench.roofline import copy_rate
from vlmopt.bench.timing import clear_cache, interleave, synchronize, time_call
from vlmopt.kernels.patchify import patchify_ref
from vlmopt.workbook import end_to_end, plots
from vlmopt.workbook.record import Record, Roof, measurement

STOCK, ON_DEVICE, OWN, HOST = "stock", "stock, device=cuda", "vlmopt", "vlmopt, host part"
BORROWED = "fast, stock's processor"
MS, STEP, DRAFT, LEVELS = "preprocessing_ms", "step_ms", "draft_ms", "grey_levels"
SIZES = {"smoke": ((256, 320), (512, 512), (500, 700)), "full": ((512, 512), (768, 1024), (1536, 2048), (3000, 4000))}
"""Height and width of the images that are timed."""
PREDICTED_MS = {(512, 512): 1.4, (768, 1024): 1.7, (1536, 2048): 3.2, (3000, 4000): 12.0}
PREDICTED_TIMES = {(256, 320): 2.5, (512, 512): 4.0, (500, 700): 6.0}
"""How many times longer stock takes than our host part: estimated from its steps on a quiet machine."""
PREDICTED_SAVED_MS = 8.0
CHECKED = ((1, 1), (1, 2), (28, 26), (27, 332), (200, 1), (64, 96), (333, 500), (700, 501))
MODES = ("RGB", "L", "P", "RGBA", "CMYK")
BUS_BYTES = 1 << 26


@dataclass(frozen=True)
class Ways:
    """Stock's processor and ours, with the limits of Qwen3-VL-2B-Instruct, for one device."""

    device: torch.device
    stock: Any
    own: Any

    @property
    def on_gpu(self) -> bool:
        """Whether ours has a device to prepare pixels on."""
        return self.device.type == "cuda"

    @property
    def judged(self) -> str:
        """The provider that stands for ours here."""
        return OWN if self.on_gpu else HOST

    def calls(self, image: PIL.Image.Image) -> dict[str, Callable[[], Any]]:
        """Each way from one image and a question to inputs on the device, as the contest's harness asks."""
        found = {STOCK: partial(inputs, self.stock, image, self.device)}
        if not self.on_gpu:
            return {**found, HOST: partial(inputs, host_part(self), image, self.device)}
        chosen = {"processor_kwargs": {"images_kwargs": {"device": str(self.device)}}}
        return {
            **found,
            ON_DEVICE: partial(inputs, self.stock, image, self.device, **chosen),
            OWN: partial(inputs, self.own, image, self.device),
        }


def ways() -> Ways:
    """The two processors for this machine's first GPU, or for its CPU (see the module)."""
    from transformers import AutoProcessor

    device = torch.device(models.default_device())
    stock = AutoProcessor.from_pretrained(models.TINY, local_files_only=True)
    stock.image_processor.size = {"shortest_edge": 65536, "longest_edge": 16777216}
    if device.type == "cuda":
        return Ways(device, stock, own.on_device(stock, device))
    images = own.Qwen2VLImageProcessor.of(stock.image_processor, device, patchify_ref)
    return Ways(device, stock, own.with_images(stock, images))


def host_part(found: Ways) -> Any:
    """Our processor with a kernel that does nothing."""

    def nothing(image: Tensor, columns: Tensor, _: int, rows: Tensor, __: int, levels: Tensor, *cut: int) -> Tensor:
        patch, _, frames = cut
        return levels.new_empty(rows.shape[1] * columns.shape[1] // patch**2, 3 * frames * patch**2)

    images = own.Qwen2VLImageProcessor.of(found.stock.image_processor, found.device, nothing)
    return own.with_images(found.stock, images)


def inputs(processor: Any, image: PIL.Image.Image, device: torch.device, **options: Any) -> Any:
    """What the harness makes of one image and a question, on `device`."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": end_to_end.QUESTION}]
    found = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        **options,
    )
    return found.to(device)


def pictures(seed: int) -> dict[str, PIL.Image.Image]:
    """Images to check by, of all sizes, shapes and modes: random pixels, half of them black or white."""
    rng = np.random.default_rng(seed)
    found = {}
    for height, width in CHECKED:
        for mode in MODES if (height, width) == (64, 96) else MODES[:1]:
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            hard = rng.integers(0, 2, (height, width, 1), dtype=bool)
            image = PIL.Image.fromarray(np.where(hard, (pixels > 127) * np.uint8(255), pixels))
            found[f"{mode} {height}x{width}"] = image.convert(mode)
    return found


def checks(found: Ways, images: Mapping[str, PIL.Image.Image]) -> list[tuple[str, str, float, float]]:
    """What `Record.check` takes: that ids and grids are stock's, and the worst pixel, over all `images`."""
    before = found.own.image_processor.calls["device"]
    pairs = [
        (inputs(found.stock, image, found.device), inputs(found.own, image, found.device)) for image in images.values()
    ]
    names = [name for name in pairs[0][0] if name != "pixel_values"]
    other = sum(not torch.equal(stock[name], ours[name]) for stock, ours in pairs for name in names)
    worst = max(grey_levels(found, stock, ours) for stock, ours in pairs)
    left = before + len(images) - found.own.image_processor.calls["device"]
    return [
        (f"{', '.join(names)}: those unlike stock's, {len(images)} images", "exact", other, 0),
        ("largest difference of a pixel, grey levels", "exact", worst, 0),
        ("images that were left to stock", "exact", left, 0),
    ]


def grey_levels(found: Ways, stock: Any, other: Any) -> float:
    """The largest difference of a normalised pixel in grey levels of 1/255; infinite for another grid."""
    if not torch.equal(stock["image_grid_thw"], other["image_grid_thw"]):
        return float("inf")
    scale = 255 * max(found.stock.image_processor.image_std)
    return ((stock["pixel_values"] - other["pixel_values"]).abs().max() * scale).item()


def measure_levels(record: Record, found: Ways, images: Mapping[str, PIL.Image.Image]) -> None:
    """Adds by how much resizing in floating point moves a pixel, torchvision's way on a GPU: on the CPU, and where
    there is a GPU by stock's own `device=`."""
    moved = [_float_difference(found, image.convert("RGB")) for image in images.values()]
    record.measure(f"{len(images)} images", "resized in floating point", LEVELS, "levels", moved)
    if not found.on_gpu:
        record.skip(f"{ON_DEVICE}: {LEVELS}", "there is no GPU here")
        return
    calls = [found.calls(image) for image in images.values()]
    moved = [grey_levels(found, call[STOCK](), call[ON_DEVICE]()) for call in calls]
    record.measure(f"{len(images)} images", ON_DEVICE, LEVELS, "levels", moved)


def _float_difference(found: Ways, image: PIL.Image.Image) -> float:
    planes = tv.pil_to_tensor(image)
    size = found.own.image_processor.resized(image)
    how = {"interpolation": tv.InterpolationMode.BICUBIC, "antialias": True}
    exact, rounded = tv.resize(planes, size, **how).float(), tv.resize(planes.float(), size, **how)
    return (exact - rounded.clamp(0, 255).round()).abs().max().item()


def stock_steps(found: Ways, image: PIL.Image.Image) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Stock's steps on the CPU, one after the other, each on what the one before gave; the last copies to a GPU."""
    images, tokenizer = found.stock.image_processor, found.stock.tokenizer
    size = found.own.image_processor.resized(image)
    cut = images.patch_size, images.merge_size, images.temporal_patch_size
    mean, std = tuple(images.image_mean), tuple(images.image_std)
    how = {"interpolation": tv.InterpolationMode.BICUBIC, "antialias": True}
    array = np.array(image.convert("RGB"))
    yield "Pillow to NumPy", lambda: np.array(image.convert("RGB"))
    yield "to planes", lambda: torch.from_numpy(array).permute(2, 0, 1).contiguous()
    planes = torch.from_numpy(array).permute(2, 0, 1).contiguous()[None]
    yield "resize", lambda: tv.resize(planes, size, **how)
    resized = tv.resize(planes, size, **how)
    yield "normalise", lambda: images.rescale_and_normalize(resized, True, images.rescale_factor, True, mean, std)
    normal = images.rescale_and_normalize(resized, True, images.rescale_factor, True, mean, std)
    yield "patchify", lambda: images.patchify(normal, *cut)
    pixels = images.patchify(normal, *cut)[0][0]
    text = found.stock.image_token * (len(pixels) // images.merge_size**2)
    yield "tokenise", lambda: tokenizer(text, return_tensors="pt")
    if found.on_gpu:
        yield "copy to the GPU", lambda: pixels.to(found.device)


def measure_steps(record: Record, found: Ways, image: PIL.Image.Image, rounds: int) -> None:
    """Adds `step_ms`: each of stock's steps on the CPU, and what the whole call takes beside them."""
    case, total = _case(image), 0.0
    for name, step in stock_steps(found, image):
        times = _times(step, found.device, rounds)
        total += statistics.median(times)
        record.measure(case, name, STEP, "ms", times)
    whole = statistics.median(_times(found.calls(image)[STOCK], found.device, rounds))
    record.measure(case, "everything else", STEP, "ms", [max(0.0, whole - total)])


def _times(fn: Callable[[], Any], device: torch.device, rounds: int) -> list[float]:
    fn()
    return [time_call(fn, device) for _ in range(rounds)]


def _case(image: PIL.Image.Image, threads: int | None = None) -> str:
    size = f"{image.height}x{image.width}"
    return size if threads is None else f"{size}, {threads} thread{'s' * (threads > 1)}"


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def roof(device: torch.device) -> Roof:
    """What bounds the image's way: pinned copies over the bus to a GPU, on a CPU the copy rate."""
    if device.type != "cuda":
        return Roof(copy_rate(device).value * 1e9)
    source = torch.empty(BUS_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(BUS_BYTES, dtype=torch.uint8, device=device)
    times = _times(lambda: target.copy_(source, non_blocking=True), device, 20)
    return Roof(BUS_BYTES / (statistics.median(times) / 1e3))


def sample(size: tuple[int, int], seed: int) -> PIL.Image.Image:
    """An image of random pixels."""
    return end_to_end.synthetic_sample(*size, seed)["image"]


def what(size: tuple[int, int]) -> str:
    """The name of the prediction for a size."""
    return f"{size[0]}x{size[1]}: preprocessing"


def predict(record: Record, found: Ways, sizes: Sequence[tuple[int, int]]) -> None:
    """Writes down what ours will take for each size; on a CPU how many times longer stock takes than our host part."""
    for size in sizes:
        if not found.on_gpu:
            record.predict(f"{what(size)}, stock over our host part", PREDICTED_TIMES[size], "times")
        elif size in PREDICTED_MS:
            record.predict(f"{what(size)}, ms", PREDICTED_MS[size], "ms")
    if found.on_gpu:
        record.predict("first token with preprocessing: saved by the processor", PREDICTED_SAVED_MS, "ms")


def measure_ways(
    record: Record, found: Ways, sizes: Sequence[tuple[int, int]], rounds: int, seed: int, limits: Roof
) -> None:
    """Adds `preprocessing_ms` of every way, for each size, with one thread of PyTorch's and with its default number."""
    for threads in sorted({1, torch.get_num_threads()}):
        for size in sizes:
            image = sample(size, seed)
            with _threads(threads):
                calls = found.calls(image)
                for call in calls.values():
                    call()
                timed = {name: partial(_cleared, call, found.device) for name, call in calls.items()}
                samples = interleave(timed, rounds)
            for name, times in samples.items():
                work = {"bytes": 3 * image.height * image.width, "ceiling": limits}
                record.measure(_case(image, threads), name, MS, "ms", times, **work)


def _cleared(call: Callable[[], Any], device: torch.device) -> float:
    """One call as the harness makes it: after the CUDA cache has been emptied."""
    clear_cache(device)
    return time_call(call, device)


def measure_drafts(record: Record, found: Ways, image: PIL.Image.Image, rounds: int) -> None:
    """Times what lost, and says why: pixels through NumPy, tokenising every image token, floating point."""
    tokens = image.height * image.width // 32**2
    drafts = {
        "NumPy's copy of the image": lambda: np.array(image),
        "Pillow's memory, shared and copied once": lambda: own.upload(image, torch.device("cpu")),
        f"tokenising {tokens} image tokens": lambda: found.stock.tokenizer(found.stock.image_token * tokens),
        "tokenising one": lambda: found.stock.tokenizer(found.stock.image_token),
    }
    for name, fn in drafts.items():
        record.measure(_case(image), name, DRAFT, "ms", _times(fn, found.device, rounds))
    n = plots.number
    array, shared, many, one = (record.value(DRAFT, name) for name in drafts)
    record.lose("the image through NumPy", f"{n(array)} ms against {n(shared)}: Pillow joins pieces and copies twice.")
    record.lose("the prompt expanded before tokenising", f"{n(many)} ms for {tokens} equal tokens, {n(one)} for one.")
    worst = max(max(row["samples"]) for row in record.find(LEVELS))
    record.lose(
        "a resize in floating point", f"moves sharp edges by up to {n(worst)} grey levels; stock's CPU rounds twice."
    )
    record.lose(
        "half the patch embedding for two equal frames",
        "saves 5 of 10 GFLOP, some 6 µs of a first token, and must first read all pixels to know that they are equal.",
    )


def measure_effect(record: Record, base: Any, image_sample: Mapping[str, Any], rounds: int) -> None:
    """Adds the first token with preprocessing of `fast` on `base`, with stock's processor and with ours."""
    field = end_to_end.contenders(base, ["fast"], record)
    if "fast" not in field:
        record.skip("ttft_with_preprocessing_ms", "the processor's effect needs preset fast, hence a GPU")
        return
    fast = field["fast"]
    borrowed = dataclasses.replace(fast.target, processor=base.processor)
    field[BORROWED] = dataclasses.replace(fast, name=BORROWED, target=borrowed)
    speed = end_to_end.speed(field, image_sample, rounds=0, first_token_rounds=rounds)
    width, height = image_sample["image"].size
    for metric, providers in speed.items():
        for name, times in providers.items():
            record.measure(f"{base.name} {height}x{width}", name, metric, "ms", times)
    synchronize(base.device)


def default_case(record: Record, size: tuple[int, int]) -> str:
    """The case of this size with PyTorch's default number of threads, which is measured last."""
    return [row["case"] for row in record.find(MS) if row["case"].startswith(f"{size[0]}x{size[1]}, ")][-1]


def settle(record: Record, found: Ways, sizes: Sequence[tuple[int, int]]) -> None:
    """Puts what was measured, with the default number of threads, beside each prediction."""
    for size in sizes:
        case = default_case(record, size)
        own_ms = record.value(MS, found.judged, case)
        if not found.on_gpu:
            record.settle(f"{what(size)}, stock over our host part", record.value(MS, STOCK, case) / own_ms)
        elif size in PREDICTED_MS:
            record.settle(f"{what(size)}, ms", own_ms)
    if record.find("ttft_with_preprocessing_ms", BORROWED):
        saved = [record.value("ttft_with_preprocessing_ms", name) for name in (BORROWED, "fast")]
        record.settle("first token with preprocessing: saved by the processor", saved[0] - saved[1])


def conclude(record: Record, found: Ways, size: tuple[int, int]) -> tuple[str, str]:
    """Answer, which tells of one size, and verdict, from the record alone."""
    n, judged, case = plots.number, found.judged, default_case(record, size)
    ours, stock = record.value(MS, judged, case), record.value(MS, STOCK, case)
    worst = max(max(row["samples"]) for row in record.find(LEVELS))
    beside = f" and {n(record.value(MS, ON_DEVICE, case))} with `device=`" if found.on_gpu else ""
    all_of_it = "" if found.on_gpu else " but the kernel, which needs a GPU"
    shape, threads = case.split(", ")
    answer = (
        f"An image of {shape} becomes inputs in {n(ours)} ms{all_of_it}, against stock's {n(stock)}{beside} "
        f"({threads}); pixels, grids and ids are stock's bit by bit, where a resize in floating point moves pixels by "
        f"up to {n(worst)} grey levels."
    )
    slower = [row["case"] for row in record.find(MS, judged) if row["p50"] > record.value(MS, STOCK, row["case"])]
    verdict = f"Slower than stock for {', '.join(slower)}." if slower else "Faster than stock at every size."
    return answer, verdict


def one(found: Ways, height: int, width: int) -> dict[str, Any]:
    """Three calls of ours on a random image, for a panel."""
    image = sample((height, width), 0)
    times = _times(found.calls(image)[found.judged], found.device, 3)
    return measurement(_case(image), found.judged, MS, "ms", times)
