"""All 500 samples on the CPU: same ids, same bits, same answers as stock, and answers worth having."""

import sys

from vlmopt import OptimizeConfig
from vlmopt.tests.passes import Pass, run_pass


def test_every_sample_is_served_by_the_stages(full_pass: Pass):
    assert full_pass.calls == {"stages": 500, "kernels": 0, "stock": 0}


def test_greedy_ids_equal_stock_on_all_samples(full_pass: Pass):
    assert len(full_pass.our_ids) == 500
    assert full_pass.our_ids == full_pass.stock_ids


def test_logits_of_every_step_are_bit_equal(full_pass: Pass):
    assert full_pass.steps > 500
    assert full_pass.differing_steps == 0, full_pass.first_difference


def test_accuracy_is_at_least_90_percent(full_pass: Pass):
    assert sum(full_pass.stock_accuracy) / 500 >= 0.90
    assert sum(full_pass.our_accuracy) / 500 >= 0.90


def test_packed_products_are_bit_equal_on_the_cpu_too(tiny, samples):
    result = run_pass(tiny, samples.select(range(24)), OptimizeConfig.preset("exact", packed=True))
    assert result.our_ids == result.stock_ids
    assert result.differing_steps == 0, result.first_difference


def test_the_comparison_rejects_a_wrong_model(tiny, samples, monkeypatch):
    """The oracle is shown a wrong answer: one op off by one part in a thousand."""
    from vlmopt.ops import Ops
    from vlmopt.runtime import generate

    right = Ops.swiglu
    # by its entry in sys.modules, since the package's attribute of this name is the function
    wrong = Ops(swiglu=lambda products: right(products) * 1.001)
    monkeypatch.setattr(sys.modules["vlmopt.optimize"], "table", lambda config: wrong)
    result = run_pass(tiny, samples.select(range(2)))
    assert result.differing_steps > 0 and result.first_difference is not None
    assert generate.ENGINES[tiny.model].calls["stages"] == 2
