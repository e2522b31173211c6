import datasets
import pytest

from vlmopt.bench.dataset import open_samples
from vlmopt.errors import VlmoptError


def test_rows_open_with_decoded_images(dataset_path):
    samples = open_samples(dataset_path)
    assert len(samples) == 6
    assert samples[1]["image"].getpixel((0, 0)) == (0, 128, 0)
    assert "image" not in samples.text(1)
    assert samples.text(1)["question_id"] == 1001


def test_one_unreadable_image_leaves_the_others_and_its_own_text(make_dataset):
    samples = open_samples(make_dataset(damaged=[2]))
    assert samples.text(2)["question"] == "which colour is blue"
    assert samples[3]["image"].size == (8, 8)
    with pytest.raises(OSError, match="cannot identify image"):
        samples[2]


def test_identity_tells_two_sets_apart_and_is_stable(make_dataset, dataset_path):
    assert open_samples(dataset_path).identity == open_samples(dataset_path).identity
    assert open_samples(dataset_path).identity != open_samples(make_dataset(count=3)).identity


def test_answers_are_optional(make_dataset):
    assert len(open_samples(make_dataset(count=2, drop=["answers"]))) == 2


def _split_set(folder):
    rows = datasets.Dataset.from_dict({"question_id": [1]})
    datasets.DatasetDict(train=rows, validation=rows).save_to_disk(str(folder))


def _truncate(folder):
    for file in folder.glob("*.arrow"):
        file.write_bytes(file.read_bytes()[:100])


def test_what_is_no_data_set_gets_one_sentence(tmp_path, make_dataset):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    _split_set(tmp_path / "splits")
    damaged = make_dataset(count=2)
    _truncate(damaged)
    cases = {
        tmp_path / "absent": "does not exist",
        tmp_path / "file": "does not exist",
        tmp_path / "empty": "is not a data set that",
        tmp_path / "splits": "holds the splits train, validation",
        damaged: "is not a data set that",
        make_dataset(count=2, drop=["image"]): "lacks the column image; it has question_id",
        make_dataset(count=2, drop=["question_id", "question"]): "lacks the column question_id and question",
        make_dataset(count=0): "has no rows",
    }
    for path, sentence in cases.items():
        with pytest.raises(VlmoptError, match=sentence) as caught:
            open_samples(path)
        assert "\n" not in str(caught.value)
