"""decode_layer: five launches against the composition of references, and that against the stages it stands for."""

import pytest
import torch

from vlmopt.errors import VlmoptError
from vlmopt.kernels import decode_layer as module
from vlmopt.kernels import oracle
from vlmopt.kernels.decode_layer import Layer, decode_layer, decode_layer_ref, launch, supports
from vlmopt.quant.copies import quantize
from vlmopt.quant.schemes import SCHEMES
from vlmopt.tests.kernels import checks

OP = "decode_layer"
SMALL = next(case for case in module.CASES if case.cpu and case.params["rows"] == 4)
GPU_CASES = pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case.name} {str(dtype)[6:]}".replace(" ", "-"))
        for case in module.CASES
        for dtype in (torch.bfloat16, torch.float16)
    ],
)


def eight_rows_have_the_same_bits_alone(h, layer, eps, head_eps, cos, sin, k, v, row):
    own = [k.clone(), v.clone()]
    together = launch(h, layer, eps, head_eps, cos, sin, *own, row)
    for i in range(8):
        angles = cos[i : i + 1], sin[i : i + 1]
        alone = launch(h[i : i + 1], layer, eps, head_eps, *angles, k, v, row - 7 + i)
        checks.same_bits([together[i : i + 1]], [alone])
    checks.same_bits(own, [k, v])


def altered(args: tuple, **changes) -> list:
    """The arguments with a layer's tensors exchanged."""
    return [args[0], list(Layer(*args[1])._replace(**changes)), *args[2:]]


def over_copies(args: tuple, scheme: str) -> list:
    """The arguments with quantised copies in the place of the products' weights."""
    layer = Layer(*args[1])
    names = ("qkv", "o", "gate_up", "down")
    return altered(args, **{name: quantize(getattr(layer, name), SCHEMES[scheme]).parts for name in names})


def one_row_each(args: tuple) -> tuple:
    """The same tokens one after the other, by the reference."""
    h, layer, eps, head_eps, cos, sin, k, v, row = args
    n_rows = len(h)
    rows = [
        decode_layer_ref(
            *(h[i : i + 1], layer, eps, head_eps, cos[i : i + 1], sin[i : i + 1], k, v, row - n_rows + 1 + i)
        )
        for i in range(n_rows)
    ]
    return torch.cat(rows), k, v


@pytest.mark.parametrize("case", [case for case in module.CASES if case.cpu], ids=lambda case: case.name)
def test_the_reference_takes_tokens_together_as_one_by_one(case):
    args = checks.arguments(module, case)
    together = oracle.outputs(module, decode_layer_ref, args)
    alone = one_row_each([oracle.clone(arg) for arg in args])
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_reference_writes_the_newest_rows_alone():
    args = checks.arguments(module, SMALL)
    before = [cache.clone() for cache in args[6:8]]
    decode_layer_ref(*args)
    newest = slice(SMALL.params["length"] - 4, SMALL.params["length"])
    for old, new in zip(before, args[6:8], strict=True):
        assert not torch.equal(old[:, newest], new[:, newest])
        new[:, newest] = old[:, newest]
        assert torch.equal(old, new)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: [a[0].repeat(3, 1), *a[1:]], "h is [12, 256]; give [1 … 8, hidden]"),
        (lambda a: [a[0], a[1][:-1], *a[2:]], "a layer of 7 tensors; give input_norm, qkv"),
        (lambda a: altered(a, down=a[1][7].float()), ""),
    ],
)
def test_refuses(change, words):
    args = change(checks.arguments(module, SMALL, torch.bfloat16))
    reason = supports(*args)
    assert reason is not None and words in reason, reason
    with pytest.raises(VlmoptError) as caught:
        decode_layer(*args)
    assert str(caught.value) == reason


def test_a_refusal_names_the_part(monkeypatch):
    monkeypatch.setattr(module.gemv_ring, "supports", lambda *args: "no")
    monkeypatch.setattr(module.gemv_ring, "supports_normed", lambda *args: None)
    monkeypatch.setattr(module.decode_attention_cluster, "supports_qkv", lambda *args: None)
    args = checks.arguments(module, SMALL, torch.bfloat16)
    assert supports(*args) == "o: no"
    monkeypatch.setattr(module.gemv_ring, "supports", lambda *args: None)
    assert supports(*args) is None


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_the_reference_over_copies_is_that_over_what_they_stand_for(scheme):
    args = checks.arguments(module, SMALL)
    copied = over_copies(args, scheme)
    plain = [copied[0], [module._plain(weight, copied[0].dtype) for weight in copied[1]], *copied[2:]]
    one, other = (oracle.outputs(module, decode_layer_ref, own) for own in (copied, plain))
    checks.same_bits(one, other)
    assert not torch.equal(one[0], oracle.outputs(module, decode_layer_ref, args)[0])


def test_over_copies_refuses_what_the_ring_does_not_take(monkeypatch):
    monkeypatch.setattr(module.decode_attention_cluster, "supports_qkv", lambda *args: None)
    monkeypatch.setattr(module.gemv_ring_copies, "supports", lambda *args: "no")
    monkeypatch.setattr(module.gemv_ring_copies, "supports_normed", lambda *args: None)
    assert supports(*over_copies(checks.arguments(module, SMALL, torch.bfloat16), "int8")) == "o: no"


def test_the_cost_is_that_of_the_weights_and_live_rows():
    moved, flops = module.cost(**module.CASES[0].params)
    weights = 2048 * (4096 + 2048 + 3 * 6144)
    assert moved == 2 * (weights + 2 * 800 * 8 * 128)
    assert flops == 2 * weights + 4 * 2 * 800 * 8 * 128


@pytest.mark.gpu
@GPU_CASES
def test_agrees_with_the_reference(case, dtype):
    checks.agrees(module, OP, case, dtype)


@pytest.mark.gpu
def test_the_oracle_rejects_a_wrong_answer():
    args = checks.arguments(module, SMALL, torch.bfloat16)
    checks.rejects(module, OP, args, lambda h, *rest: launch(h, *altered([h, *rest], o=rest[0][4].roll(1, 0))[1:]))


@pytest.mark.gpu
@pytest.mark.parametrize("check", [checks.writes_everything, checks.leaves_inputs_alone, checks.replays])
def test_as_every_kernel(check):
    check(module, OP, checks.arguments(module, SMALL, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [case for case in module.CASES if case.params["rows"] == 8], ids=lambda case: case.name
)
def test_a_row_has_the_same_bits_alone_and_among_others(case):
    eight_rows_have_the_same_bits_alone(*checks.arguments(module, case, torch.bfloat16))


@pytest.mark.gpu
def test_bits_do_not_depend_on_the_capacity_nor_on_what_lies_beyond():
    *front, k, v, row = checks.arguments(module, SMALL, torch.bfloat16)
    length = SMALL.params["length"]
    wide = [torch.full_like(cache, float("nan")).repeat(1, 2, 1) for cache in (k, v)]
    for cache, small in zip(wide, (k, v), strict=True):
        cache[:, : length - 4] = small[:, : length - 4]
    checks.same_bits([launch(*front, k, v, row)], [launch(*front, *wide, row)])


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_layers_in_a_chain_see_each_other(scheme):
    """Dependent launches of several layers, one after the other in a graph, give what waiting for each one gives."""
    case = next(case for case in module.CASES if case.params["rows"] == 1 and not case.cpu)
    drawn = [checks.arguments(module, case, torch.bfloat16, seed) for seed in range(4)]
    drawn = [args if scheme is None else over_copies(args, scheme) for args in drawn]
    h = drawn[0][0].clone()

    def run(step) -> torch.Tensor:
        x = h
        for _, *rest in drawn:
            x = step(x, *rest)
        return x

    def waited(*args) -> torch.Tensor:
        torch.cuda.synchronize()
        out = launch(*args)
        torch.cuda.synchronize()
        return out

    expected = run(waited)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(launch)
    for _ in range(20):
        graph.replay()
        checks.same_bits([expected], [found])


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@GPU_CASES
def test_over_copies_agrees_with_the_reference(case, dtype, scheme):
    args = over_copies(checks.arguments(module, case, dtype), scheme)
    torch.cuda.synchronize()
    assert supports(*args) is None, supports(*args)
    errors = oracle.compare(module, OP, args, launch)
    assert errors.ok, str(errors)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize(
    "case", [case for case in module.CASES if case.params["rows"] == 8], ids=lambda case: case.name
)
def test_over_copies_a_row_has_the_same_bits_alone_and_among_others(case, scheme):
    args = over_copies(checks.arguments(module, case, torch.bfloat16), scheme)
    torch.cuda.synchronize()
    eight_rows_have_the_same_bits_alone(*args)
