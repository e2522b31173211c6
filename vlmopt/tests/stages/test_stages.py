"""Each stage against the stock module that it re-expresses, bit by bit on the CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from vlmopt.bench.models import TINY, load
from vlmopt.ops import Ops
from vlmopt.stages.connector import positions, slots_of
from vlmopt.stages.prefill import prefill
from vlmopt.stages.tables import GRIDS_KEPT, GridTables, grid_table, rope
from vlmopt.stages.vision import encode
from vlmopt.weights import collect

GRIDS = [((1, 4, 6),), ((1, 2, 58), (1, 14, 2)), ((1, 10, 10), (1, 4, 4), (1, 6, 22)), ((3, 4, 4),)]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request):
    return load(TINY, "cpu", request.param).model


@pytest.mark.parametrize("grids", GRIDS, ids=str)
@torch.no_grad()
def test_vision_features_and_deepstack_taps(model, grids):
    weights = collect(model, packed=False).vision
    count = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(count, 1536, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    expected = model.model.visual(pixels, grid_thw=torch.tensor(grids), return_dict=True)
    features, taps = encode(pixels, grid_table(grids, weights), weights, Ops())
    assert torch.equal(features, expected.pooler_output)
    assert len(taps) == 3
    for ours, theirs in zip(taps, expected.deepstack_features, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_interpolation_table(reference, grids):
    weights = collect(reference.model, packed=False).vision
    table = grid_table(grids, weights)
    indices, taps = get_vision_interpolation_indices_and_weights(
        torch.tensor(grids), weights.side, align_corners=True, spatial_merge_size=2
    )
    assert torch.equal(table.indices, indices) and torch.equal(table.taps, taps)


def test_grid_tables_are_bounded_and_drop_the_oldest(reference):
    tables = GridTables(collect(reference.model, packed=False).vision)
    first = tables.get(((1, 2, 2),))
    for width in range(2, GRIDS_KEPT + 2):
        tables.get(((1, 4, 2 * width),))
        assert tables.get(((1, 2, 2),)) is first  # kept, since it is used
    tables.get(((1, 4, 4),))
    assert len(tables) == GRIDS_KEPT


def prompts():
    """Token types and grids: text runs and images alternate, as in a real prompt."""
    image = st.tuples(st.just(1), st.integers(1, 9), st.integers(1, 9))
    return st.lists(st.tuples(st.integers(1, 20), image), max_size=4), st.integers(1, 10)


@settings(max_examples=60)
@given(*prompts())
def test_positions_equal_stocks(reference, pieces, tail):
    types, grids = [], []
    for text, (frames, height, width) in pieces:
        types += [0] * text + [1] * (frames * height * width)
        grids.append((frames, 2 * height, 2 * width))
    types += [0] * tail
    ids = torch.zeros(1, len(types), dtype=torch.long)
    expected, delta = reference.model.model.get_rope_index(
        ids, torch.tensor([types]), image_grid_thw=torch.tensor(grids) if grids else None
    )
    ours, our_delta = positions(types, grids, 2)
    assert torch.equal(ours, expected[:, 0])
    assert our_delta == int(delta)


@pytest.mark.parametrize(
    ("types", "grids", "message"),
    [
        ([0, 1, 1, 0], [(1, 2, 2)], "does not fit"),
        ([0, 1, 0], [], "more runs"),
        ([0, 0], [(1, 2, 2)], "fewer runs"),
        ([0] + [1] * 2 + [0], [(1, 2, 2), (1, 2, 2)], "does not fit"),
    ],
)
def test_positions_refuse_what_does_not_fit(types, grids, message):
    with pytest.raises(ValueError, match=message):
        positions(types, grids, 2)


def test_rope_tables_equal_stocks(model):
    text = collect(model, packed=False).text
    index = torch.stack([torch.arange(300), torch.arange(300).flip(0), torch.arange(300) // 7])
    expected = model.model.language_model.rotary_emb(torch.zeros(1, dtype=model.dtype), index[:, None])
    for ours, theirs in zip(rope(index, text, model.dtype), expected, strict=True):
        assert torch.equal(ours, theirs[0])


def test_a_row_of_a_long_rope_table_equals_the_row_alone(model):
    """Decode looks rows up in a table where stock computes one row a step."""
    text = collect(model, packed=False).text
    long = rope(torch.arange(512).expand(3, -1), text, model.dtype)
    for row in (0, 1, 77, 511):
        alone = rope(torch.tensor([[row]] * 3), text, model.dtype)
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(long, alone, strict=True))


@torch.no_grad()
def test_hidden_states_after_every_layer(model):
    """DeepStack features must land on their own tokens: three images of different sizes, text between."""
    weights, ops = collect(model, packed=False), Ops()
    grids = ((1, 4, 4), (1, 2, 6), (1, 6, 2))
    types = [0] * 5 + [1] * 4 + [0] * 2 + [1] * 3 + [0] * 9 + [1] * 3 + [0] * 4
    ids = torch.randint(0, 250, (1, len(types)), generator=torch.Generator().manual_seed(1))
    ids[torch.tensor([types]) == 1] = weights.tokens.image
    pixels = torch.randn(40, 1536, generator=torch.Generator().manual_seed(2)).to(model.dtype)
    expected = model(
        input_ids=ids,
        pixel_values=pixels,
        image_grid_thw=torch.tensor(grids),
        mm_token_type_ids=torch.tensor([types]),
        output_hidden_states=True,
        logits_to_keep=1,
    )
    features, taps = encode(pixels, grid_table(grids, weights.vision), weights.vision, ops)
    slots = slots_of(types)
    h = ops.merge_embeddings(ids[0], weights.text.embed, slots, features)
    assert torch.equal(h, expected.hidden_states[0][0])
    angles = rope(positions(types, grids, 2)[0], weights.text, model.dtype)
    cache = torch.zeros(4, 2, 2, 64, 128, dtype=model.dtype)
    for depth in range(1, 5):
        cut = type(weights.text)(**{**vars(weights.text), "layers": weights.text.layers[:depth]})
        last = prefill(h, angles, cache, torch.arange(len(types)), slots, taps, cut, ops)
        if depth < 4:  # stock's last entry is already normalised
            assert torch.equal(last, expected.hidden_states[depth][0, -1:]), f"layer {depth - 1}"
    norm = weights.text.norm
    logits = ops.lm_head_logits(last, norm.weight, norm.eps, weights.text.head.weight)
    assert torch.equal(logits, expected.logits[0])
