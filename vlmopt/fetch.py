"""Downloads what the repository cannot carry: the real weights, and TextVQA's validation split in the contest's format.

`./run.sh fetch`. Both downloads go on where they stopped, and `HF_ENDPOINT` names a mirror (huggingface_hub reads it).
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from vlmopt.config import settings
from vlmopt.errors import VlmoptError

MODEL = "Qwen/Qwen3-VL-2B-Instruct"
MODEL_GB = 5
DATASET = "lmms-lab/textvqa"  # 5,000 validation samples: 0.9 GB to download, 1.4 GB unpacked
DATASET_GB = 5
SHORT_GB = 2
# What published TextVQA scores put after each question; the contest's harness does not.
SHORT_ANSWERS = "Answer the question using a single word or phrase."
COLUMNS = ("question_id", "image", "question", "answers")


def fetch_model(folder: Path) -> Path:
    """Download `MODEL` into `folder`, or complete a download that stopped there.

    Raises:
        VlmoptError: too little disk, no network, or files missing afterwards.
    """
    from huggingface_hub import snapshot_download

    if not is_model(folder):
        _check_disk(folder, MODEL_GB)
    print(f"weights: {MODEL} into {folder}", flush=True)
    _download(MODEL, lambda: snapshot_download(MODEL, local_dir=folder))
    if not is_model(folder):
        raise VlmoptError(f"{folder} lacks config.json or weight files after the download; delete it and fetch again")
    return folder


def fetch_data(folder: Path) -> Path:
    """Download TextVQA's validation split and write it to `folder` in the contest's format.

    `folder` appears only when it is complete; a data set that is already there is kept as it is.

    Raises:
        VlmoptError: too little disk, no network, or something else stands at `folder`.
    """
    import datasets
    from huggingface_hub import snapshot_download

    if is_data(folder):
        print(f"data: {folder} is there already", flush=True)
        return folder
    _refuse_other_content(folder)
    _check_disk(folder, DATASET_GB)
    print(f"data: {DATASET} (validation) into {folder}", flush=True)
    work = folder.with_name(folder.name + ".partial")
    files = ["data/validation-*"]  # asking by name keeps the training split, 6 GB, where it is
    _download(
        DATASET,
        lambda: snapshot_download(DATASET, repo_type="dataset", local_dir=work / "parquet", allow_patterns=files),
    )
    parts = sorted(str(path) for path in (work / "parquet" / "data").glob("validation-*.parquet"))
    if not parts:
        raise VlmoptError(f"{DATASET} came without validation files; delete {work} and fetch again")
    raw = datasets.Dataset.from_parquet(parts, cache_dir=str(work / "cache"))
    _save(to_contest_format(raw), folder, work)
    return folder


def fetch_short(data: Path) -> Path:
    """Write a second copy of `data`, beside it, whose questions end with the instruction of published scores.

    Raises:
        VlmoptError: too little disk, or something else stands at that place.
    """
    import datasets

    folder = data.with_name(data.name + "-short")
    if is_data(folder):
        print(f"data: {folder} is there already", flush=True)
        return folder
    _refuse_other_content(folder)
    _check_disk(folder, SHORT_GB)
    print(f"data: {data} with the short-answer instruction into {folder}", flush=True)
    _save(with_instruction(datasets.load_from_disk(data)), folder, folder.with_name(folder.name + ".partial"))
    return folder


def to_contest_format(raw):
    """The four columns of the contest's data set, images as the bytes that they came in (nothing is re-encoded).

    Args:
        raw: a data set with TextVQA's columns: question_id, image, question, answers (10 strings), and others.

    Raises:
        VlmoptError: a column is missing.
    """
    from datasets import Features, Image, List, Value

    missing = [column for column in COLUMNS if column not in raw.column_names]
    if missing:
        raise VlmoptError(f"the downloaded data set has no column {', '.join(missing)}; it is not {DATASET}")
    features = Features(
        {
            "question_id": Value("int64"),
            "image": Image(),
            "question": Value("string"),
            "answers": List(Value("string")),
        }
    )
    return raw.select_columns(list(COLUMNS)).cast(features)


def with_instruction(data):
    """`data` with `SHORT_ANSWERS` on a new line after each question."""
    questions = [f"{question}\n{SHORT_ANSWERS}" for question in data["question"]]
    return data.remove_columns("question").add_column("question", questions).select_columns(list(COLUMNS))


def is_model(folder: Path) -> bool:
    """Whether `folder` holds a configuration and weights."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def is_data(folder: Path) -> bool:
    """Whether `folder` holds what `datasets.load_from_disk` opens."""
    return (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()


def _download(name: str, download: Callable[[], str]) -> None:
    try:
        download()
    except Exception as error:  # the hub raises through three HTTP stacks; whichever it was, the user does the same
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].removeprefix("Got: ").rstrip(".")
        raise VlmoptError(
            f"cannot download {name} ({reason}); check the network, or name a mirror in HF_ENDPOINT, "
            "and run the same command again: it goes on where it stopped"
        ) from error


def _save(data, folder: Path, work: Path) -> None:
    shutil.rmtree(work / "converted", ignore_errors=True)  # what an interrupted run left
    data.save_to_disk(work / "converted")
    if folder.exists():  # _refuse_other_content left only an empty folder here
        folder.rmdir()
    os.replace(work / "converted", folder)
    shutil.rmtree(work)


def _refuse_other_content(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise VlmoptError(f"{folder} exists and is not a complete data set; move it away, then fetch again")


def _check_disk(folder: Path, needed_gb: float) -> None:
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free_gb = shutil.disk_usage(place).free / 2**30
    if free_gb < needed_gb:
        raise VlmoptError(
            f"{folder} needs about {needed_gb} GB of disk and {place} has {free_gb:.1f} GB free; make room"
        )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.sh fetch", description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", type=Path, default=settings().model_dir, help="default: %(default)s")
    parser.add_argument("--data-dir", type=Path, default=settings().data_dir, help="default: %(default)s")
    parser.add_argument(
        "--short-answers",
        action="store_true",
        help="also write DATA_DIR-short, whose questions end with the instruction that published scores use",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--model-only", action="store_true", help="leave the data")
    only.add_argument("--data-only", action="store_true", help="leave the weights")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    try:
        flags = _parse(arguments)
        if not flags.data_only:
            fetch_model(flags.model_dir)
        if not flags.model_only:
            fetch_data(flags.data_dir)
            if flags.short_answers:
                fetch_short(flags.data_dir)
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; run the same command again, it goes on from here", file=sys.stderr)
        return 130
    print("done; ./run.sh now takes what was fetched")
    return 0


if __name__ == "__main__":
    sys.exit(main())
