"""Every level of every policy on states small enough to count by hand, and what all of them promise on random ones."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vlmopt.errors import VlmoptError
from vlmopt.serving import policy
from vlmopt.serving.policy import POLICIES, Decision, Options, Running, State, Waiting, blocks_of, decide


def running(name="r", prompt=16, output=1, computed=None, expected=64.0) -> Running:
    computed = prompt + output - 1 if computed is None else computed
    return Running(name, prompt, output, computed, expected, 0.0, None)


def waiting(name, prompt=15, output=0, expected=32.0, arrival=0.0, deadline=None, service=1.0, most=10_000) -> Waiting:
    return Waiting(name, prompt, output, expected, arrival, deadline, service, most)


def state(free, *requests, total=100, now=0.0, seats=64) -> State:
    """Blocks of 16 tokens."""
    run = tuple(r for r in requests if isinstance(r, Running))
    return State(now, 16, free, total, seats, run, tuple(w for w in requests if isinstance(w, Waiting)))


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(VlmoptError, match="no policy 'reserv'; did you mean 'reserve'"):
        decide("reserv", state(10))
    with pytest.raises(VlmoptError, match="choose one of batch, fcfs, priority, brakes, reserve"):
        decide("xyz", state(10))


@pytest.mark.parametrize(
    "values",
    [
        {"batch": 0},
        {"hard": 0.4, "soft": 0.3},
        {"hard": -0.1},
        {"soft": 1.1},
        {"watermark": 1.0},
        {"ageing": float("nan")},
        {"margin": 1.0},
    ],
)
def test_options_that_mean_nothing_are_rejected(values):
    with pytest.raises(VlmoptError, match=next(iter(values))):
        Options(**values)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (16.5, 2), (17, 2)])
def test_blocks_are_rounded_up(tokens, blocks):
    assert blocks_of(tokens, 16) == blocks


def test_batch_starts_up_to_its_size_and_then_none_until_all_have_ended():
    four = [waiting(name) for name in "abcd"]
    assert decide("batch", state(100, *four), Options(batch=3)) == Decision(("a", "b", "c"), {}, {"d": policy.SEATS})
    assert decide("batch", state(90, running(), *four), Options(batch=3)) == Decision(
        (), {}, dict.fromkeys("abcd", policy.IN_BATCH)
    )
    assert decide("batch", state(100, *four, seats=2)).start == ("a", "b")


def test_a_batch_ends_where_the_blocks_do():
    found = decide("batch", state(2, waiting("a"), waiting("b", prompt=16), waiting("c"), total=2))
    assert found == Decision(("a",), {}, {"b": policy.BLOCKS, "c": policy.BEHIND})


def test_fcfs_counts_the_next_token_and_passes_nobody_over():
    assert decide("fcfs", state(1, running(), waiting("a", prompt=15), total=8)).start == ()
    fits = state(1, running(output=2), waiting("a", prompt=15), total=8)
    assert decide("fcfs", fits).start == ("a",)
    too_long = state(1, running(output=2), waiting("a", prompt=16), waiting("b"), total=8)
    assert decide("fcfs", too_long) == Decision((), {}, {"a": policy.BLOCKS, "b": policy.BEHIND})


def test_fcfs_leaves_the_running_what_they_take_in_this_step():
    before = state(2, running(prompt=16, output=1, computed=16), running("s", prompt=40, output=0, computed=30))
    assert decide("fcfs", replace(before, waiting=(waiting("a"),))).start == ()
    assert decide("fcfs", replace(before, free_blocks=3, waiting=(waiting("a"),))).start == ("a",)


def test_fcfs_counts_what_was_generated_before_a_preemption():
    assert decide("fcfs", state(1, running(output=2), waiting("a", prompt=8, output=8))).held == {"a": policy.BLOCKS}
    assert decide("fcfs", state(1, running(output=2), waiting("a", prompt=8, output=7))).start == ("a",)


@pytest.mark.parametrize("name", ["fcfs", "priority"])
def test_a_watermark_stays_free_when_one_starts_beside_others(name):
    marked = Options(watermark=0.05)
    assert decide(name, state(6, running(output=2), waiting("a")), marked).start == ("a",)
    assert decide(name, state(5, running(output=2), waiting("a")), marked).held == {"a": policy.BLOCKS}
    assert decide(name, state(5, waiting("a"), waiting("b")), marked) == Decision(("a",), {}, {"b": policy.BLOCKS})


def test_priority_goes_by_deadline_then_by_arrival_and_passes_nobody_over():
    requests = [
        waiting("none", arrival=0.0),
        waiting("late", arrival=1.0, deadline=90.0),
        waiting("soon", arrival=2.0, deadline=20.0),
        waiting("as soon", arrival=3.0, deadline=20.0),
    ]
    assert decide("priority", state(50, *requests)).start == ("soon", "as soon", "late", "none")
    large = waiting("large", prompt=40, arrival=9.0, deadline=1.0)
    assert decide("priority", state(2, running(output=2), *requests, large)).start == ()


@pytest.mark.parametrize("name", ["fcfs", "priority"])
def test_no_more_start_than_may_run(name):
    found = decide(name, state(50, running(), waiting("a"), waiting("b"), seats=2))
    assert found == Decision(("a",), {}, {"b": policy.SEATS})


@pytest.mark.parametrize("name", ["fcfs", "priority"])
def test_each_that_starts_leaves_fewer_blocks_to_the_next(name):
    assert decide(name, state(3, *map(waiting, "abcd"))).start == ("a", "b", "c")


@pytest.mark.parametrize(
    ("free", "output", "reason"),
    [
        (9, 0, policy.HARD),
        (9, 2, policy.HARD),
        (10, 2, policy.SOFT),
        (29, 2, policy.SOFT),
        (10, 0, None),
        (30, 2, None),
    ],
)
def test_brakes_have_three_levels(free, output, reason):
    busy = running(output=output, computed=17 if output else 0)
    found = decide("brakes", state(free, busy, waiting("a"), waiting("b")))
    assert found.held == ({"a": reason, "b": reason} if reason else {})
    assert found.start == (() if reason else ("a", "b"))


def test_brakes_let_a_burst_pass_whole_and_start_something_when_nothing_runs():
    burst = [waiting(str(i)) for i in range(31)]
    assert len(decide("brakes", state(31, running(output=2), *burst)).start) == 31
    assert decide("brakes", state(5, waiting("a"))).start == ("a",)


def test_the_levels_of_the_brakes_are_options():
    sight = state(50, running(output=2), waiting("a"))
    assert decide("brakes", sight, Options(hard=0.6, soft=0.6)).held == {"a": policy.HARD}
    assert decide("brakes", sight, Options(hard=0.1, soft=0.6)).held == {"a": policy.SOFT}


def test_reserve_keeps_what_the_running_will_take_until_the_end_of_those_that_start():
    busy = running(prompt=16, output=1, computed=16, expected=64.0)  # holds 1 block; 3 in 17 steps, 4 in 33
    long = waiting("a", expected=48.0)  # 1 block now, 2 in 17 steps, 3 in 33, where it ends
    assert decide("reserve", state(5, busy, long)).held == {"a": policy.RESERVED}
    assert decide("reserve", state(6, busy, long)).start == ("a",)


def test_reserve_lends_blocks_that_come_back_before_they_are_needed():
    busy = running(prompt=16, output=1, computed=16, expected=160.0)  # 10 blocks at its end, after 143 steps
    short = waiting("a", expected=32.0)  # 2 blocks after 17 steps, where the other holds 3
    assert decide("reserve", state(9, busy, short)).start == ("a",)
    assert decide("reserve", state(4, busy, short)).start == ("a",)
    assert decide("reserve", state(3, busy, short)).held == {"a": policy.RESERVED}


def test_reserve_counts_its_own_admissions():
    busy = running(prompt=16, output=1, computed=16, expected=64.0)
    two = [waiting("a", expected=32.0), waiting("b", expected=48.0)]
    assert decide("reserve", state(5, busy, *two)) == Decision(("a",), {}, {"b": policy.RESERVED})
    assert decide("reserve", state(6, busy, two[1])).start == ("b",)
    assert decide("reserve", state(6, busy, *two)).start == ("a", "b")


def test_reserve_says_when_not_even_the_prompt_has_room():
    assert decide("reserve", state(1, running(), waiting("a", prompt=40))).held == {"a": policy.BLOCKS}


def test_reserve_keeps_at_least_the_next_token_whatever_was_predicted():
    late = running(prompt=16, output=16, computed=31, expected=20.0)
    assert decide("reserve", state(2, late, waiting("a", prompt=15, expected=1.0))).start == ("a",)
    assert decide("reserve", state(1, late, waiting("a", prompt=15, expected=1.0))).start == ()


def test_reserve_expects_no_more_than_a_request_may_reach():
    sight = state(4, running(expected=64.0), waiting("a", expected=500.0, most=32))
    assert decide("reserve", sight).start == ("a",)
    assert decide("reserve", replace(sight, waiting=(waiting("a", expected=500.0, most=33),))).start == ()


def test_reserve_starts_the_first_alone_when_it_is_expected_to_take_everything():
    found = decide("reserve", state(10, waiting("a", expected=999.0), waiting("b", expected=900.0), total=10))
    assert found == Decision(("a",), {}, {"b": policy.RESERVED})
    assert decide("reserve", state(5, waiting("a", expected=999.0), total=10)).start == ("a",)


def test_reserve_goes_by_slack_then_by_arrival_and_puts_the_aged_first():
    requests = [
        waiting("aged late", arrival=30.0, deadline=35.0),
        waiting("missed", arrival=50.0, deadline=100.5, service=1.0),
        waiting("no deadline", arrival=60.0),
        waiting("loose", arrival=70.0, deadline=120.0, service=1.0),
        waiting("just", arrival=80.0, deadline=101.0, service=1.0),
        waiting("tight", arrival=90.0, deadline=121.0, service=20.0),
    ]
    found = decide("reserve", state(100, *requests, now=100.0), Options(ageing=60.0))
    assert found.start == ("aged late", "just", "tight", "loose", "missed", "no deadline")
    by_arrival = decide("reserve", state(100, *requests, now=100.0), Options(ageing=60.0, order=False))
    assert by_arrival.start == tuple(w.id for w in requests)


def test_reserve_passes_a_request_over_until_it_has_aged():
    requests = [waiting("large", expected=160.0, arrival=0.0), waiting("small", expected=32.0, arrival=5.0)]
    sight = state(7, running(), *requests, now=60.0)
    assert decide("reserve", sight, Options(ageing=60.0)) == Decision(("small",), {}, {"large": policy.RESERVED})
    aged = decide("reserve", replace(sight, now=60.5), Options(ageing=60.0))
    assert aged == Decision((), {}, {"large": policy.RESERVED, "small": policy.AGED})


def test_reserve_starts_what_can_wait_only_above_the_margin():
    # 2 blocks beside the 3 that the other will hold by then, of which it holds 1: 4 of the free, and a margin of 5.
    def starts(free, **changes):
        asks = waiting("a", arrival=90.0, service=1.0, **changes)
        sight = state(free, running(computed=16), asks, now=100.0)
        return decide("reserve", sight, Options(ageing=60.0, margin=0.05)).start == ("a",)

    assert starts(9, deadline=102.0) and not starts(8, deadline=102.0)
    assert starts(4, deadline=101.5) and not starts(3, deadline=101.5)  # must start before its service time has passed
    assert starts(4, deadline=100.5) and not starts(3, deadline=100.5)  # late
    assert starts(4) and not starts(3)  # has no deadline


def test_reserve_asks_no_margin_of_the_aged_nor_without_ordering():
    sight = state(4, running(computed=16), waiting("a", deadline=102.0), now=100.0)
    for opts in (Options(ageing=60.0, margin=0.05), Options(ageing=200.0, margin=0.05, order=False)):
        assert decide("reserve", sight, opts).start == ("a",)
    assert decide("reserve", sight, Options(ageing=200.0, margin=0.05)).held == {"a": policy.RESERVED}


def test_reserve_looks_at_those_that_can_wait_after_those_that_cannot():
    can_wait = waiting("can wait", deadline=15.0, service=4.0)  # slack 11 s
    tight = waiting("tight", deadline=32.0, service=20.0)  # slack 12 s, less than it will run
    assert decide("reserve", state(100, can_wait, tight)).start == ("tight", "can wait")


def test_reserve_without_ordering_passes_nobody_over():
    requests = [waiting("large", expected=160.0), waiting("small", expected=32.0)]
    found = decide("reserve", state(7, running(), *requests), Options(order=False))
    assert found == Decision((), {}, {"large": policy.RESERVED, "small": policy.BEHIND})


def test_reserve_starts_no_more_than_may_run():
    found = decide("reserve", state(90, running(), waiting("a"), waiting("b"), seats=2))
    assert found == Decision(("a",), {}, {"b": policy.SEATS})


@pytest.mark.parametrize("name", POLICIES)
def test_what_can_never_fit_is_refused_at_once_with_the_reason(name):
    requests = [waiting("over", prompt=80, output=80), waiting("fits", prompt=159), waiting("more", prompt=999)]
    found = decide(name, state(10, *requests, total=10))
    assert found.start == ("fits",) and not found.held
    assert found.refuse == {
        "over": "its 160 tokens and the next need 11 blocks, and there are 10 in all",
        "more": "its 999 tokens and the next need 63 blocks, and there are 10 in all",
    }
    assert decide(name, state(0, running(), *requests, total=10)).refuse == found.refuse


@st.composite
def states(draw) -> State:
    size, total = draw(st.integers(1, 32)), draw(st.integers(1, 60))
    tokens, seconds = st.integers(1, 300), st.floats(0, 500)
    deadlines = st.none() | seconds
    run, free = [], total
    for i in range(draw(st.integers(0, 5))):
        prompt, output = draw(tokens), draw(st.integers(0, 50))
        computed = draw(st.integers(0, max(0, prompt + output - 1)))
        expected = prompt + output + 1 + draw(st.floats(0, 300))
        if blocks_of(computed, size) <= free:
            free -= blocks_of(computed, size)
            run.append(Running(f"r{i}", prompt, output, computed, expected, draw(seconds), draw(deadlines)))
    queue = [
        Waiting(f"w{i}", prompt := draw(tokens), output := draw(st.integers(0, 50)),
                prompt + output + 1 + draw(st.floats(0, 300)), arrival, draw(deadlines), draw(seconds),
                prompt + output + 1 + draw(st.integers(0, 300)))
        for i, arrival in enumerate(sorted(draw(st.lists(seconds, max_size=8))))
    ]  # fmt: skip
    return State(draw(seconds), size, free, total, draw(st.integers(1, 9)), tuple(run), tuple(queue))


OVERFULL = State(
    0.0, 16, 8, 8, 1, (running("a", computed=0, expected=18), running("b", computed=0, expected=18)), (waiting("c"),)
)
"""More run than may, as after the limit was lowered under a running engine."""
options = st.builds(
    Options, batch=st.integers(1, 5), ageing=st.floats(0, 300), margin=st.floats(0, 0.5), order=st.booleans()
)


@given(states(), options, st.sampled_from(sorted(POLICIES)))
@example(OVERFULL, Options(), "reserve")
def test_on_any_state_a_decision_is_whole_and_promises_only_what_is_free(sight, opts, name):
    found = decide(name, sight, opts)
    by_id = {w.id: w for w in sight.waiting}
    assert sorted([*found.start, *found.refuse, *found.held]) == sorted(by_id)
    assert set(found.held.values()) <= policy.HELD

    need = {w.id: blocks_of(w.prompt + w.output + 1, sight.block_size) for w in sight.waiting}
    assert found.refuse.keys() == {name for name, blocks in need.items() if blocks > sight.total_blocks}
    taken = sum(
        blocks_of(r.prompt + r.output, sight.block_size) - blocks_of(r.computed, sight.block_size)
        for r in sight.running
    )
    if found.start:
        assert sum(need[name] for name in found.start) <= sight.free_blocks - taken
        assert len(found.start) + len(sight.running) <= sight.max_running
    elif not sight.running:
        assert not found.held
    assert decide(name, sight, opts) == found


@given(states(), options)
def test_on_any_state_what_reserve_starts_fits_step_by_step_until_it_ends(sight, opts):
    found = decide("reserve", sight, opts)
    waits = {w.id: w for w in sight.waiting}
    room = sight.total_blocks * sight.block_size
    started = [(w.prompt + w.output, min(w.expected, w.most, room)) for w in map(waits.get, found.start)]
    before = [(r.prompt + r.output, min(r.expected, room)) for r in sight.running]
    if len(started) + len(before) < 2 or not started:
        return  # one alone may take whatever there is
    blocks = sight.free_blocks + sum(blocks_of(r.computed, sight.block_size) for r in sight.running)
    step = 1
    while any(now + step <= max(end, now + 1) for now, end in started):
        lengths = [now + step for now, end in (*before, *started) if now + step < max(end, now + 1) + 1]
        assert sum(blocks_of(length, sight.block_size) for length in lengths) <= blocks
        step += 1
