"""What every provider answers, and whether a difference from stock is a rounding at a near-tie."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from tqdm.auto import tqdm

import vlmopt
from vlmopt.bench import protocol, vqa
from vlmopt.workbook.end_to_end import STOCK, Contender
from vlmopt.workbook.record import Record

ANSWER_TOKENS = 96  # the embedded data set's longest answer is 60 characters
LOSSY_POINTS = MappingProxyType({"int8": 0.5, "fp8": 0.5, "int4": 2.0})
"""Points of accuracy that copies of a scheme may lose; among few samples a lost answer is many, so one more may be."""


@dataclass(frozen=True)
class Answers:
    """One provider's answers: new ids, accuracy per sample, calls handed to stock while answering."""

    ids: list[list[int]]
    accuracy: list[float]
    to_stock: int

    @property
    def mean_accuracy(self) -> float:
        """Soft accuracy over all samples, 0 to 1."""
        return sum(self.accuracy) / len(self.accuracy)


def answer(
    field: Mapping[str, Contender], samples: Any, indices: Sequence[int], tokens: int = ANSWER_TOKENS
) -> dict[str, Answers]:
    """Every provider's greedy answer of at most `tokens` to every chosen sample, scored as the contest does."""
    found = {name: Answers([], [], 0) for name in field}
    before = {name: _to_stock(contender) for name, contender in field.items()}
    with protocol.quiet_generation():
        for index in tqdm(indices, desc="answers", leave=False):
            sample = samples[index]
            for name, contender in field.items():
                ids = new_ids(contender.target, sample, tokens)
                text = contender.target.processor.decode(ids, skip_special_tokens=True)
                found[name].ids.append(ids)
                found[name].accuracy.append(vqa.accuracy(text, sample["answers"]))
    return {
        name: dataclasses.replace(answers, to_stock=_to_stock(field[name]) - before[name])
        for name, answers in found.items()
    }


def new_ids(target: Any, sample: Mapping[str, Any], tokens: int) -> list[int]:
    """The ids of the answer, without the prompt."""
    inputs = protocol.prepare(target, sample)
    return protocol.generate(target, inputs, tokens)[0, inputs["input_ids"].shape[1] :].tolist()


def _to_stock(contender: Contender) -> int:
    return vlmopt.status(contender.target.model).calls["stock"]


def differing(answers: Mapping[str, Answers], provider: str) -> list[int]:
    """Positions of the samples whose ids differ from stock's."""
    pairs = zip(answers[STOCK].ids, answers[provider].ids, strict=True)
    return [i for i, (stock, ours) in enumerate(pairs) if stock != ours]


def worst_margin(
    stock: Any, answers: Mapping[str, Answers], provider: str, samples: Any, indices: Sequence[int]
) -> float:
    """How far the differing ids are from a near-tie: the largest margin over the measured error; at most 1 is a tie.

    At the first differing id of a sample both choices are looked up in the logits of a float32 copy of the model. Their
    margin is divided by twice the largest error of stock's own logits there, since two roundings can meet.
    """
    places = differing(answers, provider)
    if not places:
        return 0.0
    reference = copy.deepcopy(stock.model).float()
    return max(
        _margin(stock, reference, samples[indices[i]], answers[STOCK].ids[i], answers[provider].ids[i]) for i in places
    )


def _margin(stock: Any, reference: torch.nn.Module, sample: Mapping[str, Any], a: list[int], b: list[int]) -> float:
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if common is None:
        return float("inf")
    inputs = _extended(protocol.prepare(stock, sample), a[:common])
    with torch.no_grad():
        own = stock.model(**inputs).logits[0, -1].double()
        exact = reference(**inputs).logits[0, -1].double()
    error = (own - exact).abs().max().item()
    margin = (exact[a[common]] - exact[b[common]]).abs().item()
    return margin / (2 * error) if error else float("inf")


def _extended(inputs: Any, ids: Sequence[int]) -> dict[str, Any]:
    """The inputs with `ids` appended to the prompt as text."""
    inputs = dict(inputs)
    tail = inputs["input_ids"].new_tensor([list(ids)])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], tail], 1)
    inputs["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones_like(tail)], 1)
    if "mm_token_type_ids" in inputs:
        pad = torch.zeros_like(tail, dtype=inputs["mm_token_type_ids"].dtype)
        inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], pad], 1)
    return inputs


def check_answers(
    record: Record,
    field: Mapping[str, Contender],
    answers: Mapping[str, Answers],
    samples: Any,
    indices: Sequence[int],
) -> None:
    """Holds every provider to its class, and to having served its calls itself.

    Raises:
        VlmoptError: an exact provider gave other ids, a near one differs beyond a near-tie, a lossy one lost more
            accuracy than its scheme may, or a call went to stock.
    """
    stock = field[STOCK].target
    for name, contender in field.items():
        if name == STOCK:
            continue
        record.check(f"{name}: calls handed to stock", contender.cls, answers[name].to_stock, 0)
        if contender.cls == "exact":
            others = len(differing(answers, name))
            record.check(f"{name}: answers with other ids, {stock.name}", "exact", others, 0)
        elif contender.cls == "lossy":
            lost = 100 * (answers[STOCK].mean_accuracy - answers[name].mean_accuracy)
            allowed = LOSSY_POINTS[vlmopt.status(contender.target.model).config.weights] + 100 / len(indices)
            record.check(f"{name}: points of accuracy lost, {stock.name}", "lossy", lost, allowed)
        else:
            margin = worst_margin(stock, answers, name, samples, indices)
            record.check(f"{name}: margin of a differing id over the error, {stock.name}", contender.cls, margin, 1)


def measure_answers(record: Record, model: str, answers: Mapping[str, Answers]) -> None:
    """Adds each provider's `accuracy` (TextVQA's soft accuracy) and `ids_equal` (share of answers with stock's ids)."""
    for name, own in answers.items():
        case = f"{model}, {len(own.ids)} samples"
        record.measure(case, name, "accuracy", "share", [own.mean_accuracy])
        record.measure(case, name, "ids_equal", "share", [1 - len(differing(answers, name)) / len(own.ids)])
