"""The stages with every Triton kernel in place of its reference, in the interpreter: same signatures, same answers."""

import importlib

import pytest
import torch

import vlmopt
from vlmopt.ops import ENTRIES, Ops
from vlmopt.runtime.generate import ENGINES
from vlmopt.tests.passes import record_logits

MODULES = (
    *("add_rms_norm", "qkv_norm_rope_cache", "swiglu", "deepstack_add", "merge_embeddings"),
    *("vision_rotary", "add_layer_norm", "bias_gelu", "patch_embed"),
)


def kernels() -> dict:
    return {name: importlib.import_module(f"vlmopt.kernels.{name}").launch for name in MODULES}


@pytest.fixture
def answers(tiny, prompt):
    """Ids and logits of one prompt under a table of ops."""
    inputs = prompt((64, 96), "read", (96, 64), "all")

    def run(table: Ops):
        vlmopt.optimize(tiny.model, vlmopt.OptimizeConfig.preset("exact", packed=True))
        ENGINES[tiny.model].ops = table
        seen = record_logits(tiny.model)
        ids = tiny.model.generate(**inputs, max_new_tokens=3, do_sample=False)
        assert vlmopt.status(tiny.model).calls["stages"] == 1
        return ids, torch.cat(seen)

    return run


def test_all_kernels_together_give_the_references_answer(answers):
    ids, logits = answers(Ops())
    kernel_ids, kernel_logits = answers(Ops(**kernels()))
    assert torch.equal(kernel_ids, ids)
    torch.testing.assert_close(kernel_logits, logits, rtol=1e-4, atol=1e-3)


def test_one_wrong_kernel_shows(answers):
    _, logits = answers(Ops())
    wrong = kernels() | {"swiglu": lambda products: kernels()["swiglu"](products) * 1.01}
    assert (answers(Ops(**wrong))[1] - logits).abs().max() > 1e-2


def test_every_module_stands_for_an_entry():
    assert set(MODULES) <= set(ENTRIES)
