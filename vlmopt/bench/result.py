"""From measured rows to `result.json` and to the table on the terminal; pure functions."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vlmopt.bench.entrants import OURS, STOCK
from vlmopt.bench.score import CONTEST, Baseline, score, why_no_score
from vlmopt.bench.timing import quantiles

Row = Mapping[str, Any]


def build(rows: Sequence[Row], *, names: Sequence[str], settings: Mapping[str, Any], facts: Mapping[str, Any]) -> dict:
    """The content of `result.json`.

    Args:
        rows: one per sample: `index`, `question_id`, and per entrant its `SampleResult` as a mapping with `accuracy`
            (None where nothing was scored) and `calls`.
        names: the entrants; ours is reported where it took part, stock beside it as the baseline.
        settings: what a resumed run has to share with this one.
        facts: `system_info`, `environment`, `complete`, `plan` and the like, taken over as they are.
    """
    main = OURS if OURS in names else STOCK
    result = {"system_info": facts["system_info"], **_entrant(rows, main)}
    values = result["accuracy"], result["performance"]["avg_ttft_ms"], result["performance"][THROUGHPUT]
    result |= {"score": score(*values), "score_baseline": vars(CONTEST)}
    if reason := why_no_score(*values):
        result["no_score_because"] = reason
    if len(names) == 2:
        result |= {"baseline": _entrant(rows, STOCK), **_against_stock(rows, result["accuracy"])}
    calls = sum((Counter(row[main].get("calls", {})) for row in rows), Counter())
    result |= {
        "calls": {kind: calls.pop(kind, 0) for kind in ("stages", "kernels", "stock")},
        "stock_reasons": {reason.removeprefix("reason: "): count for reason, count in calls.items()},
        "settings": dict(settings),
        **{name: value for name, value in facts.items() if name != "system_info"},
        "samples": list(rows),
    }
    return result


TTFT, THROUGHPUT, WITH_PREPROCESSING = "avg_ttft_ms", "avg_throughput_tokens_per_sec", "ttft_with_preprocessing_ms"


def _entrant(rows: Sequence[Row], name: str) -> dict:
    scored = [row[name]["accuracy"] for row in rows if row[name]["accuracy"] is not None]
    return {
        "performance": _performance([row[name] for row in rows]),
        "accuracy": _mean(scored),
        "answers": [{"question_id": row["question_id"], "prediction": row[name]["prediction"]} for row in rows],
    }


def _performance(results: Sequence[Row]) -> dict:
    """Means as the contest reports them, over the samples that did not fail, and the spread of each metric."""
    good = [result for result in results if result["error"] is None]
    metrics = {
        "ttft_ms": [result["ttft_ms"] for result in good],
        "preprocess_ms": [result["preprocess_ms"] for result in good],
        WITH_PREPROCESSING: [result["preprocess_ms"] + result["ttft_ms"] for result in good],
        "tokens_per_s": [result["tokens_per_s"] for result in good],
    }
    return {
        TTFT: _mean(metrics["ttft_ms"]),
        THROUGHPUT: _mean(metrics["tokens_per_s"]),
        WITH_PREPROCESSING: _mean(metrics[WITH_PREPROCESSING]),
        "preprocessing_ms": _mean(metrics["preprocess_ms"]),
        "quantiles": {name: quantiles(values) for name, values in metrics.items() if values},
        "measured_samples": len(good),
        "failed_samples": len(results) - len(good),
    }


def _against_stock(rows: Sequence[Row], accuracy: float | None) -> dict:
    """Ours against stock over the samples that both measured, so that a failure on a hard one is no gain."""
    both = [row for row in rows if row[OURS]["error"] is None and row[STOCK]["error"] is None]
    ours, stock = (_performance([row[name] for row in both]) for name in (OURS, STOCK))
    baseline = Baseline(stock[TTFT], stock[THROUGHPUT])
    return {
        "score_vs_stock": score(accuracy, ours[TTFT], ours[THROUGHPUT], baseline),
        "same_predictions": sum(row[OURS]["prediction"] == row[STOCK]["prediction"] for row in both),
        "compared_samples": len(both),
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def table(result: Mapping[str, Any]) -> str:
    """A short plain-text summary of a result."""
    columns = {"stock": result["baseline"], "ours": result} if "baseline" in result else {result["mode"]: result}
    rows = [
        ("", *columns),
        ("time to first token, ms", *(_show(c["performance"][TTFT], 2) for c in columns.values())),
        ("  with preprocessing, ms", *(_show(c["performance"][WITH_PREPROCESSING], 2) for c in columns.values())),
        ("tokens/s, prefill included", *(_show(c["performance"][THROUGHPUT], 2) for c in columns.values())),
        ("accuracy", *(_show(c["accuracy"], 4) for c in columns.values())),
        ("failed samples", *(str(c["performance"]["failed_samples"]) for c in columns.values())),
    ]
    width = max(len(row[0]) for row in rows)
    lines = [f"{label:<{width}}" + "".join(f"{value:>14}" for value in values) for label, *values in rows]
    return "\n".join([*lines, *_notes(result)])


def _notes(result: Mapping[str, Any]) -> list[str]:
    reason = f" ({result['no_score_because']})" if "no_score_because" in result else ""
    contest = f"contest baseline, {CONTEST.ttft_ms:g} ms and {CONTEST.tokens_per_s:g} tokens/s"
    notes = [f"score against the {contest}: {_show(result['score'], 4)}{reason}"]
    if "score_vs_stock" in result:
        same, both = result["same_predictions"], result["compared_samples"]
        notes.append(f"score against stock, measured in this run: {_show(result['score_vs_stock'], 4)}")
        if result["answers_given"]:
            notes.append(f"same answer as stock: {same} of {both}")
    if result["plan"]:
        calls = result["calls"]
        notes.append(
            f"calls served by the stages: {calls['stages']}, of these with kernels: {calls['kernels']}; "
            f"handed to stock: {calls['stock']}"
        )
    return notes + [f"  to stock: {reason} ({count})" for reason, count in result["stock_reasons"].items()]


def _show(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"
