"""The record of one notebook run: what was asked, predicted, checked and measured, where and with which code.

A record is the only source of numbers for figures, report and README. It lives in `figures/<device>/NN_slug.json`
(profile `full`) or in a scratch folder (profile `smoke`), and `validate` is run on every write and every read.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vlmopt.bench.timing import quantiles
from vlmopt.errors import VlmoptError
from vlmopt.files import write_atomic
from vlmopt.workbook.schema import KEYS, MAX_SAMPLES, PROFILES, QUANTILES, SCHEMA, key, validate

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "figures"
SCRATCH = ROOT / "results" / "smoke"

_NUMBERS = re.compile(r"\[\n *((?:[-+.\dnule]+,\n *)*[-+.\dnule]+)\n *\]")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_PER_SECOND = {"GB/s": 1e9, "TB/s": 1e12, "GFLOP/s": 1e9, "TFLOP/s": 1e12}
_HIGHER_IS_BETTER = ("tokens_per_s", "accuracy", "score", "speedup", "bandwidth", "rate", "share")


@dataclass(frozen=True)
class Roof:
    """What the machine reached in the same run: bytes/s and FLOP/s; a zero or infinite rate does not bind."""

    bytes_per_s: float
    flops_per_s: float = math.inf

    def floor_s(self, bytes: float | None = None, flops: float | None = None) -> float:
        """The least time in seconds for moving `bytes` and computing `flops`, whichever takes longer."""
        moving = bytes / self.bytes_per_s if bytes and self.bytes_per_s else 0.0
        computing = flops / self.flops_per_s if flops and self.flops_per_s else 0.0
        return max(moving, computing)


def measurement(
    case: str,
    provider: str,
    metric: str,
    unit: str,
    samples: Iterable[float],
    bytes: float | None = None,
    flops: float | None = None,
    ceiling: Roof | None = None,
) -> dict[str, Any]:
    """One row of `measurements`: quantiles of `samples` and, where a ceiling is given, the share of the roofline.

    Args:
        case: model and shape, such as `random-2b 768x1024`.
        provider: whose implementation (`stock`, a preset, `cublas`, ...).
        metric: such as `decode_ms_per_token`.
        unit: of the samples; the share is computed for times (s, ms, us) and rates (GB/s, TFLOP/s).
        bytes: moved by one sample's work; with `flops` (of the same work) and `ceiling` this gives the floor.
    """
    values = [float(value) for value in samples]
    if not values:
        raise VlmoptError(f"measurement {case}/{provider}/{metric} has no samples; measure at least once")
    points = {key: _rounded(value) for key, value in quantiles(values).items() if key in QUANTILES}
    return {
        "case": case,
        "provider": provider,
        "metric": metric,
        "unit": unit,
        **points,
        "n": len(values),
        "bytes": bytes,
        "flops": flops,
        "roofline_share": _share(points["p50"], unit, bytes, flops, ceiling),
        "samples": [_rounded(value) for value in thin(values)],
    }


def thin(values: Sequence[float], limit: int = MAX_SAMPLES) -> list[float]:
    """At most `limit` of `values`, evenly spaced by rank (both extremes kept), in the order measured."""
    if len(values) <= limit:
        return list(values)
    order = sorted(range(len(values)), key=values.__getitem__)
    kept = {order[round(i * (len(values) - 1) / (limit - 1))] for i in range(limit)}
    return [value for i, value in enumerate(values) if i in kept]


def _text(data: dict[str, Any]) -> str:
    """JSON, an entry of a list a line."""
    dump = partial(json.dumps, ensure_ascii=False, allow_nan=False)
    parts = []
    for name, value in data.items():
        if isinstance(value, list):
            text = "[" + ",".join(f"\n {dump(entry)}" for entry in value) + ("\n]" if value else "]")
        else:
            text = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", dump(value, indent=1))
        parts.append(f" {dump(name)}: " + text.replace("\n", "\n "))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _rounded(value: float) -> float:
    """Seven significant digits: below any clock's resolution here, and half the size of a float's full form."""
    return float(f"{value:.7g}")


def _share(p50: float, unit: str, bytes: float | None, flops: float | None, ceiling: Roof | None) -> float | None:
    if ceiling is None or not p50:
        return None
    if unit in _SECONDS:
        floor = ceiling.floor_s(bytes, flops)
        return floor / (p50 * _SECONDS[unit]) if floor else None
    if unit in _PER_SECOND:
        limit = ceiling.flops_per_s if "FLOP" in unit else ceiling.bytes_per_s
        return p50 * _PER_SECOND[unit] / limit if limit and math.isfinite(limit) else None
    return None


@dataclass
class Record:
    """A record under construction or loaded; `validate` says whether it is fit to be published."""

    slug: str
    question: str
    profile: str
    weights: str
    environment: dict[str, Any]
    answer: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    predictions: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    measurements: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    lost: list[dict[str, Any]] = field(default_factory=list)
    verdict: str = ""
    schema: int = SCHEMA

    def predict(self, what: str, predicted: float, unit: str) -> None:
        """Writes down a prediction; `settle` it once measured."""
        self.predictions.append({"what": what, "predicted": float(predicted), "measured": None, "unit": unit})

    def settle(self, what: str, measured: float) -> None:
        """Puts the measured value beside the prediction `what`."""
        for entry in self.predictions:
            if entry["what"] == what:
                entry["measured"] = float(measured)
                return
        raise VlmoptError(f"nothing was predicted for {what!r}; call predict before measuring")

    def check(self, name: str, cls: str, measured: float, bound: float) -> None:
        """Records that `measured` is at most `bound`.

        Raises:
            VlmoptError: it is not.
        """
        passed = bool(measured <= bound)
        entry = {"name": name, "class": cls, "measured": float(measured), "bound": float(bound), "passed": passed}
        self.checks = [*(c for c in self.checks if c["name"] != name), entry]
        if not passed:
            raise VlmoptError(f"check {name!r} failed: {measured:.6g} is above its bound {bound:.6g}")

    def measure(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Adds `measurement(...)`, replacing one of the same case, provider and metric.

        Raises:
            VlmoptError: no check has passed yet, or one failed.
        """
        if not self.checks or not all(entry["passed"] for entry in self.checks):
            raise VlmoptError("refusing to measure before every check has passed; run the check cell first")
        row = measurement(*args, **kwargs)
        self.measurements = [*(m for m in self.measurements if key(m) != key(row)), row]
        return row

    def skip(self, what: str, reason: str) -> None:
        """Says what was not run, and why."""
        self.skipped.append({"what": what, "reason": reason})

    def lose(self, what: str, lesson: str) -> None:
        """Keeps a draft that did not win, with its one line of lesson."""
        self.lost.append({"what": what, "lesson": lesson})

    def find(self, metric: str, provider: str | None = None, case: str | None = None) -> list[dict[str, Any]]:
        """Measurements of `metric`, optionally of one provider and one case, in the order measured."""
        return [
            m
            for m in self.measurements
            if m["metric"] == metric and provider in (None, m["provider"]) and case in (None, m["case"])
        ]

    def class_of(self, provider: str) -> str | None:
        """The provider's class where the config tells it."""
        return self.config.get("providers", {}).get(provider, {}).get("class")

    def label(self, provider: str) -> str:
        """The provider with its class in brackets where that is known; `stock` and `exact` say it by themselves."""
        cls = self.class_of(provider)
        return f"{provider} ({cls})" if cls and provider not in ("stock", cls) else provider

    def value(self, metric: str, provider: str, case: str | None = None) -> float:
        """The p50 of one measurement.

        Raises:
            VlmoptError: it was not measured.
        """
        rows = self.find(metric, provider, case)
        if not rows:
            raise VlmoptError(f"{self.slug} holds no {metric} of {provider}" + (f" for {case}" if case else ""))
        return rows[0]["p50"]

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON holds it, `schema` first."""
        data = asdict(self)
        return {name: data[name] for name in KEYS}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Record":
        """A validated record from parsed JSON."""
        validate(data)
        return cls(**data)

    def save(self, output_dir: str | Path = "") -> "Saved":
        """Validates and writes the record where its profile says (see `folder`).

        Returns:
            the path, and what moved against the record that was there.
        """
        data = self.to_dict()
        validate(data)
        path = folder(self.profile, self.environment["device"], output_dir) / f"{self.slug}.json"
        moves = compare(self, load(path)) if path.exists() else []
        write_atomic(path, _text(data))
        return Saved(path, moves)


@dataclass(frozen=True)
class Move:
    """A measurement whose p50 left the spread of the other record; `new` or `old` is None where only one has it."""

    case: str
    provider: str
    metric: str
    unit: str
    old: float | None
    new: float | None
    better: bool | None

    def __str__(self) -> str:
        name = f"{self.case} · {self.provider} · {self.metric}"
        if self.old is None or self.new is None:
            return f"{name}: {'appeared' if self.old is None else 'vanished'}"
        word = "better" if self.better else "worse"
        return f"{name}: {self.old:.4g} → {self.new:.4g} {self.unit} ({word})"


@dataclass(frozen=True)
class Saved:
    """Where a record was written, and what moved against the one before."""

    path: Path
    moves: list[Move]


def folder(profile: str, device: str, output_dir: str | Path = "") -> Path:
    """Where records of `profile` from `device` go: `figures/`, the scratch folder, or `output_dir`; then the device.

    Raises:
        VlmoptError: an unknown profile, or `full` on the CPU without `output_dir`.
    """
    if profile not in PROFILES:
        raise VlmoptError(f"unknown profile {profile!r}; choose one of {', '.join(PROFILES)}")
    if output_dir:
        return Path(output_dir) / device
    if profile == "smoke":
        return SCRATCH / device
    if device == "cpu":
        raise VlmoptError("the full profile needs a GPU; run the smoke profile, or name an output folder")
    return FIGURES / device


def load(path: str | Path) -> Record:
    """The validated record in `path`.

    Raises:
        VlmoptError: it cannot be read, is no JSON, or breaks a rule of the schema.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise VlmoptError(f"cannot read the record {path} ({error}); run its notebook again") from error
    try:
        return Record.from_dict(data)
    except VlmoptError as error:
        raise VlmoptError(f"{path}: {error}") from error


def load_all(root: str | Path) -> list[Record]:
    """Every record in `root/<device>/NN_slug.json`, by device, then by number."""
    paths = sorted(Path(root).glob("*/[0-9][0-9]_*.json"))
    return [load(path) for path in paths]


def compare(new: Record, old: Record) -> list[Move]:
    """What moved from `old` to `new` by more than the larger of the two spreads (p80 - p20, at least 0.5 % of old)."""
    before, after = ({key(m): m for m in record.measurements} for record in (old, new))
    moves = []
    for name in dict.fromkeys([*before, *after]):
        a, b = before.get(name), after.get(name)
        unit = (a or b)["unit"]
        if a is None or b is None:
            moves.append(Move(*name, unit, a and a["p50"], b and b["p50"], None))
            continue
        spread = max(a["p80"] - a["p20"], b["p80"] - b["p20"], 0.005 * abs(a["p50"]))
        if abs(b["p50"] - a["p50"]) > spread:
            moves.append(Move(*name, unit, a["p50"], b["p50"], (b["p50"] > a["p50"]) == higher_is_better(a)))
    return moves


def higher_is_better(row: dict[str, Any]) -> bool:
    """Whether a larger value of this measurement is the better one."""
    return row["unit"] in _PER_SECOND or any(word in row["metric"] for word in _HIGHER_IS_BETTER)
