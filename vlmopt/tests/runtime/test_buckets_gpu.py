"""Buckets on a GPU: replays read nothing of what lies in the padding, and no size compiles or captures anything."""

import random

import pytest
import torch
from PIL import Image

import vlmopt
from vlmopt.bench.compilations import compiled
from vlmopt.bench.models import TINY, load, prompt
from vlmopt.runtime import buckets
from vlmopt.runtime.generate import ENGINES
from vlmopt.stages.connector import positions, slots_of

pytestmark = pytest.mark.gpu
CONFIG = vlmopt.OptimizeConfig.preset("fast", cpp_runtime=False, prompt_graphs=True)
TYPES = [0] * 15 + [1] * 216 + [0] * 3 + [1] * 10 + [0] * 12
GRIDS = ((1, 24, 36), (1, 10, 4))


@pytest.fixture(scope="module")
def loaded():
    found = load(TINY, "cuda:0", torch.bfloat16)
    vlmopt.optimize(found.model, CONFIG)
    return found


@torch.no_grad()
def test_what_lies_in_the_padding_changes_no_bit(loaded):
    made = ENGINES[loaded.model].buckets
    pixels = torch.randn(24 * 36 + 40, 1536, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    ids, places = torch.arange(40, 40 + len(TYPES), device="cuda"), positions(TYPES, GRIDS, 2)[0]
    slots = slots_of(TYPES)
    found = []
    for value in (0.0, float("nan"), float("inf")):
        for buffer in (made._pixels, made._features, made._cache.buffer, made._last, *made._by_patch[1:]):
            buffer.fill_(value)
        made._ids.fill_(10**9)
        made._slots.fill_(0)
        features, taps = made.encode(pixels, GRIDS)
        tower = torch.stack([features, *taps])
        cache = torch.full_like(made._cache.buffer, 7)
        last = made.prefill(ids, slots, features, taps, places, (), cache)
        found.append((tower, last, cache))
        assert last.isfinite().all() and (cache[:, :, :, len(TYPES) :] == 7).all()
    for other in found[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[0], other, strict=True))


def test_fifty_sizes_compile_and_capture_nothing(loaded, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a call captured a graph, or left a rung for the stages")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
    for stage in ("encode", "prefill"):
        monkeypatch.setattr(buckets, stage, refuse)
    drawn, model = random.Random(0), loaded.model
    before = vlmopt.status(model).calls["stages"]

    def first_tokens() -> None:
        size = drawn.randint(32, 640), drawn.randint(32, 640)
        image = Image.effect_noise(size, 60).convert("RGB")
        inputs = prompt(loaded.processor, image, "What does the sign say?").to(loaded.device)
        model.generate(**inputs, max_new_tokens=2, do_sample=False)

    assert compiled([first_tokens] * 50) == []
    assert vlmopt.status(model).calls["stages"] == before + 50
