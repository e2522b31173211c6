"""lm_head_q8: the choice is the plain head's, whatever the rows; looking at too few candidates is seen."""

from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vlmopt.bench.compilations import compiled
from vlmopt.kernels import add_rms_norm, gemv_ring_copies, lm_head
from vlmopt.kernels import lm_head_q8 as module
from vlmopt.tests.kernels import ahead, checks

OP = "lm_head_q8"
HALF = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
WIDTH = 32
KINDS = ("random", "ties", "near ties", "one wins", "all equal", "huge", "tiny", "outlier", "not finite")


def eight():
    return checks.arguments(module, module.CASES[-1])


def copy_of(weight):
    """The head's int8 copy as packing makes it, with its radii."""
    scale = (weight.float().abs().amax(1).nan_to_num(1, 1, 1) / 127).clamp(min=2.0**-100)
    values = (weight.float() / scale[:, None]).nan_to_num(0, 0, 0).round().clamp(-127, 127).to(torch.int8)
    return values, scale, module.radii(weight, values, scale)


def adversarial(kind, vocabulary, rows, seed, dtype, width=WIDTH):
    """Hidden states, norm, epsilon and a head whose logits are as `kind` says."""
    generator = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=generator)
    h, norm = randn(rows, width), 1 + 0.3 * randn(width)
    weight = randn(vocabulary, width) / width**0.5
    some = torch.randint(vocabulary, (max(1, vocabulary // 3),), generator=generator)
    if kind == "ties":
        weight[some] = 2 * torch.sign(h[0]) / width**0.5
    elif kind == "near ties":
        weight[some] = torch.sign(h[0]) / width**0.5 + 2.0**-9 * randn(len(some), width) / width**0.5
    elif kind == "one wins":
        weight[some[0]] = 100 * torch.sign(h[0])
    elif kind == "all equal":
        weight = weight[:1].expand(vocabulary, width).clone()
    elif kind == "huge":
        norm, weight[some] = norm * 1e4, weight[some] * 1e3
    elif kind == "tiny":
        h, weight = h * 1e-20, weight * 1e-6
    elif kind == "outlier":
        weight[some, 3] = 50.0
    elif kind == "not finite":
        h[0, 0] = float(("nan", "inf", "-inf")[seed % 3])
        weight[some[0], 1] = float("inf")
    return h.to(dtype), norm.to(dtype), 1e-6, weight.to(dtype)


heads = st.tuples(st.sampled_from(KINDS), st.integers(1, 97), st.integers(1, 8), st.integers(0, 10**6))


@pytest.mark.parametrize("dtype", HALF, ids=HALF.get)
@settings(max_examples=120)
@given(drawn=heads)
def test_the_references_choice_is_the_plain_heads(dtype, drawn):
    args = adversarial(*drawn, dtype)
    expected = lm_head.lm_head_argmax_ref(*args)
    assert torch.equal(module.lm_head_q8_ref(*args, *copy_of(args[3])), expected)


@settings(max_examples=15)
@given(drawn=heads)
@example(drawn=("not finite", 40, 2, 0))
@example(drawn=("all equal", 97, 8, 1))
def test_the_kernels_choice_is_the_plain_heads(drawn):
    args = [
        arg.to(checks.DEVICE) if isinstance(arg, torch.Tensor) else arg for arg in adversarial(*drawn, torch.float32)
    ]
    copy = copy_of(args[3])
    token, count = module.launch_counted(*args, *copy)
    checks.same_bits([lm_head.lm_head_argmax(*args)], [token])
    x = add_rms_norm.add_rms_norm_ref(args[0], None, args[1], args[2])[0]
    expected = module.candidates_ref(x, *copy).any(0).sum().item()
    assert abs(count.item() - expected) <= 2  # a bound's last place may fall to either side


@pytest.mark.parametrize("dtype", HALF, ids=HALF.get)
def test_every_row_that_attains_the_maximum_is_a_candidate(dtype):
    for kind in KINDS[:-1]:
        for seed in range(20):
            h, norm, eps, weight = adversarial(kind, 64, 4, seed, dtype)
            x = add_rms_norm.add_rms_norm_ref(h, None, norm, eps)[0]
            logits = lm_head.lm_head_logits_ref(h, norm, eps, weight)
            largest = logits == logits.amax(1, keepdim=True)
            assert not (largest & ~module.candidates_ref(x, *copy_of(weight))).any(), (kind, seed)


def test_few_candidates_where_one_wins_and_all_where_all_are_equal():
    counts = {}
    for kind in ("one wins", "all equal"):
        h, norm, eps, weight = adversarial(kind, 90, 1, 0, torch.bfloat16)
        x = add_rms_norm.add_rms_norm_ref(h, None, norm, eps)[0]
        counts[kind] = module.candidates_ref(x, *copy_of(weight)).sum().item()
    assert counts == {"one wins": 1, "all equal": 90}


def test_the_bound_holds_and_is_not_loose():
    """Against float64: no logit leaves its bounds, and the errors come within a factor of the bounds."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(400, 512, generator=generator).bfloat16()
    values, scale, radius = copy_of(weight)
    error = weight.double() - values.double() * scale.double()[:, None]
    along = error / error.norm(dim=1, keepdim=True)  # for each row the x that its error hurts most
    off = (error * along).sum(1)
    assert (off <= radius.double()).all() and (off > 0.8 * radius.double()).all()


def test_a_radius_of_nothing_is_seen():
    """The test above can fail: with bounds of zero the int8 choice itself comes out, which is another one."""
    wrong = 0
    for seed in range(20):
        args = adversarial("near ties", 64, 4, seed, torch.float32)
        values, scale, radius = copy_of(args[3])
        wrong += not torch.equal(
            module.lm_head_q8_ref(*args, values, scale, radius * 0), lm_head.lm_head_argmax_ref(*args)
        )
    assert wrong > 10


@checks.variants(module)
def test_agrees_with_the_reference(case, dtype):
    checks.agrees(module, OP, case, dtype)


def test_the_oracle_rejects_wrong_answers():
    def next_token(*args):
        return module.lm_head_q8_ref(*args) + 1

    checks.rejects(module, OP, checks.small(module), next_token)


def test_writes_everything_and_leaves_inputs_alone():
    checks.writes_everything(module, OP, eight())
    checks.leaves_inputs_alone(module, OP, eight())


def test_takes_rows_that_lie_apart():
    checks.takes_strides(module, OP, eight(), (0, 3))


def test_a_row_has_the_same_bits_alone_and_among_others():
    h, *rest = eight()
    together = module.lm_head_q8(h, *rest)
    for row in (0, 5, 7):
        checks.same_bits([together[row : row + 1]], [module.lm_head_q8(h[row : row + 1], *rest)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h, w, v, s, r: (h.double(), w, v, s, r), "float64"),
        (lambda h, w, v, s, r: (h, w[:-1], v, s, r), "contiguous int8"),
        (lambda h, w, v, s, r: (h, w, v.float(), s, r), "contiguous int8"),
        (lambda h, w, v, s, r: (h, w, v.t().contiguous().t(), s, r), "not contiguous"),
        (lambda h, w, v, s, r: (h, w, v, s[:-1], r), "one for each token"),
        (lambda h, w, v, s, r: (h, w, v, s, r.double()), "one for each token"),
        (lambda h, w, v, s, r: (h.repeat(2, 1), w, v, s, r), "16 rows"),
    ],
)
def test_refuses(change, words):
    h, norm, eps, *rest = eight()
    h, *rest = change(h, *rest)
    checks.refuses(module, OP, (h, norm, eps, *rest), words)


def test_is_registered():
    checks.is_registered(module.lm_head_q8, checks.small(module))


def test_compiles_ahead_of_time_without_spilling():
    found = ahead.compiled(f"{module.__name__}:launch", ["odd 3 x 4099x1111"], [90])
    names = ["_add_rms_norm", "_norms", "_bounds", "_list", "_look_again", "_top"]
    assert [kernel["kernel"] for kernel in found] == names
    for kernel in found:
        assert not kernel["spills"] and kernel["mma"] == (kernel["kernel"] in ("_bounds", "_look_again")), kernel


def test_the_ring_makes_the_bounds_where_it_serves(monkeypatch):
    args, asked = eight(), []
    monkeypatch.setattr(gemv_ring_copies, "serves_bounds", lambda x, values: True)
    monkeypatch.setattr(
        gemv_ring_copies, "launch_bounds", lambda *given: asked.append(given) or module.launch_bounds(*given)
    )
    checks.same_bits([lm_head.lm_head_argmax(*args[:4])], [module.launch(*args)])
    ((x, *copy, norms),) = asked
    assert all(a is b for a, b in zip(copy, args[4:], strict=True)) and norms.shape == (x.shape[0], 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=HALF.get)
@pytest.mark.parametrize("kind", KINDS)
def test_with_the_rings_bounds_the_choice_is_the_plain_heads(kind, dtype, monkeypatch):
    """And as many rows are looked at again as with the bounds that Triton makes, but for a bound's last place."""
    for seed in range(8):
        drawn = adversarial(kind, 3001, 1 + seed, seed, dtype, width=256)
        args = [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in drawn]
        copy = copy_of(args[3])
        torch.cuda.synchronize()
        if not gemv_ring_copies.serves_bounds(args[0], copy[0]):
            pytest.skip("the ring needs Hopper and nvcc")
        token, count = module.launch_counted(*args, *copy)
        checks.same_bits([lm_head.lm_head_argmax(*args)], [token])
        with monkeypatch.context() as patch:
            patch.setattr(gemv_ring_copies, "serves_bounds", lambda x, values: False)
            other = module.launch_counted(*args, *copy)
        checks.same_bits([token], [other[0]])
        assert abs(count.item() - other[1].item()) <= max(4, 0.02 * other[1].item()), seed


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("kind", ["random", "near ties"])
def test_at_the_models_shape_the_choice_is_the_plain_heads(rows, kind):
    generator = torch.Generator("cuda").manual_seed(rows)
    params = {**module.CASES[0].params, "rows": rows}
    h, norm, eps, weight, *copy = module.make(params, "cuda", torch.bfloat16, generator)
    if kind == "near ties":  # a thousand rows that differ in the last place here and there
        weight[1000:2000] = weight[1000:1001]
        weight[1000:2000, ::7] *= 1 + 2**-8
        copy = copy_of(weight)
    token, count = module.launch_counted(h, norm, eps, weight, *copy)
    checks.same_bits([lm_head.lm_head_argmax(h, norm, eps, weight)], [token])
    assert count.item() < 20_000


@pytest.mark.gpu
def test_replays_from_a_graph():
    checks.replays(module, OP, checks.arguments(module, module.CASES[0], torch.bfloat16))


@pytest.mark.gpu
def test_another_number_of_rows_compiles_nothing():
    h, norm, eps, weight, *copy = checks.arguments(module, module.CASES[-1], torch.bfloat16)
    calls = [partial(module.launch, h[:rows], norm, eps, weight, *copy) for rows in range(1, 9)]
    for kernels in (module, lm_head, add_rms_norm):
        checks.forget(kernels)
    assert compiled(calls[:1] + calls[-1:]), "the warm-up compiled nothing, so nothing was counted"
    assert compiled(calls) == []
