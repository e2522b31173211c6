"""lm_head: both kernels against their references."""

from functools import partial

import pytest
import torch

from vlmopt.bench.compilations import compiled
from vlmopt.kernels import add_rms_norm, gemv
from vlmopt.kernels import lm_head as module
from vlmopt.kernels.add_rms_norm import add_rms_norm_ref
from vlmopt.tests.kernels import checks

ARGMAX, LOGITS = OPS = ("lm_head_argmax", "lm_head_logits")
ops = pytest.mark.parametrize("op", OPS)
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def args():
    return checks.small(module)


def many():
    return checks.arguments(module, module.CASES[-1])


def chosen(logits, width=8):
    """The kernel's token where the logits are these: unit rows of hidden state pick them from the weight."""
    h, norm = torch.zeros(1, width), torch.ones(width)
    h[0, 0] = 1
    scale = add_rms_norm_ref(h, None, norm, 1e-6)[0][0, 0]
    weight = torch.zeros(len(logits), width)
    weight[:, 0] = torch.tensor(logits) / scale
    h, norm, weight = (tensor.to(checks.DEVICE) for tensor in (h, norm, weight))
    expected = module.lm_head_argmax_ref(h, norm, 1e-6, weight)
    got = module.lm_head_argmax(h, norm, 1e-6, weight)
    assert torch.equal(got, expected)
    return got.item()


@ops
@checks.variants(module)
def test_agrees_with_the_reference(op, case, dtype):
    checks.agrees(module, op, case, dtype)


@pytest.mark.parametrize(
    ("logits", "token"),
    [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([-1.0] * 100, 0),
        ([0.0] * 40 + [1.0] * 60, 40),  # the tie spans several blocks
        ([-5.0, -2.0, -3.0, -2.0], 1),
        ([-0.0, 0.0, -1.0], 0),
        ([-1.0, -0.0, 0.0], 1),
        ([1.0, INF, INF, 2.0], 1),
        ([-INF, -INF], 0),
        ([1.0] * 70, 0),
        ([-3.0] * 69 + [-1.0], 69),
        ([5.0], 0),
        ([1.0, INF, NAN, INF, NAN], 2),  # to torch, NaN is larger than any number
        ([1.0, INF, -NAN] + [NAN] * 60, 2),
    ],
)
def test_of_equal_logits_the_lowest_index_wins(logits, token):
    assert chosen(logits) == token


def test_logits_and_argmax_agree_among_themselves():
    checks.same_bits([module.lm_head_logits(*many()).argmax(-1)], [module.lm_head_argmax(*many())])


def test_the_oracle_rejects_wrong_answers(args):
    def without_the_norm(h, norm, eps, weight):
        return torch.nn.functional.linear(h, weight)

    def next_token(*args):
        return module.lm_head_argmax_ref(*args) + 1

    checks.rejects(module, LOGITS, args, without_the_norm)
    checks.rejects(module, ARGMAX, args, next_token)


@ops
def test_writes_everything_and_leaves_inputs_alone(op):
    checks.writes_everything(module, op, many())
    checks.leaves_inputs_alone(module, op, many())


@ops
def test_takes_rows_that_lie_apart(op):
    checks.takes_strides(module, op, many(), (0, 3))


@ops
def test_poison_stays_in_its_row(op):
    def poison(own, value):
        own[0][6, 3] = value

    checks.keeps_poison_in_its_row(module, op, many(), poison, lambda out: [torch.cat([out[0][:6], out[0][7:]])])


@ops
def test_a_row_has_the_same_bits_alone_and_among_others(op):
    h, *rest = many()
    together = getattr(module, op)(h, *rest)
    for row in (0, 5, 10):
        checks.same_bits([together[row : row + 1]], [getattr(module, op)(h[row : row + 1], *rest)])


@ops
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h, n, w: (h.double(), n, w), "float64"),
        (lambda h, n, w: (h, n, w.half()), "give all one dtype"),
        (lambda h, n, w: (h, n, w.t().contiguous().t()), "not contiguous"),
        (lambda h, n, w: (h[0], n, w), "[rows, hidden]"),
        (lambda h, n, w: (h[:, :-1], n, w), "[vocabulary, hidden]"),
        (lambda h, n, w: (h, n, w[:0]), "[vocabulary, hidden]"),
        (lambda h, n, w: (h[:0], n, w), "no rows"),
        (lambda h, n, w: (h, n[:-1], w), "weight has the shape"),
    ],
)
def test_refuses(op, change, words, args):
    h, norm, eps, weight = args
    h, norm, weight = change(h, norm, weight)
    checks.refuses(module, op, (h, norm, eps, weight), words)


@ops
def test_is_registered(op, args):
    checks.is_registered(getattr(module, op), args)


@pytest.mark.gpu
@ops
def test_replays_from_a_graph(op):
    checks.replays(module, op, checks.arguments(module, module.CASES[0], torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(5))
def test_on_random_logits_only_a_near_tie_may_differ(seed):
    """Without a planted winner: the chosen logit is the library's largest but for the last place of both."""
    generator = torch.Generator("cuda").manual_seed(seed)
    h, norm, eps, weight = module.make(module.CASES[0].params, "cuda", torch.bfloat16, generator)
    weight = torch.randn(weight.shape, generator=generator, device="cuda").bfloat16() / 45
    logits = module.lm_head_logits_ref(h, norm, eps, weight)[0].float()
    token = module.lm_head_argmax(h, norm, eps, weight).item()
    assert logits.max() - logits[token] <= 2 * 2**-7 * logits.max()


@pytest.mark.gpu
@ops
def test_another_number_of_rows_compiles_nothing(op):
    h, norm, eps, weight = (tensor.bfloat16() if isinstance(tensor, torch.Tensor) else tensor for tensor in many())
    calls = [partial(getattr(module, op), h[:rows], norm, eps, weight) for rows in range(1, 12)]
    for kernels in (module, gemv, add_rms_norm):
        checks.forget(kernels)
    assert compiled(calls[:1] + calls[-1:]), "the warm-up compiled nothing, so nothing was counted"
    assert compiled(calls) == []


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_logits_beyond_31_bits_of_elements():
    rows = 2**31 // 151936 + 2
    params = {**module.CASES[0].params, "rows": 1, "width": 256}
    h, norm, eps, weight = checks.arguments(module, module.Case("", params), torch.bfloat16)
    many_rows = h.repeat(rows, 1)
    logits = module.lm_head_logits(many_rows, norm, eps, weight)
    for row in (0, rows // 2, rows - 1):
        checks.same_bits([module.lm_head_logits(h, norm, eps, weight)[0]], [logits[row]])
