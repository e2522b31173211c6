"""The contest's data set: a folder that `datasets.load_from_disk` opens, one question about one image a row."""

from pathlib import Path
from typing import Any

from vlmopt.errors import VlmoptError

NEEDED = ("question_id", "image", "question")


class Samples:
    """Rows of an opened data set; an image is decoded only when its row is asked for.

    `identity` tells two data sets apart: the fingerprint that `datasets` stores with the rows.
    """

    def __init__(self, dataset: Any):
        self._rows = dataset
        self._text = dataset.select_columns([name for name in dataset.column_names if name != "image"])
        self.identity = dataset._fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict:
        """The whole row; raises whatever a damaged image makes its decoder raise."""
        return self._rows[index]

    def text(self, index: int) -> dict:
        """The row without its image: this works for a row whose image cannot be read."""
        return self._text[index]


def open_samples(path: str | Path) -> Samples:
    """Open the data set in the folder `path`.

    Raises:
        VlmoptError: no such folder, not a data set, a set of several splits, an empty one, or one that lacks a column.
    """
    path = Path(path)
    if not path.is_dir():
        raise VlmoptError(f"data set folder {path} does not exist; pass --dataset-path the folder of a saved data set")
    dataset = _load(path)
    missing = [name for name in NEEDED if name not in dataset.column_names]
    if missing:
        found = ", ".join(dataset.column_names)
        raise VlmoptError(f"data set {path} lacks the column {' and '.join(missing)}; it has {found}")
    if len(dataset) == 0:
        raise VlmoptError(f"data set {path} has no rows; pass --dataset-path another one")
    return Samples(dataset)


def _load(path: Path) -> Any:
    import datasets

    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # the reader of a damaged folder raises whatever its first broken file leads to
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise VlmoptError(
            f"{path} is not a data set that datasets.load_from_disk can open ({reason}); fetch or save it again"
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        splits = ", ".join(dataset)
        raise VlmoptError(f"{path} holds the splits {splits}; pass --dataset-path the folder of one of them")
    return dataset
