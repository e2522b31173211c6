"""The rules that a record must keep (schema 1), and the small vocabulary that records share."""

import math
import re
from collections.abc import Iterable
from typing import Any

from vlmopt.bench.timing import quantiles
from vlmopt.errors import VlmoptError

SCHEMA = 1
MAX_SAMPLES = 400
PROFILES = ("smoke", "full")
CLASSES = ("exact", "near", "lossy")
QUANTILES = ("p20", "p50", "p80", "p95")
KEYS = (
    *("schema", "slug", "question", "answer", "profile", "weights", "environment", "config", "predictions"),
    *("checks", "measurements", "skipped", "lost", "verdict"),
)
REQUIRED = tuple(name for name in KEYS if name != "lost")
MEASUREMENT_KEYS = (
    *("case", "provider", "metric", "unit", "p50", "p20", "p80", "p95"),
    *("n", "bytes", "flops", "roofline_share", "samples"),
)
_ENTRY_KEYS = {
    "predictions": ("what", "predicted", "measured", "unit"),
    "checks": ("name", "class", "measured", "bound", "passed"),
    "skipped": ("what", "reason"),
    "lost": ("what", "lesson"),
}
_ENVIRONMENT_KEYS = ("device", "torch", "transformers", "commit", "dirty")
_SLUG = re.compile(r"\d\d_[a-z0-9_]+")


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    """What identifies a measurement within its record."""
    return row["case"], row["provider"], row["metric"]


def validate(data: dict[str, Any]) -> None:
    """Holds a record to the schema.

    Raises:
        VlmoptError: naming every rule that it breaks.
    """
    faults = list(_faults(data))
    if faults:
        raise VlmoptError("not a valid record: " + "; ".join(faults))


def _faults(data: Any) -> Iterable[str]:
    if not isinstance(data, dict):
        yield "it is no JSON object"
        return
    missing = [name for name in REQUIRED if name not in data]
    unknown = [name for name in data if name not in KEYS]
    if missing or unknown:
        yield from (f"{name} is missing" for name in missing)
        yield from (f"unknown key {name}" for name in unknown)
        return
    if data["schema"] != SCHEMA:
        yield f"schema {data['schema']} is not {SCHEMA}"
    if data["profile"] not in PROFILES:
        yield f"profile {data['profile']!r} is not one of {', '.join(PROFILES)}"
    if not _SLUG.fullmatch(str(data["slug"])):
        yield f"slug {data['slug']!r} is not NN_name"
    for name in ("question", "answer", "weights", "verdict"):
        if not (isinstance(data[name], str) and data[name].strip()):
            yield f"{name} is empty"
    yield from (f"environment.{name} is missing" for name in _ENVIRONMENT_KEYS if name not in data["environment"])
    yield from (f"{place} is not finite" for place in _not_finite(data, ""))
    for name, keys in _ENTRY_KEYS.items():
        yield from _entry_faults(name, data.get(name, []), keys)
    for entry in data["measurements"]:
        yield from _measurement_faults(entry)
    names = [key(entry) for entry in data["measurements"] if "metric" in entry]
    yield from (f"{'/'.join(name)} is measured twice" for name in sorted({n for n in names if names.count(n) > 1}))


def _entry_faults(name: str, entries: list[dict[str, Any]], keys: tuple[str, ...]) -> Iterable[str]:
    for entry in entries:
        if set(entry) != set(keys):
            yield f"an entry of {name} has the keys {sorted(entry)}, not {sorted(keys)}"
        elif name == "predictions" and entry["measured"] is None:
            yield f"the prediction {entry['what']!r} was never settled"
        elif name == "checks" and entry["class"] not in CLASSES:
            yield f"check {entry['name']!r} has the class {entry['class']!r}, not one of {', '.join(CLASSES)}"
        elif name == "checks" and entry["passed"] != (entry["measured"] <= entry["bound"]):
            yield f"check {entry['name']!r} says passed={entry['passed']} against its own numbers"
        elif name == "checks" and not entry["passed"]:
            yield f"check {entry['name']!r} failed"


def _measurement_faults(entry: dict[str, Any]) -> Iterable[str]:
    if set(entry) != set(MEASUREMENT_KEYS):
        yield f"a measurement has the keys {sorted(entry)}, not {sorted(MEASUREMENT_KEYS)}"
        return
    name, samples, n = "/".join(key(entry)), entry["samples"], entry["n"]
    if not samples or len(samples) != min(n, MAX_SAMPLES):
        yield f"{name} keeps {len(samples)} samples of {n}; all are kept up to {MAX_SAMPLES}, and {MAX_SAMPLES} beyond"
        return
    if not all(math.isfinite(value) for value in samples):
        return
    # A whole sample set gives its quantiles again up to the rounding of digits; one thinned by rank brackets them.
    exact = quantiles(samples)
    ordered = sorted(samples)
    for point in QUANTILES:
        around = _bracket(ordered, int(point[1:]) / 100)
        low, high = (exact[point],) * 2 if n <= MAX_SAMPLES else around
        slack = 1e-5 * max(map(abs, around))  # a quantile near zero may lie between samples that are not
        if not low - slack <= entry[point] <= high + slack:
            yield f"{name}: {point} is {entry[point]:.6g}, its samples give {exact[point]:.6g}"


def _bracket(ordered: list[float], q: float) -> tuple[float, float]:
    position = q * (len(ordered) - 1)
    return ordered[max(0, math.floor(position) - 1)], ordered[min(len(ordered) - 1, math.ceil(position) + 1)]


def _not_finite(value: Any, place: str) -> Iterable[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield place
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _not_finite(inner, f"{place}.{name}".lstrip("."))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _not_finite(inner, f"{place}[{i}]")
