import io

import datasets
import pytest
from PIL import Image

COLOURS = ["red", "green", "blue", "white", "black"]


def _png(colour):
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(stream, format="PNG")
    return {"bytes": stream.getvalue(), "path": None}


@pytest.fixture(scope="session")
def make_dataset(tmp_path_factory):
    """Save a small data set whose right answer is the last word of each question; returns its folder."""

    def make(count=6, damaged=(), drop=()):
        broken = {"bytes": b"not an image", "path": None}
        colours = [COLOURS[i % len(COLOURS)] for i in range(count)]
        columns = {
            "question_id": [1000 + i for i in range(count)],
            "image": [broken if i in damaged else _png(colour) for i, colour in enumerate(colours)],
            "question": [f"which colour is {colour}" for colour in colours],
            "answers": [[f"The {colour.upper()}"] * 10 for colour in colours],
        }
        kinds = {
            "question_id": datasets.Value("int64"),
            "image": datasets.Image(),
            "question": datasets.Value("string"),
            "answers": datasets.List(datasets.Value("string")),
        }
        kept = [name for name in columns if name not in drop]
        dataset = datasets.Dataset.from_dict(
            {name: columns[name] for name in kept}, datasets.Features({name: kinds[name] for name in kept})
        )
        folder = tmp_path_factory.mktemp("dataset") / "data"
        dataset.save_to_disk(str(folder), num_shards=1)
        return folder

    return make


@pytest.fixture(scope="session")
def dataset_path(make_dataset):
    return make_dataset()
