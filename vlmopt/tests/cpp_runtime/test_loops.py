"""The C++ loops on the CPU against the stages with the table of references, bit by bit and layer by layer."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import vlmopt
from vlmopt.bench.models import TINY, load
from vlmopt.errors import VlmoptError
from vlmopt.ops import Ops
from vlmopt.stages.connector import positions, slots_of
from vlmopt.stages.prefill import prefill
from vlmopt.stages.tables import grid_table, rope
from vlmopt.stages.vision import encode
from vlmopt.weights import collect

GRIDS = [((1, 4, 6),), ((1, 2, 58), (1, 14, 2)), ((1, 10, 10), (1, 4, 4), (1, 6, 22)), ((3, 4, 4),), ((1, 2, 2),)]
PROMPTS = [
    ([0] * 7, ()),
    ([0], ()),
    ([0] * 3 + [1] * 6 + [0] * 5, ((1, 4, 6),)),
    ([1] * 4 + [0], ((1, 4, 4),)),
    ([0] * 2 + [1] * 4, ((1, 4, 4),)),
    ([0] * 5 + [1] * 4 + [0] * 2 + [1] * 3 + [0] * 9 + [1] * 3 + [0] * 4, ((1, 4, 4), (1, 2, 6), (1, 6, 2))),
]
CONFIG = vlmopt.OptimizeConfig(vision=True, connector=True, text=True, packed=True)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def weights(request):
    return collect(load(TINY, "cpu", request.param).model, packed=True)


def dtype_of(weights):
    return weights.text.embed.dtype


def pixels_of(grids):
    count = sum(frames * height * width for frames, height, width in grids)
    return torch.randn(count, 1536, generator=torch.Generator().manual_seed(0))


def blocks_cut(weights, depth):
    """The first `depth` blocks, and the taps that follow one of them."""
    vision = weights.vision
    taps = {block: merger for block, merger in vision.deepstack.items() if block < depth}
    return replace(weights, vision=replace(vision, blocks=vision.blocks[:depth], deepstack=taps))


@pytest.mark.parametrize("grids", GRIDS, ids=str)
@torch.no_grad()
def test_vision_equals_the_stage(runtime, weights, grids):
    table, pixels = grid_table(grids, weights.vision), pixels_of(grids)
    expected, expected_taps = encode(pixels, table, weights.vision, Ops())
    features, taps = runtime(weights).encode(pixels, grids)
    assert torch.equal(features, expected) and len(taps) == len(expected_taps) == 3
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(taps, expected_taps, strict=True))


@torch.no_grad()
def test_vision_equals_the_stage_after_every_block(runtime, weights):
    table, pixels = grid_table(GRIDS[2], weights.vision), pixels_of(GRIDS[2])
    for depth in range(1, len(weights.vision.blocks) + 1):
        cut = blocks_cut(weights, depth)
        expected, expected_taps = encode(pixels, table, cut.vision, Ops())
        features, taps = runtime(cut).encode(pixels, GRIDS[2])
        assert torch.equal(features, expected), f"block {depth - 1}"
        assert len(taps) == len(expected_taps)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(taps, expected_taps, strict=True))


def both(runtime, weights, types, grids):
    """Last row and cache of the stage and of the loops, on one prompt."""
    text, dtype = weights.text, dtype_of(weights)
    ids = torch.randint(0, 250, (len(types),), generator=torch.Generator().manual_seed(1))
    rows = torch.arange(len(types))
    features, taps, slots = None, [], None
    if grids:
        slots = slots_of(types)
        features, taps = encode(pixels_of(grids), grid_table(grids, weights.vision), weights.vision, Ops())
    places = positions(types, grids, 2)[0]
    angles, table = (rope(part, text, dtype) for part in (places, torch.arange(64).expand(3, -1)))
    caches = [torch.zeros(len(text.layers), 2, 2, 64, 128, dtype=dtype)]
    caches.append(torch.zeros(len(text.layers), 2, 2, 200, 128, dtype=dtype)[:, :, :, 70:134])  # as a batch has it
    h = Ops().merge_embeddings(ids, text.embed, slots, features)
    expected = prefill(h, angles, caches[0], rows, slots, taps, text, Ops(), narrow=True)
    given = ids.clone(), None if features is None else features.clone()
    last = runtime(weights).prefill(ids, slots, features, taps, places, table, caches[1])
    assert torch.equal(ids, given[0]) and (features is None or torch.equal(features, given[1]))
    return (expected, caches[0]), (last, caches[1])


@pytest.mark.parametrize(("types", "grids"), PROMPTS, ids=["7 text", "1 text", "image", "first", "last", "three"])
@torch.no_grad()
def test_prefill_equals_the_stage(runtime, weights, types, grids):
    (expected, expected_cache), (last, cache) = both(runtime, weights, types, grids)
    assert last.shape == (1, weights.text.embed.shape[1])
    assert torch.equal(last, expected) and torch.equal(cache, expected_cache)


@torch.no_grad()
def test_prefill_equals_the_stage_after_every_layer(runtime, weights):
    """Keys and values of a layer come from every row of the layers before, so the caches compare all rows."""
    for depth in range(1, len(weights.text.layers) + 1):
        cut = replace(weights, text=replace(weights.text, layers=weights.text.layers[:depth]))
        (expected, expected_cache), (last, cache) = both(runtime, cut, *PROMPTS[-1])
        assert torch.equal(last, expected), f"layer {depth - 1}"
        assert torch.equal(cache, expected_cache) and cache.any()


@torch.no_grad()
def test_the_narrow_last_layer_is_the_wide_ones_last_row(weights):
    types, _ = PROMPTS[0]
    text = weights.text
    h = Ops().merge_embeddings(torch.arange(len(types)), text.embed, None, None)
    arguments = h, rope(positions(types, (), 2)[0], text, dtype_of(weights))
    results, caches = [], []
    for narrow in (False, True):
        caches.append(torch.zeros(len(text.layers), 2, 2, 64, 128, dtype=dtype_of(weights)))
        results.append(prefill(*arguments, caches[-1], torch.arange(len(types)), None, [], text, Ops(), narrow))
    # the library may sum one row in another order than seven; values are about 100
    torch.testing.assert_close(*results, rtol=1e-5 if dtype_of(weights) == torch.float32 else 0.02, atol=1e-4)
    torch.testing.assert_close(*caches)


def test_every_step_is_counted(runtime, weights):
    """Vision: angles 3, patches 1, a block 8, a merger 3. Text: angles 4, merge 1, a layer 9, the last 11, a tap 1."""
    made = runtime(weights)
    grids = GRIDS[0]
    pixels = pixels_of(grids).to(dtype_of(weights))
    made.encode(pixels, grids)
    blocks, taps = len(weights.vision.blocks), len(weights.vision.deepstack)
    assert made.launches == 4 + 8 * blocks + 3 * (taps + 1)
    (_, _), _ = both(lambda _: made, weights, *PROMPTS[2])
    layers = len(weights.text.layers)
    assert made.launches == 4 + 8 * blocks + 3 * (taps + 1) + 5 + 9 * layers + 2 + taps


def test_arguments_that_do_not_fit_are_one_sentence(runtime, weights):
    made = runtime(weights)
    for pixels in (torch.zeros(24, 1000), torch.zeros(20, 1536)):
        with pytest.raises(VlmoptError, match="pixels do not fit the grids and the patches"):
            made.encode(pixels, GRIDS[0])
    with pytest.raises(VlmoptError, match="no multiple of the merge size"):
        made.encode(torch.zeros(15, 1536), ((1, 3, 5),))
    with pytest.raises(VlmoptError, match="not packed"):
        runtime(collect(load(TINY, "cpu", torch.float32).model, packed=False))
    short = torch.zeros(4, 2, 2, 2, 128, dtype=dtype_of(weights))
    places = torch.arange(3).expand(3, -1)
    angles = rope(places, weights.text, dtype_of(weights))
    with pytest.raises(VlmoptError, match="not three for each token"):
        made.prefill(torch.arange(2), None, None, [], places, angles, short)
    with pytest.raises(VlmoptError, match="the cache does not fit"):
        made.prefill(torch.arange(3), None, None, [], places, angles, short)


@pytest.mark.parametrize(
    "parts", [("read",), ((64, 96), "read", (96, 64), "all"), ((1, 1), "x")], ids=["0", "2", "1 px"]
)
def test_generate_gives_the_stages_ids(runtime, tiny, prompt, parts):
    inputs, ids = prompt(*parts), []
    for cpp in (False, True):
        vlmopt.optimize(tiny.model, CONFIG.model_copy(update={"cpp_runtime": cpp}))
        before = vlmopt.status(tiny.model).cpp_launches
        ids.append(tiny.model.generate(**inputs, max_new_tokens=8, do_sample=False))
        status = vlmopt.status(tiny.model)
        assert status.calls["stages"] == 1 and status.cls == "near"
        assert (status.cpp_launches > before) == cpp
    assert torch.equal(*ids)


def test_beside_a_cache_of_eight_bits_it_drives_the_images_alone(runtime, tiny, prompt):
    changes, ids = {"kv_cache_dtype": "fp8"}, []
    with_image, without = prompt((64, 96), "read"), prompt("read")
    for cpp in (False, True):
        vlmopt.optimize(tiny.model, CONFIG.model_copy(update={**changes, "cpp_runtime": cpp}))
        ids.append(tiny.model.generate(**with_image, max_new_tokens=8, do_sample=False))
    before = vlmopt.status(tiny.model).cpp_launches
    tiny.model.generate(**without, max_new_tokens=8, do_sample=False)
    status = vlmopt.status(tiny.model)
    assert torch.equal(*ids) and status.calls["stages"] == 2 and before == status.cpp_launches > 0


def test_a_batch_is_served_row_by_row(runtime, tiny, prompt):
    first, second = prompt((64, 96), "read"), prompt((96, 64), "all of it", seed=1)
    longest = max(inputs["input_ids"].shape[1] for inputs in (first, second))
    pad = tiny.model.generation_config.pad_token_id
    fills = {"input_ids": pad, "attention_mask": 0, "mm_token_type_ids": 0}
    inputs = {
        name: torch.cat([F.pad(row[name], (longest - row[name].shape[1], 0), value=fill) for row in (first, second)])
        for name, fill in fills.items()
    }
    inputs.update({name: torch.cat([first[name], second[name]]) for name in ("pixel_values", "image_grid_thw")})
    ids = []
    for cpp in (False, True):
        vlmopt.optimize(tiny.model, CONFIG.model_copy(update={"cpp_runtime": cpp, "batches": True}))
        ids.append(tiny.model.generate(**inputs, max_new_tokens=8, do_sample=False))
        assert vlmopt.status(tiny.model).calls["stages"] == 1
    assert torch.equal(*ids)
