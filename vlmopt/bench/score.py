"""The contest's score: 40 % accuracy, 30 % relative gain in time to first token, 30 % relative gain in throughput."""

from dataclasses import dataclass

ACCURACY_SHARE = 0.4
TTFT_SHARE = 0.3
THROUGHPUT_SHARE = 0.3


@dataclass(frozen=True)
class Baseline:
    """What a gain is measured against.

    ttft_ms: time to first token, milliseconds. tokens_per_s: new tokens per second over a call of 128 tokens, prefill
    included. Either is None where it could not be measured.
    """

    ttft_ms: float | None
    tokens_per_s: float | None


CONTEST = Baseline(ttft_ms=80.0, tokens_per_s=55.0)


def score(
    accuracy: float | None, ttft_ms: float | None, tokens_per_s: float | None, baseline: Baseline = CONTEST
) -> float | None:
    """The score against `baseline`; None where `why_no_score` gives a reason.

    0.4 × accuracy + 0.3 × (TTFT₀ − TTFT) / TTFT₀ + 0.3 × (tok/s − tok/s₀) / tok/s₀, unbounded on both sides: a system
    slower than the baseline loses what a faster one gains.
    """
    if why_no_score(accuracy, ttft_ms, tokens_per_s, baseline):
        return None
    ttft_gain = (baseline.ttft_ms - ttft_ms) / baseline.ttft_ms
    throughput_gain = (tokens_per_s - baseline.tokens_per_s) / baseline.tokens_per_s
    return ACCURACY_SHARE * accuracy + TTFT_SHARE * ttft_gain + THROUGHPUT_SHARE * throughput_gain


def why_no_score(
    accuracy: float | None, ttft_ms: float | None, tokens_per_s: float | None, baseline: Baseline = CONTEST
) -> str | None:
    """The reason why there is no score, as a short clause; None when there is one."""
    if ttft_ms is None or tokens_per_s is None:
        return "no sample was measured"
    if accuracy is None:
        return "no answers were scored"
    if not baseline.ttft_ms or not baseline.tokens_per_s:
        return "the baseline was not measured"
    return None
