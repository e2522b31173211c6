"""The device's processor against stock: same keys, grids, ids and pixels, bit by bit, or the same exception.

On a machine without a GPU the kernel's reference stands in for it, which its own tests hold equal to the kernel.
"""

import copy
import filecmp
import io
import pickle
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from vlmopt import processor as module
from vlmopt.bench.models import TINY, prompt
from vlmopt.errors import PartFailed
from vlmopt.kernels.patchify import launch, patchify_ref

CPU = torch.device("cpu")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
CASES_OF_SIZE = [(1, 1), (1, 2), (28, 26), (27, 332), (300, 30), (3, 3), (200, 1), (1, 200), (768, 1024), (765, 1022)]


@pytest.fixture(scope="module")
def stock():
    """The embedded processor with the limits of Qwen3-VL-2B-Instruct."""
    found = AutoProcessor.from_pretrained(TINY, local_files_only=True)
    found.image_processor.size = {"shortest_edge": 65536, "longest_edge": 16777216}
    return found


@pytest.fixture
def ours(stock):
    kernel = patchify_ref if DEVICE == CPU else launch
    return module.with_images(stock, module.Qwen2VLImageProcessor.of(stock.image_processor, DEVICE, kernel))


def picture(height, width, mode="RGB", seed=0):
    """Random pixels, half of them black or white, in one of Pillow's modes."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, 4), dtype=np.uint8)
    hard = rng.integers(0, 2, (height, width, 1), dtype=bool)
    image = Image.fromarray(np.where(hard, (pixels > 127) * np.uint8(255), pixels))
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 2**16, (height, width), dtype=np.uint16))
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


def same(expected, got, pixels_on=DEVICE):
    """Same keys in the same order, and every tensor in dtype, shape and bits; only the pixels lie on `pixels_on`."""
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert got[name].device == (pixels_on if name == "pixel_values" else CPU)
        assert got[name].dtype == value.dtype and torch.equal(got[name].cpu(), value), name


def both(stock, ours, call, pixels_on=DEVICE):
    """The outcome of `call` on stock and on ours: outputs compared, or the same exception of the same words."""
    try:
        expected = call(stock)
    except Exception as error:
        with pytest.raises(type(error)) as raised:
            call(ours)
        assert str(raised.value) == str(error)
    else:
        same(expected, call(ours), pixels_on)


@pytest.mark.parametrize("size", CASES_OF_SIZE, ids=str)
def test_any_size_gives_stocks_bits(stock, ours, size):
    image = picture(*size)
    same(prompt(stock, image, "what is written here?"), prompt(ours, image, "what is written here?"))
    assert ours.image_processor.calls == {"device": 1}


@pytest.mark.parametrize("size", [(201, 1), (10, 2276), (0, 5), (5, 0)], ids=str)
def test_impossible_sizes_raise_what_stock_raises(stock, ours, size):
    image = Image.new("RGB", size[::-1])
    with pytest.raises((ValueError, ZeroDivisionError)):
        prompt(stock, image, "what?")
    both(stock, ours, lambda processor: prompt(processor, image, "what?"))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F", "HSV"])
def test_any_mode_gives_stocks_bits(stock, ours, mode):
    both(stock, ours, lambda processor: prompt(processor, picture(60, 90, mode), "what?"))
    assert ours.image_processor.calls == {"device": 1}


def test_transparency_is_laid_on_white_as_stock_does(stock, ours):
    coloured, palette = picture(60, 90), picture(60, 90, "P")
    coloured.info["transparency"] = coloured.getpixel((0, 0))
    palette.info["transparency"] = 3
    for image in (coloured, palette):
        both(stock, ours, lambda processor, image=image: prompt(processor, image, "what?"))


def test_a_photo_is_not_turned_unless_stock_turns_it(stock, ours, tmp_path):
    """Orientation 6: an opened image stays as it lies, and what a path gives is stock's choice."""
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "photo.jpg"
    picture(100, 200).save(path, exif=exif)
    with Image.open(path) as opened:
        output = prompt(ours, opened, "what?")
        same(prompt(stock, opened, "what?"), output)
    _, height, width = output["image_grid_thw"][0].tolist()
    assert height < width
    message = [{"role": "user", "content": [{"type": "image", "path": str(path)}, {"type": "text", "text": "what?"}]}]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    by_path = [each.apply_chat_template(message, **options) for each in (stock, ours)]
    assert torch.equal(by_path[0]["image_grid_thw"], by_path[1]["image_grid_thw"])
    assert torch.equal(by_path[0]["pixel_values"], by_path[1]["pixel_values"].cpu())


def test_a_picture_larger_than_a_block_of_pillows_memory(stock, ours):
    image = picture(16, 3000).resize((3000, 1500), Image.Resampling.NEAREST)
    with pytest.raises(ValueError, match="not contiguous"):
        module._shared(image)
    stock_pixels, our_pixels = (each.image_processor([image], return_tensors="pt") for each in (stock, ours))
    assert torch.equal(stock_pixels["pixel_values"], our_pixels["pixel_values"].cpu())


def test_several_images_in_any_nesting_and_between_text(stock, ours):
    images = [picture(64, 64), picture(32, 96, "L", 1), picture(64, 64, seed=2)]
    pad = "<|vision_start|><|image_pad|><|vision_end|>"
    for text in (f"a {pad}{pad} b {pad}", pad.replace("<|vision_end|>", "") * 3, f"{pad} {pad}\n{pad}"):
        for nested in (images, [images], tuple(images)):
            for prompts in (text, [text]):
                call = {"images": nested, "text": prompts, "return_tensors": "pt"}
                both(stock, ours, lambda processor, call=call: processor(**call))


@pytest.mark.parametrize(
    "call",
    [
        {"text": "no image", "return_tensors": "pt"},
        {"images": [], "text": "a", "return_tensors": "pt"},
        {"images": None, "text": ["a", "b"], "padding": True, "return_tensors": "pt"},
        {"images": [None], "text": "<|image_pad|>", "return_tensors": "pt"},
        {"images": ["absent.png"], "text": "<|image_pad|>", "return_tensors": "pt"},
        {"images": [[[picture(40, 40)]]], "text": "<|image_pad|>", "return_tensors": "pt"},
        {"images": picture(40, 40), "text": "too few", "return_tensors": "pt"},
        {"images": picture(40, 40), "text": "<|image_pad|>" * 2, "return_tensors": "pt"},
        {"text": "<|image_pad|>", "return_tensors": "pt"},
        {"images": picture(40, 40), "text": "<|image_pad|>", "return_tensors": "nonsense"},
        {},
    ],
)
def test_calls_without_a_picture_or_with_a_wrong_one(stock, ours, call):
    both(stock, ours, lambda processor: processor(**call))


@pytest.mark.parametrize(
    ("changes", "prepared"),
    [
        ({"do_resize": False}, False),
        ({"size": {"shortest_edge": 4096, "longest_edge": 8192}}, False),
        ({"images_kwargs": {"do_normalize": False}}, False),
        ({"device": "cpu"}, False),
        ({"images": np.full((64, 96, 3), 9, dtype=np.uint8)}, False),
        ({"images": torch.full((3, 64, 96), 9, dtype=torch.uint8)}, False),
        ({"return_mm_token_type_ids": False}, True),
        ({"text_kwargs": {"truncation": True, "max_length": 5}}, True),
        ({"text_kwargs": {"padding": "max_length", "max_length": 90}}, True),
        ({"return_text_replacement_offsets": True}, True),
    ],
    ids=lambda value: None if isinstance(value, bool) else "+".join(value),
)
def test_options_of_ones_own_are_stocks(stock, ours, changes, prepared):
    """What the kernel does not cover is stock's on the CPU, and counted; options of the text do not concern it."""
    call = {"images": picture(64, 96), "text": "see <|image_pad|> here", "return_tensors": "pt"} | changes
    try:
        expected = stock(**call)
    except ValueError as error:
        with pytest.raises(ValueError) as raised:
            ours(**call)
        assert str(raised.value) == str(error)
    else:
        got = ours(**call)
        assert list(got) == list(expected)
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(got[name].cpu(), value), name
            else:
                assert got[name] == value, name
        assert prepared or got["pixel_values"].device == CPU
    assert (ours.image_processor.calls["device"] == 1) == prepared


def test_a_tokenizer_that_cuts_every_prompt_sees_all_of_it(stock, ours):
    plain = copy.deepcopy(stock)
    plain.tokenizer.init_kwargs.update(truncation=True, max_length=30)
    ours.tokenizer = plain.tokenizer
    with pytest.raises(ValueError, match=r"[Mm]ismatch"):
        prompt(plain, picture(64, 96), "what?")
    both(plain, ours, lambda processor: prompt(processor, picture(64, 96), "what?"))


def test_other_tensors_than_pytorchs_are_stocks(stock, ours):
    """NumPy arrays and lists are asked of the CPU, so they do not pass through the device."""
    call = {"images": picture(64, 96), "text": "<|image_pad|>"}
    for options in ({"return_tensors": "np"}, {}):
        expected, got = stock(**call, **options), ours(**call, **options)
        assert all(np.array_equal(got[name], value) for name, value in expected.items())
    assert "device" not in ours.image_processor.calls


@pytest.mark.parametrize(
    "change",
    [
        {"do_resize": False},
        {"do_normalize": False},
        {"device": "cpu"},
        {"resample": Image.Resampling.BILINEAR},
        {"size": {"shortest_edge": 0, "longest_edge": 100}},
    ],
    ids=str,
)
def test_an_image_processor_set_up_otherwise_is_stocks(stock, ours, change):
    plain = copy.deepcopy(stock)
    for processor in (plain, ours):
        for name, value in change.items():
            setattr(processor.image_processor, name, value)
    both(plain, ours, lambda processor: prompt(processor, picture(64, 96), "what?"), CPU)
    assert "device" not in ours.image_processor.calls and len(ours.image_processor.calls) == 1


def test_options_that_the_kernel_knows_are_followed(stock, ours):
    plain = copy.deepcopy(stock)
    for processor in (plain, ours):
        processor.image_processor.size = {"shortest_edge": 1024, "longest_edge": 64 * 64}
        processor.image_processor.image_mean, processor.image_processor.image_std = [0.1, 0.2, 0.3], [0.9, 0.8, 0.7]
    both(plain, ours, lambda processor: prompt(processor, picture(150, 170), "what?"))
    assert ours.image_processor.calls == {"device": 1}


def test_a_video_is_stocks(stock, ours):
    video = np.random.default_rng(0).integers(0, 256, (4, 64, 96, 3), dtype=np.uint8)
    call = {"videos": [video], "text": "<|vision_start|><|video_pad|><|vision_end|>", "do_sample_frames": False}
    expected, got = (each(**call, return_tensors="pt") for each in (stock, ours))
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert not ours.image_processor.calls


def test_a_wrong_pixel_is_seen(stock, ours):
    right = ours.image_processor.kernel
    ours.image_processor.kernel = lambda *args: right(*args).roll(1, 0)
    with pytest.raises(AssertionError, match="pixel_values"):
        same(prompt(stock, picture(64, 96), "what?"), prompt(ours, picture(64, 96), "what?"))


def test_what_is_saved_and_printed_is_stocks(stock, ours, tmp_path):
    prompt(ours, picture(64, 96), "what?")
    stock.save_pretrained(tmp_path / "stock")
    ours.save_pretrained(tmp_path / "ours")
    names = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == names
    assert filecmp.cmpfiles(tmp_path / "stock", tmp_path / "ours", names, shallow=False)[0] == names
    assert repr(ours) == repr(stock)
    again = AutoProcessor.from_pretrained(tmp_path / "ours", local_files_only=True)
    assert type(again) is type(stock) and type(again.image_processor) is type(stock.image_processor)


def test_copies_and_pickles_work(stock, ours):
    for other in (copy.deepcopy(ours), copy.copy(ours), pickle.loads(pickle.dumps(ours))):
        same(prompt(stock, picture(64, 96), "what?"), prompt(other, picture(64, 96), "what?"))
        assert other.image_processor.pixels_on == DEVICE


def test_two_threads_do_not_mix_their_prompts(stock, ours):
    """One expands its image tokens late, the other in stock's way."""
    late = {"images": picture(64, 96), "text": "<|image_pad|>", "return_tensors": "pt"}
    early = {**late, "padding": True}
    expected, wrong = stock(**late), []

    def work(call):
        for _ in range(20):
            if not torch.equal(ours(**call)["input_ids"], expected["input_ids"]):
                wrong.append(call)

    threads = [threading.Thread(target=work, args=(call,)) for call in (late, early, late)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_embedded_samples_give_stocks_inputs(reference, samples):
    images = module.Qwen2VLImageProcessor.of(reference.processor.image_processor, CPU, patchify_ref)
    ours = module.with_images(reference.processor, images)
    for sample in samples:
        pair = (prompt(each, sample["image"], sample["question"]) for each in (reference.processor, ours))
        expected, got = pair
        assert list(got) == list(expected)
        assert all(torch.equal(got[name], value) for name, value in expected.items()), sample["question_id"]
    assert images.calls == {"device": len(samples)}


def test_on_a_cpu_the_processor_stays_stocks(stock):
    assert module.on_device(stock, "cpu") is stock


def test_an_image_processor_that_leaves_all_to_stock_is_refused(stock):
    images = module.Qwen2VLImageProcessor.of(stock.image_processor, CPU, patchify_ref)
    images.do_normalize = False
    with pytest.raises(PartFailed, match="leaves out a step"):
        module.check(images, stock.image_processor)


def test_options_changed_afterwards_belong_to_one_processor_alone(stock, ours):
    before = dict(stock.image_processor.size)
    ours.image_processor.size["shortest_edge"] = 1024
    assert stock.image_processor.size == before
    assert prompt(ours, picture(64, 96), "what?")["image_grid_thw"].tolist() == [[1, 4, 6]]


def test_what_a_processor_leaves_out_of_its_output_stays_out(stock, ours):
    plain = copy.copy(stock)
    plain.return_mm_token_type_ids = ours.return_mm_token_type_ids = False
    both(plain, ours, lambda processor: prompt(processor, picture(64, 96), "what?"))


@pytest.mark.parametrize("spoil", [lambda *args: 1 / 0, lambda *args: torch.zeros_like(patchify_ref(*args))])
def test_a_kernel_that_fails_is_refused_when_the_processor_is_made(stock, spoil):
    images = module.Qwen2VLImageProcessor.of(stock.image_processor, CPU, spoil)
    with pytest.raises(PartFailed, match="leave preprocessing out") as raised:
        module.check(images, stock.image_processor)
    assert "\n" not in str(raised.value) and raised.value.part == "preprocessing"


def test_a_kernel_that_works_is_accepted_and_not_counted(stock):
    images = module.Qwen2VLImageProcessor.of(stock.image_processor, CPU, patchify_ref)
    module.check(images, stock.image_processor)
    assert not images.calls


def test_another_kind_of_processor_is_refused(stock, ours):
    with pytest.raises(PartFailed, match="Qwen3VLProcessor"):
        module.on_device(ours, "cuda:0")
    with pytest.raises(PartFailed, match="it extends Qwen3VLProcessor, and this is a TokenizersBackend"):
        module.on_device(stock.tokenizer, "cuda:0")
    other = copy.copy(stock)
    other.image_processor = stock.video_processor
    with pytest.raises(PartFailed, match="it extends Qwen2VLImageProcessor"):
        module.on_device(other, "cuda:0")


@pytest.mark.gpu
def test_on_a_gpu_the_pixels_lie_there_and_everything_else_where_stock_leaves_it(stock):
    ours = module.on_device(stock, DEVICE)
    output = prompt(ours, picture(700, 501), "what?")
    same(prompt(stock, picture(700, 501), "what?"), output)
    assert output.to(DEVICE)["pixel_values"].data_ptr() == output["pixel_values"].data_ptr()


@pytest.mark.gpu
def test_staging_memory_is_not_written_before_the_copy_is_done(stock):
    """Many images in a row without waiting: each must arrive before its pinned memory serves the next."""
    ours = module.on_device(stock, DEVICE)
    images = [picture(300 + 32 * i, 500, seed=i) for i in range(12)]
    outputs = [ours.image_processor(image, return_tensors="pt") for image in images]
    for image, output in zip(images, outputs, strict=True):
        expected = stock.image_processor(image, return_tensors="pt")["pixel_values"]
        assert torch.equal(output["pixel_values"].cpu(), expected)


def test_an_image_still_to_be_read_from_its_file_is_read(stock, ours):
    for form in ("PNG", "JPEG", "GIF", "WEBP"):
        buffer = io.BytesIO()
        picture(40, 60).save(buffer, form)
        pair = (prompt(each, Image.open(io.BytesIO(buffer.getvalue())), "what?") for each in (stock, ours))
        same(*pair)
