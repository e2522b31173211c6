"""gemv_ring_copies: CUDA C++ against the references over copies. Without a GPU it is only compiled, and refuses."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from vlmopt.errors import VlmoptError
from vlmopt.kernels import gemv_q4, gemv_q8, native, oracle
from vlmopt.kernels import gemv_ring_copies as module
from vlmopt.kernels.gemv_ring import Ring
from vlmopt.tests.kernels import checks
from vlmopt.tests.kernels.test_gemv_ring import alone, needs_nvcc, synchronize

RINGS = (
    *(Ring(4), Ring(3), Ring(6), Ring(2, 4), Ring(3, 4)),
    *(Ring(1, dependent=False), Ring(early=False), Ring(blocks=1)),
)
BITS = pytest.mark.parametrize("bits", [8, 4])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
ROW = {8: 128, 4: 256}
"""Values in a line of 128 bytes."""
MAIN = [
    (case.params["rows"], case.params["width"], case.params["out"], case.params["form"])
    for case in gemv_q4.CASES
    if not case.cpu or case.params["out"] > 1024
]
ODD = [  # rows, width, out, form
    (1, 256, 1, "plain"),
    (5, 1280, 333, "bias"),
    (8, 256, 70, "residual"),
    (3, 2304, 1058, "gated"),
    (2, 4096, 5000, "gated"),
    (7, 6400, 40, "residual"),
]
NORMED = [  # rows, width, out, gated
    (1, 2048, 4096, False),
    (8, 2048, 4096, False),
    (1, 2048, 12288, True),
    (3, 256, 40, False),
    (5, 1280, 334, True),
    (2, 4096, 333, False),
    (8, 8192, 66, True),
]


@pytest.fixture
def as_on_hopper(monkeypatch):
    """What the arguments alone are refused for, also where there is no such GPU."""
    monkeypatch.setattr(native, "refusal", lambda device: None)
    monkeypatch.setattr(module, "processors", lambda index: 132)
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)


def arguments(bits: int, rows: int, width: int, out: int, form: str, dtype=torch.bfloat16, seed: int = 0) -> tuple:
    """x, the copy's three parts, bias, residual, gated; written before the launch, which reads copies early."""
    out += -out % module.UNIT if bits == 4 else 0  # what the kernel takes
    params = {"rows": rows, "width": width, "out": out, "form": form}
    params |= {"fp8": False} if bits == 8 else {}
    kernel = gemv_q8 if bits == 8 else gemv_q4
    args = list(checks.arguments(kernel, module_case(params), dtype, seed))
    if bits == 8:
        args.insert(3, None)
    synchronize()
    return tuple(args)


def module_case(params: dict):
    return gemv_q8.Case("", params)


def normed(bits: int, rows: int, width: int, out: int, gated: bool, dtype=torch.bfloat16) -> tuple:
    """Arguments of `gemv_copy_normed_ref`; rows of h differ in size, so that one's norm cannot stand for another's."""
    x, *copy, _, _, _ = arguments(bits, rows, width, out, "gated" if gated else "plain", dtype)
    generator = torch.Generator(x.device).manual_seed(1)
    norm = (1 + 0.3 * torch.randn(width, generator=generator, device=x.device)).to(dtype)
    h = x * torch.arange(1, rows + 1, device=x.device)[:, None].to(dtype)
    synchronize()
    return h, norm, 1e-6, *copy, gated


def row_by_row(x, weight, scale, zero, bias, residual, gated, config=None):
    launch = alone(partial(module.launch, config=config))
    rows = [slice(i, i + 1) for i in range(x.shape[0])]
    own = [None if residual is None else residual[row] for row in rows]
    return torch.cat([launch(x[row], weight, scale, zero, bias, r, gated) for row, r in zip(rows, own, strict=True)])


@needs_nvcc
@pytest.mark.parametrize(("stages", "warps", "words"), [(0, 8, "1 to 16 stages"), (17, 8, "1 to 16"), (4, 6, "4 or 8")])
def test_compiles_and_says_what_a_ring_may_be(stages, warps, words):
    with pytest.raises(VlmoptError, match=words):
        module._function()(*[None] * 8, *[0] * 3, 0.0, 1, 16, 128, 0, 0, warps, stages, 1, 1, 0, 0, None)
    if warps == 8:
        with pytest.raises(VlmoptError, match=words):
            module._bounds_function()(*[None] * 8, 0, 1, 16, 128, 0, stages, 1, 1, 0, 0, None)


def test_scales_and_zeros_of_the_model_take_little_beside_the_ring():
    assert module.beside_bytes(4096, 2048, False, 264) == 64
    assert module.beside_bytes(12288, 1024, True, 264) == 3 * 16 * 48
    assert module.beside_bytes(2048, 3072, True, 264) == 48 * 48


@BITS
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, s, z: (x.float(), w, s if z is None else s.float(), z), "bfloat16 and float16"),
        (lambda x, w, s, z: (x.repeat(2, 1), w, s, z), "16 rows"),
        (lambda x, w, s, z: (x, w, s[:-1], z), ""),
        (lambda x, w, s, z: (x, w.float(), s, z), ""),
    ],
)
def test_refuses(as_on_hopper, bits, change, words):
    x, *copy, _, _, _ = arguments(bits, 8, 512, 70, "plain")
    reason = module.supports(*change(x, *copy), None, None, False)
    assert reason is not None and words in reason


def test_refuses_what_the_copy_engine_cannot_take(as_on_hopper):
    x, weight, scale, *_ = arguments(8, 2, 512, 70, "plain")
    flat = torch.zeros(70 * 520 + 16, dtype=torch.int8, device=weight.device)
    assert "does not begin" in module.supports(x, flat[8:][: 70 * 512].view(70, 512), scale, None, None, None, False)
    apart = flat[: 70 * 520].view(70, 520)[:, :512]
    assert "row of the weight" in module.supports(x, apart, scale, None, None, None, False)
    assert "multiples of 128" in module.supports(x[:, :192], weight[:, :192], scale, None, None, None, False)
    e4m3 = torch.zeros(70, 512, dtype=torch.float8_e4m3fn, device=weight.device)
    assert "takes int8" in module.supports(x, e4m3, scale, None, None, None, False)


def test_refuses_scales_that_are_not_copied_sixteen_bytes_at_a_time(as_on_hopper):
    x, weight, scale, zero, *rest = arguments(4, 2, 512, 80, "plain")
    shifted = torch.cat([scale.flatten()[:1], scale.flatten()])[1:].view_as(scale)
    assert "scales do not begin" in module.supports(x, weight, shifted, zero, *rest)
    some = weight[:70], scale[:, :70].contiguous(), zero[:, :70].contiguous()
    assert "70 rows" in module.supports(x, *some, *rest)


@BITS
def test_normed_refuses(as_on_hopper, bits):
    h, norm, eps, *copy, gated = normed(bits, 2, 512, 64, False)
    assert module.supports_normed(h, norm, eps, *copy, gated) is None
    assert "shape" in module.supports_normed(h, norm[1:], eps, *copy, gated)
    assert "one dtype" in module.supports_normed(h, norm.float(), eps, *copy, gated)
    shifted = torch.cat([norm[:4], norm])[4:]
    assert "norm does not begin" in module.supports_normed(h, shifted, eps, *copy, gated)


def test_serves_where_the_kernel_runs(monkeypatch):
    asked = []
    monkeypatch.setattr(module.native, "works", lambda stem, index, instead: asked.append(stem) or True)
    monkeypatch.setattr(module, "processors", lambda index: 132)
    serves, bf16 = module._serves.__wrapped__, torch.bfloat16
    assert serves(0, bf16, torch.int8, (4096, 2048), (2048, 1)) and serves(
        0, bf16, torch.uint8, (4096, 1024), (1024, 1)
    )
    assert asked == ["gemv_ring_copies"] * 2
    assert not serves(-1, bf16, torch.int8, (4096, 2048), (2048, 1)), "a CPU"
    assert not serves(0, torch.float32, torch.int8, (4096, 2048), (2048, 1))
    assert not serves(0, bf16, torch.float8_e4m3fn, (4096, 2048), (2048, 1))
    assert not serves(0, bf16, torch.int8, (151936, 2048), (2048, 1)), "the head"
    assert serves(0, bf16, torch.int8, (151936, 2048), (2048, 1), math.inf), "the head's bounds"
    assert not serves(0, bf16, torch.int8, (65, 77), (77, 1), math.inf)
    assert asked.pop() == "gemv_ring_copies"
    assert not serves(0, bf16, torch.uint8, (4096, 1088), (1088, 1))
    assert len(asked) == 2, "nothing is compiled for a copy that is not served anyway"


@BITS
def test_serves_nothing_on_other_devices(bits):
    x, *copy, _, _, _ = arguments(bits, 1, 256, 16, "plain")
    assert not module.serves(x.cpu(), *(None if part is None else part.cpu() for part in copy))


@pytest.mark.gpu
@BITS
@DTYPES
@pytest.mark.parametrize("shape", [*MAIN, *ODD], ids=str)
def test_agrees_with_the_reference(shape, bits, dtype):
    args = arguments(bits, *shape, dtype)
    assert module.supports(*args) is None and module.serves(*args[:4])
    errors = oracle.compare(module, "gemv_copy", args, alone(module.launch))
    assert errors.ok, str(errors)


@pytest.mark.gpu
@BITS
@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_every_ring_agrees(shape, ring, bits):
    errors = oracle.compare(module, "gemv_copy", arguments(bits, *shape), alone(partial(module.launch, config=ring)))
    assert errors.ok, str(errors)


@pytest.mark.gpu
@BITS
@DTYPES
@pytest.mark.parametrize("ring", [None, *RINGS], ids=str)
@pytest.mark.parametrize("shape", NORMED, ids=str)
def test_normed_agrees_with_the_reference(shape, ring, bits, dtype):
    args = normed(bits, *shape, dtype)
    assert module.supports_normed(*args) is None
    errors = oracle.compare(module, "gemv_copy_normed", args, alone(partial(module.launch_normed, config=ring)))
    assert errors.ok, str(errors)


@pytest.mark.gpu
@DTYPES
def test_every_value_of_a_byte_is_widened_exactly(dtype):
    values = torch.arange(-128, 128, dtype=torch.int8, device="cuda")
    one, x = torch.ones(256, device="cuda"), torch.zeros(1, 256, dtype=dtype, device="cuda")
    for column in (0, 1, 2, 3, 77, 255):
        weight = torch.zeros(256, 256, dtype=torch.int8, device="cuda")
        weight[:, column] = values
        x.zero_()[0, column] = 1
        checks.same_bits([values.to(dtype)[None]], [alone(module.launch)(x, weight, one, None)])


@pytest.mark.gpu
@DTYPES
def test_every_value_of_four_bits_is_widened_exactly_at_every_zero(dtype):
    values, zeros = torch.arange(256, device="cuda") % 16, torch.arange(256, device="cuda") // 16
    x = torch.zeros(1, 256, dtype=dtype, device="cuda")
    for column in (0, 1, 2, 3, 64, 77, 127, 128, 255):
        wide = torch.zeros(256, 256, dtype=torch.uint8, device="cuda")
        wide[:, column] = values
        x.zero_()[0, column] = 1
        scale = torch.full((2, 256), 0.5, dtype=dtype, device="cuda")
        zero = zeros.to(torch.uint8).expand(2, -1).contiguous()
        got = alone(module.launch)(x, gemv_q4.pack(wide), scale, zero)
        checks.same_bits([((values - zeros) / 2).to(dtype)[None]], [got])


@pytest.mark.gpu
@BITS
def test_the_oracle_rejects_wrong_answers(bits):
    def without_a_warps_columns(x, *rest):
        x = x.clone()
        x[:, 128:256] = 0
        return alone(module.launch)(x, *rest)

    def with_the_scales_of_others(x, weight, scale, *rest):
        return alone(module.launch)(x, weight, scale.roll(1, -1), *rest)

    for wrong in (without_a_warps_columns, with_the_scales_of_others):
        assert not oracle.compare(module, "gemv_copy", arguments(bits, 8, 2048, 712, "plain"), wrong).ok


@pytest.mark.gpu
@BITS
@pytest.mark.parametrize("form", ["plain", "bias", "residual", "gated"])
@pytest.mark.parametrize("width", [2048, 6144])
def test_a_row_has_the_same_bits_alone_and_among_others(form, bits, width):
    x, *copy, bias, residual, gated = arguments(bits, 8, width, 712, form)
    together = module.launch(x, *copy, bias, residual, gated)
    for rows in (slice(0, 1), slice(4, 5), slice(7, 8), slice(0, 3)):
        own = None if residual is None else residual[rows]
        checks.same_bits([together[rows]], [module.launch(x[rows], *copy, bias, own, gated)])


@pytest.mark.gpu
@BITS
@pytest.mark.parametrize(("width", "gated"), [(2048, False), (2048, True), (6144, False), (8192, True)])
def test_a_normed_row_has_the_same_bits_alone_and_among_others(width, gated, bits):
    h, *rest = normed(bits, 8, width, 712, gated)
    together = module.launch_normed(h, *rest)
    for rows in (slice(0, 1), slice(4, 5), slice(7, 8), slice(0, 3)):
        checks.same_bits([together[rows]], [module.launch_normed(h[rows], *rest)])


@pytest.mark.gpu
@BITS
def test_a_row_with_nan_changes_no_other_row(bits):
    x, *rest = arguments(bits, 8, 2048, 712, "plain")
    clean = module.launch(x, *rest)
    x[3, 77] = float("nan")
    dirty = module.launch(x, *rest)
    checks.same_bits([clean[:3], clean[4:]], [dirty[:3], dirty[4:]])
    assert dirty[3].isnan().all()


@pytest.mark.gpu
@BITS
@pytest.mark.parametrize("ring", [None, *RINGS], ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "out", "form"),
    [(8, 2048, 4096, "residual"), (8, 2048, 12288, "gated"), (8, 6144, 2048, "residual"), (3, 2048, 12288, "bias")],
)
def test_many_runs_have_the_bits_of_single_rows(rows, width, out, form, ring, bits):
    """A stage of the ring that is overwritten too early is seen: with many rows its readers wait behind loads of x."""
    args = arguments(bits, rows, width, out, form)
    expected = row_by_row(*args, config=ring)
    got = [module.launch(*args, config=ring) for _ in range(20)]
    torch.cuda.synchronize()
    checks.same_bits([expected] * 20, got)


@pytest.mark.gpu
@BITS
def test_takes_more_rows_and_rows_that_lie_apart_or_begin_anywhere(bits):
    x, *copy, _, residual, _ = arguments(bits, 19, 2048, 712, "residual")
    expected = row_by_row(x, *copy, None, residual, False)
    apart = [checks.spread(tensor) for tensor in (x, residual)]
    wide = torch.zeros(19, 2048 + 5, dtype=x.dtype, device=x.device)
    wide[:, 5:] = x
    torch.cuda.synchronize()
    checks.same_bits([expected], [module.launch(apart[0], *copy, None, apart[1])])
    checks.same_bits([expected], [module.launch(wide[:, 5:], *copy, None, residual)])


@pytest.mark.gpu
@BITS
@pytest.mark.parametrize("form", ["bias", "residual", "gated"])
@pytest.mark.parametrize("check", [checks.writes_everything, checks.replays])
def test_as_every_kernel(check, form, bits):
    check(module, "launch", arguments(bits, 5, 1280, 334, form))


@pytest.mark.gpu
@BITS
@pytest.mark.parametrize("ring", [Ring(4), Ring(3, 4), Ring(early=False)], ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("rows", [1, 8])
def test_dependent_launches_in_a_chain_change_no_bit(rows, with_norm, ring, bits):
    """Each product reads what the one before has written, so a kernel that does not wait is seen."""
    copies = [arguments(bits, 1, 2048, 2048, "plain", seed=seed)[1:4] for seed in range(24)]
    generator = torch.Generator("cuda").manual_seed(0)
    first, norm = (torch.randn(n, 2048, generator=generator, device="cuda").bfloat16() for n in (rows, 1))
    torch.cuda.synchronize()

    def chain(config):
        x = first
        for copy in copies:
            y = module.launch_normed(x, norm[0], 1e-6, *copy, config=config) if with_norm else x
            x = module.launch(y, *copy, None, x, config=config)
        return x

    expected = alone(chain)(replace(ring, dependent=False))
    checks.same_bits([expected], [alone(chain)(ring)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(ring)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    checks.same_bits([expected], [result])


def bounded(rows: int, width: int, out: int, dtype: torch.dtype) -> tuple:
    """Arguments of `launch_bounds`."""
    x, weight, scale, *_ = arguments(8, rows, width, out, "plain", dtype)
    generator = torch.Generator(x.device).manual_seed(1)
    radius, norms = (torch.rand(n, generator=generator, device=x.device) for n in (out, (rows, 1)))
    synchronize()
    return x, weight, scale, radius, norms


def bounds_ref(x, weight, scale, radius, norms, blocks):
    """Upper bounds [rows, out] and each block's best lower one [rows, blocks], in float64."""
    product = x.double() @ (weight.double() * scale.double()[:, None]).t()
    off, units = radius.double() * norms.double(), math.ceil(weight.shape[0] / module.UNIT)
    sizes = [units // blocks + (block < units % blocks) for block in range(blocks)]
    parts = (product - off).split(
        [module.UNIT * size for size in sizes[:-1]] + [weight.shape[0] - module.UNIT * sum(sizes[:-1])], 1
    )
    return product + off, torch.stack([part.amax(1) for part in parts], 1)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("ring", [module.BOUNDS, Ring(3), Ring(early=False), Ring(blocks=1)], ids=str)
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 2048, 151936), (8, 2048, 5000), (3, 128, 33), (5, 6400, 700)])
def test_bounds_lie_about_the_products(rows, width, out, ring, dtype):
    args = bounded(rows, width, out, dtype)
    upper, lowest, count = alone(partial(module.launch_bounds, config=ring))(*args)
    expected = bounds_ref(*args, lowest.shape[1])
    torch.testing.assert_close(upper.double(), expected[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(lowest.double(), expected[1], rtol=1e-5, atol=1e-4)
    assert count.tolist() == [0]


@pytest.mark.gpu
def test_bounds_of_a_row_are_its_own_and_a_nan_has_none_below():
    x, *copy, norms = bounded(8, 2048, 5000, torch.bfloat16)
    clean = module.launch_bounds(x, *copy, norms)
    checks.same_bits([part[5:6] for part in clean[:2]], list(module.launch_bounds(x[5:6], *copy, norms[5:6])[:2]))
    x[3, 77] = float("nan")
    dirty = module.launch_bounds(x, *copy, norms)
    for whole, now in zip(clean[:2], dirty[:2], strict=True):
        checks.same_bits([whole[:3], whole[4:]], [now[:3], now[4:]])
    assert dirty[0][3].isnan().all() and (dirty[1][3] == float("-inf")).all()


@pytest.mark.gpu
@pytest.mark.parametrize("check", [checks.writes_everything, checks.replays])
def test_bounds_as_every_kernel(check):
    check(module, "launch_bounds", bounded(5, 1280, 334, torch.bfloat16))
