"""Calibrated copies: better than rounding to nearest where it counts, and whatever Hessians look like."""

import copy

import pytest
import torch

import vlmopt
from vlmopt import OptimizeConfig, VlmoptError
from vlmopt.bench.models import TINY, load
from vlmopt.quant import calibration, pack
from vlmopt.quant.calibration import GPTQ, calibrated, gptq, hessians
from vlmopt.quant.checkpoints import SYMMETRIC
from vlmopt.quant.copies import quantize
from vlmopt.quant.schemes import SCHEMES, Scheme
from vlmopt.runtime.generate import ENGINES
from vlmopt.weights import collect


def draw(rows: int, width: int, seed: int) -> torch.Tensor:
    """Rows that a quarter as many hidden values make up, some inputs large: one distribution for every seed."""
    own = torch.Generator().manual_seed(seed)
    mix = torch.randn(width // 4, width, generator=torch.Generator().manual_seed(77)) / 8
    x = torch.randn(rows, width // 4, generator=own) @ mix + 0.3 * torch.randn(rows, width, generator=own)
    return x * (1 + 4 * (torch.arange(width) % 17 == 0))


def weight_of(out: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(out, width, generator=torch.Generator().manual_seed(5)).to(dtype)


def error(weight: torch.Tensor, made, x: torch.Tensor) -> float:
    """Relative error of the products with x, in float64."""
    exact = x.double() @ weight.double().t()
    return ((x.double() @ made.dequantize(torch.float64).t() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", [GPTQ, SYMMETRIC], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize(("rows", "less"), [(2000, 0.6), (60, 0.98)])
def test_products_with_rows_it_has_not_seen_are_nearer_than_rounding_gives(dtype, scheme, rows, less):
    """Also from fewer rows than columns, by little."""
    weight, seen, held_out = weight_of(48, 384, dtype), draw(rows, 384, 0), draw(500, 384, 1)
    made = gptq(weight, seen.t() @ seen, scheme)
    plain = error(weight, quantize(weight, scheme), held_out)
    assert error(weight, made, held_out) < less * plain


def test_what_a_group_is_off_by_is_made_up_for_in_the_next_ones():
    """The inputs of two groups are the same, and independent within a group: the second alone can undo the first."""
    weight, half = weight_of(16, 256), torch.randn(4000, 128, generator=torch.Generator().manual_seed(0))
    seen = torch.cat([half, half], 1)
    made, plain = gptq(weight, seen.t() @ seen), quantize(weight, GPTQ)
    assert torch.equal(made.scale[0], plain.scale[0]) and not torch.equal(made.scale[1], plain.scale[1])
    assert error(weight, made, seen) < 0.8 * error(weight, plain, seen)


def test_without_correlation_it_is_rounding_to_nearest():
    weight = weight_of(8, 256)
    for hessian in (torch.eye(256) * 3, torch.zeros(256, 256)):
        made, plain = gptq(weight, hessian), quantize(weight, SCHEMES["int4"])
        for part, tensor in plain.tensors.items():
            assert torch.equal(made.tensors[part], tensor), part


def test_an_input_that_is_always_zero_changes_nothing_and_is_kept():
    weight, seen = weight_of(8, 256), draw(500, 256, 0)
    seen[:, 7] = 0
    made = gptq(weight, seen.t() @ seen)
    assert made.values.dtype == torch.uint8 and made.dequantize(torch.float32).isfinite().all()
    step = made.scale[0].float()
    assert ((made.dequantize(torch.float32) - weight)[:, 7].abs() <= 1.01 * step).all()


@pytest.mark.parametrize("rank", [1, 3])
def test_a_hessian_of_low_rank_is_damped(rank):
    weight, seen = weight_of(16, 256), draw(rank, 256, 0)
    made = gptq(weight, seen.t() @ seen)
    assert error(weight, made, seen) < 0.3 * error(weight, quantize(weight, GPTQ), seen)


def test_bad_arguments_are_told_in_one_sentence():
    weight, good = weight_of(4, 256), torch.eye(256)
    for value in (float("nan"), float("inf")):
        bad = good.clone()
        bad[3, 5] = value
        with pytest.raises(VlmoptError, match="a Hessian holds an infinity or NaN"):
            gptq(weight, bad)
        with pytest.raises(VlmoptError, match="a weight holds an infinity or NaN"):
            gptq(weight.index_fill(1, torch.tensor([2]), value), good)
    with pytest.raises(VlmoptError, match="is no sum of squares"):
        gptq(weight, good.index_fill(1, torch.tensor([2]), -9.0))
    with pytest.raises(VlmoptError, match=r"shape \(128, 128\) is not of a weight \(4, 256\)"):
        gptq(weight, torch.eye(128))
    with pytest.raises(VlmoptError, match="no groups of 128"):
        gptq(torch.zeros(2, 100), torch.eye(100))


def test_the_arguments_are_left_as_they_are():
    weight, seen = weight_of(8, 256), draw(300, 256, 0)
    hessian = seen.t() @ seen
    before = weight.clone(), hessian.clone()
    gptq(weight, hessian)
    assert torch.equal(weight, before[0]) and torch.equal(hessian, before[1])


@pytest.fixture(scope="module")
def prompts(prompt):
    return [prompt((64, 96 + 32 * i), f"what is written on sign {i}?", seed=i) for i in range(6)]


@pytest.fixture(scope="module")
def found(reference, prompts):
    return hessians(reference.model, prompts[:4])


def inputs_seen(model, batches) -> dict[str, torch.Tensor]:
    """What every product is called with, by another way than the one under test: modules by their names."""
    names = {"qkv": "self_attn.k_proj", "o": "self_attn.o_proj", "gate_up": "mlp.up_proj", "down": "mlp.down_proj"}
    seen: dict[str, list[torch.Tensor]] = {}
    hooks = []
    for index in range(len(model.model.language_model.layers)):
        for part, name in names.items():
            module = model.get_submodule(f"model.language_model.layers.{index}.{name}")
            rows = seen.setdefault(f"layers.{index}.{part}", [])
            hooks.append(module.register_forward_hook(lambda _, x, y, rows=rows: rows.append(x[0].flatten(0, -2))))
    for batch in batches:
        model(**batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows) for name, rows in seen.items()}


def test_hessians_are_those_of_every_products_inputs(reference, prompts, found):
    seen = inputs_seen(reference.model, prompts[:4])
    assert found.keys() == seen.keys() and len(found) == 4 * 4
    for name, x in seen.items():
        expected = (x.double().t() @ x.double()).float()
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_no_hook_is_left(tiny, prompts):
    hessians(tiny.model, prompts[:1])
    with pytest.raises(ValueError, match="input_ids"):
        hessians(tiny.model, [{"no such argument": 1}])
    assert not any(module._forward_pre_hooks for module in tiny.model.modules())


def test_every_layer_of_the_model_is_nearer_on_prompts_it_has_not_seen(reference, prompts, found):
    text = collect(reference.model, packed=False).text
    made, plain = calibrated(text, found, with_head=False), pack.pack(text, SCHEMES["int4"], with_head=False)
    held_out = inputs_seen(reference.model, prompts[4:])
    for name, linears in pack.products_of(text).items():
        weight = pack.joint(linears)
        errors = [error(weight, copies.body[name], held_out[name]) for copies in (made, plain)]
        assert errors[0] < 0.9 * errors[1], (name, errors)


def test_copies_are_served_saved_and_loaded_as_others_are(tiny, prompts, found, tmp_path):
    text = collect(tiny.model, packed=False).text
    made = calibrated(text, found)
    assert {part.scheme for part in made.body.values()} == {GPTQ} and made.head is not None
    assert Scheme.from_dict(GPTQ.to_dict()) == GPTQ
    assert made.bytes == pack.bytes_of(text, GPTQ, True)
    again = pack.load(pack.save(tmp_path / "copies.safetensors", made, text), text)
    config = OptimizeConfig.preset("exact", packed=True, weights="int4", head8=True)
    ids = []
    for copies in (made, again):
        vlmopt.optimize(tiny.model, config, copies)
        assert ENGINES[tiny.model].weights.text.layers[1].o.weight is copies.body["layers.1.o"]
        ids.append(tiny.model.generate(**prompts[0], max_new_tokens=12, do_sample=False))
    assert torch.equal(*ids) and vlmopt.status(tiny.model).calls["stages"] == 1
    reasons = [vlmopt.plan(tiny.model, config, copies).parts for copies in (made, None)]
    told = [next(part.reason for part in parts if part.name == "weights") for parts in reasons]
    assert "decode reads int4-gptq copies" in told[0] and "decode reads int4 copies" in told[1]
    for name, own in made.body.items():
        assert again.body[name].scheme == GPTQ
        assert all(torch.equal(tensor, again.body[name].tensors[part]) for part, tensor in own.tensors.items())


def test_what_other_copies_cost_is_told_by_their_kind(tiny):
    """Symmetric copies of another tool have no row of their own."""
    text = collect(tiny.model, packed=False).text
    copies = pack.pack(text, SYMMETRIC, with_head=False)
    planned = vlmopt.plan(tiny.model, OptimizeConfig.preset("exact", weights="int4"), copies)
    assert "decode reads int4 copies" in next(part.reason for part in planned.parts if part.name == "weights")


def test_a_product_without_a_hessian_is_refused(reference, found):
    text = collect(copy.deepcopy(reference.model), packed=True).text
    assert calibrated(text, found).body.keys() == found.keys()
    with pytest.raises(VlmoptError, match=r"layers\.0\.o was not called.*give at least one batch"):
        calibrated(text, {name: h for name, h in found.items() if name != "layers.0.o"})


@pytest.mark.gpu
def test_on_a_gpu_calibrated_copies_are_served_by_kernels(prompts):
    loaded = load(TINY, "cuda")
    batches = [{name: tensor.to("cuda") for name, tensor in each.items()} for each in prompts]
    copies = calibrated(collect(loaded.model, packed=False).text, hessians(loaded.model, batches[:4]))
    vlmopt.optimize(loaded.model, "fast4", copies)
    loaded.model.generate(**batches[5], max_new_tokens=12, do_sample=False)
    assert vlmopt.status(loaded.model).calls == {"stages": 1, "kernels": 1, "stock": 0}


def test_more_damping_moves_the_copy_towards_rounding(monkeypatch):
    weight, seen = weight_of(16, 256), draw(400, 256, 0)
    plain = quantize(weight, GPTQ).dequantize(torch.float32)
    far = []
    for damping in (0.01, 1.0, 1e6):
        monkeypatch.setattr(calibration, "DAMPING", damping)
        far.append((gptq(weight, seen.t() @ seen).dequantize(torch.float32) - plain).norm().item())
    assert far[0] > far[1] > far[2] and far[2] < 1e-2 * far[0]
