"""The result file of one run: what was asked, what became of each request, and the numbers that follow."""

import glob
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmopt.config import settings
from vlmopt.files import write_atomic
from vlmopt.serving import metrics
from vlmopt.serving.drive import Fate
from vlmopt.serving.workload import ABSOLUTE_SLO, absolute_slo

SCHEMA = 1
FACTORS = (1.5, 2.0, 3.0, 5.0, 7.0, 10.0)  # of the unloaded latency, for the sweep of objectives


class Record:
    """The content of `eval_<model>_<mode>_<timestamp>.json`, and where it lies.

    `outcome` is `running` until the end (a file that still says so belongs to a run that was killed), then `finished`,
    `interrupted` or `failed`; `error` says why.
    """

    def __init__(self, folder: Path, model: str, mode: str, config: Mapping[str, Any], calibration: Mapping[str, Any]):
        stamp = int(time.time())
        while (path := folder / f"eval_{model}_{mode}_{stamp}.json").exists():
            stamp += 1
        self.path = path
        self.content: dict[str, Any] = {
            "schema": SCHEMA,
            "model": model,
            "mode": mode,
            "outcome": "running",
            "error": None,
            "started": stamp,
            "commit": settings().git_commit,
            "config": dict(config),
            "calibration": dict(calibration),
        }

    def write(self) -> None:
        """Put the file in place of what it was; a kill in the middle leaves that whole."""
        write_atomic(self.path, json.dumps(self.content, ensure_ascii=False, indent=1) + "\n")

    def end(self, outcome: str, error: str | None = None) -> None:
        """The last word on the run, written."""
        self.content |= {"outcome": outcome, "error": error}
        self.write()

    def note(self, fates: Sequence[Fate], series: Sequence[Mapping[str, float]], preemptions: int) -> None:
        """What is known by now; `preemptions` by vLLM's own count."""
        times = [fate.times() for fate in fates if fate.arrival is not None]
        unloaded = self.content["calibration"]["unloaded"]
        late = [fate.sent - fate.arrival for fate in fates if fate.sent is not None]
        self.content |= {
            "metrics": metrics.summarise(times) | {"preemptions": preemptions},
            "units": metrics.UNITS,
            "kinds": {
                kind: {name: value for name, value in numbers.items() if name not in ("preemptions", "peak_memory")}
                for kind, numbers in metrics.summarise_kinds(times).items()
            },
            "slo_attainment": {
                "absolute": {ABSOLUTE_SLO: metrics.slo_attainment_rate(times, absolute_slo(list(unloaded)))},
                "times_unloaded": metrics.attainment_over_factors(times, unloaded, FACTORS),
            },
            "sent_late": {"p99": metrics.percentile(late, 99), "max": max(late, default=None), "unit": "s"},
            "series": list(series),
            "requests": [_row(fate) for fate in fates],
        }


def finished(folder: Path, model: str) -> list[dict[str, Any]]:
    """The contents of the result files in `folder` of the runs of `model` that have finished, the oldest first."""
    contents = [json.loads(path.read_bytes()) for path in folder.glob(f"eval_{glob.escape(model)}_*.json")]
    runs = [content for content in contents if content["model"] == model and content["outcome"] == "finished"]
    return sorted(runs, key=lambda content: content["started"])


def quality(fates: Sequence[Fate], random_weights: bool, bert_model: Path | None) -> dict[str, Any]:
    """ROUGE-L and BERTScore of the finished answers against their references, or why they were not computed."""
    if random_weights:
        absent = {"value": None, "note": "not computed: the weights are random, so the answers mean nothing"}
        return {"rouge_l": absent, "bert_score": absent}
    pairs = [(f.text, f.request.reference) for f in fates if f.outcome == "finished" and f.request.reference]
    answers, references = [answer for answer, _ in pairs], [reference for _, reference in pairs]
    scores = {
        "rouge_l": metrics.rouge_l(answers, references),
        "bert_score": metrics.bert_score(answers, references, bert_model),
    }
    return {name: {"value": score.value, "note": score.note} for name, score in scores.items()}


def table(records: Sequence[Record]) -> str:
    """One line for each run, for people."""
    rows = [("model", "mode", "outcome", "finished", "mean s", "p99 s", "TTFT s", "tokens/s", "in SLO", "preempted")]
    for record in records:
        numbers = record.content.get("metrics", {})
        share = numbers.get("slo_attainment_rate")
        rows.append(
            (
                record.content["model"],
                record.content["mode"],
                record.content["outcome"],
                f"{numbers.get('requests_finished', 0)}/{numbers.get('requests', 0)}",
                _number(numbers.get("avg_latency")),
                _number(numbers.get("p99_latency")),
                _number(numbers.get("avg_ttft")),
                _number(numbers.get("system_throughput_tokens_per_sec")),
                "–" if share is None else f"{share:.1%}",
                str(numbers.get("preemptions", "–")),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _row(fate: Fate) -> dict[str, Any]:
    row = {
        "id": fate.request.id,
        "kind": fate.request.kind,
        "outcome": fate.outcome,
        "reason": fate.reason,
        "arrival": fate.arrival,
        "first_token": fate.first_token,
        "end": fate.end,
        "prompt_tokens": fate.prompt_tokens,
        "output_tokens": fate.tokens,
        "slo": fate.request.slo,
        "answer": fate.text,
    }
    return {name: value for name, value in row.items() if value not in (None, "")}
