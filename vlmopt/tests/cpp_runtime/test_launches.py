"""The GPU's steps without a GPU: launches reach a made-up driver, which hands each to Triton's interpreter.

So every kernel gets the arguments and the grid that C++ computes, on the memory that C++ carves, and the answer is
compared with the stages'. Products and attention are computed in place of the libraries'.
"""

import ctypes
import inspect
import subprocess
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
from torch.nn import functional as F

from vlmopt.bench.models import TINY, load
from vlmopt.cpp_runtime import build, kernels
from vlmopt.cpp_runtime.bridge import PrefillCall, VisionCall
from vlmopt.errors import VlmoptError
from vlmopt.ops import Ops
from vlmopt.stages.connector import positions, slots_of
from vlmopt.stages.prefill import prefill
from vlmopt.stages.tables import grid_table, rope
from vlmopt.stages.vision import encode
from vlmopt.weights import collect

pytestmark = [
    pytest.mark.skipif(build.compiler() is None or not build.cuda_headers(), reason="no C++ compiler or CUDA headers"),
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here, not interpreted"),
]
GRIDS = ((1, 4, 2), (1, 2, 2))
TYPES = [0, 0, 1, 1, 0, 1, 0]
LAUNCH = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_ulong, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint),
    ctypes.POINTER(ctypes.c_void_p),
)


@dataclass
class Variant:
    """One kernel as the driver knows it: how it is described, and an example of its arguments by name."""

    kernel: Any
    described: kernels.Kernel
    example: dict[str, Any]


class FakeGpu:
    """A driver and a cuBLASLt over ordinary memory; `launched` are the kernels' names in order."""

    def __init__(self, path: str, variants: dict[str, Variant]):
        self._library = ctypes.CDLL(path)
        self._variants = dict(enumerate(variants.items()))
        self._on_launch = LAUNCH(self._launch)  # kept, since the library does not hold it
        ctypes.c_void_p.in_dll(self._library, "on_launch").value = ctypes.cast(self._on_launch, ctypes.c_void_p).value
        described = {name: variant.described for name, variant in variants.items()}
        self.gpu = kernels.Gpu(path, path, described, 0)
        self.launched: list[str] = []
        self.faults: list[str] = []

    def count(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._library, name).value

    def _launch(self, function: int, x: int, y: int, threads: int, shared: int, dependent: int, parameters) -> int:
        name = f"kernel {function}"
        try:
            name, variant = self._variants[function]
            self.launched.append(name)
            told = variant.described
            assert (threads, shared, dependent) == (32 * told.warps, told.shared, told.dependent)
            given, names = iter(range(100)), list(variant.example)
            values, letters = dict(variant.example), iter(told.layout)
            constexprs = constants_of(variant.kernel)
            for name in names:
                if name not in constexprs:
                    values[name] = argument(values[name], next(letters), parameters, given)
            for _ in range(2):
                assert pointed(parameters[next(given)], ctypes.c_void_p) is None, "scratch memory was given"
            variant.kernel[(x, y, 1)](**values)
        except Exception as fault:  # nothing may cross C++
            self.faults.append(f"{name}: {fault!r}")
            return 1
        return 0


def constants_of(kernel: Any) -> set[str]:
    annotations = inspect.signature(kernel.fn).parameters
    return {name for name, parameter in annotations.items() if "constexpr" in str(parameter.annotation)}


def pointed(address: int, kind: Any) -> Any:
    return kind.from_address(address).value


def argument(example: Any, letter: str, parameters, given) -> Any:
    """A parameter as the kernel would read it; of a pointer the first value, from which the interpreter goes on."""
    if letter == "-":
        return example if example is None else 1
    address = parameters[next(given)]
    if letter in "pP":
        memory = pointed(address, ctypes.c_void_p)
        return torch.frombuffer((ctypes.c_char * example.element_size()).from_address(memory), dtype=example.dtype)
    kinds = {"i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}
    return pointed(address, kinds[letter.lower()])


def variant_of(index: int, kernel: Any, launch: Any) -> Variant:
    """Described as Triton would: what is 1 is left out, multiples of 16 are relied on, unless told otherwise."""
    args, kwargs = kernels.arguments(kernel, launch)
    example = inspect.getcallargs(kernel.fn, *args, **kwargs)
    constexprs, loose = constants_of(kernel), kernel.kwargs.get("do_not_specialize") or ()
    letters = []
    for name, value in example.items():
        if name in constexprs:
            continue
        if torch.is_tensor(value):
            letters.append("P" if value.data_ptr() % 16 == 0 else "p")
        elif isinstance(value, float):
            letters.append("f")
        elif name in loose:
            letters.append("i")
        else:
            letters.append("-" if value in (1, None) else "I" if value % 16 == 0 else "i")
    constants = {name: int(example[name]) for name in constexprs}
    return Variant(kernel, kernels.Kernel(index, 4, 64 * index, bool(index % 2), "".join(letters), constants), example)


@pytest.fixture(scope="module")
def weights():
    """Two blocks, one of them with a tap, and two layers: every kind of step once, for the interpreter is slow."""
    whole = collect(load(TINY, "cpu", torch.float16).model, packed=True)
    taps = {0: next(iter(whole.vision.deepstack.values()))}
    vision = replace(whole.vision, blocks=whole.vision.blocks[:2], deepstack=taps)
    return replace(whole, vision=vision, text=replace(whole.text, layers=whole.text.layers[:2]))


@pytest.fixture(scope="module")
def fake(weights, tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "fake_gpu.so"
    included = [part for part in build.options() if part not in build.OPTIONS]
    source = str(build.SOURCES.parent / "tests" / "cpp_runtime" / "fake_gpu.c")
    command = ["-x", "c", *included, "-O3", "-march=native", "-shared", "-fPIC", "-o", str(path), source]
    subprocess.run([str(build.compiler()), *command, "-lm"], check=True)
    launches = kernels.launches(weights).items()
    variants = {name: variant_of(index, *launch) for index, (name, launch) in enumerate(launches)}
    attention = torch.library.Library("aten", "IMPL")
    attention.impl("_flash_attention_forward", flash_attention, "CPU")
    yield FakeGpu(str(path), variants)
    attention._destroy()


def flash_attention(q, k, v, ends_q, ends_k, rows, length, dropout, causal, *rest, **options):
    assert ends_q is None and ends_k is None and (rows, length) == (q.shape[1], k.shape[1])
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal and rows > 1, enable_gqa=True).transpose(1, 2)
    nothing = out.new_empty(0)
    return out, nothing, nothing, nothing, nothing


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Within fp16's error over these few layers; an argument gone astray is off by the values themselves."""
    error = (ours.float() - theirs.float()).square().mean().sqrt()
    assert error < 0.01 * theirs.float().square().mean().sqrt()


@torch.no_grad()
def test_vision_and_prefill_by_launches_give_the_stages_answer(weights, fake):
    runtime = build.load().Runtime(weights, fake.gpu)
    frozen, tried = fake.count("choices"), fake.count("products")
    assert tried == 5, "every form was tried once, for there is but one algorithm"
    pixels = torch.randn(12, 1536, generator=torch.Generator().manual_seed(0))
    table = grid_table(GRIDS, weights.vision)
    expected, expected_taps = encode(pixels, table, weights.vision, Ops())
    features, taps = runtime.encode(VisionCall(pixels, GRIDS, 0))
    assert not fake.faults
    for ours, theirs in zip((features, *taps), (expected, *expected_taps), strict=True):
        close(ours, theirs)
    blocks, mergers = len(weights.vision.blocks), 1 + len(weights.vision.deepstack)
    assert fake.launched.count("attend") == fake.launched.count("rotate") == blocks
    assert runtime.launches == 4 + 2 + 8 * blocks + 4 * mergers, "four for angles and the pixels' dtype"
    assert len(fake.launched) + fake.count("products") - tried == runtime.launches - 4

    fake.launched.clear()
    before, made = runtime.launches, fake.count("products")
    text, ids = weights.text, torch.arange(40, 40 + len(TYPES))
    rows, slots = torch.arange(len(TYPES)), slots_of(TYPES)
    places = positions(TYPES, GRIDS, 2)[0]
    angles, table = (rope(part, text, torch.float16) for part in (places, torch.arange(32).expand(3, -1)))
    caches = [torch.zeros(len(text.layers), 2, 2, 32, 128, dtype=torch.float16) for _ in range(2)]
    h = Ops().merge_embeddings(ids, text.embed, slots, expected)
    expected_row = prefill(h, angles, caches[0], rows, slots, expected_taps, text, Ops(), narrow=True)
    call = PrefillCall(ids, slots, expected, expected_taps, places, *table, caches[1], 0)
    last = runtime.prefill(call)
    assert not fake.faults
    close(last, expected_row)
    for ours, theirs in zip(caches[1].flatten(0, 1), caches[0].flatten(0, 1), strict=True):
        close(ours, theirs)
    layers = len(text.layers)
    assert runtime.launches - before == 4 + 1 + 9 * layers + 2 + len(expected_taps), "four for angles and rows"
    assert fake.launched.count("attend_causal") == layers - 1
    assert len(fake.launched) + fake.count("products") - made + 1 == runtime.launches - before - 4, (
        "one is the library's"
    )
    assert fake.launched[:2] == ["merge", "rms_norm"] and fake.launched[-2:] == ["add_rms_norm", "swiglu"]
    assert fake.count("choices") == frozen and not fake.count("refused"), "an algorithm was chosen during a call"


@torch.no_grad()
def test_images_of_several_attention_tiles_and_frames(weights, fake):
    grids = ((1, 4, 2), (2, 8, 10))
    cut = replace(weights, vision=replace(weights.vision, blocks=weights.vision.blocks[:1], deepstack={}))
    pixels = torch.randn(168, 1536, generator=torch.Generator().manual_seed(1)).half()
    expected, _ = encode(pixels, grid_table(grids, cut.vision), cut.vision, Ops())
    features, taps = build.load().Runtime(cut, fake.gpu).encode(VisionCall(pixels, grids, 0))
    assert not fake.faults and taps == []
    close(features, expected)


@torch.no_grad()
def test_a_prompt_of_text_alone(weights, fake):
    runtime, ids, rows = build.load().Runtime(weights, fake.gpu), torch.arange(5), torch.arange(5)
    places = rows.expand(3, -1)
    angles = rope(places, weights.text, torch.float16)
    caches = [torch.zeros(2, 2, 2, 16, 128, dtype=torch.float16) for _ in range(2)]
    h = Ops().merge_embeddings(ids, weights.text.embed, None, None)
    expected = prefill(h, angles, caches[0], rows, None, [], weights.text, Ops(), narrow=True)
    last = runtime.prefill(PrefillCall(ids, None, None, (), places, *angles, caches[1], 0))
    assert not fake.faults
    close(last, expected)
    close(caches[1], caches[0])


@torch.no_grad()
def test_a_launch_that_fails_or_does_not_fit_is_one_sentence(weights, fake):
    ids = torch.arange(5)
    angles = rope(ids.expand(3, -1), weights.text, torch.float16)
    cache = torch.zeros(4, 2, 2, 16, 128, dtype=torch.float16)
    call = PrefillCall(ids, None, None, (), ids.expand(3, -1), *angles, cache, 0)

    def serve(**changes: Any) -> None:
        rms_norm = replace(fake.gpu.kernels["rms_norm"], **changes)
        gpu = replace(fake.gpu, kernels={**fake.gpu.kernels, "rms_norm": rms_norm})
        build.load().Runtime(weights, gpu).prefill(call)

    layout = fake.gpu.kernels["rms_norm"].layout
    with pytest.raises(VlmoptError, match="argument 9 of the kernel rms_norm is not of the kind -"):
        serve(layout=layout[:-1] + "-")
    with pytest.raises(VlmoptError, match="another number of arguments"):
        serve(layout=layout + "i")
    with pytest.raises(VlmoptError, match="no constant BLOCK_M"):
        serve(constants={})
    with pytest.raises(VlmoptError, match="rms_norm could not be launched: CUDA_ERROR_INVALID_VALUE"):
        serve(function=1000)
    fake.faults.clear()
    with pytest.raises(VlmoptError, match="no kernel is described as embed"):
        build.load().Runtime(weights, replace(fake.gpu, kernels={})).prefill(call)
    with pytest.raises(VlmoptError, match="the CUDA driver cannot be loaded"):
        build.load().Runtime(weights, replace(fake.gpu, driver="nowhere.so"))
    full = collect(load(TINY, "cpu", torch.float32).model, packed=True)
    with pytest.raises(VlmoptError, match="takes bfloat16 or float16"):
        build.load().Runtime(full, fake.gpu)


def parameter(name: str, is_constexpr: bool = False):
    return type("Parameter", (), {"name": name, "is_constexpr": is_constexpr})()


def test_the_layout_says_what_triton_left_of_a_signature():
    parameters = [parameter(name) for name in "xynmse"] + [parameter("BLOCK", True)]
    signature = {"x": "*bf16", "y": "*i64", "n": "i32", "m": "constexpr", "s": "i64", "e": "fp32", "BLOCK": "constexpr"}
    attributes = {(0,): [["tt.divisibility", 16]], (2,): [["tt.divisibility", 16]], (4,): []}
    assert kernels.layout(parameters, signature, attributes) == "PpI-lf"
    with pytest.raises(VlmoptError, match="is a fp64, which C"):
        kernels.layout(parameters[:1], {"x": "fp64"}, {})
