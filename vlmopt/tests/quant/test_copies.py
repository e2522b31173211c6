"""Quantised copies: error bounds against float64, files, and other tools' layouts."""

import dataclasses

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmopt.errors import VlmoptError
from vlmopt.quant import pack
from vlmopt.quant.checkpoints import MEMBERS, PREFIX, SYMMETRIC, from_checkpoint, nibbles
from vlmopt.quant.copies import Quantized, quantize, row_errors
from vlmopt.quant.schemes import SCHEMES, Scheme
from vlmopt.weights import collect

EVERY = {**SCHEMES, SYMMETRIC.name: SYMMETRIC}
schemes = pytest.mark.parametrize("scheme", EVERY.values(), ids=EVERY)


@pytest.fixture(scope="module")
def text():
    from vlmopt.bench.models import TINY, load

    return collect(load(TINY, "cpu", torch.float32).model, packed=True).text


def weight_of(kind: str, rows: int, width: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    if kind == "outlier":
        weight[0, 5] = 300.0
    elif kind == "zeros":
        weight[0] = 0
    elif kind == "positive":
        weight = weight.abs() + 0.5
    elif kind == "tiny":
        weight *= 1e-4
    return weight.to(dtype)


def largest_error(weight: torch.Tensor, copy: Quantized) -> torch.Tensor:
    """What rounding to nearest may be off by, each value, in float64."""
    if copy.scheme.values == "int8":
        return copy.scale.double()[:, None].expand(weight.shape) / 2
    if copy.scheme.values == "fp8":  # three bits of mantissa; below 2⁻⁶ steps of 2⁻⁹
        scaled = weight.double().abs() / copy.scale.double()[:, None]
        return copy.scale.double()[:, None] * torch.maximum(scaled * 2**-4, torch.tensor(2.0**-10))
    # half a step, and another half where the whole number for zero or the kept scale moves the ends
    return copy.scale.double().t()[:, :, None].expand(-1, -1, 128).flatten(1)


@schemes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@settings(max_examples=40)
@given(
    drawn=st.tuples(
        st.sampled_from(["normal", "outlier", "zeros", "positive", "tiny"]),
        st.integers(1, 9),
        st.sampled_from([128, 384]),
        st.integers(0, 1000),
    )
)
def test_no_value_is_off_by_more_than_rounding_allows(scheme, dtype, drawn):
    weight = weight_of(*drawn, dtype)
    copy = quantize(weight, scheme)
    off = (weight.double() - copy.dequantize(torch.float64)).abs()
    bound = largest_error(weight, copy)
    if scheme.zero_point and dtype != torch.float32:
        bound = bound + weight.double().abs() * 2**-8  # the scale is kept in the weight's dtype
    # the quotient in fp32 is off by up to 127 · 2⁻²⁴ steps, twice that in halves of a step, and so is the product
    assert (off <= bound * (1 + 4 * 127 * 2**-24)).all()


@schemes
def test_the_bound_sees_a_copy_that_is_off(scheme):
    weight = weight_of("normal", 4, 384, 0, torch.float32)
    copy = quantize(weight.roll(1, 1), scheme)
    assert ((weight.double() - copy.dequantize(torch.float64)).abs() > largest_error(weight, copy)).any()


@schemes
def test_row_errors_are_those_of_float64(scheme):
    weight = weight_of("normal", 70, 384, 0, torch.bfloat16)
    copy = quantize(weight, scheme)
    off = weight.double() - copy.dequantize(torch.float64)
    exact = torch.stack([error.norm() / row.double().norm() for error, row in zip(off, weight, strict=True)])
    torch.testing.assert_close(row_errors(weight, copy), exact)
    assert exact.max() < (0.2 if scheme.values == "int4" else 0.05)


@schemes
def test_schemes_survive_json_and_count_their_bytes(scheme):
    assert Scheme.from_dict(scheme.to_dict()) == scheme
    copy = quantize(weight_of("normal", 6, 384, 0, torch.bfloat16), scheme)
    assert scheme.bytes(6, 384, 2) == copy.bytes


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "x"}, "not a quantisation scheme"),
        ({"name": "x", "values": "int4", "group": 64}, "no kernel serves int4 in groups of 64"),
        ({"name": "x", "values": "int8", "zero_point": True}, "with a zero point"),
    ],
)
def test_a_scheme_that_no_kernel_serves_is_refused(data, words):
    with pytest.raises(VlmoptError, match=words):
        Scheme.from_dict(data)


def test_weights_that_cannot_be_quantised_are_refused():
    with pytest.raises(VlmoptError, match="no groups of 128"):
        quantize(torch.zeros(2, 100), SCHEMES["int4"])
    with pytest.raises(VlmoptError, match="infinity or NaN"):
        quantize(torch.full((2, 128), float("nan")), SCHEMES["int8"])


@schemes
def test_a_saved_file_gives_the_same_copies(scheme, text, tmp_path):
    made = pack.pack(text, scheme, with_head=True)
    found = pack.load(pack.save(tmp_path / "copies.safetensors", made, text), text)
    assert found.body.keys() == made.body.keys() and len(made.body) == 4 * len(text.layers)
    for name, copy in made.body.items():
        assert found.body[name].scheme == scheme
        for part, tensor in copy.tensors.items():
            assert torch.equal(found.body[name].tensors[part].float(), tensor.float()), name
    assert torch.equal(found.head.radius, made.head.radius) and found.head.weight is text.head.weight
    assert found.bytes == made.bytes == pack.bytes_of(text, scheme, True)


def test_a_file_of_other_weights_is_refused_in_one_sentence(text, tmp_path):
    path = pack.save(tmp_path / "copies.safetensors", pack.pack(text, None, True), text)
    head = dataclasses.replace(text.head, weight=text.head.weight * 1.001)
    with pytest.raises(VlmoptError, match="was made from other weights"):
        pack.load(path, dataclasses.replace(text, head=head))
    (tmp_path / "bad").write_bytes(b"no such file")
    with pytest.raises(VlmoptError, match="cannot be read"):
        pack.load(tmp_path / "bad", text)
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(VlmoptError, match="no copies that this version knows"):
        pack.load(tmp_path / "other", text)


def to_int32(values: torch.Tensor) -> torch.Tensor:
    """Values 0 … 15 as compressed-tensors packs a row: eight to a word, the lowest bits first."""
    words = torch.zeros(len(values), values.shape[1] // 8, dtype=torch.int64)
    for place in range(8):
        words |= values[:, place::8].long() << (4 * place)
    return words.to(torch.int32)


def checkpoint(text, layout: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint's tensors in a layout, and the weights that they stand for by our names."""
    tensors, stands_for = {}, {}
    for index, layer in enumerate(text.layers):
        heads = [text.n_heads * text.head_dim] + 2 * [text.n_kv_heads * text.head_dim]
        sizes = {"qkv": heads, "o": None, "gate_up": [len(layer.gate_up[0].weight) // 2] * 2, "down": None}
        for part, members in MEMBERS.items():
            weight = (getattr(layer, part) if sizes[part] is None else getattr(layer, part)[0]).weight
            rows = weight.split(sizes[part]) if sizes[part] else [weight]
            wholes = []
            for member, own in zip(members, rows, strict=True):
                new, whole = member_tensors(own, layout)
                tensors |= {f"{PREFIX}{index}.{member}.{key}": tensor for key, tensor in new.items()}
                wholes.append(whole)
            stands_for[f"layers.{index}.{part}"] = torch.cat(wholes)
    return tensors, stands_for


def member_tensors(weight: torch.Tensor, layout: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    if layout in ("int8", "fp8", "torchao int8"):
        scale = weight.abs().amax(1, keepdim=True) / (448 if layout == "fp8" else 127)
        ratio = weight / scale
        values = ratio.to(torch.float8_e4m3fn) if layout == "fp8" else ratio.round().to(torch.int8)
        names = ("_weight_qdata", "_weight_scale") if "torchao" in layout else ("weight", "weight_scale")
        return dict(zip(names, (values, scale), strict=True)), values.float() * scale
    groups = weight.unflatten(1, (-1, 128))
    scale = groups.abs().amax(2) / 6
    zero = torch.randint(-2, 3, scale.shape) if layout == "asymmetric" else torch.zeros_like(scale)
    steps = ((groups / scale[:, :, None]).round() + zero[:, :, None]).clamp(-8, 7)
    tensors = {"weight_packed": to_int32(steps.flatten(1) + 8), "weight_scale": scale}
    tensors["weight_shape"] = torch.tensor(weight.shape)
    if layout == "asymmetric":
        tensors["weight_zero_point"] = to_int32((zero + 8).t()).t().contiguous()
    return tensors, ((steps - zero[:, :, None]) * scale[:, :, None]).flatten(1)


@pytest.mark.parametrize("layout", ["int8", "fp8", "symmetric", "asymmetric", "torchao int8"])
def test_other_tools_checkpoints_load(layout, text, tmp_path):
    tensors, stands_for = checkpoint(text, layout)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    copies = from_checkpoint(safetensors.torch.load_file(path), text)
    assert copies.body.keys() == stands_for.keys()
    for name, copy in copies.body.items():
        assert torch.equal(copy.dequantize(torch.float32), stands_for[name]), name


def test_nibbles_are_read_lowest_first():
    assert nibbles(torch.tensor([[0x76543210, -1]], dtype=torch.int32)).tolist() == [[*range(8), *[15] * 8]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, n: t.pop(f"{n}.weight_scale"), "has no .*weight_scale"),
        (lambda t, n: t.update({f"{n}.weight": t[f"{n}.weight"].float()}), "torch.float32 values"),
        (lambda t, n: t.update({f"{n}.weight": t[f"{n}.weight"][:, :-1].contiguous()}), "another shape"),
        (lambda t, n: t.update({f"{n}.weight_scale": t[f"{n}.weight_scale"][:1]}), "one scale for each output"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change, words, text):
    tensors, _ = checkpoint(text, "int8")
    change(tensors, f"{PREFIX}0.self_attn.o_proj")
    with pytest.raises(VlmoptError, match=words):
        from_checkpoint(tensors, text)
