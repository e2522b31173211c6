"""What notebook 13 shows of the embedded model: pictures, facts, accuracy by kind, the training curve."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmopt.bench.models import TINY, load
from vlmopt.workbook import record, signs, structure, tiny
from vlmopt.workbook.answers import Answers, differing
from vlmopt.workbook.end_to_end import STOCK

DATA = record.ROOT / "data"
_READS_A_STRING = ("colour", "top", "bottom", "read_all")
OTHER_IDS, POINTS_APART = 0.01, 0.2
"""The share of answers whose ids may differ from stock's, and how many points of accuracy may lie between them."""
AGAIN = record.ROOT / "results" / "tiny-again"
"""Where a second training with the first one's seed is looked for: a model folder."""
POINTS_AGAIN = 1.0
"""How many points of accuracy may lie between two trainings with one seed."""


def examples(samples: Any) -> list[tuple[Any, str]]:
    """One image of each kind of question with its question and right answer."""
    first = {samples.text(i)["kind"]: i for i in reversed(range(len(samples)))}
    rows = [samples[first[kind]] for kind in signs.KINDS if kind in first]
    return [(row["image"], f"{row['question']} → {tiny.right_answer(row['answers'])}") for row in rows]


def facts(target: Any, samples: Any, folder: Path = TINY, data: Path = DATA) -> dict[str, int]:
    """Bytes and parameters of the model, bytes of the data; counts of image sizes, strings, and strings trained on."""
    texts = {text for i in range(len(samples)) for text in strings(samples.text(i))}
    return {
        "parameters": structure.parameter_count(target.model),
        "weight_bytes": (folder / "model.safetensors").stat().st_size,
        "data_bytes": sum(path.stat().st_size for path in data.iterdir()),
        "image_sizes": len({samples[i]["image"].size for i in range(len(samples))}),
        "strings": len(texts),
        "strings_seen": sum(not signs.held_out(text) for text in texts),
    }


def strings(row: dict[str, Any]) -> Iterator[str]:
    """The strings on signs that a sample's right answer spells out."""
    if row["kind"] in _READS_A_STRING:
        yield from tiny.right_answer(row["answers"]).split(", ")


def measure_accuracy(
    rec: record.Record, target: Any, given: Answers, samples: Any, chosen: Sequence[int]
) -> dict[str, float]:
    """Adds the share of answers that are right letter for letter, for each kind of question and for all of `chosen`."""
    shares = tiny.accuracy(
        (samples.text(index), target.processor.decode(ids, skip_special_tokens=True))
        for index, ids in zip(chosen, given.ids, strict=True)
    )
    for kind, share in shares.items():
        rec.measure(f"{target.name}, {len(chosen)} samples", kind, "accuracy", "share", [share])
    return shares


def check_alike(rec: record.Record, given: Mapping[str, Answers]) -> None:
    """Holds every provider's answers to stock's: few other ids, and hardly another accuracy.

    Raises:
        VlmoptError: one lies further from stock.
    """
    for name, own in given.items():
        if name != STOCK:
            others = len(differing(given, name)) / len(own.ids)
            apart = 100 * abs(own.mean_accuracy - given[STOCK].mean_accuracy)
            rec.check(f"{name}: share of answers with other ids than stock's", "near", others, OTHER_IDS)
            rec.check(f"{name}: points of accuracy between it and stock", "near", apart, POINTS_APART)


def measure_again(
    rec: record.Record, first: Mapping[str, float], samples: Any, chosen: Sequence[int], folder: Path = AGAIN
) -> None:
    """Adds `accuracy_again`, that of a model trained once more, and holds it to the `first` one's; skips without it.

    Raises:
        VlmoptError: more than `POINTS_AGAIN` lie between them.
    """
    if not folder.is_dir():
        rec.skip("a second training", f"there is none in {folder.relative_to(record.ROOT)}")
        return
    again = load(folder)
    shares = tiny.evaluate(again.model, again.processor, [samples[index] for index in chosen])
    for kind, share in shares.items():
        rec.measure(f"trained again, {len(chosen)} samples", kind, "accuracy_again", "share", [share])
    apart = 100 * abs(shares["all"] - first["all"])
    rec.check("points of accuracy between two trainings with one seed", "near", apart, POINTS_AGAIN)


def add_training(rec: record.Record, log: Path = TINY / "train_log.json", points: int = 60) -> None:
    """Adds loss and teacher-forced accuracy over the training steps from its log, at most `points` of each."""
    if not log.exists():
        rec.skip("training curve", "the model folder holds no train_log.json")
        return
    history = json.loads(log.read_text())
    for row in _spread(history["losses"], points):
        rec.measure(f"step {row['step']}", "training", "loss", "nats", [row["loss"]])
    for row in _spread(history["evaluations"], points):
        shares = row["exact"].values()
        rec.measure(f"step {row['step']}", "training", "train_exact", "share", [sum(shares) / len(shares)])


def _spread(rows: list[dict[str, Any]], points: int) -> list[dict[str, Any]]:
    step = -(-len(rows) // points) or 1
    return rows[::-1][::step][::-1]


def ask(target: Any, sample: dict[str, Any]) -> str:
    """The model's answer to one sample beside the right one."""
    answer = tiny.ask(target.model, target.processor, sample["image"], sample["question"])
    return f"{sample['question']} → {answer} (right: {tiny.right_answer(sample['answers'])})"
