"""The forecast of blocks in use: counted by hand, and against a count step by step."""

from hypothesis import given
from hypothesis import strategies as st

from vlmopt.serving.forecast import Forecast


def counted(requests, size) -> list[int]:
    """Blocks in each step until all have ended."""
    last = max((steps for _, steps in requests), default=0)
    return [sum(-(-(tokens + step - 1) // size) for tokens, steps in requests if steps >= step)
            for step in range(1, last + 1)]  # fmt: skip


def test_the_peak_lies_where_one_ends_and_not_at_the_sum_of_all_ends():
    # Blocks of 4: the first holds 1 for 4 steps; the second grows from 1 to 3 in 9 steps.
    forecast = Forecast(9, 4, [(1, 4), (4, 9)])
    assert forecast.peak == 3
    assert counted([(1, 4), (4, 9)], 4) == [2, 3, 3, 3, 2, 3, 3, 3, 3]


def test_one_more_fits_as_long_as_the_others_let_it():
    forecast = Forecast(3, 4, [(4, 9)])
    assert forecast.fits(1, 4)
    assert not forecast.fits(1, 6)  # the sixth step needs 2 beside the 3 of the other
    forecast.add(1, 4)
    assert forecast.peak == 3
    assert forecast.fits(1, 1) and not forecast.fits(1, 2)


def test_what_overflows_after_its_end_holds_nobody_back():
    assert Forecast(3, 4, [(4, 99)]).peak > 3
    assert Forecast(3, 4, [(4, 99)]).fits(1, 4)


def test_an_empty_forecast():
    forecast = Forecast(2, 4)
    assert forecast.peak == 0
    assert forecast.fits(5, 4) and not forecast.fits(5, 5)
    assert forecast.fits(1, 4, left=1) and not forecast.fits(5, 4, left=1)


requests = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), max_size=9)


sizes, tokens, steps = st.sampled_from([1, 2, 3, 16]), st.integers(1, 60), st.integers(1, 40)


@given(requests, requests, st.integers(1, 80), sizes, tokens, steps, st.integers(0, 20))
def test_it_agrees_with_a_count_step_by_step(first, later, blocks, size, tokens, steps, left):
    forecast = Forecast(blocks, size, first)
    for request in later:
        forecast.add(*request)
    known = [*first, *later]
    assert forecast.peak == max(counted(known, size), default=0)
    most = max(counted([*known, (tokens, steps)], size)[:steps])
    assert forecast.fits(tokens, steps) == (most <= blocks)
    assert forecast.fits(tokens, steps, left) == (most + left <= blocks)
