"""gemv: the kernel against its reference."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from vlmopt.bench.compilations import compiled
from vlmopt.kernels import gemv as module
from vlmopt.kernels import oracle
from vlmopt.tests.kernels import checks

OP = "gemv"
SMALL = {case.params["form"]: case for case in module.CASES if case.cpu}
EIGHT = {"rows": 8, "width": 300, "out": 70}
HELD = module.Tiles(16, 64, 4, 3, held=True)


def eight(form: str):
    return checks.arguments(module, module.Case("", {**EIGHT, "form": form}))


@checks.variants(module)
def test_agrees_with_the_reference(case, dtype):
    checks.agrees(module, OP, case, dtype)


@pytest.mark.parametrize("case", SMALL.values(), ids=lambda case: case.name)
def test_weights_held_in_registers_are_added_too(case):
    args = checks.arguments(module, case)
    assert oracle.compare(module, OP, args, partial(module.launch, config=HELD)).ok


def test_every_launch_configuration_fits_its_shape():
    for (out, n_in), config in module.LAUNCH.items():
        assert n_in % config.block_k == 0 and out % config.block_n == 0
        assert config.ahead <= n_in and config.block_n % 2 == 0


@pytest.mark.parametrize("form", SMALL)
def test_the_oracle_rejects_wrong_answers(form):
    def without_the_last_column(x, weight, *rest):
        return module.gemv_ref(x[:, :-1], weight[:, :-1], *rest)

    def without_what_follows(x, weight, bias, residual, gated):
        return module.gemv_ref(x, weight[: len(weight) // 2] if gated else weight, None, None, False)

    checks.rejects(module, OP, checks.arguments(module, SMALL[form]), without_the_last_column)
    if form != "plain":
        checks.rejects(module, OP, checks.arguments(module, SMALL[form]), without_what_follows)


@pytest.mark.parametrize("form", SMALL)
def test_a_row_has_the_same_bits_alone_and_among_others(form):
    x, weight, bias, residual, gated = eight(form)
    together = module.gemv(x, weight, bias, residual, gated)
    for row in (0, 4, 7):
        own = None if residual is None else residual[row : row + 1]
        checks.same_bits([together[row : row + 1]], [module.gemv(x[row : row + 1], weight, bias, own, gated)])
    few = module.gemv(x[:3], weight, bias, None if residual is None else residual[:3], gated)
    checks.same_bits([together[:3]], [few])


def test_the_launcher_takes_more_rows_with_the_same_bits():
    x, weight, *_ = checks.arguments(module, module.Case("", {**EIGHT, "rows": 19, "form": "plain"}))
    many = module.launch(x, weight)
    checks.same_bits([many[9:17]], [module.launch(x[9:17], weight)])
    assert oracle.compare(module, OP, (x, weight, None, None, False), module.launch).ok


@pytest.mark.parametrize("form", SMALL)
def test_writes_everything_and_leaves_inputs_alone(form):
    args = checks.arguments(module, SMALL[form])
    checks.writes_everything(module, OP, args)
    checks.leaves_inputs_alone(module, OP, args)


def test_takes_rows_that_lie_apart():
    checks.takes_strides(module, OP, eight("residual"), (0, 1, 3))
    checks.takes_strides(module, OP, eight("gated"), (0, 1))


@pytest.mark.parametrize(("form", "argument"), [("plain", 0), ("gated", 0), ("residual", 0), ("residual", 3)])
def test_poison_stays_in_its_row(form, argument):
    def poison(own, value):
        own[argument][5, 2] = value

    checks.keeps_poison_in_its_row(module, OP, eight(form), poison, lambda out: [torch.cat([out[0][:5], out[0][6:]])])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, b, r, g: (x.double(), w, b, r, g), "float64"),
        (lambda x, w, b, r, g: (x, w.half(), b, r, g), "give all one dtype"),
        (lambda x, w, b, r, g: (x, w.t().contiguous().t(), b, r, g), "not contiguous"),
        (lambda x, w, b, r, g: (x[:, :-1], w, b, r, g), "[out, in]"),
        (lambda x, w, b, r, g: (x[None], w, b, r, g), "[rows, in]"),
        (lambda x, w, b, r, g: (x[:0], w, b, None, g), "0 rows"),
        (lambda x, w, b, r, g: (x.repeat(2, 1), w, b, None, g), "16 rows"),
        (lambda x, w, b, r, g: (x, w, w[0], r, g), "bias has the shape"),
        (lambda x, w, b, r, g: (x, w, b, r[:1], g), "residual has the shape"),
        (lambda x, w, b, r, g: (x, w, b, r, True), "takes no residual"),
        (lambda x, w, b, r, g: (x, w[:-1], b, None, True), "even number"),
    ],
)
def test_refuses(change, words):
    checks.refuses(module, OP, change(*eight("residual")), words)


@pytest.mark.parametrize("form", SMALL)
def test_is_registered(form):
    checks.is_registered(module.gemv, checks.arguments(module, SMALL[form]))


@pytest.mark.gpu
@pytest.mark.parametrize("case", module.CASES[:5], ids=lambda case: case.name)
def test_replays_from_a_graph(case):
    checks.replays(module, OP, checks.arguments(module, case, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("case", module.CASES[:4], ids=lambda case: case.name)
def test_a_row_has_the_same_bits_at_the_models_shapes(case):
    x, weight, bias, residual, gated = checks.arguments(
        module, module.Case("", {**case.params, "rows": 8}), torch.bfloat16
    )
    together = module.gemv(x, weight, bias, residual, gated)
    for row in range(8):
        checks.same_bits([together[row : row + 1]], [module.gemv(x[row : row + 1], weight, bias, residual, gated)])


@pytest.mark.gpu
def test_dependent_launches_in_a_chain_change_no_bit():
    """Each product reads what the one before has written, so a kernel that does not wait is seen."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [torch.randn(2048, 2048, generator=generator, device="cuda").bfloat16() / 45 for _ in range(24)]
    first = torch.randn(1, 2048, generator=generator, device="cuda").bfloat16()

    def chain(config):
        x = first
        for weight in weights:
            x = module.launch(x, weight, config=config)
        return x

    own = module.LAUNCH[2048, 2048]
    expected = chain(replace(own, dependent=False))
    checks.same_bits([expected], [chain(own)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(own)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    checks.same_bits([expected], [result])


@pytest.mark.gpu
def test_another_number_of_rows_compiles_nothing():
    x, weight = (tensor.bfloat16() for tensor in eight("plain")[:2])
    calls = [partial(module.launch, x[:rows], weight) for rows in range(1, 9)]
    checks.forget(module)
    assert compiled(calls[:1] + calls[-1:]), "the warm-up compiled nothing, so nothing was counted"
    assert compiled(calls) == []


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_offsets_beyond_31_bits():
    """A gate/up view into a buffer so wide that its last rows lie beyond 2³¹ elements."""
    rows, stride = 12288, 180_000
    wide = torch.empty(rows, stride, dtype=torch.bfloat16, device="cuda")
    x, weight, *_ = checks.arguments(module, module.CASES[2], torch.bfloat16)
    wide[:, -2048:] = weight
    checks.same_bits([module.launch(x, weight, gated=True)], [module.launch(x, wide[:, -2048:], gated=True)])
