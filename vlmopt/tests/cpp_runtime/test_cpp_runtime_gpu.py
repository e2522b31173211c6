"""The C++ runtime on a GPU: the Python path's answers, nearly all launches from C++, nothing compiled on the way.

Its rival, graphs by bucket, is held to the same answers.
"""

import pytest
import torch
from PIL import Image

import vlmopt
from vlmopt.bench.compilations import compiled
from vlmopt.bench.models import RANDOM_2B, TINY, load, prompt
from vlmopt.ops import Ops
from vlmopt.runtime.generate import ENGINES
from vlmopt.stages.connector import positions, slots_of
from vlmopt.stages.prefill import prefill
from vlmopt.stages.tables import grid_table, rope
from vlmopt.stages.vision import encode
from vlmopt.workbook.profiling import profile_call

pytestmark = pytest.mark.gpu
PYTHON = vlmopt.OptimizeConfig.preset("fast", cpp_runtime=False)
CPP = vlmopt.OptimizeConfig.preset("fast")
BUCKETS = vlmopt.OptimizeConfig.preset("fast", cpp_runtime=False, prompt_graphs=True)
drivers = pytest.mark.parametrize("config", [CPP, BUCKETS], ids=["cpp", "buckets"])
GRIDS = ((1, 24, 36), (1, 10, 4))
TYPES = [0] * 15 + [1] * 216 + [0] * 3 + [1] * 10 + [0] * 12


@pytest.fixture(scope="module")
def loaded():
    return load(TINY, "cuda:0", torch.bfloat16)


@pytest.fixture
def model(loaded):
    yield loaded.model
    vlmopt.revert(loaded.model)


def far(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> float:
    """Our relative RMS error in units of the other's."""
    errors = [(part.double() - exact).square().mean().sqrt() for part in (ours, theirs)]
    return (errors[0] / errors[1]).item()


def upcast(value):
    """The same weights, with every tensor in float64."""
    if isinstance(value, torch.Tensor):
        return value.double()
    if isinstance(value, tuple):
        return tuple(upcast(part) for part in value)
    if isinstance(value, dict):
        return {key: upcast(part) for key, part in value.items()}
    return (
        type(value)(**{name: upcast(part) for name, part in vars(value).items()})
        if hasattr(value, "__dict__")
        else value
    )


@drivers
@torch.no_grad()
def test_features_taps_and_last_row_are_near(model, config):
    """No further from float64 than 1.5 times the reference in bf16, as for every part of class near."""
    vlmopt.optimize(model, config)
    engine, reference = ENGINES[model], Ops()
    driver = engine.cpp or engine.buckets
    weights, exact = engine.weights, upcast(engine.weights)
    generator = torch.Generator("cuda").manual_seed(0)
    pixels = torch.randn(24 * 36 + 40, 1536, device="cuda", generator=generator)
    grid = grid_table(GRIDS, weights.vision)
    features, taps = driver.encode(pixels, GRIDS)
    theirs, their_taps = encode(pixels, grid, weights.vision, reference)
    true, true_taps = encode(pixels.bfloat16().double(), grid, exact.vision, reference)
    for own, other, right in zip((features, *taps), (theirs, *their_taps), (true, *true_taps), strict=True):
        assert far(own, other, right) < 1.5

    ids = torch.arange(40, 40 + len(TYPES), device="cuda")
    rows = torch.arange(len(TYPES), device="cuda")
    slots = slots_of(TYPES).cuda()
    places = positions(TYPES, GRIDS, 2)[0]
    found = []
    for text, dtype, given in (
        (weights.text, torch.bfloat16, (theirs, their_taps)),
        (exact.text, torch.float64, (theirs.double(), [tap.double() for tap in their_taps])),
    ):
        cache = torch.zeros(len(text.layers), 2, 2, 512, 128, dtype=dtype, device="cuda")
        h = reference.merge_embeddings(ids, text.embed, slots, given[0])
        angles = rope(places.cuda(), weights.text, torch.bfloat16)
        angles = tuple(part.to(dtype) for part in angles)
        found.append(prefill(h, angles, cache, rows, slots, given[1], text, reference))
    table = rope(torch.arange(512, device="cuda").expand(3, -1), weights.text, torch.bfloat16)
    cache = torch.zeros(len(weights.text.layers), 2, 2, 512, 128, dtype=torch.bfloat16, device="cuda")
    last = driver.prefill(ids, slots.cpu(), theirs, their_taps, places, table, cache)
    assert far(last, *found) < 1.5


@drivers
def test_generate_gives_the_python_paths_ids(loaded, model, samples, config):
    given = []
    for chosen in (PYTHON, config):
        vlmopt.optimize(model, chosen)
        given.append([])
        for sample in samples.select(range(60)):
            inputs = prompt(loaded.processor, sample["image"], sample["question"]).to(loaded.device)
            given[-1].append(model.generate(**inputs, max_new_tokens=72, do_sample=False).tolist())
    assert sum(ours != theirs for ours, theirs in zip(*given, strict=True)) <= 1


def sized(loaded, height: int, width: int):
    image = Image.effect_noise((width, height), 60).convert("RGB")
    return prompt(loaded.processor, image, "What does the sign say?").to(loaded.device)


def test_nine_of_ten_launches_come_from_cpp():
    """On the shapes of the 2B model, since the embedded one has few layers for what Python launches around them."""
    large = load(RANDOM_2B, "cuda:0", torch.bfloat16)
    vlmopt.optimize(large.model, CPP)
    inputs = sized(large, 512, 512)

    def first_token() -> None:
        large.model.generate(**inputs, max_new_tokens=1, do_sample=False)

    first_token()
    before = vlmopt.status(large.model).cpp_launches
    first_token()
    from_cpp = vlmopt.status(large.model).cpp_launches - before
    assert from_cpp >= 0.9 * profile_call(first_token, large.device).launches


def test_a_new_size_compiles_nothing(loaded, model):
    vlmopt.optimize(model, CPP)
    sizes = [(64, 64), (96, 352), (288, 160), (416, 224), (32, 512)]
    made = compiled(
        [lambda s=size: model.generate(**sized(loaded, *s), max_new_tokens=2, do_sample=False) for size in sizes]
    )
    assert made == []
    assert vlmopt.status(model).calls["stages"] == len(sizes)
