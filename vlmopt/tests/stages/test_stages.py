"""Each stage against the stock module that it re-expresses, bit by bit on the CPU, and its forms against each other."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from vlmopt.bench.models import TINY, load
from vlmopt.errors import VlmoptError
from vlmopt.kernels.decode_attention import decode_attention_live_ref
from vlmopt.kernels.decode_layer import Layer, decode_layer_ref
from vlmopt.kernels.linear_swiglu import linear_swiglu_ref
from vlmopt.ops import Ops
from vlmopt.stages.connector import positions, require_fit, slots_of
from vlmopt.stages.decode import attention, decode_step, layer_tensors, packed, whole_step
from vlmopt.stages.layer import attention_block, mlp_block
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
    assert first.lengths == (4,)
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
    assert torch.equal(ours, expected[:, 0]) and ours.dtype == torch.int64
    assert our_delta == int(delta)


@pytest.mark.parametrize(
    ("types", "grids", "message"),
    [
        ([0, 1, 1, 0], [(1, 2, 2)], "does not fit"),
        ([0, 1, 0], [], "more runs"),
        ([0, 0], [(1, 2, 2)], "fewer runs"),
        ([0] + [1] * 2 + [0], [(1, 2, 2), (1, 2, 2)], "does not fit"),
        ([0, 1, 0], [(1, 3, 2)], "does not fit"),
        ([0, 1, 0], [(1, 2, 3)], "does not fit"),
        ([0, 1, 0], [(1, -2, -2)], "does not fit"),
    ],
)
def test_positions_refuse_what_does_not_fit(types, grids, message):
    with pytest.raises(ValueError, match=message):
        positions(types, grids, 2)


def test_a_misfit_is_told_with_the_runs_own_length():
    with pytest.raises(ValueError, match=r"^a run of 2 image tokens does not fit an image of 1×2×2$"):
        require_fit([(3, 5)], [(1, 2, 2)], 2)


def test_slots_number_the_image_tokens():
    slots = slots_of([0, 1, 1, 0, 1])
    assert slots.tolist() == [-1, 0, 1, -1, 2] and slots.dtype == torch.int32


@torch.no_grad()
def test_a_tap_behind_the_last_block_changes_no_feature(reference):
    """None of the models known has one; the block's own output is then the stream, with nothing left to add."""
    weights = collect(reference.model, packed=False).vision
    pixels = torch.randn(24, 1536, generator=torch.Generator().manual_seed(0))
    table = grid_table(((1, 4, 6),), weights)
    plain, _ = encode(pixels, table, replace(weights, deepstack={}), Ops())
    features, taps = encode(pixels, table, replace(weights, deepstack={len(weights.blocks) - 1: weights.merger}), Ops())
    assert torch.equal(features, plain) and torch.equal(taps[0], plain)


def test_rope_tables_equal_stocks(model):
    text = collect(model, packed=False).text
    index = torch.stack([torch.arange(300), torch.arange(300).flip(0), torch.arange(300) // 7])
    expected = model.model.language_model.rotary_emb(torch.zeros(1, dtype=model.dtype), index[:, None])
    for ours, theirs in zip(rope(index, text, model.dtype), expected, strict=True):
        assert torch.equal(ours, theirs[0])


def test_a_rope_scale_multiplies_both_tables(model):
    text, places = collect(model, packed=False).text, torch.arange(9).expand(3, -1)
    for ours, plain in zip(
        rope(places, replace(text, rope_scale=2.0), torch.float32), rope(places, text, torch.float32), strict=True
    ):
        assert torch.equal(ours, 2 * plain)


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


@torch.no_grad()
def test_hidden_states_of_a_text(model):
    weights, ops = collect(model, packed=False).text, Ops()
    ids = torch.randint(0, 250, (1, 12), generator=torch.Generator().manual_seed(3))
    expected = model(input_ids=ids, output_hidden_states=True).hidden_states
    angles = rope(torch.arange(12).expand(3, -1), weights, model.dtype)
    cache = torch.zeros(4, 2, 2, 16, 128, dtype=model.dtype)
    for depth in range(1, 4):
        cut = replace(weights, layers=weights.layers[:depth])
        h = ops.merge_embeddings(ids[0], weights.embed, None, None)
        last = prefill(h, angles, cache, torch.arange(12), None, [], cut, ops)
        assert torch.equal(last, expected[depth][0, -1:]), f"layer {depth - 1}"


@pytest.fixture(scope="module")
def text():
    """Packed weights of a model in fp32."""
    return collect(load(TINY, "cpu", torch.float32).model, packed=True).text


def refuse(*args, **kwargs):
    raise AssertionError("an entry was called that has no part here")


def near(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


IDS = torch.tensor([70, 268, 268, 268, 32, 101, 110, 33, 70, 111, 9])


def run_prefill(text, length, padding=0, taps=3, ops=None, **form):
    """Last row and cache of a prompt whose rows 1 to 3 are an image, and the rows that each layer's MLP has seen."""
    seen, ops = [], ops or Ops()
    counted = replace(ops, swiglu=lambda products: (seen.append(len(products[0])), ops.swiglu(products))[1])
    ids = F.pad(IDS[:length], (0, padding), value=5)
    slots = slots_of((ids == 268).long())
    deepstack = torch.randn(4, 3, text.embed.shape[1], generator=torch.Generator().manual_seed(4))[:taps]
    places, cache = torch.arange(len(ids)), torch.full((4, 2, 2, 16, 128), 7.0)
    h, angles = text.embed[ids], rope(places.expand(3, -1), text, torch.float32)
    return prefill(h, angles, cache, places, slots, deepstack, text, counted, **form), cache, seen


NARROWINGS = {
    "the last row": (0, Ops(decode_attention_masked=refuse)),
    "the last row, its length on the device": (
        0,
        Ops(decode_attention_live=decode_attention_live_ref, decode_attention_masked=refuse),
    ),
    "a row before padding": (4, Ops(decode_attention=refuse)),
}


@pytest.mark.parametrize("name", NARROWINGS)
@torch.no_grad()
def test_a_last_layer_of_one_row_gives_that_row_and_every_rows_keys_and_values(text, name):
    padding, ops = NARROWINGS[name]
    asked = torch.tensor([8]) if padding else None
    expected, whole, _ = run_prefill(text, 9)
    last, cache, rows = run_prefill(text, 9, padding, ops=ops, narrow=True, asked=asked)
    assert rows == [9 + padding] * 3 + [1]
    near(last, expected)
    near(cache[:, :, :, :9], whole[:, :, :, :9])
    assert (cache[:, :, :, 9 + padding :] == 7).all()


@torch.no_grad()
def test_a_last_layer_of_one_row_adds_its_bias(text):
    *others, last = text.layers
    text = replace(text, layers=(*others, replace(last, o=biased(last.o))))
    near(run_prefill(text, 9, narrow=True)[0], run_prefill(text, 9)[0])


@pytest.mark.parametrize("taps", [1, 4])
@torch.no_grad()
def test_the_row_asked_for_is_the_last_before_padding(text, taps):
    expected, _, _ = run_prefill(text, 9, taps=taps)
    found, _, rows = run_prefill(text, 9, 4, taps=taps, asked=torch.tensor([8]))
    assert rows == [13] * 4
    near(found, expected)


@torch.no_grad()
def test_a_last_layer_whose_features_are_still_to_be_added_is_not_narrowed(text):
    last, _, rows = run_prefill(text, 9, taps=4, narrow=True)
    assert rows == [9] * 4 and torch.equal(last, run_prefill(text, 9, taps=4)[0])


ATTENTIONS = {
    "waiting": (Ops(decode_attention_masked=refuse), True),
    "masked": (Ops(decode_attention=refuse), False),
    "live": (
        Ops(
            decode_attention_live=decode_attention_live_ref,
            decode_attention=refuse,
            decode_attention_masked=refuse,
        ),
        True,
    ),
    "a layer in one": (Ops(decode_layer=decode_layer_ref, add_rms_norm=refuse, linear=refuse), True),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ATTENTIONS)
@torch.no_grad()
def test_the_newest_tokens_over_the_cache_give_the_rows_of_the_whole_prompt(text, name, count):
    ops, may_wait = ATTENTIONS[name]
    _, cache, _ = run_prefill(text, 8, taps=0)
    row = torch.arange(8, 8 + count)
    angles = rope(row.expand(3, -1), text, torch.float32)
    attend = attention(row, cache, ops, may_wait)
    h = decode_step(IDS[row], angles, cache, row, attend, text, ops)
    for i in range(count):
        expected, whole, _ = run_prefill(text, 9 + i, taps=0)
        near(h[i : i + 1], expected)
    near(cache, whole)


def test_the_mask_over_the_cache_has_its_type_and_one_querys_output_is_not_copied():
    given, output = [], torch.zeros(1)
    ops = Ops(decode_attention_masked=lambda q, k, v, bias: (given.append(bias), output)[1])
    attend = attention(torch.tensor([1]), torch.zeros(1, 2, 1, 4, 8, dtype=torch.bfloat16), ops)
    assert attend(output, output, output) is output
    assert given[0].dtype == torch.bfloat16 and given[0].tolist() == [0, 0, float("-inf"), float("-inf")]


@torch.no_grad()
def test_separate_products_are_not_for_entries_that_cover_a_layer(reference):
    separate = collect(reference.model, packed=False).text
    cache, row = torch.zeros(4, 2, 2, 16, 128), torch.tensor([0])
    ops, angles = Ops(decode_layer=refuse, linear_swiglu=refuse), rope(row.expand(3, -1), separate, torch.float32)
    h = decode_step(IDS[:1], angles, cache, row, attention(row, cache, ops, True), separate, ops)
    assert torch.isfinite(h).all()
    with pytest.raises(VlmoptError, match=r"^a whole step takes packed products without biases$"):
        whole_step(angles, cache, IDS[:1], row, row, row, separate, replace(ops, decode_step=refuse))


def test_products_are_packed_where_each_is_one_weight_without_a_bias(text, reference):
    assert packed(text) and not packed(collect(reference.model, packed=False).text)
    first, bias = text.layers[0], torch.zeros(1)
    for changes in (
        {"qkv": (replace(first.qkv[0], bias=bias),)},
        {"o": replace(first.o, bias=bias)},
        {"gate_up": first.gate_up * 2},
        {"down": replace(first.down, bias=bias)},
    ):
        assert not packed(replace(text, layers=(replace(first, **changes), *text.layers[1:])))
    assert not packed(replace(text, head=replace(text.head, bias=bias)))


def test_a_whole_step_gives_its_entry_everything_in_the_launchers_order(text):
    first = text.layers[0]
    told_apart = replace(text, layers=(replace(first, q_norm=replace(first.q_norm, eps=0.5)), *text.layers[1:]))
    *state, cos, sin = torch.arange(7).split(1)
    cache, token, row, delta, history = state
    entry = Ops(decode_step=lambda *args: args)
    layers, embed, norm, head, rope_, eps, head_eps, *rest = whole_step(
        (cos, sin), cache, token, row, delta, history, told_apart, entry
    )
    assert [list(map(id, layer)) for layer in layers] == [
        list(map(id, layer_tensors(one))) for one in told_apart.layers
    ]
    assert (embed is text.embed) and (norm is text.norm.weight) and (head is text.head.weight) and rope_ == (cos, sin)
    assert (eps, head_eps) == (first.input_norm.eps, 0.5)
    assert torch.cat(rest).tolist() == [0, 1, 2, 3, 4]


def test_a_layers_tensors_stand_in_the_order_of_the_entrys_layer(text):
    first = text.layers[0]
    named = Layer(*layer_tensors(first))
    assert named.qkv is first.qkv[0].weight and named.gate_up is first.gate_up[0].weight
    for name in ("input_norm", "q_norm", "k_norm", "o", "post_norm", "down"):
        assert getattr(named, name) is getattr(first, name).weight


@torch.no_grad()
def test_gate_and_up_in_one_launch_where_they_are_packed(text, reference):
    x, layer = torch.randn(3, text.embed.shape[1], generator=torch.Generator().manual_seed(5)), text.layers[0]
    expected = mlp_block(x, layer, Ops())
    near(mlp_block(x, layer, Ops(linear_swiglu=linear_swiglu_ref, swiglu=refuse)), expected)
    separate = collect(reference.model, packed=False).text.layers[0]
    near(mlp_block(x, separate, Ops(linear_swiglu=refuse)), expected)


@torch.no_grad()
def test_a_bias_of_any_product_is_added(reference):
    layer = collect(reference.model, packed=False).text.layers[0]
    layer = replace(layer, **{name: biased(getattr(layer, name)) for name in ("qkv", "o", "gate_up", "down")})
    x = torch.randn(3, layer.o.weight.shape[0], generator=torch.Generator().manual_seed(6))
    gate, up = (F.linear(x, one.weight, one.bias) for one in layer.gate_up)
    near(mlp_block(x, layer, Ops()), F.linear(F.silu(gate) * up, layer.down.weight, layer.down.bias))
    products, heads = [], torch.ones(3, layer.o.weight.shape[1])
    ops = Ops(qkv_norm_rope_cache=lambda given, *rest: products.extend(given))
    out = attention_block(x, layer, (x, x), torch.zeros(2, 1), x, lambda q, k, v: heads, ops)
    near(out, F.linear(heads, layer.o.weight, layer.o.bias))
    for found, one in zip(products, layer.qkv, strict=True):
        near(found, F.linear(x, one.weight, one.bias))


def biased(linear):
    if isinstance(linear, tuple):
        return tuple(map(biased, linear))
    return replace(linear, bias=torch.linspace(1, 2, len(linear.weight)))
