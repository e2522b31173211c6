"""gemv_ring: CUDA C++ against the reference of `gemv`. Without a GPU it is only compiled, and refuses."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from vlmopt.errors import VlmoptError
from vlmopt.kernels import add_rms_norm, gemv, native, oracle
from vlmopt.kernels import gemv_ring as module
from vlmopt.kernels.case import Case
from vlmopt.tests.kernels import checks

needs_nvcc = pytest.mark.skipif(native.compiler() is None, reason="nvcc is not installed")

RINGS = (
    *(module.OTHER, module.Ring(5), module.Ring(2, 4), module.Ring(3, 4)),
    *(module.Ring(1, dependent=False), module.Ring(early=False)),
)
ODD = [
    Case("", {"rows": rows, "width": width, "out": out, "form": form})
    for rows, width, out, form in [
        (1, 64, 1, "plain"),
        (5, 1088, 333, "bias"),
        (8, 256, 70, "residual"),
        (3, 2112, 66, "gated"),
        (2, 4096, 5000, "gated"),
        (7, 6208, 40, "residual"),
    ]
]
NORMED = [  # rows, width, out, gated
    (1, 2048, 4096, False),
    (8, 2048, 4096, False),
    (1, 2048, 12288, True),
    (3, 64, 40, False),
    (5, 1088, 334, True),
    (2, 4096, 333, False),
    (8, 8192, 66, True),
]
FITTING = [case for case in gemv.CASES if case.params["width"] % module.LINE == 0 and not case.cpu]


@pytest.fixture
def as_on_hopper(monkeypatch):
    """What the arguments alone are refused for, also where there is no such GPU."""
    monkeypatch.setattr(native, "refusal", lambda device: None)


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def arguments(case: Case, dtype: torch.dtype = torch.bfloat16):
    """A case's arguments, written before the launch: the weight is read without waiting for the kernel ahead."""
    args = checks.arguments(gemv, case, dtype)
    synchronize()
    return args


def alone(fn):
    """`fn` with nothing else on the GPU: a reference may consist of dependent launches itself."""

    def call(*args):
        synchronize()
        result = fn(*args)
        synchronize()
        return result

    return call


def row_by_row(x, weight, bias, residual, gated, config=None):
    rows = [slice(i, i + 1) for i in range(x.shape[0])]
    own = [None if residual is None else residual[row] for row in rows]
    launch = alone(partial(module.launch, config=config))
    return torch.cat([launch(x[row], weight, bias, r, gated) for row, r in zip(rows, own, strict=True)])


def eight(form: str = "plain"):
    return arguments(Case("", {"rows": 8, "width": 2048, "out": 712, "form": form}))


def normed(rows: int, width: int, out: int, gated: bool, dtype: torch.dtype = torch.bfloat16):
    """Arguments of `gemv_normed_ref`; rows of h differ in size, so that one row's norm cannot stand for another's."""
    form = "gated" if gated else "plain"
    x, weight, *_ = arguments(Case("", {"rows": rows, "width": width, "out": out, "form": form}), dtype)
    generator = torch.Generator(x.device).manual_seed(1)
    norm = (1 + 0.3 * torch.randn(width, generator=generator, device=x.device)).to(dtype)
    h = x * torch.arange(1, rows + 1, device=x.device)[:, None].to(dtype)
    synchronize()
    return h, norm, 1e-6, weight, gated


@needs_nvcc
@pytest.mark.parametrize(("stages", "warps", "words"), [(0, 8, "1 to 16 stages"), (17, 8, "1 to 16"), (4, 6, "4 or 8")])
def test_compiles_and_says_what_a_ring_may_be(stages, warps, words):
    with pytest.raises(VlmoptError, match=words):
        module._function()(*[None] * 6, *[0] * 3, 0.0, 1, 16, 64, 0, 0, warps, stages, 1, 1, 0, 0, None)


@pytest.mark.parametrize(("units", "at_most"), [(256, 132), (128, 132), (768, 132), (9496, 132), (1, 132), (133, 132)])
def test_blocks_share_evenly(units, at_most):
    blocks = module.blocks_of(units, at_most)
    assert blocks <= at_most and -(-units // blocks) == -(-units // at_most)


def test_every_launch_configuration_fits_its_shape():
    for (out, n_in), ring in module.LAUNCH.items():
        assert n_in % module.LINE == 0 and out <= module.MOST_OUTPUTS
        assert ring.warps in (4, 8) and 1 <= ring.stages <= 6, "two blocks do not fit a multiprocessor"
        shared = ring.stages * 16384 + 9216 + module.ROWS * (2 * n_in + 16)
        assert shared <= 227 * 1024, "eight rows of a norm do not fit beside the ring"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w: (x.float(), w.float()), "bfloat16 and float16"),
        (lambda x, w: (x[:, :-4], w[:, :-4]), "multiples of 64"),
        (lambda x, w: (x[:, :64], w[:, 4:68]), "weight does not begin"),
        (lambda x, w: (x[:, :64], w.flatten()[: 68 * 300].view(300, 68)[:, :64]), "row of the weight"),
        (lambda x, w: (x[:, :64].repeat(2, 1), w[:, :64]), "16 rows"),
    ],
)
def test_refuses(as_on_hopper, change, words):
    reason = module.supports(*change(*eight()[:2]), None, None, False)
    assert reason is not None and words in reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h, norm, eps, w, gated: (h.float(), norm.float(), eps, w.float(), gated), "bfloat16 and float16"),
        (lambda h, norm, eps, w, gated: (h, norm[1:], eps, w, gated), "shape"),
        (lambda h, norm, eps, w, gated: (h, norm.float(), eps, w, gated), "one dtype"),
        (lambda h, norm, eps, w, gated: (h[:, :64], norm[4:68], eps, w[:, :64], gated), "norm does not begin"),
        (lambda h, norm, eps, w, gated: (h.repeat(1, 5), norm.repeat(5), eps, w.repeat(1, 5), gated), "1 to 8192"),
    ],
)
def test_normed_refuses(as_on_hopper, change, words):
    reason = module.supports_normed(*change(*normed(2, 2048, 64, False)))
    assert reason is not None and words in reason


def test_refuses_other_devices():
    assert "CUDA" in module.supports(*(tensor.cpu() for tensor in eight()[:2]), None, None, False)


def test_serves_nothing_on_other_devices():
    assert not module.serves(eight()[1].cpu())


def test_serves_where_the_kernel_runs_and_is_faster(monkeypatch):
    asked = []
    monkeypatch.setattr(module.native, "works", lambda stem, index, instead: asked.append(index) or index == 0)
    serves = module._serves.__wrapped__
    bf16, contiguous = torch.bfloat16, (2048, 1)
    assert serves(0, bf16, (4096, 2048), contiguous) and serves(0, torch.float16, (4096, 2048), (4096, 1))
    assert not serves(1, bf16, (4096, 2048), contiguous), "another kind of device"
    assert asked == [0, 0, 1]
    assert not serves(0, torch.float32, (4096, 2048), contiguous)
    assert not serves(0, bf16, (151936, 2048), contiguous), "the head"
    assert not serves(0, bf16, (4096, 2080), (2080, 1)) and not serves(0, bf16, (4096, 2048), (2052, 1))
    assert not serves(0, bf16, (4096, 2048), (1, 4096)) and not serves(0, bf16, (4, 4096, 2048), (8388608, 2048, 1))
    assert asked == [0, 0, 1], "nothing is compiled for a weight that is not served anyway"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", [*FITTING, *ODD], ids=str)
def test_agrees_with_the_reference(case, dtype):
    args = arguments(case, dtype)
    assert module.supports(*args) is None
    errors = oracle.compare(gemv, "gemv", args, alone(module.launch))
    assert errors.ok, str(errors)


@pytest.mark.gpu
@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("case", ODD, ids=str)
def test_every_ring_agrees(case, ring):
    errors = oracle.compare(gemv, "gemv", arguments(case), alone(partial(module.launch, config=ring)))
    assert errors.ok, str(errors)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("ring", [None, *RINGS], ids=str)
@pytest.mark.parametrize("shape", NORMED, ids=str)
def test_normed_agrees_with_the_reference(shape, ring, dtype):
    args = normed(*shape, dtype)
    assert module.supports_normed(*args) is None
    errors = oracle.compare(module, "gemv_normed", args, alone(partial(module.launch_normed, config=ring)))
    assert errors.ok, str(errors)


@pytest.mark.gpu
def test_the_oracle_rejects_a_wrong_norm():
    def with_too_long_rows(h, norm, eps, weight, gated):
        x = add_rms_norm.add_rms_norm_ref(h, None, norm, eps)[0] * 1.05
        return gemv.gemv_ref(x, weight, None, None, gated)

    assert not oracle.compare(module, "gemv_normed", normed(8, 2048, 712, False), with_too_long_rows).ok


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "gated"), [(2048, False), (2048, True), (6144, False), (8192, True)])
def test_a_normed_row_has_the_same_bits_alone_and_among_others(width, gated):
    h, *rest = normed(8, width, 712, gated)
    together = module.launch_normed(h, *rest)
    for rows in (slice(0, 1), slice(4, 5), slice(7, 8), slice(0, 3)):
        checks.same_bits([together[rows]], [module.launch_normed(h[rows], *rest)])


@pytest.mark.gpu
def test_a_row_with_nan_changes_no_other_normed_row():
    h, *rest = normed(8, 2048, 712, False)
    clean = module.launch_normed(h, *rest)
    h[3, 77] = float("nan")
    dirty = module.launch_normed(h, *rest)
    checks.same_bits([clean[:3], clean[4:]], [dirty[:3], dirty[4:]])
    assert dirty[3].isnan().all()


@pytest.mark.gpu
def test_serves_the_weights_of_the_model_but_the_head():
    weight = torch.empty(12288, 2048, dtype=torch.bfloat16, device="cuda")
    assert module.serves(weight) and module.serves(weight[:, :1024])
    assert not module.serves(weight.float()) and not module.serves(weight[:, 4:1028])
    assert not module.serves(torch.empty(151936, 64, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.gpu
def test_the_oracle_rejects_wrong_answers():
    def without_a_warps_columns(x, weight, *rest):
        x = x.clone()
        x[:, 64:128] = 0
        torch.cuda.synchronize()
        return module.launch(x, weight, *rest)

    assert not oracle.compare(gemv, "gemv", eight(), without_a_warps_columns).ok


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["plain", "bias", "residual", "gated"])
def test_a_row_has_the_same_bits_alone_and_among_others(form):
    x, weight, bias, residual, gated = eight(form)
    together = module.launch(x, weight, bias, residual, gated)
    for rows in (slice(0, 1), slice(4, 5), slice(7, 8), slice(0, 3)):
        own = None if residual is None else residual[rows]
        checks.same_bits([together[rows]], [module.launch(x[rows], weight, bias, own, gated)])


@pytest.mark.gpu
@pytest.mark.parametrize("ring", [None, *RINGS], ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "out", "form"),
    [(8, 2048, 4096, "residual"), (8, 2048, 12288, "gated"), (8, 6144, 2048, "residual"), (3, 2048, 12288, "bias")],
)
def test_many_runs_have_the_bits_of_single_rows(rows, width, out, form, ring):
    """A stage of the ring that is overwritten too early is seen: with many rows its readers wait behind loads of x."""
    args = arguments(Case("", {"rows": rows, "width": width, "out": out, "form": form}))
    expected = row_by_row(*args, config=ring)
    got = [module.launch(*args, config=ring) for _ in range(20)]
    torch.cuda.synchronize()
    checks.same_bits([expected] * 20, got)


@pytest.mark.gpu
def test_takes_more_rows_and_rows_that_lie_apart():
    x, weight, _, residual, _ = arguments(Case("", {"rows": 19, "width": 2048, "out": 712, "form": "residual"}))
    expected = row_by_row(x, weight, None, residual, False)
    apart = [checks.spread(tensor) for tensor in (x, weight, residual)]
    torch.cuda.synchronize()
    checks.same_bits([expected], [module.launch(apart[0], apart[1], None, apart[2])])


@pytest.mark.gpu
def test_takes_rows_that_begin_anywhere():
    x, weight, *_ = eight()
    wide = torch.zeros(8, 2048 + 5, dtype=x.dtype, device=x.device)
    wide[:, 5:] = x
    assert module.supports(wide[:, 5:], weight, None, None, False) is None
    checks.same_bits([module.launch(x, weight)], [module.launch(wide[:, 5:], weight)])


@pytest.mark.gpu
@pytest.mark.parametrize("ring", [module.OTHER, module.Ring(3, 4), module.Ring(early=False)], ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("rows", [1, 8])
def test_dependent_launches_in_a_chain_change_no_bit(rows, with_norm, ring):
    """Each product reads what the one before has written, so a kernel that does not wait is seen."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [torch.randn(2048, 2048, generator=generator, device="cuda").bfloat16() / 45 for _ in range(24)]
    first, norm = (torch.randn(n, 2048, generator=generator, device="cuda").bfloat16() for n in (rows, 1))
    torch.cuda.synchronize()

    def chain(config):
        x = first
        for weight in weights:
            y = module.launch_normed(x, norm[0], 1e-6, weight, config=config) if with_norm else x
            x = module.launch(y, weight, None, x, config=config)
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
