"""Records made up for the tests: an end-to-end comparison with every kind of entry."""

from collections.abc import Callable

import pytest

from vlmopt.workbook.record import Record, Roof

ENVIRONMENT = {
    "device": "test-gpu",
    "gpu_name": "Test GPU",
    "cpu_model": "Test CPU",
    "torch": "2.0",
    "triton": None,
    "transformers": "5.0",
    "python": "3.11",
    "commit": "0123456789abcdef",
    "dirty": False,
    "clock_mhz": 1980.0,
    "power_w": 300.0,
    "temperature_c": 40.0,
    "threads": 2,
    "timestamp": "2026-01-01T00:00:00+00:00",
}
CASE = "random-2b 768x1024"


@pytest.fixture
def make_record() -> Callable[..., Record]:
    """A finished `61_end_to_end`; keyword arguments replace fields, `scale` multiplies every time of `fast`."""

    def make(scale: float = 1.0, **fields) -> Record:
        record = Record(
            **{
                "slug": "61_end_to_end",
                "question": "How much faster?",
                "profile": "full",
                "weights": "random-2b",
                "environment": dict(ENVIRONMENT),
                "answer": "Twice as fast.",
                "verdict": "Worth it.",
                "config": {"providers": {"fast": {"class": "near"}}},
                **fields,
            }
        )
        record.predict("decode ratio", 2.0, "×")
        record.settle("decode ratio", 2.1)
        record.check("answers with other ids", "near", 0, 0)
        for provider, factor in (("stock", 2.0), ("fast", scale)):
            times = [factor * (1 + 0.01 * i) for i in range(5)]
            record.measure(CASE, provider, "ttft_ms", "ms", [10 * t for t in times])
            roof = Roof(bytes_per_s=4e12)
            record.measure(CASE, provider, "decode_ms_per_token", "ms", times, bytes=2e9, ceiling=roof)
            record.measure(CASE, provider, "tokens_per_s", "tokens/s", [100 / t for t in times])
        record.measure(CASE, "floor", "decode_ms_per_token", "ms", [0.5])
        record.skip("fast8", "it does not exist yet")
        record.lose("one block a row", "Too few loads in flight.")
        return record

    return make


@pytest.fixture
def checked() -> Record:
    """A record of nothing yet, whose checks have passed, so that it can be measured into."""
    record = Record("61_end_to_end", "How fast?", "full", "random-2b", dict(ENVIRONMENT))
    record.check("nothing", "exact", 0, 0)
    return record
