"""The simulator: times counted by hand, and what must hold for any requests on any engine under every policy."""

from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmopt.errors import VlmoptError
from vlmopt.serving import policy, replica, simulate
from vlmopt.serving.lengths import OutputLengths
from vlmopt.serving.policy import POLICIES, Decision, Options, blocks_of
from vlmopt.serving.simulate import Engine, Request, StepTime

# Sums of these are exact, so that one long stretch of steps and many short ones end at the same time.
EXACT = StepTime(base=2**-6, prefill=2**-12, running=2**-10, kv=2**-16)
UNIT = StepTime(base=1.0, prefill=0.0, running=0.0, kv=0.0)


def run(requests, engine, name="fcfs", **settings):
    return simulate.simulate(requests, engine, name, **settings)


class Bound:
    """Predicts a length that no answer exceeds."""

    def __init__(self, tokens: float):
        self.tokens = tokens

    def observe(self, kind: str, tokens: int) -> None:
        assert tokens <= self.tokens

    def expected(self, kind: str, output_so_far: int = 0) -> float:
        return self.tokens


class Blind:
    """Predicts that every answer ends with its next token."""

    def observe(self, kind: str, tokens: int) -> None: ...

    def expected(self, kind: str, output_so_far: int = 0) -> float:
        return output_so_far + 1


def test_a_request_alone_takes_the_steps_that_the_step_time_says():
    step = StepTime(base=0.1, prefill=0.01, running=0.001, kv=0.0001)
    (found,) = run([(5.0, 10, 3, "chat", None)], Engine(step, blocks=10)).outcomes
    assert found.start == 5.0
    assert found.first == pytest.approx(5.0 + 0.1 + 10 * 0.01 + 0.001 + 10 * 0.0001)
    assert found.end == pytest.approx(found.first + 2 * (0.1 + 0.001) + (11 + 12) * 0.0001)
    assert (found.preemptions, found.refused) == (0, None)


def test_an_arrival_is_looked_at_when_the_step_that_runs_has_ended():
    found = run([(0.0, 4, 9, "chat"), (2.5, 4, 2, "chat"), (4.0, 4, 1, "chat")], Engine(UNIT, blocks=10))
    assert [(o.start, o.first, o.end) for o in found.outcomes] == [(0, 1, 9), (3, 4, 5), (4, 5, 5)]
    assert found.steps == 9


def test_outcomes_stand_in_the_order_of_the_requests():
    found = run([(7.0, 4, 1, "chat", None), Request(1.0, 4, 2, "chat")], Engine(UNIT, blocks=10)).outcomes
    assert [(o.start, o.end) for o in found] == [(7, 8), (1, 3)]


def test_the_last_that_started_is_preempted_when_the_blocks_run_out_and_recomputed_later():
    # Of 5 blocks of 2 tokens both hold 2 for the third and the fourth token, and both need a third for the fifth.
    found = run([(0.0, 3, 4, "chat"), (0.0, 3, 4, "chat")], Engine(UNIT, blocks=5, block_size=2))
    first, second = found.outcomes
    assert (first.start, first.end, first.preemptions) == (0, 4, 0)
    assert (second.start, second.first, second.end, second.preemptions) == (0, 1, 6, 1)
    assert found.preemptions == 1
    assert found.peak_blocks == 5 - 1


def test_nothing_starts_in_the_step_of_a_preemption():
    third = (1.5, 1, 1, "chat")
    found = run([(0.0, 3, 4, "chat"), (0.0, 3, 4, "chat"), third], Engine(UNIT, blocks=5, block_size=2), "reserve",
                lengths=Blind)  # fmt: skip
    assert found.outcomes[1].preemptions == 1
    assert found.outcomes[2].start == 3


def test_by_priority_the_least_urgent_is_preempted():
    first, second = ((0.0, 3, 4, "chat", deadline) for deadline in (90.0, 50.0))
    found = run([first, second], Engine(UNIT, blocks=5, block_size=2), "priority")
    assert [o.preemptions for o in found.outcomes] == [1, 0]
    assert [o.end for o in found.outcomes] == [6, 4]


def test_a_policy_that_looks_ahead_is_asked_as_often_as_the_engine_says():
    # The second fits beside the end of the first once it is far enough behind it, while nothing happens.
    requests = [(0.0, 4, 12, "chat"), (0.5, 4, 12, "chat")]
    each, fourth = (Engine(UNIT, blocks=26, block_size=1, ask_every=every) for every in (1, 4))
    starts = [
        run(requests, engine, "reserve", lengths=lambda: Bound(12)).outcomes[1].start for engine in (each, fourth)
    ]
    assert 1 < starts[0] < 12 and starts[0] < starts[1] < 12


def test_a_request_that_outgrows_the_whole_engine_is_refused_and_the_others_go_on():
    requests = [(0.0, 4, 9, "chat"), (0.0, 99, 1, "chat"), (0.0, 4, 2, "chat")]
    found = run(requests, Engine(UNIT, blocks=5, block_size=2))
    grown, large, small = found.outcomes
    assert "11 tokens" not in large.refused and "its 99 tokens and the next need 50 blocks" in large.refused
    assert large.start is None and large.end is None
    assert "its 11 tokens and the next need 6 blocks" in grown.refused
    assert grown.first == 1 and grown.end is None
    assert small.refused is None and small.end is not None
    assert found.refused == 2


def test_prompts_beyond_the_budget_start_in_later_steps_and_a_long_one_alone():
    requests = [(0.0, 6, 2, "chat"), (0.0, 5, 2, "chat"), (0.0, 20, 1, "chat")]
    found = run(requests, Engine(UNIT, blocks=50, budget=10))
    assert [o.start for o in found.outcomes] == [0, 1, 2]


def test_round_robin_goes_in_turn_and_least_tokens_to_the_emptiest():
    requests = [(0.0, 100, 2, "chat"), (0.0, 1, 2, "chat"), (0.0, 1, 2, "chat"), (0.0, 1, 2, "chat")]
    engine = Engine(UNIT, blocks=50)
    in_turn = run(requests, engine, replicas=2)
    assert [o.replica for o in in_turn.outcomes] == [0, 1, 0, 1]
    fewest = run(requests, engine, replicas=2, router="least-tokens", lengths=lambda: OutputLengths(default=10))
    assert [o.replica for o in fewest.outcomes] == [0, 1, 1, 1]
    later = [*requests, (9.0, 1, 2, "chat")]  # all have ended: the first is as empty as the second
    fewest = run(later, engine, replicas=2, router="least-tokens", lengths=lambda: OutputLengths(default=10))
    assert fewest.outcomes[-1].replica == 0


def test_each_of_many_replicas_does_with_its_share_what_one_does_alone():
    items = [(i / 8, 20 + i, 5 + 7 * i % 30, "chat", 9.0) for i in range(12)]
    engine = Engine(EXACT, blocks=9, max_running=4)
    alone = run(items, engine, "reserve", lengths=learning).outcomes
    many = run([item for item in items for _ in range(64)], engine, "reserve", replicas=64, lengths=learning).outcomes
    for replica_number in range(64):
        share = many[replica_number::64]
        assert [outcome._replace(replica=0) for outcome in share] == list(alone)
        assert {outcome.replica for outcome in share} == {replica_number}


def test_the_occupancy_is_the_mean_over_time():
    # From 100 s on a token a second, for 320 seconds: 1 block for 16 seconds, then 2, up to 20.
    found = run([(100.0, 1, 320, "chat")], Engine(UNIT, blocks=40))
    assert found.peak_blocks == 20
    times, shares = zip(*found.occupancy, strict=True)
    assert times[0] == 100 and times[-1] < 420
    assert sum(shares) * (times[1] - times[0]) == pytest.approx(16 * 210 / 40, rel=0.01)
    assert shares[0] == pytest.approx(1 / 40, rel=0.01) and shares[-1] == pytest.approx(20 / 40, rel=0.01)


def test_the_occupancy_over_time_is_bounded_and_counts_every_replica():
    requests = [(i / 4, 20, 1 + i % 7, "chat") for i in range(3 * simulate.POINTS)]
    found = run(requests, Engine(EXACT, blocks=4), replicas=2)
    times, shares = zip(*found.occupancy, strict=True)
    assert simulate.POINTS / 2 <= len(times) <= simulate.POINTS
    assert list(times) == sorted(times)
    assert min(shares) >= 0 and max(shares) <= 1
    # Every step of every request holds 2 of the 8 blocks, and all steps take nearly the same time.
    end = max(o.end for o in found.outcomes)
    busy = sum(o.end - o.start for o in found.outcomes)
    assert sum(shares) * (times[1] - times[0]) == pytest.approx(busy * 2 / 8, rel=0.01)
    assert busy < end


def test_a_long_queue_is_handed_over_in_parts_and_served_in_order():
    count = 2 * replica.WINDOW + 10
    found = run([(0.0, 4, 3, "chat")] * count, Engine(UNIT, blocks=1000, max_running=7))
    assert [o.start for o in found.outcomes] == [3 * (i // 7) for i in range(count)]


def test_what_waits_is_all_handed_over_when_nothing_runs_and_seats_are_many():
    count = 2 * replica.WINDOW + 10
    found = run([(0.0, 4, 3, "chat")] * count, Engine(UNIT, blocks=count, max_running=count))
    assert [o.start for o in found.outcomes] == [i // replica.WINDOW for i in range(count)]


def test_a_window_full_of_refusals_makes_room_for_those_behind_it():
    large = [(0.0, 999, 1, "chat")] * (2 * replica.WINDOW)
    found = run([*large, (0.0, 4, 2, "chat")], Engine(UNIT, blocks=10))
    assert found.refused == len(large)
    assert found.outcomes[-1].start == 0.0


def test_one_that_waits_again_takes_its_place_by_arrival(monkeypatch):
    monkeypatch.setattr(replica, "WINDOW", 2)
    engine = Engine(UNIT, blocks=10)
    for last in range(6):
        waits = replica.Replica(engine, "fcfs", Options(), OutputLengths())
        for place in [*(place for place in range(6) if place != last), last]:
            job = replica.Job(place, Request(0.0, 4, 2, "chat"), engine)
            job.place = place
            waits.receive(job)
        assert [job.place for job in (*waits.window, *waits.tail)] == list(range(6))


def test_no_requests_give_no_outcomes():
    found = run([], Engine(UNIT, blocks=1))
    assert (found.outcomes, found.occupancy, found.steps, found.preemptions) == ((), (), 0, 0)


@pytest.mark.parametrize(
    ("requests", "changes", "message"),
    [
        ([], {"name": "fcsf"}, "did you mean 'fcfs'"),
        ([], {"router": "random"}, "router 'random'.*round-robin, least-tokens"),
        ([], {"replicas": 0}, "0 replicas"),
        ([(0.0, 0, 1, "chat")], {}, "request 0 .*prompt of 1 token or more"),
        ([(0.0, 1, 1, "chat"), (0.0, 1, 9999, "chat")], {}, "request 1 .*1 to max_tokens = 2048"),
        ([(float("nan"), 1, 1, "chat")], {}, "finite arrival"),
    ],
)
def test_what_means_nothing_is_rejected(requests, changes, message):
    with pytest.raises(VlmoptError, match=message):
        run(requests, Engine(UNIT, blocks=10), **changes)


@pytest.mark.parametrize("values", [(0, 1, 1, 1), (1, -1, 1, 1), (1, 1, 1, float("nan"))])
def test_a_step_takes_time(values):
    with pytest.raises(VlmoptError, match="base > 0"):
        StepTime(*values)


def test_an_engine_has_blocks():
    with pytest.raises(VlmoptError, match="blocks, block_size"):
        Engine(UNIT, blocks=0)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda state, _: Decision(tuple(w.id for w in state.waiting), {}, {}), "promises 4 blocks of 3"),
        (lambda state, _: Decision((), {}, {w.id: "" for w in state.waiting}), "starts none of 2 waiting"),
    ],
)
def test_a_policy_that_promises_too_much_or_never_starts_anything_is_found_out(monkeypatch, rule, message):
    monkeypatch.setattr(policy, "POLICIES", MappingProxyType({"bad": rule}))
    with pytest.raises(RuntimeError, match=message):
        run([(0.0, 20, 5, "chat")] * 2, Engine(UNIT, blocks=3), "bad")


def states_seen(monkeypatch, requests, engine, name) -> list:
    seen = []
    monkeypatch.setattr(replica, "decide", lambda *asked: seen.append(asked[1]) or policy.decide(*asked))
    run(requests, engine, name)
    return seen


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_cannot_see_how_long_answers_will_be(monkeypatch, name):
    engine = Engine(UNIT, blocks=30)
    short, long = ([(i, 40, output, "chat", 50.0) for i in range(8)] for output in (20, 30))
    some, others = (states_seen(monkeypatch, requests, engine, name) for requests in (short, long))
    before = [state for state in some if state.now < 20]  # nothing has ended yet
    assert len(before) > 5
    assert before == [state for state in others if state.now < 20]


kinds = st.sampled_from(["chat", "summary"])
ticks = st.integers(0, 600).map(lambda tick: tick / 64)
requests = st.lists(
    st.tuples(ticks, st.integers(1, 40), st.integers(1, 30), kinds, st.none() | ticks), min_size=1, max_size=25
)
engines = st.builds(
    Engine,
    st.just(EXACT),
    blocks=st.integers(4, 40),
    block_size=st.sampled_from([1, 2, 4, 16]),
    max_running=st.integers(1, 12),
    budget=st.integers(10, 200),
    max_tokens=st.just(30),
)
names = st.sampled_from(sorted(POLICIES))
options = st.builds(
    Options,
    batch=st.integers(1, 4),
    ageing=st.integers(0, 64).map(lambda n: n / 8),
    margin=st.sampled_from([0.0, 0.05, 0.5]),
    order=st.booleans(),
)
windows = st.sampled_from([2, replica.WINDOW])
clusters = st.fixed_dictionaries({"replicas": st.integers(1, 3), "router": st.sampled_from(simulate.ROUTERS)})


def learning() -> OutputLengths:
    """Wrong at first, and often later."""
    return OutputLengths(quantile=0.5, window=8, default=4)


def watch(asked: list):
    """A `decide` that first looks at the question: blocks are counted right, the waiting are in order of arrival."""

    def checking(name, state, opts):
        held = sum(blocks_of(r.computed, state.block_size) for r in state.running)
        assert state.free_blocks == state.total_blocks - held >= 0
        assert [w.arrival for w in state.waiting] == sorted(w.arrival for w in state.waiting)
        assert all(r.expected >= r.prompt + r.output + 1 for r in (*state.running, *state.waiting))
        asked.append(state)
        return policy.decide(name, state, opts)

    return checking


@settings(max_examples=400)
@given(requests, engines, names, options, clusters, windows)
def test_every_request_ends_or_is_refused_for_a_reason_that_holds(items, engine, name, opts, cluster, window):
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "WINDOW", window)
        patch.setattr(replica, "decide", watch(asked))
        found = run(items, engine, name, options=opts, lengths=learning, **cluster)
        assert found == run(items, engine, name, options=opts, lengths=learning, **cluster)
    assert asked and len(found.outcomes) == len(items)
    assert found.peak_blocks <= engine.blocks
    assert len(found.preempted_at) == found.preemptions and list(found.preempted_at) == sorted(found.preempted_at)

    room = engine.blocks * engine.block_size
    for (arrival, prompt, output, *_), outcome in zip(items, found.outcomes, strict=True):
        assert (outcome.refused is None) == (outcome.end is not None)
        if outcome.refused is not None:
            assert prompt + output > room
        else:
            assert prompt + output <= room + 1
            assert arrival <= outcome.start < outcome.first <= outcome.end
    # Each step gives a token to somebody: the waits are bounded by the work that there is.
    assert found.steps <= sum(output for _, _, output, *_ in items)


def due(item) -> float:
    return float("inf") if item[4] is None else item[4]


@settings(max_examples=400)
@given(requests, engines, names, options, windows)
def test_nobody_is_passed_over_for_longer_than_the_policy_says(items, engine, name, opts, window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "WINDOW", window)
        found = run(items, engine, name, options=opts, lengths=learning)
    order = sorted(range(len(items)), key=lambda i: items[i][0])
    patience = opts.ageing if name == "reserve" and opts.order else 0.0
    for place, i in enumerate(order):
        start = found.outcomes[i].start
        for j in order[place + 1 :] if start is not None else ():
            other = found.outcomes[j].start
            is_overtaken = other is not None and other < start and items[j][0] > items[i][0]
            if name == "priority":
                is_overtaken = is_overtaken and not due(items[j]) < due(items[i])
            assert not is_overtaken or other - items[i][0] <= patience


@settings(max_examples=300)
@given(requests, engines, options, clusters)
def test_reserve_preempts_nobody_when_no_answer_exceeds_its_prediction(items, engine, opts, cluster):
    room = engine.blocks * engine.block_size
    items = [item for item in items if item[1] + item[2] <= room]
    longest = max((item[2] for item in items), default=1)
    found = run(items, engine, "reserve", options=opts, lengths=lambda: Bound(longest + 1), **cluster)
    assert (found.preemptions, found.refused) == (0, 0)


def test_the_others_do_preempt_where_reserve_does_not():
    items, engine = [(0.0, 8, 30, "chat")] * 6, Engine(EXACT, blocks=20, block_size=4)
    assert run(items, engine, "reserve", lengths=lambda: Bound(31)).preemptions == 0
    assert run(items, engine, "fcfs").preemptions > 0
    assert run(items, engine, "brakes").preemptions > 0
    assert run(items, engine, "reserve", lengths=Blind).preemptions > 0


@settings(max_examples=300)
@given(requests, engines, names, options, clusters, windows)
def test_steps_taken_in_one_end_as_steps_taken_one_by_one(items, engine, name, opts, cluster, window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "WINDOW", window)
        at_once = run(items, engine, name, options=opts, lengths=learning, **cluster)
        patch.setattr(replica, "MOST_STEPS", 1)
        one_by_one = run(items, engine, name, options=opts, lengths=learning, **cluster)
    assert at_once.outcomes == one_by_one.outcomes
    assert (at_once.steps, at_once.peak_blocks) == (one_by_one.steps, one_by_one.peak_blocks)
