"""What is asked under load: an embedded bilingual set, and the data-set builder for BELLE, HC3-Chinese and XL-Sum.

`python -m vlmopt.serving.prompts OUT.json` builds a file that `--test_cases_path` takes; see `--help`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from vlmopt.errors import VlmoptError
from vlmopt.files import require_writable, write_atomic

EMBEDDED = Path(__file__).with_name("prompts.json")
SEED = 42


@dataclass(frozen=True)
class Prompt:
    """One text to send and what a good answer says.

    `kind` is the request class (`question`, `explain`, `summary`, and `chat` for BELLE's dialogues); `language` is `zh`
    or `en`; `reference` is what ROUGE-L and BERTScore compare an answer with; `image` is the path of one to send along.
    """

    id: str
    kind: str
    language: str
    text: str
    reference: str
    image: str | None = None


@dataclass(frozen=True)
class Source:
    """A public data set: where its rows are on the hub and in a local folder, and how a row becomes a prompt."""

    repository: str
    hub: str  # the file in the repository, after its revision where that is not main
    local: tuple[str, ...]  # patterns inside the local folder, the first that matches counts
    kind: str
    columns: tuple[str, ...]
    prompt: Callable[[Mapping[str, Any]], str]
    reference: Callable[[Mapping[str, Any]], str]

    @property
    def folder(self) -> str:
        """The data set's name inside a local folder of data sets: its repository's name without the owner."""
        return self.repository.split("/")[1]


SOURCES: dict[str, Source] = {
    "belle": Source(
        repository="BelleGroup/generated_chat_0.4M",
        hub="/generated_chat_0.4M.json",
        local=("generated_chat_0.4M.json", "*.json", "*.jsonl", "**/*.parquet"),
        kind="chat",
        columns=("instruction", "input", "output"),
        prompt=lambda row: "\n".join(part for part in (row["instruction"], row["input"]) if part),
        reference=lambda row: row["output"],
    ),
    "hc3": Source(
        repository="Hello-SimpleAI/HC3-Chinese",
        hub="/all.jsonl",
        local=("all.jsonl", "*.jsonl", "**/*.parquet"),
        kind="explain",
        columns=("question", "human_answers"),
        prompt=lambda row: row["question"],
        reference=lambda row: next(iter(row["human_answers"] or ()), ""),
    ),
    "xlsum": Source(
        repository="csebuetnlp/xlsum",
        hub="@refs/convert/parquet/chinese_simplified/test/*.parquet",
        local=("chinese_simplified/test/*.parquet", "**/chinese_simplified_test.jsonl"),
        kind="summary",
        columns=("text", "summary"),
        prompt=lambda row: f"请用一两句话概括下面这篇文章的主要内容。\n\n{row['text']}",
        reference=lambda row: row["summary"],
    ),
}


@cache
def embedded_prompts() -> tuple[Prompt, ...]:
    """The prompts that ship with the package: Chinese and English, three kinds, written for this project."""
    return load_prompts(EMBEDDED)


def load_prompts(path: str | Path) -> tuple[Prompt, ...]:
    """Read prompts from a JSON file: a list of objects with the fields of `Prompt`.

    `image` may be left out; a relative one counts from the file's folder.

    Raises:
        VlmoptError: no such file, not such a list, an empty one, two prompts of one id, or an image that is missing.
    """
    needed = {field.name for field in fields(Prompt)} - {"image"}
    try:
        rows = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise VlmoptError(f"cannot read the prompts {path} ({error.strerror}); pass another path") from error
    except ValueError as error:
        raise VlmoptError(f"the prompts {path} are not JSON ({error}); build or fetch them again") from error
    if not isinstance(rows, list) or not rows:
        raise VlmoptError(f"the prompts {path} are not a list of at least one prompt")
    for number, row in enumerate(rows):
        texts = row.items() if isinstance(row, dict) else ()
        names = {name for name, value in texts if name != "image" or value is not None}
        if names - {"image"} != needed or not all(isinstance(row[name], str) for name in names):
            raise VlmoptError(f"prompt {number} of {path} is not an object of the texts {', '.join(sorted(needed))}")
    prompts = tuple(Prompt(**row) for row in rows)
    folder = Path(path).parent
    prompts = tuple(replace(p, image=str(folder / p.image)) if p.image else p for p in prompts)
    for prompt in prompts:
        if prompt.image and not Path(prompt.image).is_file():
            raise VlmoptError(
                f"the image {prompt.image} of prompt {prompt.id} in {path} does not exist; put its path right"
            )
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise VlmoptError(f"the prompts {path} hold one id twice; give every prompt its own")
    return prompts


def save_prompts(path: str | Path, prompts: Sequence[Prompt]) -> Path:
    """Write prompts so that `load_prompts` reads them; a kill in the middle leaves the previous file whole."""
    rows = [{name: value for name, value in asdict(prompt).items() if value is not None} for prompt in prompts]
    return write_atomic(path, json.dumps(rows, ensure_ascii=False, indent=1) + "\n")


def build_prompts(
    counts: Mapping[str, int], folder: str | Path | None = None, *, seed: int = SEED, longest: int = 6000
) -> tuple[Prompt, ...]:
    """Draw `counts` prompts from each named source, shuffled with `seed`; the same files give the same prompts.

    Args:
        counts: how many rows of `belle`, `hc3` and `xlsum`.
        folder: holds `generated_chat_0.4M`, `HC3-Chinese` and `xlsum` as fetched from the hub; None asks the hub.
        seed: of the shuffle, the same for every source.
        longest: characters; rows whose prompt is longer are passed over, as are those without prompt or answer.

    Raises:
        VlmoptError: an unknown source, a folder, file or column that is missing, an unreachable hub, or too few rows.
    """
    for name in counts:
        if name not in SOURCES:
            raise VlmoptError(f"there is no data set {name!r}; choose among {', '.join(SOURCES)}")
    return tuple(
        prompt
        for name, count in counts.items()
        for prompt in _draw(name, count, None if folder is None else Path(folder), seed, longest)
    )


def _draw(name: str, count: int, folder: Path | None, seed: int, longest: int) -> list[Prompt]:
    source = SOURCES[name]
    rows = _rows(source, folder)
    missing = [column for column in source.columns if column not in rows.column_names]
    if missing:
        found = ", ".join(rows.column_names)
        raise VlmoptError(f"data set {source.repository} lacks the column {' and '.join(missing)}; it has {found}")
    drawn: list[Prompt] = []
    for number, row in enumerate(rows.shuffle(seed=seed)):
        if len(drawn) == count:
            break
        text, reference = source.prompt(row).strip(), (source.reference(row) or "").strip()
        if text and reference and len(text) <= longest:
            drawn.append(Prompt(f"{name}-{number}", source.kind, "zh", text, reference))
    if len(drawn) < count:
        raise VlmoptError(f"data set {source.repository} has {len(drawn)} usable rows, not {count}; ask for fewer")
    return drawn


def _rows(source: Source, folder: Path | None) -> Any:
    import datasets

    files = [f"hf://datasets/{source.repository}{source.hub}"] if folder is None else _local_files(source, folder)
    form = "parquet" if files[0].endswith(".parquet") else "json"
    try:
        return datasets.load_dataset(form, data_files=files, split="train")
    except Exception as error:  # the hub's client and the readers raise whatever went wrong underneath
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        place = folder or "the hub"
        raise VlmoptError(
            f"cannot read the data set {source.repository} from {place} ({reason}); pass a folder that holds it as "
            f"{source.folder}"
        ) from error


def _local_files(source: Source, folder: Path) -> list[str]:
    place = folder / source.folder
    if not place.is_dir():
        raise VlmoptError(f"data folder {place} does not exist; fetch {source.repository} into it")
    for pattern in source.local:
        if files := sorted(str(path) for path in place.glob(pattern) if path.is_file()):
            return files
    raise VlmoptError(f"data folder {place} holds none of {', '.join(source.local)}; fetch {source.repository} again")


def main(arguments: list[str] | None = None) -> int:
    """Build what the command line asks for and return the exit status: 0, or 2 where it cannot be built."""
    parser = argparse.ArgumentParser(
        prog="python -m vlmopt.serving.prompts",
        description="Draw prompts from BELLE, HC3-Chinese and XL-Sum (Chinese) into one file of test cases.",
    )
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the file to write")
    for name, source in SOURCES.items():
        parser.add_argument(f"--{name}", type=int, default=100, metavar="N", help=f"rows of {source.repository} (100)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="holds the data sets as fetched (default: the hub)")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help=f"of the shuffle ({SEED})")
    options = parser.parse_args(arguments)
    counts = {name: getattr(options, name) for name in SOURCES if getattr(options, name) > 0}
    try:
        if not counts:
            raise VlmoptError("no rows are asked for; give at least one data set a number above 0")
        require_writable(options.out)
        prompts = build_prompts(counts, options.folder, seed=options.seed)
        print(f"{len(prompts)} prompts in {save_prompts(options.out, prompts)}")
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
