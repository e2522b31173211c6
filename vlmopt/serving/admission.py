"""What the scheduler decides with, free of vLLM: its settings, what a request says of itself, what was learned.

Settings come from vLLM's `--additional-config '{"vlmopt": {...}}'`. A request says things of itself in its sampling
parameters' `extra_args` (over HTTP: `vllm_xargs`), all optional:

    vlmopt_kind        text; requests of one kind are expected to have outputs of like length
    vlmopt_slo         seconds from arrival within which it should end
    vlmopt_max_tokens  output tokens that the policy takes for the most, instead of `max_tokens`: for evaluations that
                       end a request by a length which the policy must not see
    vlmopt_admission   JSON object: no work but a message to the scheduler; see `Settings.control`
"""

import dataclasses
import difflib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmopt.errors import VlmoptError
from vlmopt.serving.lengths import QUANTILE, OutputLengths
from vlmopt.serving.policy import POLICIES, Options

PLAIN = "vllm"  # the policy that changes nothing: vLLM's own admission, with our counts
SUPPORTED = ((0, 26), (0, 33))
KEPT = 0.95  # what an answer weighs in the seconds that a token takes, once another one has finished
_OPTIONS = {option.name: option for option in dataclasses.fields(Options)}


def check_version(version: str) -> None:
    """Refuse a vLLM that the scheduler was not written for.

    Raises:
        VlmoptError: `version` is outside 0.26 to 0.33.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if not match or not SUPPORTED[0] <= (int(match[1]), int(match[2])) <= SUPPORTED[1]:
        raise VlmoptError(f"vLLM {version} is not supported, 0.26 to 0.33 are; install one of those, such as 0.32.0.")


@dataclass(frozen=True)
class Settings:
    """How requests are admitted; every field but `control` can be changed in a running engine.

    `policy` is one of `policy.POLICIES` or "vllm" (vLLM's own admission). `options` are the policy's. `predict` is
    "quantile" (output lengths learned from the last `window` of each kind, at `quantile`) or "most" (every request is
    expected to use all its `max_tokens`). `slo` is the objective in seconds of requests that say none, 0 for none. With
    `control`, a request that carries `vlmopt_admission` changes the settings and is answered with the counts; leave it
    off where clients are not trusted.
    """

    policy: str = "reserve"
    options: Options = field(default_factory=Options)
    predict: str = "quantile"
    quantile: float = QUANTILE
    window: int = 256
    slo: float = 0.0
    control: bool = False

    @classmethod
    def make(cls, values: Mapping[str, Any], base: "Settings | None" = None) -> "Settings":
        """`base` (default: the defaults) with `values`, in which the policy's options stand beside the other names.

        Raises:
            VlmoptError: an unknown name (the nearest is named) or a value of the wrong type or range.
        """
        base = base or cls()
        own = [item.name for item in dataclasses.fields(cls) if item.name != "options"]
        for name in values:
            if name not in own and name not in _OPTIONS:
                nearest = difflib.get_close_matches(name, [*own, *_OPTIONS], 1, 0)[0]
                raise VlmoptError(f"unknown admission setting {name!r}; the nearest is {nearest!r}.")
        defaults = {**dataclasses.asdict(cls()), **dataclasses.asdict(Options())}
        for name, value in values.items():
            kind = type(defaults[name])
            if kind is float and type(value) is int:
                continue
            if type(value) is not kind:
                raise VlmoptError(f"the admission setting {name!r} takes {kind.__name__}, not {value!r}.")
        options = dataclasses.replace(base.options, **{k: v for k, v in values.items() if k in _OPTIONS})
        made = dataclasses.replace(base, options=options, **{k: v for k, v in values.items() if k in own})
        if made.policy not in (known := [PLAIN, *POLICIES]):
            nearest = difflib.get_close_matches(made.policy, known, 1, 0)[0]
            raise VlmoptError(f"unknown policy {made.policy!r}; the nearest is {nearest!r}.")
        if made.predict not in ("quantile", "most"):
            raise VlmoptError(f"the admission setting 'predict' takes 'quantile' or 'most', not {made.predict!r}.")
        if not 0 < made.quantile <= 1 or made.window < 1:
            raise VlmoptError("the admission settings take a quantile in (0, 1] and a window of at least 1 request.")
        if not 0 <= made.slo < float("inf"):
            raise VlmoptError(f"the admission setting 'slo' is in seconds, 0 or more and finite, not {made.slo}.")
        return made

    def as_dict(self) -> dict[str, Any]:
        """The settings as `make` takes them."""
        flat = dataclasses.asdict(self)
        return {**flat.pop("options"), **flat}


def parse_policy(text: str) -> dict[str, Any]:
    """Settings from a policy's name with changes, such as `reserve` or `reserve:predict=most,order=false`.

    Raises:
        VlmoptError: a change that is no `name=value`, an unknown name or a bad value.
    """
    policy, _, rest = text.partition(":")
    values: dict[str, Any] = {"policy": policy}
    for change in filter(None, rest.split(",")):
        name, equals, value = change.partition("=")
        if not equals or name in ("policy", "control"):
            raise VlmoptError(f"policy {text!r}: {change!r} is no change; write them as in 'reserve:quantile=0.8'.")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    Settings.make(values)
    return values


@dataclass(frozen=True)
class Said:
    """What a request says of itself: its kind, its SLO in seconds, the most output tokens to reckon with."""

    kind: str = ""
    slo: float | None = None
    max_tokens: int | None = None
    faults: int = 0  # entries of the wrong type or range: taken as not said, and counted

    @classmethod
    def read(cls, extra: Mapping[str, Any] | None) -> "Said":
        """Read the `vlmopt_` entries of `extra_args`; a malformed one must not harm other requests."""
        extra = extra or {}
        kind, slo, most = (extra.get(f"vlmopt_{name}") for name in ("kind", "slo", "max_tokens"))
        good = [
            kind is None or isinstance(kind, str),
            slo is None or (type(slo) in (int, float) and 0 < slo < float("inf")),
            most is None or (type(most) in (int, float) and 1 <= most < float("inf")),
        ]
        return cls(
            kind if good[0] and kind else "",
            float(slo) if good[1] and slo is not None else None,
            int(most) if good[2] and most is not None else None,
            good.count(False),
        )


@dataclass
class Counts:
    """Decisions since the last reading. `held` counts a request once a step in which it was held, by reason."""

    steps: int = 0
    decisions: int = 0  # steps in which the policy was asked
    started: int = 0
    resumed: int = 0  # started again after a preemption
    preempted: int = 0
    finished: int = 0
    faults: int = 0
    held: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """The counts as JSON takes them."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}


class Knowledge:
    """What finished requests have taught: output lengths by kind, and the seconds that an output token takes."""

    def __init__(self, settings: Settings):
        self.predict = settings.predict
        self.lengths = OutputLengths(quantile=settings.quantile, window=settings.window)
        self._seconds = self._tokens = 0.0  # of what finished, what is older counting less

    def finished(self, kind: str, output: int, seconds: float) -> None:
        """A request of `kind` ended by itself after `output` tokens, `seconds` after it started."""
        self.lengths.observe(kind, output)
        self._seconds = KEPT * self._seconds + seconds
        self._tokens = KEPT * self._tokens + max(1, output)

    @property
    def seconds_per_token(self) -> float:
        """Of all that finished together: short answers, of which the prompt takes the larger part, count for little.
        0 before anything finished: all deadlines can still be met."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def expected(self, kind: str, prompt: int, output: int, most: int) -> float:
        """Tokens in all when it ends: at least one more than it has, at most `most`."""
        if self.predict == "most":
            return float(max(most, prompt + output + 1))
        return max(prompt + output + 1.0, min(most, prompt + self.lengths.expected(kind, output)))

    def service(self, tokens: float) -> float:
        """Seconds that `tokens` more output tokens will take."""
        return self.seconds_per_token * max(0.0, tokens)
