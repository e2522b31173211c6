"""Fixtures shared by all tests: the embedded model, its data set, and one 500-sample pass a dtype."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image

from vlmopt.bench.models import TINY, Loaded, load
from vlmopt.optimize import revert
from vlmopt.tests.passes import Pass, run_pass

DATA = Path(__file__).parents[2] / "data"
settings.register_profile("same every time", deadline=None, derandomize=True)
settings.load_profile("same every time")  # --hypothesis-profile=default looks at other cases
torch.set_num_threads(1)  # the embedded model is too small for more to help


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped, and counted as skipped, where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def tiny() -> Loaded:
    """A fresh embedded model in fp32 on the CPU; tests may do to it what they like."""
    return load(TINY, "cpu", torch.float32)


@pytest.fixture(scope="session")
def reference() -> Loaded:
    """The embedded model in fp32 on the CPU, never optimised nor changed."""
    return load(TINY, "cpu", torch.float32)


@pytest.fixture(scope="session")
def samples():
    """The 500 samples of the embedded data set."""
    import datasets

    return datasets.load_from_disk(str(DATA))


@pytest.fixture(scope="session", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def full_pass(request: pytest.FixtureRequest, samples) -> Pass:
    """Stock and the exact stages over all samples, side by side; run once a dtype."""
    loaded = load(TINY, "cpu", request.param)
    result = run_pass(loaded, samples)
    revert(loaded.model)
    return result


@pytest.fixture(scope="session")
def prompt(reference: Loaded) -> Callable[..., dict[str, torch.Tensor]]:
    """Builds processor output from text pieces and image sizes (height, width), in the order given."""

    def build(*parts: str | tuple[int, int], seed: int = 0, **changes) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng(seed)
        content = []
        for part in parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                image = Image.fromarray(rng.integers(0, 256, (*part, 3), dtype=np.uint8))
                content.append({"type": "image", "image": image})
        inputs = reference.processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        return {**inputs, **changes}

    return build
