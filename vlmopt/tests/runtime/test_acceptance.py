"""Which drafts hold, drawn or not, and how many are worth drafting."""

import math

import pytest
import torch

from vlmopt.runtime.acceptance import LOSS, Pace, accept_drawn, break_even, count_equal, tokens_a_step

CHEAP = {0: 1.0, 2: 1.06, 4: 1.1, 7: 1.2}
DRAWS = 4000
CHI_SQUARE = {3: 16.3, 15: 37.7}
"""By degrees of freedom: what one right sampler in a thousand exceeds."""


@pytest.mark.parametrize(
    ("draft", "chosen", "held"),
    [([], [5], 0), ([1], [1, 2], 1), ([1], [2, 1], 0), ([1, 2, 3], [1, 9, 3, 4], 1), ([1, 2, 3], [1, 2, 3, 4], 3)],
)
def test_drafts_hold_up_to_the_first_that_is_not_the_models_own(draft, chosen, held):
    assert count_equal(torch.tensor(draft, dtype=torch.int64), torch.tensor(chosen)) == held


def distributions(generator: torch.Generator, rows: int, flat: float = 1.0) -> torch.Tensor:
    return (torch.randn(rows, 4, generator=generator, dtype=torch.float64) / flat).softmax(-1)


def pairs(p: torch.Tensor, second: torch.Tensor, q: torch.Tensor, accept) -> torch.Tensor:
    """How often each pair of tokens comes out, where `second` [4, 4] is the model's after each first token."""
    counts = torch.zeros(4, 4)
    for _ in range(DRAWS):
        draft = torch.multinomial(q[0], 1)
        held, token = accept(draft, q, torch.stack([p, second[draft[0]]]))
        first = draft[0] if held else token[0]
        after = token[0] if held else torch.multinomial(second[first], 1)[0]
        counts[first, after] += 1
    return counts


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return ((counts - DRAWS * expected) ** 2 / (DRAWS * expected)).sum().item()


def without_residual(draft, q, p):
    """A wrong rule: after a rejection it draws from p itself."""
    held = (torch.rand(1, dtype=p.dtype) * q[0, draft[0]] < p[0, draft[0]]).long()[0]
    return held, torch.multinomial(p[held], 1)


def point_mass(token: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor([token]), 4).double()


@pytest.mark.parametrize("lookup", [False, True], ids=["a drafter that draws", "prompt lookup"])
def test_drawn_tokens_follow_the_models_distribution_whatever_is_drafted(lookup):
    generator = torch.Generator().manual_seed(1)
    p, second = distributions(generator, 1)[0], distributions(generator, 4)
    q = point_mass(2) if lookup else distributions(generator, 1, flat=0.5)
    torch.manual_seed(0)
    assert chi_square(pairs(p, second, q, accept_drawn), p[:, None] * second) < CHI_SQUARE[15]
    assert chi_square(pairs(p, second, q, without_residual), p[:, None] * second) > 10 * CHI_SQUARE[15]


def test_a_draft_from_the_models_own_distribution_always_holds():
    p = distributions(torch.Generator().manual_seed(0), 4)
    torch.manual_seed(0)
    for _ in range(50):
        draft = torch.multinomial(p[:3], 1)[:, 0]
        held, token = accept_drawn(draft, p[:3], p)
        assert held == 3 and 0 <= token < 4


def test_the_token_after_drafts_that_all_hold_is_drawn_from_the_last_distribution():
    p = torch.cat([point_mass(1), distributions(torch.Generator().manual_seed(3), 1)])
    torch.manual_seed(0)
    drawn = [int(accept_drawn(torch.tensor([1]), point_mass(1), p)[1]) for _ in range(DRAWS)]
    assert chi_square(torch.bincount(torch.tensor(drawn), minlength=4), p[1]) < CHI_SQUARE[3]


def test_break_even_is_where_a_step_gains_nothing():
    assert tokens_a_step(0, 4) == 1 and tokens_a_step(1, 4) == 5
    for k, cost in CHEAP.items():
        if k:
            assert tokens_a_step(break_even(cost, k), k) == pytest.approx(cost)
    assert break_even(1, 2) == pytest.approx(0, abs=1e-9)
    assert break_even(3.5, 2) == math.inf


def pace_after(*steps: tuple[int, bool, int], costs=CHEAP, pace: Pace | None = None) -> Pace:
    pace = pace or Pace()
    for k, found, held in steps:
        pace = pace.after(k, found, held, costs)
    return pace


def test_a_call_begins_with_drafts_where_they_are_cheap_and_goes_far_where_they_hold():
    assert Pace().choose(CHEAP) > 0
    assert pace_after(*[(4, True, 4)] * 10).choose(CHEAP) == 7
    some = pace_after(*[(4, True, 1), (4, True, 0)] * 10)
    assert some.choose(CHEAP) == 2


@pytest.mark.parametrize("step", [(4, True, 0), (4, False, 0)], ids=["drafts that fail", "nothing to draft"])
def test_it_rests_where_drafts_lose_and_tries_again_for_one_step(step):
    pace = pace_after(*[step] * 30)
    assert pace.choose(CHEAP) == 0
    rested = 0
    while not (k := pace.choose(CHEAP)):
        pace, rested = pace.after(0, False, 0, CHEAP), rested + 1
    assert (CHEAP[k] - 1) / rested <= LOSS + 1e-9, "trying again costs more than it may"
    assert pace_after((k, *step[1:]), pace=pace).choose(CHEAP) == 0
    recovered = pace
    for _ in range(20):
        recovered = recovered.after(k, True, k, CHEAP)
    assert recovered.choose(CHEAP) == 7


def test_a_step_that_costs_more_than_it_can_give_is_left_alone():
    dear = {0: 1.0, 2: 3.5, 4: 6.0}
    perfect = pace_after(*[(2, True, 2)] * 20, costs=dear)
    assert perfect.rest > 200 and perfect.choose(dear) == 0


def test_tokens_after_the_first_that_fails_are_not_counted_against_the_drafter():
    """Of four drafts one held and one failed; what came after says nothing."""
    long = pace_after(*[(4, True, 1)] * 60)
    assert long.held / long.tried == pytest.approx(0.5, abs=0.01)


def test_a_long_answer_without_anything_to_draft_leaves_what_was_believed_of_drafts():
    free = {0: 1.0, 4: 1.0}
    pace = pace_after(*[(4, False, 0)] * 10_000, costs=free)
    assert pace.held / pace.tried == 0.5
    assert pace_after(*[(4, True, 4)] * 5, costs=free, pace=pace).choose(free) == 4
