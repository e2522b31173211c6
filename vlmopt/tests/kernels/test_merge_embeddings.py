"""merge_embeddings: the kernel against its reference."""

import pytest
import torch

from vlmopt.kernels import merge_embeddings as module
from vlmopt.kernels.merge_embeddings import merge_embeddings_ref
from vlmopt.tests.kernels import checks

OP = "merge_embeddings"
ODD = next(case for case in module.CASES if case.name.startswith("small odd"))


@pytest.fixture
def args():
    return checks.arguments(module, ODD)


@checks.variants(module)
def test_agrees_with_the_reference(case, dtype):
    checks.agrees(module, OP, case, dtype)


@pytest.mark.parametrize("rows", [[11], [0], [7, 3, 11, 0, 4, 10, 2], list(range(12))])
def test_features_of_any_number_in_any_order_give_the_reference_bits(args, rows):
    ids, embed, slots, _ = args
    slots.fill_(-1)
    for slot, row in enumerate(rows):
        slots[row] = slot
    features = torch.randn(len(rows), embed.shape[1], device=ids.device)
    expected = embed[ids]
    expected[rows] = features
    for merge in (merge_embeddings_ref, module.merge_embeddings):
        checks.same_bits([expected], [merge(ids, embed, slots, features)])


def test_a_slot_without_a_feature_takes_the_embedding(args):
    ids, embed, slots, features = args
    other = slots.clone()
    other[slots < 0] = torch.tensor([-7, 7, 2**31 - 1, -(2**31), 8], dtype=torch.int32, device=ids.device)
    expected = merge_embeddings_ref(ids, embed, slots, features)
    checks.same_bits([expected], [module.merge_embeddings(ids, embed, other, features)])


def test_features_of_another_dtype_are_rounded_to_the_embeddings(args):
    ids, embed, slots, features = args
    features = features.half()
    expected = merge_embeddings_ref(ids, embed, slots, features)
    checks.same_bits([expected], [module.merge_embeddings(ids, embed, slots, features)])


def test_an_unknown_id_gives_a_row_of_nan(args):
    ids, embed, slots, features = args
    text, visual = ((slots < 0).nonzero().flatten().tolist(), (slots >= 0).nonzero().flatten().tolist())
    clean = module.merge_embeddings(ids, embed, slots, features)
    for unknown in (embed.shape[0], -1, 2**40):
        ids[text[0]] = unknown
        ids[visual[0]] = unknown  # where a feature goes the id is not read
        out = module.merge_embeddings(ids, embed, slots, features)
        assert out.isnan().any(dim=1).nonzero().flatten().tolist() == [text[0]] and out[text[0]].isnan().all()
        others = [row for row in range(12) if row != text[0]]
        checks.same_bits([clean[others]], [out[others]])
        assert module.merge_embeddings(ids, embed, None, None)[text[0]].isnan().all()


def test_the_oracle_rejects_wrong_answers(args):
    checks.rejects(module, OP, args, lambda ids, *rest: merge_embeddings_ref(ids.roll(1), *rest))
    checks.rejects(module, OP, args, lambda ids, embed, slots, features: merge_embeddings_ref(ids, embed, None, None))
    checks.rejects(module, OP, args, lambda ids, embed, slots, f: merge_embeddings_ref(ids, embed, slots, f.roll(1, 0)))


def test_writes_everything_and_leaves_inputs_alone(args):
    for given in (args, (*args[:2], None, None)):
        checks.writes_everything(module, OP, given)
        checks.leaves_inputs_alone(module, OP, given)


def test_takes_rows_that_lie_apart(args):
    checks.takes_strides(module, OP, args, (1, 3))


def test_poison_stays_in_its_row(args):
    row = args[2].tolist().index(2)
    checks.keeps_poison_in_its_row(
        module,
        OP,
        args,
        lambda own, value: own[3][2].fill_(value),
        lambda out: [torch.cat([out[0][:row], out[0][row + 1 :]])],
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids, e, slots, f: (ids, e.double(), slots, f), "float64"),
        (lambda ids, e, slots, f: (ids.int(), e, slots, f), "ids is torch.int32"),
        (lambda ids, e, slots, f: (ids, e.t(), slots, f), "not contiguous"),
        (lambda ids, e, slots, f: (ids, e, slots, None), "come together"),
        (lambda ids, e, slots, f: (ids, e, None, f), "come together"),
        (lambda ids, e, slots, f: (ids, e, slots, f[:, 1:]), "features is"),
        (lambda ids, e, slots, f: (ids, e, slots, f.t().contiguous().t()), "rows of features"),
        (lambda ids, e, slots, f: (ids, e, slots[1:], f), "(11,) for 12 rows"),
    ],
)
def test_refuses(args, change, words):
    checks.refuses(module, OP, change(*args), words)


def test_is_registered(args):
    checks.is_registered(module.merge_embeddings, args)
    checks.is_registered(module.merge_embeddings, (*args[:2], None, None))


@pytest.mark.gpu
@pytest.mark.parametrize("case", module.CASES[:2], ids=lambda case: case.name)
def test_replays_from_a_graph(case):
    checks.replays(module, OP, checks.arguments(module, case, torch.bfloat16))


@pytest.mark.gpu
def test_a_new_size_compiles_nothing():
    base = module.Case("", {"width": 384})
    checks.compiles_nothing_new(module, OP, base, rows=(1000, 2000), features=(1, 1000), vocabulary=(1000, 2000))
