"""What a run under load amounts to: latencies, throughput and SLO attainment from request times, quality from answers.

Latencies are over the requests that finished. Refused, failed and unfinished requests are counted apart, and each of
them misses its objective, so that refusing work never looks like attaining it. What cannot be computed is None, never
0.
"""

import importlib
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from vlmopt.errors import VlmoptError

OUTCOMES = ("finished", "refused", "failed", "unfinished")
PERCENTILES = (50, 95, 99)
# The unit of every number of a summary; names are the seed system's where it has one.
UNITS: dict[str, str] = {
    "requests": "requests",
    **{f"requests_{outcome}": "requests" for outcome in OUTCOMES},
    "total_time": "s",
    **{
        f"{statistic}_{what}": "s"
        for what in ("latency", "ttft", "time_per_output_token")
        for statistic in ("avg", *(f"p{percent}" for percent in PERCENTILES))
    },
    "system_throughput_requests_per_sec": "requests/s",
    "system_throughput_tokens_per_sec": "tokens/s",
    "slo_attainment_rate": "share of all requests that have an objective",
    "preemptions": "preemptions",
    "peak_memory": "bytes",
}


@dataclass(frozen=True)
class Times:
    """What happened to one request; times in seconds on one clock.

    Attributes:
        outcome: `finished`, `refused` (can never fit), `failed` (an error) or `unfinished` (the run ended before it).
        first_token, end: None where it did not get so far; `end` counts for finished requests only.
        output_tokens: tokens generated.
        slo: seconds from arrival within which it should have ended; None without an objective.
    """

    id: str
    kind: str
    arrival: float
    outcome: str = "finished"
    first_token: float | None = None
    end: float | None = None
    output_tokens: int = 0
    preemptions: int = 0
    slo: float | None = None

    def __post_init__(self):
        if self.outcome not in OUTCOMES:
            raise VlmoptError(f"outcome {self.outcome!r} of request {self.id} is none of {', '.join(OUTCOMES)}")
        if self.outcome == "finished" and (self.end is None or self.first_token is None):
            raise VlmoptError(f"request {self.id} finished without the time of its first token or of its end")
        known = [time for time in (self.arrival, self.first_token, self.end) if time is not None]
        if any(later < earlier for earlier, later in pairwise(known)):
            raise VlmoptError(f"the times of request {self.id} are not in order: {known}")

    @property
    def finished(self) -> bool:
        """Whether it got its whole answer."""
        return self.outcome == "finished"

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the last token; None unless it finished."""
        return self.end - self.arrival if self.finished else None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token; None unless it finished."""
        return self.first_token - self.arrival if self.finished else None

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token after the first; None unless it finished with at least two."""
        if not self.finished or self.output_tokens < 2:
            return None
        return (self.end - self.first_token) / (self.output_tokens - 1)


def summarise(times: Sequence[Times], peak_memory: int | None = None) -> dict[str, float | int | None]:
    """The numbers named in `UNITS` for one run.

    `total_time` runs from the first arrival of any request to the last end of a finished one, and both throughputs
    are finished requests, and their tokens, over it.

    Args:
        peak_memory: bytes, measured by the caller; None where it was not.
    """
    finished = [request for request in times if request.finished]
    total = max(r.end for r in finished) - min(r.arrival for r in times) if finished else None
    return {
        "requests": len(times),
        **{f"requests_{outcome}": sum(r.outcome == outcome for r in times) for outcome in OUTCOMES},
        "total_time": total,
        **_spread("latency", (r.latency for r in finished)),
        **_spread("ttft", (r.ttft for r in finished)),
        **_spread("time_per_output_token", (r.time_per_output_token for r in finished)),
        "system_throughput_requests_per_sec": len(finished) / total if total else None,
        "system_throughput_tokens_per_sec": sum(r.output_tokens for r in finished) / total if total else None,
        "slo_attainment_rate": slo_attainment_rate(times),
        "preemptions": sum(r.preemptions for r in times),
        "peak_memory": peak_memory,
    }


def summarise_kinds(times: Sequence[Times]) -> dict[str, dict[str, float | int | None]]:
    """`summarise` for the requests of each kind, kinds in alphabetical order."""
    kinds = sorted({request.kind for request in times})
    return {kind: summarise([request for request in times if request.kind == kind]) for kind in kinds}


def slo_attainment_rate(times: Iterable[Times], slo: Mapping[str, float] | None = None) -> float | None:
    """Share of the requests with an objective that finished within it, from 0 to 1; None where none has one.

    Args:
        slo: seconds per kind to use instead of each request's own; kinds that it lacks have no objective.
    """
    judged = [(r, r.slo if slo is None else slo.get(r.kind)) for r in times]
    judged = [(r, limit) for r, limit in judged if limit is not None]
    if not judged:
        return None
    return sum(r.finished and r.latency <= limit for r, limit in judged) / len(judged)


def attainment_over_factors(
    times: Sequence[Times], unloaded: Mapping[str, float], factors: Iterable[float]
) -> dict[float, float | None]:
    """The attainment if the objective were `factor` times the unloaded latency (seconds per kind), for each factor."""
    return {
        factor: slo_attainment_rate(times, {kind: factor * latency for kind, latency in unloaded.items()})
        for factor in factors
    }


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The percentile, linear between the two nearest values as in NumPy; None of no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _spread(name: str, values: Iterable[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    average = math.fsum(known) / len(known) if known else None
    return {
        f"avg_{name}": average,
        **{f"p{percent}_{name}": percentile(known, percent) for percent in PERCENTILES},
    }


@dataclass(frozen=True)
class Quality:
    """A mean score from 0 to 1, or None with `note` saying why it was not computed."""

    value: float | None
    note: str = ""


# Characters that are tokens by themselves: Chinese with its extensions, kana without their marks, Hangul syllables.
_CJK = (
    r"\u3005-\u3007\u3041-\u3096\u30a1-\u30fa\u30fc\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff"
    r"\U00020000-\U0003ffff"
)
_TOKEN = re.compile(rf"[{_CJK}]|(?:(?![{_CJK}])[^\W_])+")


class BilingualTokenizer:
    """Tokens for ROUGE in Chinese and other text: each CJK character, and each run of other letters or digits.

    Text is normalised (NFKC, so that full-width letters equal plain ones) and lower-cased; punctuation is dropped. In
    place of rouge-score's own tokenizer, which drops every character but ASCII letters and digits.
    """

    def tokenize(self, text: str) -> list[str]:
        """The tokens of `text`, in order."""
        return _TOKEN.findall(unicodedata.normalize("NFKC", text).lower())


def rouge_l(answers: Sequence[str], references: Sequence[str]) -> Quality:
    """Mean ROUGE-L F-measure over the pairs, by rouge-score with `BilingualTokenizer`.

    Raises:
        VlmoptError: not as many answers as references.
    """
    _pairs(answers, references)
    try:
        scorers = importlib.import_module("rouge_score.rouge_scorer")
    except ModuleNotFoundError as error:
        return _absent(error)
    if not answers:
        return Quality(None, "not computed: there is no answer")
    scorer = scorers.RougeScorer(["rougeL"], tokenizer=BilingualTokenizer())
    scores = [
        scorer.score(reference, answer)["rougeL"].fmeasure
        for answer, reference in zip(answers, references, strict=True)
    ]
    return Quality(math.fsum(scores) / len(scores))


def bert_score(
    answers: Sequence[str], references: Sequence[str], model: str | Path | None, device: str = "cpu"
) -> Quality:
    """Mean BERTScore F1 over the pairs, by bert-score, with the encoder in the folder `model`; nothing is fetched.

    The layer is the one that bert-score recommends for a model of the folder's name, else the last. The scores are not
    rescaled with a baseline.

    Raises:
        VlmoptError: not as many answers as references.
    """
    _pairs(answers, references)
    if model is None:
        return Quality(None, "not computed: no model folder was given")
    try:
        package = importlib.import_module("bert_score")
    except ModuleNotFoundError as error:
        return _absent(error)
    if not answers:
        return Quality(None, "not computed: there is no answer")
    folder = Path(model)
    if not (folder / "config.json").is_file():  # a name that is no folder would be looked up on the hub
        return Quality(None, f"not computed: {folder} is not the folder of a model")
    try:
        layers = _layers(package, folder)
        scorer = package.BERTScorer(model_type=str(folder), num_layers=layers, device=device)
        _, _, f1 = scorer.score(list(answers), list(references))
        return Quality(float(f1.mean()))
    except Exception as error:  # the run is over and its other numbers stand; this one is then not known
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        return Quality(None, f"not computed: {folder} is not a model that bert-score can use here ({reason})")


def _layers(package: Any, folder: Path) -> int:
    recommended = package.utils.model2layers.get(folder.name)
    return recommended or json.loads((folder / "config.json").read_bytes())["num_hidden_layers"]


def _absent(error: ModuleNotFoundError) -> Quality:
    package = (error.name or str(error)).partition(".")[0]
    return Quality(None, f"not computed: the package {package} is not installed")


def _pairs(answers: Sequence[str], references: Sequence[str]) -> None:
    if len(answers) != len(references):
        raise VlmoptError(f"{len(answers)} answers cannot be compared with {len(references)} references")
