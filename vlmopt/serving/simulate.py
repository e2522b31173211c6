"""What a policy does to a list of requests on engines that are not at hand: a discrete-event simulator.

One or many engines (see `replica`) stand behind a router, which sends each request on when it arrives: in turn, or to
the one with the fewest tokens outstanding (prompts and expected answers of what it was sent and has not ended).
"""

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tqdm.auto import tqdm

from vlmopt.errors import VlmoptError
from vlmopt.serving.lengths import OutputLengths
from vlmopt.serving.policy import DEFAULTS, Options, State, decide
from vlmopt.serving.replica import Engine, Job, Lengths, Replica, Request, StepTime

__all__ = ["POINTS", "ROUTERS", "Engine", "Outcome", "Request", "Result", "StepTime", "simulate"]

POINTS = 2000  # of the occupancy over time, at most
ROUTERS = ("round-robin", "least-tokens")


class Outcome(NamedTuple):
    """One request: seconds of its first start, first token and end (None: never), and why it was refused, if it was."""

    replica: int
    start: float | None
    first: float | None
    end: float | None
    preemptions: int
    refused: str | None


@dataclass(frozen=True)
class Result:
    """Outcomes in the order of the requests; `occupancy` as (seconds, mean share of all blocks held from then to the
    next of at most POINTS points); `peak_blocks` held at any time by one replica; `steps` of all replicas;
    `preempted_at` in seconds."""

    outcomes: tuple[Outcome, ...]
    occupancy: tuple[tuple[float, float], ...]
    peak_blocks: int
    steps: int
    preempted_at: tuple[float, ...]

    @property
    def preemptions(self) -> int:
        return sum(outcome.preemptions for outcome in self.outcomes)

    @property
    def refused(self) -> int:
        return sum(outcome.refused is not None for outcome in self.outcomes)


def simulate(
    requests: Iterable[Request | tuple],
    engine: Engine,
    policy: str,
    options: Options = DEFAULTS,
    replicas: int = 1,
    router: str = "round-robin",
    lengths: Callable[[], Lengths] = OutputLengths,
) -> Result:
    """Run `requests` to their ends.

    Args:
        requests: fields of `Request`, in any order.
        policy: a name of `policy.POLICIES`.
        router: one of ROUTERS.
        lengths: makes the predictor of each replica, and the router's.

    Raises:
        VlmoptError: an unknown policy or router, no replica, or a request that means nothing.
    """
    if router not in ROUTERS or replicas < 1:
        raise VlmoptError(f"{replicas} replicas, router {router!r}: give 1 or more, and one of {', '.join(ROUTERS)}")
    jobs = [Job(i, Request(*request), engine) for i, request in enumerate(requests)]
    decide(policy, State(0.0, 1, 1, 1, 1, (), ()), options)  # an unknown name fails here, even without requests
    jobs_by_arrival = sorted(jobs, key=lambda job: job.request.arrival)
    origin = jobs_by_arrival[0].request.arrival if jobs else 0.0
    engines = [Replica(engine, policy, options, lengths()) for _ in range(replicas)]
    cluster = _Cluster(engines, router, lengths(), origin)
    with tqdm(total=len(jobs), desc=f"simulating {policy}", unit="request", delay=1, leave=False) as bar:
        for place, job in enumerate(jobs_by_arrival):
            job.place = place
            cluster.run(job.request.arrival, bar)
            cluster.send(job)
        cluster.run(math.inf, bar)
    outcomes = tuple(Outcome(j.replica, j.start, j.first, j.end, j.preemptions, j.refused) for j in jobs)
    steps = sum(replica.steps for replica in cluster.replicas)
    peak = max(replica.peak for replica in cluster.replicas)
    preempted_at = tuple(heapq.merge(*(replica.preempted_at for replica in cluster.replicas)))
    return Result(outcomes, cluster.occupancy.points(), peak, steps, preempted_at)


class _Cluster:
    """Replicas behind a router, and the order of what happens on them."""

    def __init__(self, replicas: list[Replica], router: str, lengths: Lengths, origin: float):
        self.replicas, self.router, self.lengths = replicas, router, lengths
        self.occupancy = _Occupancy(sum(replica.engine.blocks for replica in replicas), origin)
        self._due: list[tuple[float, int]] = []  # a heap; entries that are not their replica's `due` are stale
        self._outstanding = [0.0] * len(replicas)
        self._sent = 0

    def send(self, job: Job) -> None:
        """Hand `job` to the replica that the router chooses."""
        if self.router == "round-robin":
            job.replica = self._sent % len(self.replicas)
        else:
            job.replica = self._outstanding.index(min(self._outstanding))
        self._sent += 1
        job.cost = job.request.prompt + self.lengths.expected(job.request.kind, 0)
        self._outstanding[job.replica] += job.cost
        replica = self.replicas[job.replica]
        before = replica.due
        replica.receive(job)
        if replica.due != before:
            heapq.heappush(self._due, (replica.due, job.replica))

    def run(self, until: float, bar: tqdm) -> None:
        """Everything that happens before `until`."""
        while self._due and self._due[0][0] < until:
            due, index = heapq.heappop(self._due)
            replica = self.replicas[index]
            if replica.due != due:
                continue
            begin, held_first = replica.clock, replica.held(1)
            self.occupancy.add(begin, due, held_first, replica.finish_steps())
            gone = replica.begin_steps()
            for job in gone:
                self._outstanding[index] -= job.cost
                if job.refused is None:
                    self.lengths.observe(job.request.kind, job.request.output)
            bar.update(len(gone))
            if replica.due is not None:
                heapq.heappush(self._due, (replica.due, index))


class _Occupancy:
    """The mean share of all blocks held in each of at most POINTS equal stretches of time from `origin` seconds on."""

    def __init__(self, blocks: int, origin: float):
        self._blocks, self._origin, self._end, self._width = blocks, origin, origin, 2.0**-6
        self._areas: list[float] = []  # blocks x seconds

    def add(self, begin: float, end: float, held_first: int, held_last: int) -> None:
        """Blocks held on one replica grew evenly from the one to the other between two moments."""
        if end <= begin:
            return
        self._end = max(self._end, end)
        while self._end > self._origin + self._width * POINTS:
            pairs = zip(self._areas[::2], [*self._areas[1::2], 0.0], strict=False)
            self._areas = [first + second for first, second in pairs]
            self._width *= 2
        while self._origin + self._width * len(self._areas) < self._end:
            self._areas.append(0.0)
        rise = (held_last - held_first) / (end - begin)
        first = int((begin - self._origin) / self._width)
        for place in range(first, len(self._areas)):
            left = max(begin, self._origin + self._width * place)
            right = min(end, self._origin + self._width * (place + 1))
            if right <= left:
                break
            self._areas[place] += (right - left) * (held_first + rise * ((left + right) / 2 - begin))

    def points(self) -> tuple[tuple[float, float], ...]:
        """The beginning of each stretch, in seconds, and its share."""
        begins = [self._origin + self._width * place for place in range(len(self._areas))]
        return tuple(
            (begin, area / (min(self._width, self._end - begin) * self._blocks))
            for begin, area in zip(begins, self._areas, strict=True)
        )
