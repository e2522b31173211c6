"""Vision and prefill by bucket on the CPU, where nothing is captured: the stages' values, whatever lies in padding."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import vlmopt
from vlmopt.bench.models import TINY, load
from vlmopt.errors import PartFailed
from vlmopt.ops import KERNELS, Ops, launcher
from vlmopt.runtime import buckets
from vlmopt.runtime.buckets import Buckets
from vlmopt.runtime.generate import ENGINES
from vlmopt.stages.connector import positions, slots_of
from vlmopt.stages.prefill import prefill
from vlmopt.stages.tables import grid_table, rope
from vlmopt.stages.vision import encode
from vlmopt.weights import collect

CONFIG = vlmopt.OptimizeConfig.preset("exact", packed=True, prompt_graphs=True)
GRIDS = [((1, 4, 6),), ((1, 2, 58), (1, 14, 2)), ((1, 10, 10), (1, 4, 4), (1, 6, 22)), ((3, 4, 4),), ((1, 2, 2),)]
PROMPTS = {
    "text": ([0] * 7, ()),
    "one token": ([0], ()),
    "image": ([0] * 3 + [1] * 6 + [0] * 5, ((1, 4, 6),)),
    "image last": ([0] * 2 + [1] * 4, ((1, 4, 4),)),
    "three": ([0] * 5 + [1] * 4 + [0] * 2 + [1] * 3 + [0] * 9 + [1] * 3 + [0] * 4, ((1, 4, 4), (1, 2, 6), (1, 6, 2))),
    "as long as a rung": ([0] * 2 + [1] * 4 + [0] * 26, ((1, 4, 4),)),
}
SMALL = {"patches": buckets.ladder(16, 256), "tokens": buckets.ladder(16, 64)}


@pytest.fixture(scope="module")
def weights():
    return collect(load(TINY, "cpu", torch.float32).model, packed=True)


@pytest.fixture(scope="module")
def made(weights):
    """One instance for all tests: what a test leaves in the padding is the next one's."""
    return Buckets(weights, Ops(), **SMALL)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def poison(made):
    """NaN wherever a call's values lie, and rows and tiles that point at real ones."""
    for buffer in (made._pixels, made._features, made._cache.buffer, made._last, *made._by_patch[1:]):
        buffer.fill_(float("nan"))
    made._ids.fill_(10**9)
    made._places.fill_(3)
    made._slots.fill_(0)
    made._by_patch[0].fill_(1)
    made._tiles.copy_(torch.tensor([0, 0, 16], dtype=torch.int32))


def pixels_of(grids):
    count = sum(frames * height * width for frames, height, width in grids)
    return torch.randn(count, 1536, generator=torch.Generator().manual_seed(0))


def near(ours, theirs):
    """Up to the order in which a library sums a product of more rows."""
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_ladder_pads_by_a_quarter_at_most():
    for sizes in (buckets.PATCHES, buckets.TOKENS, buckets.ladder(16, 40)):
        assert list(sizes) == sorted(set(sizes)) and all(size % 4 == 0 for size in sizes)
        assert all(size <= 1.25 * below for below, size in pairwise(sizes))
    assert buckets.ladder(16, 40) == (16, 20, 24, 28, 32, 40)
    assert (buckets.PATCHES[-1], buckets.TOKENS[-1]) == (8192, 2048)
    runs = dict.fromkeys((16, 20, 24))
    assert [buckets._next(runs, size) for size in (1, 16, 17, 24, 25)] == [16, 16, 20, 24, None]


@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_the_tower_gives_the_stages_features(made, weights, grids):
    expected, expected_taps = encode(pixels_of(grids), grid_table(grids, weights.vision), weights.vision, Ops())
    found = []
    for spoil in (lambda: None, lambda: poison(made)):
        spoil()
        features, taps = made.encode(pixels_of(grids), grids)
        found.append(torch.stack([features, *taps]))
    assert torch.equal(*found), "what lay in the padding has reached a real row"
    near(found[0], torch.stack([expected, *expected_taps]))


def both(made, weights, types, grids, ops=None):
    """Last row and cache of the stage and of the bucket, on one prompt, with poison left behind before the bucket."""
    text, length = weights.text, len(types)
    ids = torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(1))
    features, taps, slots = None, [], None
    if grids:
        slots = slots_of(types)
        features, taps = encode(pixels_of(grids), grid_table(grids, weights.vision), weights.vision, Ops())
    places = positions(types, grids, 2)[0]
    caches = [torch.full((len(text.layers), 2, 2, 64, 128), 7.0) for _ in range(2)]
    h = Ops().merge_embeddings(ids, text.embed, slots, features)
    rows, angles = torch.arange(length), rope(places, text, torch.float32)
    expected = prefill(h, angles, caches[0], rows, slots, taps, text, Ops(), narrow=True)
    last = made.prefill(ids, slots, features, taps, places, (), caches[1])
    return (expected, caches[0]), (last, caches[1])


@pytest.mark.parametrize("name", PROMPTS)
def test_the_prompt_gives_the_stages_last_row_and_cache(made, weights, name):
    (expected, expected_cache), (last, cache) = both(made, weights, *PROMPTS[name])
    poison(made)
    _, (again, cache_again) = both(made, weights, *PROMPTS[name])
    assert torch.equal(last, again) and torch.equal(cache, cache_again), "the padding has reached a real row"
    assert last.shape == expected.shape and last is not made._last
    near(last, expected)
    near(cache, expected_cache)
    assert (cache[:, :, :, len(PROMPTS[name][0]) :] == 7).all(), "rows beyond the prompt were written"


def test_kernels_take_the_padding_too(weights):
    """In the interpreter, on two blocks and two layers."""
    vision = replace(weights.vision, blocks=weights.vision.blocks[:2], deepstack={0: weights.vision.deepstack[1]})
    cut = replace(weights, vision=vision, text=replace(weights.text, layers=weights.text.layers[:2]))
    ops = Ops(**{name: launcher(name) for name in KERNELS})
    made = Buckets(cut, ops, patches=(48,), tokens=(20,))
    poison(made)
    grids = ((1, 4, 6), (1, 2, 4))
    expected, expected_taps = encode(pixels_of(grids), grid_table(grids, vision), vision, Ops())
    features, taps = made.encode(pixels_of(grids), grids)
    near(torch.stack([features, *taps]), torch.stack([expected, *expected_taps]))
    poison(made)
    (expected, expected_cache), (last, cache) = both(made, cut, [0, *[1] * 6, 0, 0, *[1] * 2, 0, 0], grids)
    near(last, expected)
    near(cache, expected_cache)


def test_what_fits_no_rung_takes_the_stages(weights, monkeypatch):
    made = Buckets(weights, Ops(), patches=(256,), tokens=(13,))
    monkeypatch.setattr(made, "_towers", {256: None})
    monkeypatch.setattr(made, "_prompts", {13: None})
    for grids in (((1, 10, 26),), ((1, 2, 2),) * (buckets.SEGMENTS + 1)):
        expected, _ = encode(pixels_of(grids), grid_table(grids, weights.vision), weights.vision, Ops())
        assert torch.equal(made.encode(pixels_of(grids), grids)[0], expected)
    (expected, expected_cache), (last, cache) = both(made, weights, *PROMPTS["image"])
    assert torch.equal(last, expected) and torch.equal(cache, expected_cache)
    with pytest.raises(TypeError, match="not callable"):  # one token less is the rung's
        both(made, weights, [0] * 13, ())


@pytest.mark.parametrize(
    "parts", [("read",), ((64, 96), "read", (96, 64), "all"), ((1, 1), "x")], ids=["0", "2", "1 px"]
)
def test_generate_gives_the_stages_ids(tiny, prompt, parts):
    inputs, ids = prompt(*parts), []
    for padded in (False, True):
        vlmopt.optimize(tiny.model, CONFIG.model_copy(update={"prompt_graphs": padded}))
        assert (ENGINES[tiny.model].buckets is not None) == padded
        ids.append(tiny.model.generate(**inputs, max_new_tokens=8, do_sample=False))
        assert vlmopt.status(tiny.model).calls["stages"] == 1
    assert torch.equal(*ids)


def test_a_batch_is_served_row_by_row(tiny, prompt):
    inputs, ids = prompt((64, 96), "read"), []
    alone = {name: torch.cat([value, value]) for name, value in inputs.items()}
    for padded in (False, True):
        vlmopt.optimize(tiny.model, CONFIG.model_copy(update={"prompt_graphs": padded, "batches": True}))
        ids.append(tiny.model.generate(**alone, max_new_tokens=8, do_sample=False))
        assert vlmopt.status(tiny.model).calls["stages"] == 1
    assert torch.equal(*ids)


def test_two_drivers_are_refused_in_one_sentence():
    with pytest.raises(vlmopt.VlmoptError, match=r"both drive vision and prefill; switch one of them off$"):
        vlmopt.OptimizeConfig.preset("fast", prompt_graphs=True)
    assert vlmopt.OptimizeConfig.preset("fast", prompt_graphs=True, cpp_runtime=False).prompt_graphs


def part_of(model, config):
    return next(part for part in vlmopt.plan(model, config).parts if part.name == "prompt_graphs")


def test_the_plan_says_what_it_needs(tiny):
    assert part_of(tiny.model, CONFIG).state == "on" and "without graphs" in part_of(tiny.model, CONFIG).reason
    assert "packed" in part_of(tiny.model, CONFIG.model_copy(update={"packed": False})).reason
    assert part_of(tiny.model, "exact").state == "off"


@pytest.mark.parametrize("strict", [True, False])
def test_a_capture_that_fails_raises_or_is_recorded_as_skipped(tiny, prompt, monkeypatch, strict):
    """As on a GPU whose driver refuses the capture."""

    def refuse(*_, **__):
        raise PartFailed("prompt_graphs", "it could not be captured in a CUDA graph: refused")

    monkeypatch.setattr(Buckets, "_runs", refuse)
    config = CONFIG.model_copy(update={"strict": strict})
    if strict:
        with pytest.raises(vlmopt.VlmoptError, match="could not be captured"):
            vlmopt.optimize(tiny.model, config)
        assert not vlmopt.status(tiny.model).active
        return
    parts = {part.name: part for part in vlmopt.optimize(tiny.model, config).parts}
    assert parts["prompt_graphs"].state == "skipped" and "refused" in parts["prompt_graphs"].reason
    tiny.model.generate(**prompt((64, 64), "x"), max_new_tokens=2, do_sample=False)
    assert vlmopt.status(tiny.model).calls["stages"] == 1
