"""One engine of the simulator: continuous batching in steps, blocks, and preemption by recompute.

A step computes the prompts of the requests that start in it, whole, and one token of each that runs, and takes

    base + prefill * prompt tokens + running * requests + kv * tokens held at its end        (seconds)

Before a step the running take the blocks of their next token. Where these are not there, the last that started gives
all of its own back, waits in its place by arrival and is recomputed later; nothing starts in such a step. Otherwise the
policy is asked, as vLLM's scheduler does. A policy never sees how long an answer will be, only what is predicted from
those that have ended on the same engine, and it is handed the first WINDOW of the waiting by arrival.

Steps between which nothing can change are taken in one: while no request arrives, ends or is preempted, free blocks
only fall, so what a policy holds back it goes on holding back; one of LOOK_AHEAD is asked again all the same.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol

from vlmopt.errors import VlmoptError
from vlmopt.serving.policy import LOOK_AHEAD, Options, Running, State, Waiting, decide, urgency

WINDOW = 256  # waiting requests that a policy is handed
MOST_STEPS = 1 << 20  # taken in one, where nothing changes for that long


class Request(NamedTuple):
    """Times in seconds from the beginning, lengths in tokens; `output` is hidden from policies and router."""

    arrival: float
    prompt: int
    output: int
    kind: str
    deadline: float | None = None


class Lengths(Protocol):
    """What predicts the lengths of answers, in tokens; OutputLengths is one."""

    def observe(self, kind: str, tokens: int) -> None: ...

    def expected(self, kind: str, output_so_far: int = 0) -> float: ...


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: `base`, and for each prompt token, each running request and each token held.

    Raises:
        VlmoptError: a step would take no time, or less.
    """

    base: float
    prefill: float
    running: float
    kv: float

    def __post_init__(self) -> None:
        if not (self.base > 0 and self.prefill >= 0 and self.running >= 0 and self.kv >= 0):
            raise VlmoptError(f"{self}: a step needs base > 0 and the other coefficients >= 0 seconds")


@dataclass(frozen=True)
class Engine:
    """One engine.

    Raises:
        VlmoptError: a value that means nothing.
    """

    step: StepTime
    blocks: int
    block_size: int = 16  # tokens
    max_running: int = 256
    budget: int = 8192  # prompt tokens in one step; a longer prompt has a step to itself
    max_tokens: int = 2048  # that each request asks for at most
    ask_every: int = 1  # steps between two looks of a policy that looks ahead; our scheduler's: ASK_EVERY

    def __post_init__(self) -> None:
        if min(self.blocks, self.block_size, self.max_running, self.budget, self.max_tokens) < 1:
            raise VlmoptError(f"{self}: blocks, block_size, max_running, budget and max_tokens need to be 1 or more")


_place = attrgetter("place")


class Job:
    """A request on its way. While it runs, it holds `base` + steps of its replica tokens."""

    __slots__ = ("base", "cost", "end", "ends", "first", "id", "most", "output", "place", "preemptions")
    __slots__ += ("refused", "replica", "request", "start")

    def __init__(self, index: int, request: Request, engine: Engine):
        if not (math.isfinite(request.arrival) and request.prompt >= 1 and 1 <= request.output <= engine.max_tokens):
            raise VlmoptError(
                f"request {index} is {request}: it needs a finite arrival, a prompt of 1 token or more, "
                f"and an output of 1 to max_tokens = {engine.max_tokens}"
            )
        self.id, self.request = str(index), request
        self.most = request.prompt + engine.max_tokens
        self.place = self.replica = self.output = self.base = self.ends = self.preemptions = 0
        self.cost = 0.0
        self.start: float | None = None
        self.first: float | None = None
        self.end: float | None = None
        self.refused: str | None = None

    def length(self) -> int:
        """Prompt and what had been generated when it last began to wait."""
        return self.request.prompt + self.output


class Replica:
    """One engine at a boundary between two steps: at `clock` seconds, after `steps` steps. The next `planned` steps end
    at `due` (None: nothing to do)."""

    def __init__(self, engine: Engine, policy: str, options: Options, lengths: Lengths):
        self.engine, self.policy, self.options, self.lengths = engine, policy, options, lengths
        self.clock, self.steps, self.planned, self.due = 0.0, 0, 0, None
        self.running: list[Job] = []  # in the order of their starts
        self.window: list[Job] = []  # the first of the waiting, by arrival
        self.tail: deque[Job] = deque()  # the others
        self.peak = 0
        self.preempted_at: list[float] = []
        self._first_step = self._step = self._growth = 0.0

    def receive(self, job: Job) -> None:
        """`job` arrives: the step that runs now is the last before it is looked at."""
        self._push(job)
        now = job.request.arrival
        if self.due is None:
            self.clock = self.due = max(self.clock, now)
        elif self.planned > 1:
            self.planned = 1 + bisect_left(range(1, self.planned), now, key=lambda n: self.clock + self._duration(n))
            self.due = self.clock + self._duration(self.planned)

    def held(self, ahead: int) -> int:
        """Blocks that the running hold `ahead` steps from now."""
        size, steps = self.engine.block_size, self.steps + ahead
        return sum(-(-(job.base + steps) // size) for job in self.running)

    def finish_steps(self) -> int:
        """Take the planned steps; the blocks held at their end."""
        self.clock, self.steps, self.planned = self.due, self.steps + self.planned, 0
        held = self.held(0)
        self.peak = max(self.peak, held)
        return held

    def begin_steps(self) -> list[Job]:
        """End, preempt, ask the policy, and plan the next steps; returns those that ended or were refused."""
        gone = [job for job in self.running if job.ends == self.steps]
        if gone:
            self.running = [job for job in self.running if job.ends != self.steps]
        for job in gone:
            job.end = self.clock
            self.lengths.observe(job.request.kind, job.request.output)
        is_short = self._preempt()
        started, refused, ask_again = [], [], is_short
        if self.window and not (is_short and self.running):
            started, refused, ask_again = self._ask()
        self.due = None
        if self.running:
            self._plan(started, ask_again)
        elif self.window and refused:
            self.due = self.clock  # those that move up have not been looked at
        elif self.window:
            raise RuntimeError(f"{self.policy} starts none of {len(self.window)} waiting requests with nothing running")
        return gone + refused

    def _push(self, job: Job) -> None:
        if self.tail and job.place > self.tail[-1].place:
            self.tail.append(job)
        elif self.tail and job.place > self.tail[0].place:
            insort(self.tail, job, key=_place)
        else:
            insort(self.window, job, key=_place)
            if len(self.window) > WINDOW:
                self.tail.appendleft(self.window.pop())

    def _preempt(self) -> bool:
        """Take back what the last that started hold, until the others have room for a step."""
        before = len(self.running)
        while self.running and self.held(1) > self.engine.blocks:
            job = self.running.pop(self._victim())
            job.output = job.base + self.steps - job.request.prompt + 1
            job.preemptions += 1
            self.preempted_at.append(self.clock)
            self._push(job)
        return len(self.running) < before

    def _victim(self) -> int:
        """Which of the running is preempted: as vLLM's, the last that started or, by priority, the least urgent."""
        if self.policy != "priority":
            return -1
        return max(range(len(self.running)), key=lambda place: urgency(self.running[place].request))

    def _ask(self) -> tuple[list[Job], list[Job], bool]:
        """The jobs that start and those that are refused, and whether the next step may start more of the waiting."""
        decision = decide(self.policy, self._state(), self.options)
        waiting = {job.id: job for job in self.window}
        started, tokens = [], 0
        for job in map(waiting.__getitem__, decision.start):
            tokens += job.length()
            if started and tokens > self.engine.budget:
                break
            started.append(job)
        refused = [waiting[name] for name in decision.refuse]
        for job in refused:
            job.refused = decision.refuse[job.id]
        for job in started:
            job.base = job.length() - self.steps - 1
            job.ends = self.steps + job.request.output - job.output
            job.start = self.clock if job.start is None else job.start
        if started or refused:
            gone = {job.id for job in started} | decision.refuse.keys()
            self.window = [job for job in self.window if job.id not in gone]
        self.running += started
        if self.held(1) > self.engine.blocks:
            raise RuntimeError(f"{self.policy} promises {self.held(1)} blocks of {self.engine.blocks}")
        is_cut = len(started) < len(decision.start)
        is_refilled = bool(self.tail) and len(self.window) < WINDOW
        while self.tail and len(self.window) < WINDOW:
            self.window.append(self.tail.popleft())
        return started, refused, is_cut or is_refilled

    def _state(self) -> State:
        engine, steps = self.engine, self.steps
        running = []
        for job in self.running:
            arrival, prompt, _, kind, deadline = job.request
            computed = job.base + steps
            output = computed - prompt + 1
            expected = prompt + self.lengths.expected(kind, output)
            running.append(Running(job.id, prompt, output, computed, expected, arrival, deadline))
        step, size = engine.step, len(running) + 1
        pace = step.base + step.running * size + step.kv * sum(r.computed for r in running)
        fresh: dict[str, float] = {}
        waiting = []
        for job in self.window:
            arrival, prompt, _, kind, deadline = job.request
            output = job.output
            answer = fresh.get(kind) if output == 0 else self.lengths.expected(kind, output)
            if answer is None:
                answer = fresh[kind] = self.lengths.expected(kind, 0)
            service = step.prefill * (prompt + output) + pace * (answer - output)
            waiting.append(Waiting(job.id, prompt, output, prompt + answer, arrival, deadline, service, job.most))
        free = engine.blocks - self.held(0)
        state = (self.clock, engine.block_size, free, engine.blocks, engine.max_running)
        return State(*state, tuple(running), tuple(waiting))

    def _plan(self, started: list[Job], ask_again: bool) -> None:
        step, count = self.engine.step, len(self.running)
        tokens = sum(job.base for job in self.running) + count * (self.steps + 1)
        self._first_step = step.prefill * sum(job.length() for job in started)
        self._step = step.base + step.running * count + step.kv * tokens
        self._growth = step.kv * count
        most = 1 if ask_again and self.window else min(MOST_STEPS, min(job.ends for job in self.running) - self.steps)
        if self.window and self.policy in LOOK_AHEAD:
            most = min(most, self.engine.ask_every)
        if self.held(most) > self.engine.blocks:
            most = bisect_left(range(1, most), self.engine.blocks + 1, key=self.held)
        self.planned = most
        self.due = self.clock + self._duration(most)
        for job in started:
            job.first = self.clock + self._duration(1) if job.first is None else job.first

    def _duration(self, steps: int) -> float:
        """Seconds of the next `steps` steps, of which each holds a token more of each request than the one before."""
        return self._first_step + steps * self._step + self._growth * (steps * (steps - 1) // 2)
