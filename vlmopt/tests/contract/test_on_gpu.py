"""What needs a GPU: kernels and graphs on random conversations, tens of thousands of patches, offsets beyond 2³¹."""

import copy
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image

import vlmopt
from vlmopt import OptimizeConfig
from vlmopt.bench.models import TINY, load, prompt
from vlmopt.ops import Ops, table
from vlmopt.runtime.generate import ENGINES
from vlmopt.workbook import contract_study
from vlmopt.workbook.conversations import prepare

pytestmark = pytest.mark.gpu
GREEDY = {"do_sample": False, "max_new_tokens": 6}
CASES = 80


@pytest.fixture(scope="module")
def loaded():
    return load(TINY, "cuda:0", torch.bfloat16)


@pytest.fixture
def fast(loaded):
    model = copy.deepcopy(loaded.model)
    vlmopt.optimize(model, "fast")
    return model


def test_random_conversations_differ_at_near_ties_only(loaded, fast):
    rows, differing = contract_study.study(loaded, fast, CASES, seed=1)
    contract_study.require(rows, differing, seed=1)


def test_rows_of_a_batch_say_what_the_prompts_say_alone(loaded, fast):
    case = next(c for c in (contract_study.case_of(2, i, False) for i in range(99)) if len(c.chats) == 4)
    together, alone = prepare(loaded.processor, case, loaded.device)
    rows = fast.generate(**together, **GREEDY, eos_token_id=None)[:, -6:]
    assert vlmopt.status(fast).calls["stages"] == 1
    reference, options = copy.deepcopy(loaded.model).float(), {**GREEDY, "eos_token_id": None}
    for row, inputs in zip(rows, alone, strict=True):
        single = fast.generate(**inputs, **GREEDY, eos_token_id=None)[0, -6:]
        assert contract_study._near_tie(loaded.model, reference, inputs, options, single, row)


@pytest.mark.parametrize(("height", "width"), [(15420, 690), (3000, 4000)], ids=["a strip", "12 megapixels"])
@pytest.mark.parametrize("preset", ["exact", "fast"])
def test_tens_of_thousands_of_patches(loaded, preset, height, width):
    """A full mask over the larger one would have more than 2³¹ elements."""
    processor = copy.deepcopy(loaded.processor)
    processor.image_processor.size = {"shortest_edge": 65536, "longest_edge": 16777216}
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    inputs = prompt(processor, Image.fromarray(pixels), "what is it?").to(loaded.device)
    assert inputs["pixel_values"].shape[0] > 42_000
    model = copy.deepcopy(loaded.model)
    vlmopt.optimize(model, preset)
    mine, theirs = (m.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :] for m in (model, loaded.model))
    assert vlmopt.status(model).calls["stages"] == 1
    if preset == "exact":
        assert torch.equal(mine, theirs)
    else:
        reference = copy.deepcopy(loaded.model).float()
        assert contract_study._near_tie(loaded.model, reference, dict(inputs), GREEDY, theirs, mine)


def test_the_last_layer_of_a_cache_beyond_two_billion_values():
    """Row 131,071 of layer 27 of the 2B model's cache; the same on a cache of its own is the answer."""
    heads, queries, width, capacity = 8, 16, 128, 131_072
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GB of free device memory")
    ops, generator = table(OptimizeConfig.preset("fast")), torch.Generator("cuda").manual_seed(0)
    assert ops.qkv_norm_rope_cache is not Ops.qkv_norm_rope_cache

    def random(*shape):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    product, norms, angles = (
        random(1, (queries + 2 * heads) * width),
        (random(width), random(width)),
        random(2, 1, width),
    )
    whole = torch.zeros(28, 2, heads, capacity, width, device="cuda", dtype=torch.bfloat16)
    assert whole.numel() > 2**31
    own = torch.zeros_like(whole[27])
    row = torch.tensor([capacity - 1], device="cuda")
    found = []
    for kv in (whole[27], own):
        q = ops.qkv_norm_rope_cache([product], *norms, 1e-6, *angles, kv[0], kv[1], row)
        found.append((q, ops.decode_attention_live(q, kv[0], kv[1], row=row)))
    assert torch.equal(whole[27], own) and not torch.equal(own, torch.zeros_like(own))
    assert not whole[:27].any()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_two_hundred_lengths_and_fifty_grids_keep_graphs_and_memory_bounded(loaded, fast):
    rng, levels = Random(0), []
    tokenizer = loaded.processor.tokenizer
    for number in range(250):
        if number % 5 == 4:
            picture = Image.new("RGB", (rng.randint(20, 400), rng.randint(20, 400)))
            inputs = prompt(loaded.processor, picture, "what?").to(loaded.device)
        else:
            inputs = tokenizer("a" * rng.randint(1, 1500), return_tensors="pt").to(loaded.device)
        fast.generate(**inputs, **GREEDY)
        if number % 50 == 49:
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            levels.append(torch.cuda.memory_allocated())
    assert vlmopt.status(fast).calls == {"stages": 250, "kernels": 250, "stock": 0}
    assert len(ENGINES[fast].graphs) <= 8
    assert max(levels) - levels[0] < 16 * 2**20, levels
