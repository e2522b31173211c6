"""`./run.sh fetch` without a network: the hub's functions are replaced, the conversion works on a made-up TextVQA."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from PIL import Image

from vlmopt import fetch
from vlmopt.errors import VlmoptError


def jpeg(colour: tuple[int, int, int]) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (40, 24), colour).save(stream, "JPEG")
    return stream.getvalue()


IMAGES = [jpeg((200, 10, 10)), jpeg((10, 200, 10)), jpeg((10, 10, 200))]


def textvqa() -> datasets.Dataset:
    """Three samples with TextVQA's columns and types."""
    rows = {
        "image_id": ["a", "b", "c"],
        "question_id": [34602, 34603, 34604],
        "question": ["what is the brand?", "what does it say?", "how many?"],
        "question_tokens": [["what"], ["what"], ["how"]],
        "image": [{"bytes": image, "path": f"{index}.jpg"} for index, image in enumerate(IMAGES)],
        "image_width": [40] * 3,
        "answers": [[f"answer {row}"] * 7 + ["other"] * 3 for row in range(3)],
        "set_name": ["val"] * 3,
    }
    features = datasets.Features(
        {
            "image_id": datasets.Value("string"),
            "question_id": datasets.Value("int32"),
            "question": datasets.Value("string"),
            "question_tokens": datasets.List(datasets.Value("string")),
            "image": datasets.Image(),
            "image_width": datasets.Value("int32"),
            "answers": datasets.List(datasets.Value("string")),
            "set_name": datasets.Value("string"),
        }
    )
    return datasets.Dataset.from_dict(rows, features=features)


class Hub:
    """Stands for huggingface_hub.snapshot_download: writes small files, remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict]] = []
        self.failure: BaseException | None = None
        self.weights = "model.safetensors"

    def __call__(self, repository: str, **arguments) -> str:
        self.asked.append((repository, arguments))
        if self.failure:
            raise self.failure
        folder = Path(arguments["local_dir"])
        if arguments.get("repo_type") == "dataset":
            (folder / "data").mkdir(parents=True, exist_ok=True)
            data = textvqa()
            data.select([0, 1]).to_parquet(folder / "data" / "validation-00000-of-00002.parquet")
            data.select([2]).to_parquet(folder / "data" / "validation-00001-of-00002.parquet")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text("{}")
            (folder / self.weights).write_bytes(b"weights")
        return str(folder)


@pytest.fixture
def hub(monkeypatch) -> Hub:
    stand_in = Hub()
    monkeypatch.setattr("huggingface_hub.snapshot_download", stand_in)
    return stand_in


@pytest.fixture
def folders(tmp_path) -> list[str]:
    return ["--model-dir", str(tmp_path / "model"), "--data-dir", str(tmp_path / "data")]


def test_both_are_fetched_and_the_data_opens_in_the_contests_format(hub, folders, tmp_path, capsys):
    assert fetch.main(folders) == 0
    assert [name for name, _ in hub.asked] == ["Qwen/Qwen3-VL-2B-Instruct", "lmms-lab/textvqa"]
    assert fetch.is_model(tmp_path / "model")
    data = datasets.load_from_disk(tmp_path / "data")
    assert data.column_names == ["question_id", "image", "question", "answers"]
    assert data.features["question_id"].dtype == "int64"
    assert data["question_id"][:] == [34602, 34603, 34604]
    assert data[0]["question"] == "what is the brand?"
    assert data[2]["answers"] == ["answer 2"] * 7 + ["other"] * 3
    assert data[1]["image"].size == (40, 24)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "model"], "nothing else is left"
    assert "textvqa" in capsys.readouterr().out


def test_only_the_validation_split_is_asked_for(hub, tmp_path):
    fetch.fetch_data(tmp_path / "data")
    [(_, arguments)] = hub.asked
    assert arguments["repo_type"] == "dataset"
    assert arguments["allow_patterns"] == ["data/validation-*"]


def test_images_keep_the_bytes_that_they_came_in(hub, tmp_path):
    fetch.fetch_data(tmp_path / "data")
    raw = datasets.load_from_disk(tmp_path / "data").cast_column("image", datasets.Image(decode=False))
    assert [row["image"]["bytes"] for row in raw] == IMAGES


@pytest.mark.parametrize(("flag", "asked"), [("--model-only", fetch.MODEL), ("--data-only", fetch.DATASET)])
def test_one_of_the_two(hub, folders, flag, asked):
    assert fetch.main([*folders, flag]) == 0
    assert [name for name, _ in hub.asked] == [asked]


def test_data_that_is_there_is_not_fetched_again(hub, tmp_path):
    fetch.fetch_data(tmp_path / "data")
    fetch.fetch_data(tmp_path / "data")
    assert len(hub.asked) == 1


def test_short_answers_makes_a_second_copy_with_the_instruction(hub, folders, tmp_path):
    assert fetch.main([*folders, "--data-only", "--short-answers"]) == 0
    plain, short = (datasets.load_from_disk(tmp_path / name) for name in ("data", "data-short"))
    assert plain[1]["question"] == "what does it say?"
    assert short[1]["question"] == "what does it say?\nAnswer the question using a single word or phrase."
    assert short.column_names == plain.column_names
    assert short["answers"][:] == plain["answers"][:]
    raw = short.cast_column("image", datasets.Image(decode=False))
    assert [row["image"]["bytes"] for row in raw] == IMAGES
    assert fetch.main([*folders, "--data-only", "--short-answers"]) == 0
    assert len(hub.asked) == 1


@pytest.mark.parametrize("failure", [ConnectionError("Name or service not known\nand more"), RuntimeError("")])
def test_a_failing_network_gets_one_sentence(hub, folders, tmp_path, capsys, failure):
    hub.failure = failure
    assert fetch.main(folders) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: cannot download Qwen/Qwen3-VL-2B-Instruct (")
    assert "HF_ENDPOINT" in line and "goes on where it stopped" in line
    assert not (tmp_path / "data").exists()


def test_an_interrupted_download_goes_on(hub, folders, tmp_path, capsys):
    hub.failure = KeyboardInterrupt()
    assert fetch.main([*folders, "--data-only"]) == 130
    assert "run the same command again" in capsys.readouterr().err
    hub.failure = None
    assert fetch.main([*folders, "--data-only"]) == 0
    places = {str(arguments["local_dir"]) for _, arguments in hub.asked}
    assert len(places) == 1, "the second call continues in the folder of the first"


def test_an_interrupted_conversion_leaves_no_data_set_and_is_repeated(hub, folders, tmp_path, monkeypatch):
    save = datasets.Dataset.save_to_disk

    def stop_half_way(data, folder, *arguments, **options):
        save(data, folder, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(datasets.Dataset, "save_to_disk", stop_half_way)
        assert fetch.main([*folders, "--data-only"]) == 130
    assert not (tmp_path / "data").exists()
    assert fetch.main([*folders, "--data-only"]) == 0
    assert len(datasets.load_from_disk(tmp_path / "data")) == 3


def test_too_little_disk_is_said_before_the_download(hub, folders, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**12, 10**12, 3 * 2**30))
    for flag in ("--model-only", "--data-only"):
        assert fetch.main([*folders, flag]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "needs about 5 GB" in line and "3.0 GB free" in line
    assert hub.asked == []


def test_something_else_at_the_place_is_left_alone(hub, tmp_path, folders, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("years of work")
    assert fetch.main([*folders, "--data-only"]) == 2
    assert "move it away" in capsys.readouterr().err
    assert (tmp_path / "data" / "thesis.tex").read_text() == "years of work"
    assert hub.asked == []


def test_an_empty_folder_at_the_place_is_filled(hub, tmp_path):
    (tmp_path / "data").mkdir()
    fetch.fetch_data(tmp_path / "data")
    assert fetch.is_data(tmp_path / "data")


def test_weights_that_came_incomplete_are_refused(hub, tmp_path):
    hub.weights = "README.md"
    with pytest.raises(VlmoptError, match="or weight files after the download"):
        fetch.fetch_model(tmp_path / "model")


def test_another_data_set_is_refused():
    with pytest.raises(VlmoptError, match="no column answers"):
        fetch.to_contest_format(textvqa().remove_columns("answers"))


def test_bad_flags_end_with_2_and_no_traceback():
    command = [sys.executable, "-m", "vlmopt.fetch", "--model-only", "--data-only"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "usage:" in result.stderr and "Traceback" not in result.stderr
