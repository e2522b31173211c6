"""The vision tower's rotation: bit-equal to its reference wherever it runs."""

import random
from functools import partial

import pytest
import torch

from vlmopt.bench.compilations import compiled
from vlmopt.kernels import oracle
from vlmopt.kernels import vision_rotary as module
from vlmopt.tests.kernels import checks

OP = "vision_rotary"


def wrong(qkv, cos, sin, n_heads):
    return module.vision_rotary_ref(qkv, cos, -sin, n_heads)


@checks.variants(module)
def test_has_its_reference_s_bits(case, dtype):
    args = checks.arguments(module, case, dtype)
    expected = module.vision_rotary_ref(*args)
    checks.same_bits(expected, module.vision_rotary(*args))
    checks.same_bits(expected, module.launch(*args))


def test_the_oracle_rejects_another_sense_of_rotation():
    checks.rejects(module, OP, checks.small(module), wrong)


def test_every_element_is_written_and_inputs_stay():
    checks.writes_everything(module, OP, checks.small(module))
    checks.leaves_inputs_alone(module, OP, checks.small(module))


def test_q_and_k_are_contiguous_and_v_is_a_view():
    qkv, *rest = checks.small(module)
    q, k, v = module.vision_rotary(qkv, *rest)
    assert q.is_contiguous() and k.is_contiguous()
    assert v.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()


def test_rows_may_lie_apart():
    checks.takes_strides(module, OP, checks.small(module), [0])


def test_halves_of_the_tables_may_differ():
    qkv, cos, sin, heads = checks.small(module)
    cos, sin = torch.rand_like(cos), torch.rand_like(sin)
    checks.same_bits(module.vision_rotary_ref(qkv, cos, sin, heads), module.vision_rotary(qkv, cos, sin, heads))


def test_no_rows_give_no_rows():
    qkv, cos, sin, heads = checks.small(module)
    assert [x.shape for x in module.vision_rotary(qkv[:0], cos[:0], sin[:0], heads)] == [(0, heads, 64)] * 3


def test_more_heads_than_a_block_holds():
    args = module.make({"rows": 2, "heads": 21}, checks.DEVICE, torch.float32, torch.Generator(checks.DEVICE))
    checks.same_bits(module.vision_rotary_ref(*args), module.vision_rotary(*args))


def test_poison_stays_in_its_row():
    def poison(args, value):
        args[0][1] = value

    checks.keeps_poison_in_its_row(
        module, OP, checks.small(module), poison, lambda out: [torch.cat([x[:1], x[2:]]) for x in out]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda qkv, cos, sin, n: (qkv.double(), cos, sin, n), "float64"),
        (lambda qkv, cos, sin, n: (qkv, cos.half(), sin, n), "float16"),
        (lambda qkv, cos, sin, n: (qkv, cos.half(), sin.half(), n), "contiguous float32"),
        (lambda qkv, cos, sin, n: (qkv, cos[:-1], sin, n), "contiguous float32"),
        (lambda qkv, cos, sin, n: (qkv, cos, checks.spread(sin), n), "contiguous float32"),
        (lambda qkv, cos, sin, n: (qkv, cos, sin, n + 1), "heads of 64"),
        (lambda qkv, cos, sin, n: (qkv[None], cos, sin, n), "heads of 64"),
        (lambda qkv, cos, sin, n: (qkv.t().contiguous().t(), cos, sin, n), "not contiguous"),
        (lambda qkv, cos, sin, n: (qkv, cos.to("meta"), sin.to("meta"), n), "move them to one device"),
    ],
)
def test_refuses(change, words):
    checks.refuses(module, OP, change(*checks.small(module)), words)


def test_is_registered():
    checks.is_registered(torch.ops.vlmopt.vision_rotary.default, checks.small(module))


@pytest.mark.gpu
def test_replays_the_same_bits():
    checks.replays(module, OP, checks.arguments(module, module.CASES[0], torch.bfloat16))


@pytest.mark.gpu
def test_a_new_size_compiles_nothing():
    sizes = [module.CASES[0].params["rows"], *random.Random(0).sample(range(1, 5000), 50)]
    generator = torch.Generator("cuda").manual_seed(0)
    sets = [module.make({"rows": rows, "heads": 16}, "cuda", torch.bfloat16, generator) for rows in sizes]
    assert len(compiled([lambda: module.launch(*sets[0])])) <= 1
    assert compiled(partial(module.launch, *args) for args in sets[1:]) == []


def test_the_oracle_finds_no_error_at_all():
    assert oracle.compare(module, OP, checks.small(module)) == oracle.Errors(0, 0)
