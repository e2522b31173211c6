"""Stock against ours on random conversations."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vlmopt
from vlmopt import OptimizeConfig
from vlmopt.workbook import contract_study
from vlmopt.workbook.conversations import KINDS, PLAIN, draw

SERVING = OptimizeConfig.preset("exact", batches=True)


@pytest.fixture
def serving(ours):
    vlmopt.optimize(ours, SERVING)
    return ours


def test_random_conversations_get_stocks_ids_or_exception(serving, reference):
    kinds, served = Counter(), Counter()

    @settings(max_examples=200)
    @given(st.randoms(use_true_random=False))
    def run(rng):
        verdict = contract_study.compare(draw(rng, sampling=True), reference, serving, None)
        kinds[verdict.kind] += 1
        served[verdict.kind] += verdict.served
        assert not verdict.differs

    run()
    assert set(kinds) == set(KINDS) and kinds.total() >= 200
    assert served[PLAIN] / kinds[PLAIN] >= contract_study.LEAST_SERVED
    assert served["batch"] and served["options"] and served["chat"] and not served["video"]
