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


@pytest.mark.parametrize("rows", [[], [11], [0], [7, 3, 11, 0, 4, 10, 2], list(range(12))])
def test_rows_of_any_number_in_any_order_give_the_reference_bits(args, rows):
    ids, embed = args[:2]
    index = torch.tensor(rows, dtype=torch.int64, device=ids.device)
    features = torch.randn(len(rows), embed.shape[1], device=ids.device)
    expected = merge_embeddings_ref(ids, embed, index, features)
    checks.same_bits([expected], [module.merge_embeddings(ids, embed, index, features)])


def test_features_of_another_dtype_are_rounded_to_the_embeddings(args):
    ids, embed, rows, features = args
    features = features.half()
    expected = merge_embeddings_ref(ids, embed, rows, features)
    checks.same_bits([expected], [module.merge_embeddings(ids, embed, rows, features)])


def test_an_unknown_id_gives_a_row_of_nan(args):
    ids, embed, rows, features = args
    text = [row for row in range(12) if row not in rows.tolist()]
    clean = module.merge_embeddings(ids, embed, rows, features)
    for unknown in (embed.shape[0], -1, 2**40):
        ids[text[0]] = unknown
        ids[rows[0]] = unknown  # where a feature goes the id is not read
        out = module.merge_embeddings(ids, embed, rows, features)
        assert out.isnan().any(dim=1).nonzero().flatten().tolist() == [text[0]] and out[text[0]].isnan().all()
        others = [row for row in range(12) if row != text[0]]
        checks.same_bits([clean[others]], [out[others]])
        assert module.merge_embeddings(ids, embed, None, None)[text[0]].isnan().all()


def test_the_oracle_rejects_wrong_answers(args):
    checks.rejects(module, OP, args, lambda ids, *rest: merge_embeddings_ref(ids.roll(1), *rest))
    checks.rejects(module, OP, args, lambda ids, embed, rows, features: merge_embeddings_ref(ids, embed, None, None))
    checks.rejects(module, OP, args, lambda ids, embed, rows, f: merge_embeddings_ref(ids, embed, rows, f.roll(1, 0)))


def test_writes_everything_and_leaves_inputs_alone(args):
    for given in (args, (*args[:2], None, None)):
        checks.writes_everything(module, OP, given)
        checks.leaves_inputs_alone(module, OP, given)


def test_takes_rows_that_lie_apart(args):
    checks.takes_strides(module, OP, args, (1, 3))


def test_poison_stays_in_its_row(args):
    row = int(args[2][2])
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
        (lambda ids, e, rows, f: (ids, e.double(), rows, f), "float64"),
        (lambda ids, e, rows, f: (ids.int(), e, rows, f), "ids is torch.int32"),
        (lambda ids, e, rows, f: (ids, e.t(), rows, f), "not contiguous"),
        (lambda ids, e, rows, f: (ids, e, rows, None), "come together"),
        (lambda ids, e, rows, f: (ids, e, None, f), "come together"),
        (lambda ids, e, rows, f: (ids, e, rows, f[:, 1:]), "features is"),
        (lambda ids, e, rows, f: (ids, e, rows, f.t().contiguous().t()), "rows of features"),
        (lambda ids, e, rows, f: (ids, e, rows[1:], f), "6 rows for 7 features"),
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
