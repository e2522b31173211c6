"""The judge of all kernels."""

from types import SimpleNamespace

import torch

from vlmopt.kernels import oracle
from vlmopt.kernels.case import Case


def test_few_values_are_judged_on_several_draws():
    """A kernel as good as its reference passes on 40 values too, where one draw's largest error is luck."""
    seeds = []

    def make(params, device, dtype, generator):
        seeds.append(generator.initial_seed())
        return (torch.randn(params["n"], generator=generator, dtype=torch.float64).to(dtype),)

    module = SimpleNamespace(make=make, op_ref=lambda x: x / 3, op=lambda x: (x.float() / 3 * 1.0001).to(x.dtype))
    for n, draws in ((40, oracle.MOST_DRAWS), (1000, 3), (5000, 1)):
        seeds.clear()
        assert oracle.compare_case(module, "op", Case("", {"n": n}), "cpu", torch.bfloat16, seed=5).ok
        assert seeds == list(range(5, 5 + draws))
    module.op = lambda x: (x.float() / 3 * 1.02).to(x.dtype)
    assert not oracle.compare_case(module, "op", Case("", {"n": 40}), "cpu", torch.bfloat16).ok
    seeds.clear()
    oracle.compare_case(module, "op", Case("", {"n": 40}), "cpu", torch.float32)
    assert len(seeds) == 1, "in fp32 each value is judged alone"
