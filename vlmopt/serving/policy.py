"""Which of the waiting requests may start in this step: a pure function of what an engine holds.

One call looks at one step. A request that starts takes the blocks of its prompt (and of what it had generated before
it was preempted) and of the next token; these must be free after the running have taken theirs. Policies differ in what
else they keep back, and in the order in which they look at the waiting.

`batch`     up to `Options.batch` start when nothing runs, then none until all of them have ended.
`fcfs`      in order of arrival while their blocks are free: plain vLLM, with `Options.watermark` its `--watermark`.
`priority`  as `fcfs`, the nearest deadline first.
`brakes`    none while fewer than `hard` of all blocks are free, none while fewer than `soft` are and anything decodes,
            else as `fcfs`. The level is looked at once a step, so a burst in one step passes whole.
`reserve`   while the blocks suffice in every coming step, as forecast: each that runs takes a token a step and gives
            all its blocks back at its expected end, and each that starts is counted with those that run. One
            that has time to spare leaves the share `Options.margin` of all blocks free.

Progress: with nothing running, the first in the policy's order starts if its blocks are free at all; and a request
whose next token can never fit is refused at once.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from vlmopt.errors import VlmoptError
from vlmopt.serving.forecast import Forecast

IN_BATCH = "the batch before it runs"
SEATS = "as many run as may"
BLOCKS = "its blocks are not free"
BEHIND = "behind one that waits for blocks"
HARD = "hard brake"
SOFT = "soft brake"
RESERVED = "the free blocks are reserved"
AGED = "behind one that has waited too long"
HELD = frozenset({IN_BATCH, SEATS, BLOCKS, BEHIND, HARD, SOFT, RESERVED, AGED})

# Ranks of the waiting in `reserve`, see `_rank`.
_HAS_AGED, _IS_TIGHT, _HAS_TIME, _IS_LATE = range(4)

# What these hold back may start a step later though nothing ended: it then reaches its peak after another's end.
LOOK_AHEAD = frozenset({"reserve"})
# Steps after which a policy that let nobody start is asked again though nobody came or went.
ASK_EVERY = 8


class Running(NamedTuple):
    """A request that holds blocks; lengths in tokens, times in seconds."""

    id: str
    prompt: int
    output: int  # generated so far
    computed: int  # whose keys and values are held
    expected: float  # in all when it ends, as predicted; at least prompt + output + 1
    arrival: float
    deadline: float | None


class Waiting(NamedTuple):
    """A request that holds no blocks; lengths in tokens, times in seconds."""

    id: str
    prompt: int
    output: int  # above 0 if it was preempted and must be recomputed
    expected: float  # in all when it ends, as predicted; at least prompt + output + 1
    arrival: float
    deadline: float | None
    service: float  # seconds that it will need once it has started, as predicted
    most: int  # that it can reach: prompt and the most that it may generate


@dataclass(frozen=True, slots=True)
class State:
    """What one step begins with; `now` in seconds, `block_size` in tokens, `waiting` in order of arrival."""

    now: float
    block_size: int
    free_blocks: int
    total_blocks: int
    max_running: int
    running: tuple[Running, ...]
    waiting: tuple[Waiting, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """Each of the waiting is in one of the three: `start` in this order, `refuse` and `held` (one of HELD) by id."""

    start: tuple[str, ...]
    refuse: dict[str, str]
    held: dict[str, str]


@dataclass(frozen=True)
class Options:
    """What the policies can be told.

    Raises:
        VlmoptError: a value that means nothing.
    """

    batch: int = 8  # requests in a batch of `batch`
    hard: float = 0.10  # share of free blocks
    soft: float = 0.30  # share of free blocks
    watermark: float = 0.0  # share of blocks left free by `fcfs` and `priority` when one starts beside others
    # Seconds of waiting after which `reserve` puts a request before all others. Good is twice the longest objective:
    # sooner, and overload ends in order of arrival; later, and those that missed theirs wait the longest.
    ageing: float = 60.0
    # Share of blocks that `reserve` leaves free in its forecast when it starts a request that could also start later
    # and be in time. A few percent keep some more objectives in a short overload, and some fewer in a long one.
    margin: float = 0.03
    order: bool = True  # whether `reserve` looks at deadlines; without, it goes by arrival and skips nobody

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise VlmoptError(f"batch is {self.batch}; give the number of requests in a batch, 1 or more")
        if not 0 <= self.hard <= self.soft <= 1:
            raise VlmoptError(f"hard is {self.hard} and soft is {self.soft}; they need 0 <= hard <= soft <= 1")
        if not 0 <= self.watermark < 1:
            raise VlmoptError(f"watermark is {self.watermark}; give a share of all blocks, at least 0 and below 1")
        if not self.ageing >= 0:
            raise VlmoptError(f"ageing is {self.ageing}; give seconds, 0 or more")
        if not 0 <= self.margin < 1:
            raise VlmoptError(f"margin is {self.margin}; give a share of all blocks, at least 0 and below 1")


DEFAULTS = Options()


def blocks_of(tokens: float, block_size: int) -> int:
    """Blocks of `block_size` tokens that hold `tokens`, rounded up."""
    return int(-(-tokens // block_size))


def decide(name: str, state: State, options: Options = DEFAULTS) -> Decision:
    """The decision of the policy `name` on `state`.

    Raises:
        VlmoptError: there is no such policy.
    """
    if name not in POLICIES:
        match = difflib.get_close_matches(name, list(POLICIES), n=1)
        hint = f"did you mean {match[0]!r}?" if match else f"choose one of {', '.join(POLICIES)}"
        raise VlmoptError(f"there is no policy {name!r}; {hint}")
    return POLICIES[name](state, options)


_Rule = Callable[[State, Options], tuple[list[str], dict[str, str]]]


def _refusing(rule: _Rule) -> Callable[[State, Options], Decision]:
    """The policy that refuses what can never fit and asks `rule` about the others."""

    def policy(state: State, options: Options) -> Decision:
        room = state.total_blocks * state.block_size
        refuse = {
            w.id: f"its {w.prompt + w.output} tokens and the next need {_at_start(w, state)} blocks, "
            f"and there are {state.total_blocks} in all"
            for w in state.waiting
            if w.prompt + w.output >= room
        }
        if refuse:
            state = replace(state, waiting=tuple(w for w in state.waiting if w.id not in refuse))
        start, held = rule(state, options)
        return Decision(tuple(start), refuse, held)

    return policy


def _batch(state: State, options: Options) -> tuple[list[str], dict[str, str]]:
    if state.running:
        return [], {w.id: IN_BATCH for w in state.waiting}
    return _in_order(state, options, state.waiting, min(options.batch, state.max_running))


def _fcfs(state: State, options: Options) -> tuple[list[str], dict[str, str]]:
    return _in_order(state, options, state.waiting, state.max_running - len(state.running))


def _priority(state: State, options: Options) -> tuple[list[str], dict[str, str]]:
    return _in_order(state, options, sorted(state.waiting, key=urgency), state.max_running - len(state.running))


def _brakes(state: State, options: Options) -> tuple[list[str], dict[str, str]]:
    free = state.free_blocks / state.total_blocks
    if state.running and free < options.hard:
        return [], {w.id: HARD for w in state.waiting}
    if free < options.soft and any(_decodes(r) for r in state.running):
        return [], {w.id: SOFT for w in state.waiting}
    return _fcfs(state, options)


def _reserve(state: State, options: Options) -> tuple[list[str], dict[str, str]]:
    """Admission under the forecast peak of the blocks in use.

    The forecast holds one token more of each request than it will have, for engines that schedule a step ahead. It
    knows no time that prompts take: one computed in parts ends some steps later than forecast.

    A request that does not fit is passed over for later ones that do, until it has waited `ageing` seconds: from then
    on it comes before all that arrived after it, and holds them back until it fits. So nobody waits longer than
    `ageing` and the time that those that arrived before it and those that run at that moment take.

    A request that can wait leaves `margin` free for those that will arrive with no time to spare before it has ended.
    One that is late leaves none: late ones would gather until all have waited too long, and hold back the others.
    """
    forecast = None
    seats = state.max_running - len(state.running)
    margin = int(options.margin * state.total_blocks)
    start, held, blocked = [], {}, False
    ranked = ((*_rank(w, state, options), w) for w in state.waiting)
    for rank, _, w in sorted(ranked, key=itemgetter(0, 1)):
        if len(start) >= seats:
            held[w.id] = SEATS
        elif blocked:
            held[w.id] = AGED if options.order else BEHIND
        elif _at_start(w, state) > state.free_blocks:
            held[w.id] = BLOCKS
            blocked = rank == _HAS_AGED
        else:
            forecast = forecast or _forecast(state)  # needed only if somebody could start
            to_come = _to_come(w, min(w.expected, w.most), state)
            left = margin if rank == _HAS_TIME else 0
            if forecast.fits(*to_come, left) or not (state.running or start):
                start.append(w.id)
                forecast.add(*to_come)
            else:
                held[w.id] = RESERVED
                blocked = rank == _HAS_AGED
    return start, held


POLICIES: Mapping[str, Callable[[State, Options], Decision]] = MappingProxyType(
    {
        "batch": _refusing(_batch),
        "fcfs": _refusing(_fcfs),
        "priority": _refusing(_priority),
        "brakes": _refusing(_brakes),
        "reserve": _refusing(_reserve),
    }
)


def urgency(request: Running | Waiting) -> tuple[float, float]:
    """The order of `priority`: the nearest deadline first, those without one last, by arrival where equal."""
    return (math.inf if request.deadline is None else request.deadline), request.arrival


def _in_order(
    state: State, options: Options, waiting: Iterable[Waiting], seats: int
) -> tuple[list[str], dict[str, str]]:
    """The first `seats` of the waiting, up to the first whose blocks are not free above the watermark."""
    left = state.free_blocks - sum(_next_taken(r, state) for r in state.running)
    above = int(options.watermark * state.total_blocks)
    start, held, blocked = [], {}, False
    for w in waiting:
        need = _at_start(w, state)
        if len(start) >= seats:
            held[w.id] = SEATS
        elif blocked:
            held[w.id] = BEHIND
        elif need + above * bool(state.running or start) <= left:
            start.append(w.id)
            left -= need
        else:
            held[w.id] = BLOCKS
            blocked = True
    return start, held


def _rank(w: Waiting, state: State, options: Options) -> tuple[int, float]:
    """The order in which `reserve` looks at the waiting: first those that have waited too long (without `order`, all),
    by arrival; then those that can still meet their deadline, the least slack first, those with less slack than they
    will run before those that have time; then those that cannot meet it or have none, by arrival."""
    if not options.order or state.now - w.arrival > options.ageing:
        return _HAS_AGED, w.arrival
    slack = -1.0 if w.deadline is None else w.deadline - w.service - state.now
    if slack < 0:
        return _IS_LATE, w.arrival
    return _IS_TIGHT if slack < w.service else _HAS_TIME, slack


def _forecast(state: State) -> Forecast:
    blocks = state.free_blocks + sum(blocks_of(r.computed, state.block_size) for r in state.running)
    return Forecast(blocks, state.block_size, (_to_come(r, r.expected, state) for r in state.running))


def _decodes(r: Running) -> bool:
    """Whether all but its newest token is computed, so that a step gives it one more."""
    return r.output > 0 and r.computed >= r.prompt + r.output - 1


def _at_start(w: Waiting, state: State) -> int:
    return blocks_of(w.prompt + w.output + 1, state.block_size)


def _to_come(r: Running | Waiting, expected: float, state: State) -> tuple[int, int]:
    """Tokens that it holds in the next step, and steps until its expected end, cut to what all blocks hold."""
    now = r.prompt + r.output
    end = min(math.ceil(expected), state.total_blocks * state.block_size)
    return now + 1, max(1, end - now)


def _next_taken(r: Running, state: State) -> int:
    """Blocks that it takes for the tokens that it has and does not hold yet."""
    held = blocks_of(r.computed, state.block_size)
    return max(0, blocks_of(r.prompt + r.output, state.block_size) - held)
