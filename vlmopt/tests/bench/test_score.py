import pytest

from vlmopt.bench.score import CONTEST, Baseline, score, why_no_score


def test_baseline_itself_scores_its_accuracy_alone():
    assert score(0.8, 80.0, 55.0) == pytest.approx(0.32)


def test_hand_computed_gain_and_loss():
    assert score(0.9, 40.0, 110.0) == pytest.approx(0.4 * 0.9 + 0.3 * 0.5 + 0.3 * 1.0)
    assert score(1.0, 160.0, 27.5) == pytest.approx(0.4 - 0.3 - 0.15)


def test_measured_baseline():
    assert score(0.5, 10.0, 200.0, Baseline(20.0, 100.0)) == pytest.approx(0.2 + 0.15 + 0.3)


@pytest.mark.parametrize(
    "values, baseline, reason",
    [
        ((0.9, None, 50.0), CONTEST, "no sample was measured"),
        ((0.9, 50.0, None), CONTEST, "no sample was measured"),
        ((None, 50.0, 50.0), CONTEST, "no answers were scored"),
        ((0.9, 50.0, 50.0), Baseline(None, None), "the baseline was not measured"),
        ((0.9, 50.0, 50.0), Baseline(20.0, None), "the baseline was not measured"),
        ((0.9, 50.0, 50.0), Baseline(None, 100.0), "the baseline was not measured"),
    ],
)
def test_no_score_without_its_parts_and_the_reason_is_told(values, baseline, reason):
    assert score(*values, baseline) is None
    assert why_no_score(*values, baseline) == reason


def test_a_complete_measurement_has_no_reason():
    assert why_no_score(0.0, 50.0, 50.0) is None
