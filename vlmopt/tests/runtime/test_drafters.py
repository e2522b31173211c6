"""Prompt lookup against its definition, and a draft model that catches up with what was said."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmopt.runtime.drafters import NOT_TEXT, Lookup


def look_up(tokens, k, beyond=(7, 7, 7)):
    """The drafts after `tokens`, with something else behind them in memory."""
    history = torch.tensor([*tokens, *beyond])
    before = history.clone()
    draft, found = Lookup()(history, torch.tensor([len(tokens) - 1]), k)
    assert draft.shape == (k,) and found.shape == (1,) and found.dtype == torch.bool
    assert torch.equal(history, before)
    return draft.tolist() if found else None


def by_definition(tokens, k):
    for n in (3, 2):
        last = tokens[-n:]
        if len(last) < n or NOT_TEXT in last:
            continue
        for end in range(len(tokens) - 2, 1, -1):
            if end + 1 >= n and tokens[end + 1 - n : end + 1] == last:
                known = tokens[end + 1 :]
                return [max(0, known[i % len(known)]) for i in range(k)]
    return None


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6, 1]),
        ([9, 2, 3, 4, 1, 2, 3, 5, 0, 2, 3], [5, 0, 2, 3]),
        ([1, 2, 3, 4, 5, 2, 3, 6, 1, 2, 3], [4, 5, 2, 3]),
        ([8, 8, 8, 8], [8, 8, 8, 8]),
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 4, 5], None),
        ([5], None),
        ([9, 1, 2, NOT_TEXT, 4, 1, 2], [0, 4, 1, 2]),
        ([3, NOT_TEXT, NOT_TEXT, NOT_TEXT, NOT_TEXT], None),
        ([3, 1, NOT_TEXT, 5, 3, 1, NOT_TEXT], None),
    ],
    ids=["three", "the latest two", "three before two", "runs", "periods", "new", "one", "image", "in image", "end"],
)
def test_lookup(tokens, draft):
    assert look_up(tokens, 4) == draft


@given(st.lists(st.integers(NOT_TEXT, 3), min_size=1, max_size=24), st.integers(1, 7), st.lists(st.integers(0, 3)))
def test_lookup_is_its_definition_whatever_lies_beyond_the_live_row(tokens, k, beyond):
    assert look_up(tokens, k, (*beyond, 0, 0)) == by_definition(tokens, k)
