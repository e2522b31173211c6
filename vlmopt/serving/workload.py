"""Load: when requests arrive, what they ask, how long each answer is, and when it is due; one trace for every policy.

Everything is drawn from a seed, each thing from a stream of its own: another arrival rate leaves the prompts and output
lengths as they are. The output length is hidden: it ends a request, and no policy is told it.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from vlmopt.errors import VlmoptError
from vlmopt.files import write_atomic
from vlmopt.serving.prompts import Prompt

SCHEMA = 1
ABSOLUTE_SLO = 30.0  # seconds, the seed system's


class Arrival(NamedTuple):
    """`seconds` after the start of the run or, in a closed loop, after the end of the request numbered `after`."""

    seconds: float
    after: int | None = None


def poisson(rate: float, seed: int) -> Iterator[Arrival]:
    """Open loop: arrivals without end, independent of each other, `rate` requests per second on average."""
    return bursts(rate, 1, seed)


def bursts(rate: float, size: int, seed: int) -> Iterator[Arrival]:
    """Open loop: `size` requests at one instant, such instants at random so that `rate` requests per second result."""
    _positive(rate=rate, size=size)
    return _bursts(rate, size, seed)


def _bursts(rate: float, size: int, seed: int) -> Iterator[Arrival]:
    generator = _stream(seed, "arrivals")
    now = 0.0
    while True:
        now += generator.expovariate(rate / size)
        yield from (Arrival(now) for _ in range(size))


def closed_loop(users: int, think: float, seed: int) -> Iterator[Arrival]:
    """Closed loop: each of `users` thinks (`think` seconds on average, exponential), asks, waits for the end, thinks.

    Request i comes from user i modulo `users`, so it follows request i - `users`; the thinking times belong to the
    requests and are therefore the same whatever the server does.
    """
    _positive(users=users, think=think)
    return _closed_loop(users, think, seed)


def _closed_loop(users: int, think: float, seed: int) -> Iterator[Arrival]:
    generator = _stream(seed, "arrivals")
    number = 0
    while True:
        yield Arrival(generator.expovariate(1 / think), number - users if number >= users else None)
        number += 1


@dataclass(frozen=True)
class LogNormal:
    """Lengths in tokens: a log-normal with this median and this standard deviation of the logarithm, cut to a range."""

    median: float
    sigma: float
    shortest: int = 1
    longest: int = 2048

    def draw(self, generator: random.Random) -> int:
        """One length, a whole number from `shortest` to `longest`."""
        return min(max(round(generator.lognormvariate(math.log(self.median), self.sigma)), self.shortest), self.longest)


# Tokens per kind of request: answers to short questions are short, explanations long and widely spread, summaries short
# and alike behind a long prompt. The shape is what matters to a policy: a class predicts a length, roughly.
OUTPUT_TOKENS: dict[str, LogNormal] = {
    "question": LogNormal(64, 0.6),
    "explain": LogNormal(320, 0.7),
    "summary": LogNormal(96, 0.4),
    "chat": LogNormal(192, 0.8),
}
PROMPT_TOKENS: dict[str, LogNormal] = {
    "question": LogNormal(40, 0.4),
    "explain": LogNormal(64, 0.5),
    "summary": LogNormal(700, 0.6, longest=4096),
    "chat": LogNormal(96, 0.6),
}


@dataclass(frozen=True)
class Request:
    """One request of a trace.

    Attributes:
        arrival: seconds after the start of the run or, if `after` names a request, after that one's end.
        prompt: its text; None where only the length counts.
        image: path of an image to send along; None without.
        prompt_tokens: its length; None where the text is to be tokenised.
        output_tokens: the hidden length of its answer.
        slo: seconds from arrival to end within which it should be done; None without such an objective.
    """

    id: str
    arrival: float
    kind: str
    output_tokens: int
    prompt: str | None = None
    prompt_tokens: int | None = None
    slo: float | None = None
    after: str | None = None
    reference: str | None = None
    image: str | None = None

    def arrives(self, ended: float = 0.0) -> float:
        """Its arrival in seconds after the start of the run; `ended`: when the request `after` ended, likewise."""
        return ended + self.arrival

    def deadline(self, ended: float = 0.0) -> float | None:
        """When it should be done, in seconds after the start of the run; `ended` as for `arrives`."""
        return None if self.slo is None else self.arrives(ended) + self.slo


@dataclass(frozen=True)
class Trace:
    """The requests of one run, and what made them (`made`: JSON values, kept for the record)."""

    requests: tuple[Request, ...]
    made: Mapping[str, Any]

    def with_slo(self, slo: Mapping[str, float]) -> "Trace":
        """The same trace with these objectives, in seconds per kind; arrivals, prompts and lengths stay.

        Raises:
            VlmoptError: a kind of the trace has no objective.
        """
        if missing := sorted({request.kind for request in self.requests} - slo.keys()):
            raise VlmoptError(f"no latency objective for requests of the kind {' and '.join(missing)}")
        requests = tuple(replace(request, slo=slo[request.kind]) for request in self.requests)
        return Trace(requests, {**self.made, "slo": dict(slo)})

    def save(self, path: str | Path) -> Path:
        """Write it as JSON; a kill in the middle leaves the previous file whole."""
        rows = [
            {name: value for name, value in asdict(request).items() if value is not None} for request in self.requests
        ]
        content = {"schema": SCHEMA, "made": dict(self.made), "requests": rows}
        return write_atomic(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read what `save` wrote.

        Raises:
            VlmoptError: no such file, another format, a value out of range, or an id that is doubled or not there.
        """
        try:
            content = json.loads(Path(path).read_bytes())
            if content["schema"] != SCHEMA:
                raise VlmoptError(f"trace {path} has schema {content['schema']}, not {SCHEMA}; make it again")
            trace = cls(tuple(Request(**row) for row in content["requests"]), content["made"])
        except OSError as error:
            raise VlmoptError(f"cannot read the trace {path} ({error.strerror}); pass another path") from error
        except (ValueError, KeyError, TypeError) as error:
            raise VlmoptError(f"{path} is not a trace of requests ({error}); make it again") from error
        if fault := next((fault for fault in map(_fault, trace.requests) if fault), None) or _order_fault(trace):
            raise VlmoptError(f"trace {path} is damaged: {fault}; make it again")
        return trace


def trace_of_prompts(
    prompts: Sequence[Prompt],
    arrivals: Iterator[Arrival],
    count: int,
    *,
    seed: int,
    outputs: Mapping[str, LogNormal] = OUTPUT_TOKENS,
    made: Mapping[str, Any] | None = None,
) -> Trace:
    """`count` requests that send `prompts` in random order, each once before any comes again.

    Raises:
        VlmoptError: no prompts, fewer than one request, or a kind for which `outputs` knows no length.
    """
    _positive(prompts=len(prompts), count=count)
    _known({prompt.kind for prompt in prompts}, outputs)
    order = _rounds(prompts, _stream(seed, "prompts"))
    asked = [
        {"kind": prompt.kind, "prompt": prompt.text, "reference": prompt.reference, "image": prompt.image}
        for prompt in islice(order, count)
    ]
    return _trace(asked, arrivals, seed, outputs, made)


def trace_of_lengths(
    shares: Mapping[str, float],
    arrivals: Iterator[Arrival],
    count: int,
    *,
    seed: int,
    prompts: Mapping[str, LogNormal] = PROMPT_TOKENS,
    outputs: Mapping[str, LogNormal] = OUTPUT_TOKENS,
    made: Mapping[str, Any] | None = None,
) -> Trace:
    """`count` requests of which only the lengths are known: for dummy weights and for the simulator.

    Args:
        shares: weight of each kind in the mix; weights need not add up to 1.

    Raises:
        VlmoptError: fewer than one request, no weight above 0, or a kind for which a length is not known.
    """
    if any(not share >= 0 for share in shares.values()):
        raise VlmoptError("the share of a kind of request must not be below 0")
    _positive(count=count, shares=sum(shares.values()))
    _known(shares.keys(), outputs)
    _known(shares.keys(), prompts)
    kinds, lengths = _stream(seed, "kinds"), _stream(seed, "prompts")
    drawn = kinds.choices(list(shares), weights=list(shares.values()), k=count)
    asked = [{"kind": kind, "prompt_tokens": prompts[kind].draw(lengths)} for kind in drawn]
    return _trace(asked, arrivals, seed, outputs, made)


def relative_slo(unloaded: Mapping[str, float], factor: float = 3.0) -> dict[str, float]:
    """Objective per kind in seconds: `factor` times the latency that a request of the kind has on an idle server."""
    _positive(factor=factor, **unloaded)
    return {kind: factor * latency for kind, latency in unloaded.items()}


def absolute_slo(kinds: Sequence[str], seconds: float = ABSOLUTE_SLO) -> dict[str, float]:
    """One objective in seconds for all kinds."""
    _positive(seconds=seconds)
    return dict.fromkeys(kinds, seconds)


def _trace(
    asked: Sequence[Mapping[str, Any]],
    arrivals: Iterator[Arrival],
    seed: int,
    outputs: Mapping[str, LogNormal],
    made: Mapping[str, Any] | None,
) -> Trace:
    generator = _stream(seed, "outputs")
    requests = tuple(
        Request(
            id=_name(number),
            arrival=arrival.seconds,
            after=None if arrival.after is None else _name(arrival.after),
            output_tokens=outputs[ask["kind"]].draw(generator),
            **ask,
        )
        for number, (ask, arrival) in enumerate(zip(asked, arrivals, strict=False))
    )
    if len(requests) < len(asked):
        raise VlmoptError(f"the arrivals end after {len(requests)} of {len(asked)} requests")
    return Trace(requests, {"seed": seed, "count": len(asked), **(made or {})})


def _name(number: int) -> str:
    return f"r{number:06d}"


def _stream(seed: int, purpose: str) -> random.Random:
    return random.Random(f"{purpose} {seed}")


def _rounds(prompts: Sequence[Prompt], generator: random.Random) -> Iterator[Prompt]:
    while True:
        yield from generator.sample(prompts, len(prompts))


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise VlmoptError(f"{name} must be above 0 and finite, not {value}")


def _known(kinds: Any, lengths: Mapping[str, LogNormal]) -> None:
    if unknown := sorted(set(kinds) - lengths.keys()):
        raise VlmoptError(f"no length is known for requests of the kind {' and '.join(unknown)}")


def _fault(request: Request) -> str | None:
    """What is wrong with a request that came from a file."""
    texts = {"id": str, "kind": str, **dict.fromkeys(("prompt", "after", "reference", "image"), str | None)}
    numbers = {"arrival": float | int, "output_tokens": int, "prompt_tokens": int | None, "slo": float | int | None}
    types = {**texts, **numbers}
    for field in fields(request):
        value = getattr(request, field.name)
        if not isinstance(value, types[field.name]) or isinstance(value, bool):
            return f"{field.name} of request {request.id} is {value!r}"
    if not 0 <= request.arrival < math.inf:
        return f"request {request.id} arrives at {request.arrival}"
    if any(
        value is not None and not value > 0 for value in (request.output_tokens, request.prompt_tokens, request.slo)
    ):
        return f"a length or objective of request {request.id} is not above 0"
    if request.prompt is None and request.prompt_tokens is None:
        return f"request {request.id} has neither a prompt nor its length"
    return None


def _order_fault(trace: Trace) -> str | None:
    """Ids are unique, and a request follows only one that stands before it."""
    seen: set[str] = set()
    for request in trace.requests:
        if request.id in seen:
            return f"the id {request.id} stands twice"
        if request.after is not None and request.after not in seen:
            return f"request {request.id} follows {request.after}, which does not stand before it"
        seen.add(request.id)
    return None
