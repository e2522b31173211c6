"""The stages with every Triton kernel in place of its reference, in the interpreter: same signatures, same answers."""

from dataclasses import replace

import pytest
import torch

import vlmopt
from vlmopt.errors import PartFailed
from vlmopt.kernels import decode_layer, lm_head, swiglu
from vlmopt.kernels.decode_layer import decode_layer_ref
from vlmopt.ops import ENTRIES, KERNELS, Ops, kernels_of, launcher, table
from vlmopt.runtime.generate import ENGINES
from vlmopt.tests.passes import record_logits


def kernels() -> dict:
    return {name: launcher(name) for name in KERNELS}


@pytest.fixture
def answers(tiny, prompt):
    """Ids and logits of one prompt under a table of ops."""
    inputs = prompt((64, 96), "read", (96, 64), "all")

    def run(table: Ops):
        vlmopt.optimize(tiny.model, vlmopt.OptimizeConfig.preset("exact", packed=True))
        ENGINES[tiny.model].ops = table
        seen = record_logits(tiny.model)
        ids = tiny.model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert vlmopt.status(tiny.model).calls["stages"] == 1
        return ids, torch.cat(seen)

    return run


def test_all_kernels_together_give_the_references_answer(answers):
    ids, logits = answers(Ops())
    # the entry that covers a layer needs a GPU, without which those that it covers serve
    kernel_ids, kernel_logits = answers(replace(Ops(**kernels()), decode_layer=None))
    assert torch.equal(kernel_ids, ids)
    torch.testing.assert_close(kernel_logits, logits, rtol=1e-4, atol=1e-3)


def test_one_wrong_kernel_shows(answers):
    _, logits = answers(Ops())
    wrong = Ops(linear_swiglu=lambda x, weight: 1.01 * launcher("linear_swiglu")(x, weight))
    assert (answers(wrong)[1] - logits).abs().max() > 1e-2


def test_the_entry_that_covers_a_layer_gives_the_answer_of_those_that_it_covers(answers):
    def refuse(*args):
        raise AssertionError("a covered entry was called in a decode step")

    ids, logits = answers(Ops())
    covering = Ops(decode_layer=decode_layer_ref, decode_attention=refuse)
    covering_ids, covering_logits = answers(covering)
    assert torch.equal(covering_ids, ids) and torch.equal(covering_logits, logits)


def test_every_kernel_stands_for_an_entry():
    assert set(KERNELS) <= set(ENTRIES)


def config(kernels) -> vlmopt.OptimizeConfig:
    return vlmopt.OptimizeConfig.preset("exact", kernels=kernels)


def test_a_table_has_the_launchers_of_the_kernels_asked_for_and_else_references():
    assert table(config("none")) == Ops() and kernels_of(config("none")) == ()
    some = table(config(("swiglu", "lm_head_argmax", "decode_layer")))
    assert some == Ops(
        swiglu=swiglu.launch, lm_head_argmax=lm_head.launch_lm_head_argmax, decode_layer=decode_layer.launch
    )
    assert kernels_of(config("all")) == tuple(KERNELS) and table(config("all")) == Ops(**kernels())


def test_a_checked_table_has_the_registered_ops_where_there_are_any():
    checked = table(config(("swiglu", "lm_head_argmax", "decode_layer")), checked=True)
    assert checked == Ops(
        swiglu=swiglu.swiglu, lm_head_argmax=lm_head.lm_head_argmax, decode_layer=decode_layer.decode_layer
    )


def test_an_entry_without_a_kernel_is_refused_with_those_that_have_one():
    with pytest.raises(vlmopt.VlmoptError) as refused:
        table(config(("swiglu", "swigloo")))
    assert str(refused.value) == f"ops has no entry 'swigloo'; entries are {', '.join(ENTRIES)}"
    with pytest.raises(vlmopt.VlmoptError) as refused:
        table(config(("swiglu", "decode_attention")))
    assert str(refused.value) == f"entry 'decode_attention' has no kernel; entries with one: {', '.join(KERNELS)}"


def test_kernels_are_tried_on_the_model_before_the_first_call(tiny):
    vlmopt.optimize(tiny.model, vlmopt.OptimizeConfig.preset("exact", packed=True))
    engine = ENGINES[tiny.model]
    own = engine.ops
    engine.try_kernels(tiny.model, table(vlmopt.OptimizeConfig.preset("fast"), checked=True))
    assert engine.ops is own


def test_a_kernel_that_cannot_serve_the_model_is_the_parts_failure(tiny):
    vlmopt.optimize(tiny.model, vlmopt.OptimizeConfig.preset("exact", packed=True))
    engine = ENGINES[tiny.model]
    own = engine.ops

    def refuse(*args):
        raise vlmopt.VlmoptError("rows of 256 values; the kernel takes none")

    with pytest.raises(PartFailed, match="a kernel cannot serve this model: rows of 256") as caught:
        engine.try_kernels(tiny.model, Ops(add_rms_norm=refuse))
    assert caught.value.part == "kernels" and engine.ops is own


def test_an_entry_that_cannot_serve_is_left_to_those_it_covers(tiny):
    vlmopt.optimize(tiny.model, vlmopt.OptimizeConfig.preset("exact", packed=True))
    engine = ENGINES[tiny.model]

    def refuse(*args):
        raise vlmopt.VlmoptError("h of 256 values; the kernel takes none")

    engine.ops, engine.kernels = Ops(decode_layer=refuse), ("decode_layer", "swiglu")
    engine.try_kernels(tiny.model, Ops(decode_layer=refuse))
    assert engine.ops.decode_layer is None and engine.kernels == ("swiglu",)
    assert engine.left_out == {"decode_layer": "h of 256 values; the kernel takes none"}
    engine.ops, engine.left_out = Ops(decode_layer=decode_layer_ref), {}
    engine.try_kernels(tiny.model, engine.ops)
    assert engine.ops.decode_layer is decode_layer_ref and not engine.left_out
