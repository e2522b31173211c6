"""gemv_q4: the kernel against its reference."""

from functools import partial

import pytest
import torch

from vlmopt.bench.compilations import compiled
from vlmopt.kernels import gemv_q4 as module
from vlmopt.kernels import oracle
from vlmopt.tests.kernels import ahead, checks

OP = "gemv_q4"
SMALL = {case.params["form"]: case for case in module.CASES if case.cpu}
EIGHT = {"rows": 8, "width": 384, "out": 70}
forms = pytest.mark.parametrize("form", SMALL)


def eight(form: str):
    return checks.arguments(module, module.Case("", {**EIGHT, "form": form}))


@checks.variants(module)
def test_agrees_with_the_reference(case, dtype):
    checks.agrees(module, OP, case, dtype)


def test_bytes_unpack_to_what_was_packed():
    values = torch.randint(16, (5, 384), dtype=torch.uint8)
    packed = module.pack(values)
    assert packed.shape == (5, 192) and torch.equal(module.unpack(packed), values)
    assert packed[2, 64 + 3] == values[2, 128 + 3] | values[2, 128 + 64 + 3] << 4


@pytest.mark.parametrize(("dtype", "base", "bits"), [(torch.bfloat16, 128, 0x4300), (torch.float16, 1024, 0x6400)])
def test_a_value_is_the_last_place_of_the_half_dtypes(dtype, base, bits):
    values = torch.arange(16, dtype=torch.int16)
    assert torch.equal((values | bits).view(dtype), (base + values).to(dtype))
    zeros = torch.arange(16, dtype=torch.int16)[:, None]
    steps = (values | bits).view(dtype) - (zeros + base).to(dtype)
    assert torch.equal(steps.float(), (values - zeros).float())


def test_every_launch_configuration_fits_its_shape():
    for (out, n_in), config in module.LAUNCH.items():
        assert n_in % (module.GROUP * config.groups) == 0 and out % config.block_n == 0 and config.block_n % 2 == 0
        assert config.ahead <= n_in // 2


@forms
def test_the_oracle_rejects_wrong_answers(form):
    def with_another_zero(x, weight, scale, zero, *rest):
        return module.gemv_q4_ref(x, weight, scale, zero + 1, *rest)

    def with_halves_exchanged(x, weight, *rest):
        return module.gemv_q4_ref(x, weight << 4 | weight >> 4, *rest)

    def with_one_scale(x, weight, scale, *rest):
        return module.gemv_q4_ref(x, weight, scale * 0 + scale.mean(), *rest)

    for wrong in (with_another_zero, with_halves_exchanged, with_one_scale):
        checks.rejects(module, OP, checks.arguments(module, SMALL[form]), wrong)


@forms
def test_a_row_has_the_same_bits_alone_and_among_others(form):
    x, *copy, bias, residual, gated = eight(form)
    together = module.gemv_q4(x, *copy, bias, residual, gated)
    for row in (0, 4, 7):
        own = None if residual is None else residual[row : row + 1]
        checks.same_bits([together[row : row + 1]], [module.gemv_q4(x[row : row + 1], *copy, bias, own, gated)])


@forms
def test_writes_everything_and_leaves_inputs_alone(form):
    args = checks.arguments(module, SMALL[form])
    checks.writes_everything(module, OP, args)
    checks.leaves_inputs_alone(module, OP, args)


def test_takes_rows_that_lie_apart():
    checks.takes_strides(module, OP, eight("residual"), (0, 5))


@pytest.mark.parametrize(("form", "argument"), [("plain", 0), ("gated", 0), ("residual", 5)])
def test_poison_stays_in_its_row(form, argument):
    def poison(own, value):
        own[argument][5, 2] = value

    checks.keeps_poison_in_its_row(module, OP, eight(form), poison, lambda out: [torch.cat([out[0][:5], out[0][6:]])])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, s, z, r: (x.double(), w, s, z, r), "float64"),
        (lambda x, w, s, z, r: (x, w.short(), s, z, r), "contiguous uint8"),
        (lambda x, w, s, z, r: (x, w[:, :-1], s, z, r), "contiguous uint8"),
        (lambda x, w, s, z, r: (x, w[:, :32].contiguous(), s, z, r), "multiples of 128"),
        (lambda x, w, s, z, r: (x, w, s.half(), z, r), "give all one dtype"),
        (lambda x, w, s, z, r: (x, w, s[:-1], z, r), "scale has the shape"),
        (lambda x, w, s, z, r: (x, w, s, z[:, :-1].contiguous(), r), "zero has the shape"),
        (lambda x, w, s, z, r: (x, w, s, z.char(), r), "give uint8"),
        (lambda x, w, s, z, r: (x[:, :-128], w, s, z, r), "[out, in]"),
        (lambda x, w, s, z, r: (x[:0], w, s, z, None), "0 rows"),
        (lambda x, w, s, z, r: (x, w, s, z, r[:1]), "residual has the shape"),
    ],
)
def test_refuses(change, words):
    x, weight, scale, zero, _, residual, gated = eight("residual")
    x, weight, scale, zero, residual = change(x, weight, scale, zero, residual)
    checks.refuses(module, OP, (x, weight, scale, zero, None, residual, gated), words)


@forms
def test_is_registered(form):
    checks.is_registered(module.gemv_q4, checks.arguments(module, SMALL[form]))


def test_compiles_ahead_of_time_without_spilling():
    found = ahead.compiled(f"{module.__name__}:launch", ["gate_up 1 x 12288x2048 gated"])
    assert len(found) == 2
    for kernel in found:
        assert kernel["mma"] and not kernel["spills"], kernel


@pytest.mark.gpu
@pytest.mark.parametrize("case", module.CASES[:5], ids=lambda case: case.name)
def test_replays_from_a_graph(case):
    checks.replays(module, OP, checks.arguments(module, case, torch.bfloat16))


@pytest.mark.gpu
def test_another_number_of_rows_compiles_nothing():
    x, weight, scale, zero, *_ = eight("plain")
    calls = [partial(module.launch, x[:rows].bfloat16(), weight, scale.bfloat16(), zero) for rows in range(1, 9)]
    checks.forget(module)
    assert compiled(calls[:1] + calls[-1:]), "the warm-up compiled nothing, so nothing was counted"
    assert compiled(calls) == []


@pytest.mark.gpu
def test_is_closer_to_the_copy_than_the_rounded_weight_is():
    case = module.Case("", {"rows": 8, "width": 2048, "out": 4096, "form": "plain"})
    assert oracle.compare(module, OP, checks.arguments(module, case, torch.bfloat16)).rms < 1
