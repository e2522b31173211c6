"""decode_persistent: the one-launch step against its reference, and the reference against the stages."""

import ctypes
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vlmopt.errors import VlmoptError
from vlmopt.kernels import decode_persistent as module
from vlmopt.kernels import native
from vlmopt.kernels.decode_attention import decode_attention_ref
from vlmopt.kernels.decode_persistent import Buffers, DecodePersistent, Layer, Model, decode_persistent_ref, supports
from vlmopt.kernels.lm_head import lm_head_logits_ref
from vlmopt.ops import Ops
from vlmopt.stages.decode import decode_step
from vlmopt.tests.kernels import checks
from vlmopt.weights import Linear, Norm, TextLayer, TextWeights

SMALL = module.CASES[4]
RMS_BOUND = 1.5


def draw(case=SMALL, dtype=torch.bfloat16, seed=0) -> tuple[Model, Buffers]:
    return checks.arguments(module, case, dtype, seed)


def copied(buffers: Buffers) -> Buffers:
    return Buffers(*(tensor.clone() for tensor in buffers))


def widened(model: Model, buffers: Buffers) -> tuple[Model, Buffers]:
    """Both in float64, integers as they are."""

    def wide(value):
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    layers = [Layer(*map(wide, layer)) for layer in model.layers]
    return Model(layers, *map(wide, model[1:])), Buffers(*(wide(tensor).clone() for tensor in buffers))


def relative_error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def logits(h: Tensor, model: Model) -> Tensor:
    """What the head makes of the stream h [hidden], in the model's dtype."""
    return lm_head_logits_ref(h[None], model.norm, model.eps, model.head)[0]


def judge(model: Model, start: Buffers, h: Tensor, end: Buffers) -> dict[str, float]:
    """Errors of a step from `start` that left `h` and `end`, in units of the reference's own; all shall be small."""
    expected, (wide, exact) = copied(start), widened(model, start)
    own = decode_persistent_ref(model, expected)
    truth = decode_persistent_ref(wide, exact)
    row = int(start.row)
    exact_logits = logits(truth, wide)
    spread = (logits(own, model).double() - exact_logits).abs().max().item()
    behind = (exact_logits.max() - exact_logits[end.token]).item()
    written = [buffers.cache[:, :, :, row] for buffers in (end, expected, exact)]
    kept = torch.equal(end.cache[:, :, :, :row], start.cache[:, :, :, :row])
    advanced = int(end.row) == row + 1 and int(end.history[row + 1]) == int(end.token)
    return {
        "h": relative_error(h, truth) / relative_error(own, truth),
        "cache": relative_error(written[0], written[2]) / relative_error(written[1], written[2]),
        "token": 0.0 if end.token.equal(expected.token) else behind / (2 * spread),
        "kept": 0.0 if kept and end.cache[:, :, :, row + 1 :].isnan().all() else float("inf"),
        "advanced": 0.0 if advanced else float("inf"),
    }


def test_the_reference_is_what_the_stages_make():
    model, buffers = draw(dtype=torch.float32)
    layers = tuple(
        TextLayer(
            input_norm=Norm(layer.input_norm, None, model.eps),
            qkv=(Linear(layer.qkv),),
            q_norm=Norm(layer.q_norm, None, model.head_eps),
            k_norm=Norm(layer.k_norm, None, model.head_eps),
            o=Linear(layer.o),
            post_norm=Norm(layer.post_norm, None, model.eps),
            gate_up=(Linear(layer.gate_up),),
            down=Linear(layer.down),
        )
        for layer in model.layers
    )
    weights = TextWeights(
        *(model.embed, layers, Norm(model.norm, None, model.eps), Linear(model.head), model.norm, 1.0, (1, 1, 1)),
        *(4, 2, module.WIDTH, 4096),
    )
    own, place = copied(buffers), buffers.row + buffers.delta
    rope = model.cos.index_select(0, place), model.sin.index_select(0, place)
    attend = partial(decode_attention_ref, length=int(own.row) + 1)
    h = decode_step(own.token, rope, own.cache, own.row, attend, weights, Ops())
    token = Ops().lm_head_argmax(h, model.norm, model.eps, model.head)
    checks.same_bits([h[0]], [decode_persistent_ref(model, buffers)])
    checks.same_bits([own.cache, token, own.row + 1], [buffers.cache, buffers.token, buffers.row])
    assert buffers.history[buffers.row] == token


def test_the_arguments_are_laid_out_as_the_kernel_reads_them():
    if native.compiler() is None:
        pytest.skip("needs nvcc")
    library = native.library(module.STEM)
    assert library.decode_persistent_arguments() == ctypes.sizeof(module.Arguments)
    for sizes in ((28, 2048, 6144, 16), (4, 256, 768, 4), (36, 2560, 9728, 64)):
        arguments = module.Arguments(**dict(zip(("n_layers", "hidden", "mlp", "heads"), sizes, strict=True)))
        assert library.decode_persistent_shared(ctypes.byref(arguments)) == module.shared_bytes(*sizes)


def altered_layer(model: Model, **changes: Tensor) -> Model:
    return model._replace(layers=[*model.layers[:-1], model.layers[-1]._replace(**changes)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m, b: (altered_layer(m, down=m.layers[0].down[:, :-8]), b), "down of layer 3"),
        (lambda m, b: (altered_layer(m, o=m.layers[0].o.float()), b), "o of layer 3 is torch.float32"),
        (lambda m, b: (altered_layer(m, o=m.layers[0].o.mT.contiguous().mT.reshape(512, 256)), b), "o of layer 3"),
        (lambda m, b: (m._replace(layers=m.layers[:2]), b), "cache is [4, 2, 2, 320, 128]"),
        (lambda m, b: (m._replace(head=m.head[:-1]), b), "head is [330, 256]"),
        (lambda m, b: (m._replace(cos=m.cos[:, :64]), b), "cos and sin"),
        (lambda m, b: (m._replace(norm=m.norm.repeat(2)[1:257]), b), "multiple of 16 bytes"),
        (lambda m, b: (m._replace(cos=m.cos.mT.contiguous().mT), b), "cos is not contiguous"),
        (lambda m, b: (m, b._replace(row=b.row.int())), "row is torch.int32"),
        (lambda m, b: (m, b._replace(history=b.history[:-1])), "give int64 [321]"),
        (lambda m, b: (m, b._replace(cache=b.cache.transpose(2, 3).contiguous().transpose(2, 3))), "strides"),
        (lambda m, b: (m, b._replace(cache=b.cache[..., :64])), "give [4 layers, 2, Hkv, capacity, 128]"),
    ],
)
def test_refuses(change, words):
    model, buffers = change(*draw())
    reason = supports(model, buffers)
    assert reason is not None and words in reason, reason
    with pytest.raises(VlmoptError) as caught:
        DecodePersistent(model, buffers)
    assert str(caught.value) == reason


def test_refuses_another_device():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "needs a CUDA device" in supports(*draw())


@pytest.mark.gpu
@pytest.mark.parametrize("case", module.CASES, ids=lambda case: case.name)
def test_agrees_with_the_reference(case):
    model, start = draw(case)
    end = copied(start)
    step = DecodePersistent(model, end)
    step.step()
    errors = judge(model, start, step.h, end)
    assert all(error <= RMS_BOUND for error in errors.values()), errors


@pytest.mark.gpu
def test_the_judge_rejects_a_wrong_answer():
    model, start = draw()
    end = copied(start)
    step = DecodePersistent(altered_layer(model, o=model.layers[-1].o.roll(1, 0)), end)
    step.step()
    assert judge(model, start, step.h, end)["h"] > RMS_BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("dependent", [False, True])
def test_steps_in_a_graph_have_the_bits_of_single_steps(dependent):
    model, start = draw(module.CASES[1])
    alone, replayed = copied(start), copied(start)
    single, unrolled = DecodePersistent(model, alone), DecodePersistent(model, replayed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            unrolled.step(dependent)
    for _ in range(5):
        graph.replay()
        for _ in range(8):
            single.step()
        checks.same_bits([*alone, single.h], [*replayed, unrolled.h])


@pytest.mark.gpu
def test_bits_do_not_depend_on_the_capacity():
    model, start = draw()
    wide = start._replace(cache=torch.full_like(start.cache, float("nan")).repeat(1, 1, 1, 2, 1))
    wide.cache[:, :, :, :320] = start.cache
    wide = copied(wide._replace(history=start.history.repeat(2)))
    one, other = DecodePersistent(model, copied(start)), DecodePersistent(model, wide)
    one.step()
    other.step()
    checks.same_bits([one.h, one.buffers.token], [other.h, other.buffers.token])


@pytest.mark.gpu
def test_runs_over_a_view_of_a_larger_cache():
    model, start = draw()
    large = torch.full_like(start.cache, float("nan")).repeat(1, 1, 1, 2, 1)
    large[:, :, :, :320] = start.cache
    one = DecodePersistent(model, copied(start))
    other = DecodePersistent(model, copied(start)._replace(cache=large[:, :, :, :320]))
    one.step()
    other.step()
    checks.same_bits([one.h, one.buffers.cache], [other.h, other.buffers.cache])


@pytest.mark.gpu
def test_the_timeline_is_that_of_a_step():
    model, start = draw()
    one, other = DecodePersistent(model, copied(start)), DecodePersistent(model, copied(start))
    one.step()
    marks = other.timeline()
    checks.same_bits([one.h, *one.buffers], [other.h, *other.buffers])
    assert marks.shape == (one.blocks, len(module.MARKS) * 4 + 3)
    assert (marks >= 0).all() and (marks.sum(1) > 0).all() and one.fault() is None


@pytest.mark.gpu
def test_the_first_layers_alone_leave_token_and_row():
    model, start = draw()
    end = copied(start)
    step = DecodePersistent(model, end)
    step.run_layers(1)
    expected, (wide, exact) = copied(start), widened(model, start)
    own = module.layer_ref(F.embedding(start.token, model.embed), 0, model, expected)
    truth = module.layer_ref(F.embedding(start.token, wide.embed), 0, wide, exact)
    for got, mine, best in zip(step.latest(), own, truth, strict=True):
        assert relative_error(got, best[0]) <= RMS_BOUND * relative_error(mine[0], best[0])
    checks.same_bits(start[1:], end[1:])


def test_the_cost_is_that_of_the_weights_and_live_rows():
    moved, flops = module.cost(**module.CASES[-1].params)
    weights = 28 * 2048 * (4096 + 2048 + 3 * 6144) + 151936 * 2048
    assert moved == 2 * (weights + 28 * 2 * 800 * 8 * 128)
    assert flops == 2 * weights + 4 * 28 * 2 * 800 * 8 * 128
