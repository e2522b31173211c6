"""Predicted lengths of answers: quantiles counted by hand, and what holds for any observations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmopt.errors import VlmoptError
from vlmopt.serving.lengths import SETTLED, OutputLengths


def observed(values, **settings) -> OutputLengths:
    lengths = OutputLengths(**{"default": 1, "quantile": 0.9, **settings})
    for value in values:
        lengths.observe("chat", value)
    return lengths


def test_the_default_stands_until_something_was_observed_and_grows_with_the_answer():
    lengths = OutputLengths(default=100, growth=1.5)
    assert lengths.expected("chat") == lengths.expected("chat", 50) == 100
    assert lengths.expected("chat", 99) == 148.5
    assert lengths.expected("chat", 200) == 300


def test_the_quantile_is_the_smallest_length_that_so_large_a_share_reached():
    hundred = observed(range(1, 101))
    assert hundred.expected("chat") == 90
    assert observed(range(1, 101), quantile=1).expected("chat") == 100
    assert observed(range(1, 101), quantile=0.5).expected("chat") == 50


def test_an_answer_that_outlives_the_others_is_compared_with_those_that_became_longer():
    hundred = observed(range(1, 101))
    assert hundred.expected("chat", 50) == 95
    assert hundred.expected("chat", 99) == 100
    assert hundred.expected("chat", 100) == 150
    assert observed([1] * SETTLED, growth=1.5).expected("chat", 1) == 2


def test_kinds_are_apart():
    lengths = observed([500] * SETTLED, default=7)
    assert lengths.expected("chat") == 500
    assert lengths.expected("summary") == 7


def test_only_the_newest_count():
    lengths = observed([900] * 50 + [10] * 19, window=20)
    assert lengths.expected("chat", 0) == 10
    assert lengths.expected("chat", 10) == 900
    lengths.observe("chat", 20)
    assert lengths.expected("chat", 10) == 20


def test_the_first_to_end_do_not_lower_the_default():
    lengths = observed([5] * (SETTLED - 1), default=100)
    assert lengths.expected("chat") == 100
    lengths.observe("chat", 5)
    assert lengths.expected("chat") == 5


def test_a_window_shorter_than_that_is_settled_once_full():
    lengths = observed([5] * 3, default=100, window=4)
    assert lengths.expected("chat") == 100
    lengths.observe("chat", 5)
    assert lengths.expected("chat") == 5


@pytest.mark.parametrize("settings", [{"quantile": 0}, {"quantile": 1.1}, {"window": 0}, {"default": 0}, {"growth": 1}])
def test_settings_that_mean_nothing_are_rejected(settings):
    name, value = next(iter(settings.items()))
    with pytest.raises(VlmoptError, match=f"{name}={value}"):
        OutputLengths(**settings)


@given(
    st.lists(st.integers(1, 60), max_size=40),
    st.floats(0.01, 1),
    st.integers(1, 30),
    st.floats(1, 80),
)
def test_a_prediction_lies_ahead_of_the_answer_and_never_falls_as_it_grows(values, quantile, window, default):
    lengths = observed(values, quantile=quantile, window=window, default=default)
    found = [lengths.expected("chat", output) for output in range(90)]
    assert all(expected >= output + 1 for output, expected in enumerate(found))
    assert found == sorted(found)


@given(st.lists(st.integers(1, 60), min_size=SETTLED), st.integers(1, SETTLED))
def test_a_window_forgets_exactly_what_is_older(values, window):
    old, new = observed(values, window=window), observed(values[-window:], window=window)
    assert [old.expected("chat", n) for n in range(70)] == [new.expected("chat", n) for n in range(70)]
