"""gemv_q8: the kernel against its reference, for int8 and e4m3 values."""

from functools import partial

import pytest
import torch

from vlmopt.bench.compilations import compiled
from vlmopt.kernels import gemv_q8 as module
from vlmopt.kernels import oracle
from vlmopt.tests.kernels import ahead, checks

OP = "gemv_q8"
SMALL = {case.name: case for case in module.CASES if case.cpu}
EIGHT = {"rows": 8, "width": 300, "out": 70}
small = pytest.mark.parametrize("case", SMALL.values(), ids=lambda case: case.name)


def eight(form: str, fp8: bool = False):
    return checks.arguments(module, module.Case("", {**EIGHT, "form": form, "fp8": fp8}))


@checks.variants(module)
def test_agrees_with_the_reference(case, dtype):
    checks.agrees(module, OP, case, dtype)


def test_every_value_of_a_byte_is_widened_exactly():
    values = torch.arange(-128, 128, dtype=torch.int8, device=checks.DEVICE)
    weight = torch.zeros(256, 16, dtype=torch.int8, device=checks.DEVICE)
    weight[:, 3] = values
    x = torch.zeros(1, 16, device=checks.DEVICE)
    x[0, 3] = 1
    one = torch.ones(256, device=checks.DEVICE)
    checks.same_bits([values.float()[None]], [module.gemv_q8(x, weight, one, None, None, False)])


def test_every_launch_configuration_fits_its_shape():
    for (out, n_in), config in module.LAUNCH.items():
        assert n_in % (2 * config.block_k) == 0 and out % config.block_n == 0
        assert config.ahead <= n_in and config.block_n % 2 == 0


@small
def test_the_oracle_rejects_wrong_answers(case):
    def without_the_scale(x, weight, scale, *rest):
        return module.gemv_q8_ref(x, weight, scale * 0 + scale.mean(), *rest)

    def without_the_last_column(x, weight, *rest):
        return module.gemv_q8_ref(x[:, :-1], weight[:, :-1], *rest)

    for wrong in (without_the_scale, without_the_last_column):
        checks.rejects(module, OP, checks.arguments(module, case), wrong)


@pytest.mark.parametrize("form", ["plain", "bias", "residual", "gated"])
def test_a_row_has_the_same_bits_alone_and_among_others(form):
    x, weight, scale, bias, residual, gated = eight(form)
    together = module.gemv_q8(x, weight, scale, bias, residual, gated)
    for row in (0, 4, 7):
        own = None if residual is None else residual[row : row + 1]
        alone = module.gemv_q8(x[row : row + 1], weight, scale, bias, own, gated)
        checks.same_bits([together[row : row + 1]], [alone])


@small
def test_writes_everything_and_leaves_inputs_alone(case):
    args = checks.arguments(module, case)
    checks.writes_everything(module, OP, args)
    checks.leaves_inputs_alone(module, OP, args)


def test_takes_rows_that_lie_apart():
    checks.takes_strides(module, OP, eight("residual"), (0, 4))
    x, weight, *rest = eight("gated")
    wide = torch.full((len(weight), weight.shape[1] + 20), 127, dtype=torch.int8, device=weight.device)
    wide[:, : weight.shape[1]] = weight
    apart = module.gemv_q8(x, wide[:, : weight.shape[1]], *rest)
    checks.same_bits([module.gemv_q8(x, weight, *rest)], [apart])


@pytest.mark.parametrize(("form", "argument"), [("plain", 0), ("gated", 0), ("residual", 4)])
def test_poison_stays_in_its_row(form, argument):
    def poison(own, value):
        own[argument][5, 2] = value

    checks.keeps_poison_in_its_row(module, OP, eight(form), poison, lambda out: [torch.cat([out[0][:5], out[0][6:]])])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, s, r: (x.double(), w, s, r), "float64"),
        (lambda x, w, s, r: (x, w.float(), s, r), "int8 and float8_e4m3fn"),
        (lambda x, w, s, r: (x, w.t().contiguous().t(), s, r), "not contiguous"),
        (lambda x, w, s, r: (x, w, s.double(), r), "one for each output"),
        (lambda x, w, s, r: (x, w, s[:-1], r), "one for each output"),
        (lambda x, w, s, r: (x[:, :-1], w, s, r), "[out, in]"),
        (lambda x, w, s, r: (x[:0], w, s, None), "0 rows"),
        (lambda x, w, s, r: (x, w, s, r[:1]), "residual has the shape"),
    ],
)
def test_refuses(change, words):
    x, weight, scale, _, residual, gated = eight("residual")
    x, weight, scale, residual = change(x, weight, scale, residual)
    checks.refuses(module, OP, (x, weight, scale, None, residual, gated), words)


def test_refuses_a_copy_on_another_device():
    x, weight, scale, *rest = eight("plain")
    assert "one device" in module.supports(x, weight.to("meta"), scale, *rest)


@pytest.mark.parametrize("case", [case for case in SMALL.values() if not case.params["fp8"]], ids=lambda c: c.name)
def test_is_registered(case):  # torch's own check cannot compare e4m3 values
    checks.is_registered(module.gemv_q8, checks.arguments(module, case))


def test_compiles_ahead_of_time_without_spilling():
    names = ["gate_up 1 x 12288x2048 gated int8"]
    found = ahead.compiled(f"{module.__name__}:launch", names)
    assert len(found) == 2
    for kernel in found:
        assert kernel["mma"] and not kernel["spills"], kernel


def test_compiles_e4m3_ahead_of_time():
    (kernel,) = ahead.compiled(f"{module.__name__}:launch", ["o 1 x 2048x2048 residual fp8"], [90])
    assert kernel["mma"] and not kernel["spills"], kernel


@pytest.mark.gpu
@pytest.mark.parametrize("case", module.CASES[:5], ids=lambda case: case.name)
def test_replays_from_a_graph(case):
    checks.replays(module, OP, checks.arguments(module, case, torch.bfloat16))


@pytest.mark.gpu
def test_another_number_of_rows_compiles_nothing():
    x, weight, scale, *_ = eight("plain")
    calls = [partial(module.launch, x[:rows].bfloat16(), weight, scale) for rows in range(1, 9)]
    checks.forget(module)
    assert compiled(calls[:1] + calls[-1:]), "the warm-up compiled nothing, so nothing was counted"
    assert compiled(calls) == []


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_is_closer_to_the_copy_than_the_rounded_weight_is(fp8):
    case = module.Case("", {"rows": 8, "width": 2048, "out": 4096, "form": "plain", "fp8": fp8})
    errors = oracle.compare(module, OP, checks.arguments(module, case, torch.bfloat16))
    assert errors.rms < 1
