"""The model's parts add up to what PyTorch counts, for the 2B shapes on the meta device and for the tiny model."""

import pytest

from vlmopt.bench import roofline
from vlmopt.workbook import structure
from vlmopt.workbook.structure import Request


@pytest.fixture(scope="module")
def big():
    return structure.meta_model(structure.config_2b())


def test_the_2b_model_has_its_published_size(big):
    parts = structure.parts(big, Request((1, 48, 64), 798))
    assert sum(part.parameters for part in parts) == structure.parameter_count(big) == 2_127_532_032
    assert all(parameter.is_meta for parameter in big.parameters())


@pytest.mark.parametrize("request_", [Request((1, 48, 64), 798), Request((2, 6, 4), 40)], ids=["photo", "two frames"])
def test_flops_and_bytes_agree_with_the_roofline(big, request_):
    parts = structure.parts(big, request_)
    flops = roofline.prefill_flops(big.config, request_.tokens, request_.grid)
    assert sum(part.first_token_flops for part in parts) == flops
    norms = next(part for part in parts if part.name == "text norms")
    read = sum(part.decode_bytes for part in parts) - norms.decode_bytes
    assert read == roofline.decode_bytes(big.config, request_.tokens)


def test_the_linear_layers_flops_are_those_that_pytorch_counts(reference, prompt):
    inputs = prompt((64, 96), "what does the sign say?")
    asked = Request(tuple(inputs["image_grid_thw"][0].tolist()), inputs["input_ids"].shape[1])
    counted = structure.counted_products(reference.model, inputs)
    assert counted == structure.linear_flops(reference.model, asked)
    longer = Request(asked.grid, asked.tokens + 1)
    assert counted < structure.linear_flops(reference.model, longer)


def test_a_photo_has_four_patches_a_visual_token():
    request = structure.photo_request(768, 1024, text_tokens=30)
    assert request.patches == 3072
    assert request.tokens == 768 + 30


def test_rows_for_display_are_in_the_units_they_name():
    (row,) = structure.part_rows([structure.Part("text MLP", 2_000_000, 3_000_000_000, 4_000_000)])
    assert row == {"part": "text MLP", "parameters, M": 2, "first token, GFLOP": 3, "decode step, MB": 4}
