"""evaluation_wrapper.py as an outside harness uses it."""

import logging
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import vlmopt
import vlmopt.processor
from vlmopt.bench.models import TINY, prompt
from vlmopt.config import PRESETS, Settings
from vlmopt.errors import PartFailed, VlmoptError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def wrapper_class(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    sys.modules.pop("evaluation_wrapper", None)
    from evaluation_wrapper import VLMModel

    return VLMModel


def harness(model, image, question):
    """The three calls of the contest's harness on one sample; returns the ids of each."""
    inputs = prompt(model.processor, image, question).to(model.device)
    options = {"do_sample": False, "temperature": 0.0, "use_cache": True}
    with torch.no_grad():
        first = model.model.generate(**inputs, max_new_tokens=1, **options)
        second = model.model.generate(**inputs, max_new_tokens=128, **options)
        again = prompt(model.processor, image, question).to(model.device)
        third = model.model.generate(**again, max_new_tokens=1024, **options)
    return first, second, third


@pytest.mark.parametrize("preset", [None, "exact", "stock"])
def test_the_harness_gets_stocks_answers(wrapper_class, reference, samples, preset):
    model = wrapper_class(str(TINY), preset=preset)
    plain = wrapper_class(str(TINY), preset="stock")
    for sample in samples.select(range(3)):
        mine, stock = (harness(each, sample["image"], sample["question"]) for each in (model, plain))
        for ours, theirs in zip(mine, stock, strict=True):
            assert torch.equal(ours, theirs)
    expected = 0 if preset == "stock" else 9
    assert model.status.calls == {"stages": expected, "kernels": 0, "stock": 0}


def test_a_transformers_that_was_not_tested_leaves_every_call_to_stock(wrapper_class, samples, monkeypatch, caplog):
    plain = wrapper_class(str(TINY), preset="stock")
    monkeypatch.setattr(vlmopt.weights.transformers, "__version__", "5.99.0")
    with caplog.at_level(logging.WARNING):
        model = wrapper_class(str(TINY))
    assert "every call is left to stock: this model cannot be optimised: transformers 5.99.0" in caplog.text
    assert (model.plan, model.enabled, model.status.active) == (None, [], False)
    mine, stock = (harness(each, samples[0]["image"], samples[0]["question"]) for each in (model, plain))
    assert all(map(torch.equal, mine, stock))
    monkeypatch.setattr(sys.modules["evaluation_wrapper"], "settings", lambda: Settings(strict=True))
    with pytest.raises(VlmoptError, match="outside the tested range"):
        wrapper_class(str(TINY))


def test_attributes_and_the_fallback_to_the_cpu(wrapper_class):
    model = wrapper_class(str(TINY))
    assert type(model.model).__name__ == "Qwen3VLForConditionalGeneration"
    assert type(model.processor).__name__ == "Qwen3VLProcessor"
    assert model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert model.model.dtype == torch.bfloat16, "the checkpoint's own dtype is kept"
    assert isinstance(model.generate(Image.new("RGB", (96, 64)), "what?", 4), str)


def test_methods_record_only_what_they_switch_on(wrapper_class, caplog):
    caplog.set_level(logging.INFO, "vlmopt")
    fast = wrapper_class(str(TINY))
    assert fast.enabled == ["vision encoder", "KV cache", "cross-modal connector"]
    assert "quantization: nothing to switch on" in caplog.text
    assert wrapper_class(str(TINY), preset="stock").enabled == []


@pytest.mark.parametrize("preset", PRESETS)
def test_every_switch_of_a_preset_reaches_the_model(wrapper_class, preset):
    model = wrapper_class(str(TINY), preset=preset)
    assert model.plan.config == vlmopt.OptimizeConfig.preset(preset, strict=False)
    assert ("quantization" in model.enabled) == (preset in ("fast8", "fast4"))


def test_a_method_left_out_switches_its_part_off(wrapper_class, monkeypatch):
    monkeypatch.setattr(wrapper_class, "_optimize_vision_encoder", lambda self: None)
    model = wrapper_class(str(TINY))
    assert model.enabled == ["KV cache", "cross-modal connector"]
    assert not model.status.config.vision and model.status.config.text


def test_on_a_cpu_the_processor_is_stocks_own(wrapper_class):
    model = wrapper_class(str(TINY), device="cpu")
    assert type(model.processor).__module__.startswith("transformers.")
    part = {part.name: part for part in vlmopt.plan(model.model, "fast").parts}["preprocessing"]
    assert part.state == "skipped" and "needs a CUDA device" in part.reason


@pytest.mark.parametrize("strict", [True, False])
def test_pixels_that_the_device_cannot_prepare_raise_or_are_left_to_stock(wrapper_class, monkeypatch, caplog, strict):
    """As on a GPU where the kernel does not compile."""

    def refuse(*_):
        raise PartFailed("preprocessing", "its kernel does not work here")

    on = vlmopt.Part("preprocessing", "on", "", "exact")
    monkeypatch.setattr(sys.modules["vlmopt.optimize"], "_parts", lambda *_: [on])
    monkeypatch.setattr(vlmopt.processor, "on_device", refuse)
    monkeypatch.setattr(sys.modules["evaluation_wrapper"], "settings", lambda: Settings(preset="fast", strict=strict))
    if strict:
        with pytest.raises(vlmopt.VlmoptError, match="its kernel does not work here"):
            wrapper_class(str(TINY), device="cpu", preset="stock")
        return
    model = wrapper_class(str(TINY), device="cpu", preset="stock")
    assert "preprocessing" not in model.enabled
    assert "preprocessing is left to stock: its kernel does not work here" in caplog.text
    assert type(model.processor).__module__.startswith("transformers.")


@pytest.mark.gpu
def test_on_a_gpu_the_pixels_are_prepared_there(wrapper_class, samples):
    model = wrapper_class(str(TINY))
    inputs = prompt(model.processor, samples[0]["image"], samples[0]["question"])
    assert "preprocessing" in model.enabled and inputs["pixel_values"].device == model.device
    assert model.processor.image_processor.calls == {"device": 1}


def test_the_file_stays_small():
    assert len((ROOT / "evaluation_wrapper.py").read_text().splitlines()) <= 120


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "absent", "there is no model folder"),
        (lambda path: path, "has no config.json"),
        (lambda path: _write(path, "config.json", "{"), "cannot be loaded"),
        (lambda path: _write(path, "config.json", '{"architectures": ["LlamaForCausalLM"]}'), "LlamaForCausalLM"),
    ],
)
def test_a_bad_model_folder_is_one_sentence(wrapper_class, tmp_path, make, message):
    with pytest.raises(vlmopt.VlmoptError, match=message) as raised:
        wrapper_class(str(make(tmp_path)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content[:8] + b"x" + content[9:],
        lambda content: b"\x80\x04" + content,
        lambda content: content + b"more",
    ],
    ids=["truncated", "empty", "an endless header", "a header that is no JSON", "as a pickle begins", "longer"],
)
def test_damaged_weights_are_one_sentence(wrapper_class, tmp_path, damage):
    for file in TINY.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(damage(content) if file.suffix == ".safetensors" else content)
    with pytest.raises(vlmopt.VlmoptError, match="cannot be loaded") as raised:
        wrapper_class(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_an_unknown_device_and_preset_are_one_sentence(wrapper_class):
    with pytest.raises(vlmopt.VlmoptError, match="unknown device 'gpu'"):
        wrapper_class(str(TINY), device="gpu")
    with pytest.raises(vlmopt.VlmoptError, match="unknown preset 'fats'; did you mean 'fast'"):
        wrapper_class(str(TINY), preset="fats")


def _write(folder: Path, name: str, content: str) -> Path:
    (folder / name).write_text(content)
    return folder
