"""The studies of the decode step and the cache: what they compare, and what they say of a record."""

import pytest
import torch

import vlmopt
from vlmopt.bench.dataset import open_samples
from vlmopt.kernels.decode_attention import decode_attention_ref
from vlmopt.ops import Ops
from vlmopt.runtime.generate import ENGINES
from vlmopt.workbook import cache_study, decode_study, end_to_end
from vlmopt.workbook.decode_study import LAYERS, REFERENCES, RUNGS, WHOLE, at
from vlmopt.workbook.record import ROOT, Record, Roof


def offered(ops: Ops) -> set[str]:
    return {name for name, value in vars(ops).items() if value is not getattr(Ops(), name)}


def test_each_rung_adds_to_those_before_it():
    tables = decode_study.tables()
    assert list(tables) == list(RUNGS) and tables[REFERENCES] == Ops()
    before: set[str] = set()
    for rung, added in RUNGS.items():
        now = offered(tables[rung])
        assert now == (before | set(added)) - ({"decode_layer"} if rung == WHOLE else set())
        before = now
    assert "decode_step" not in offered(tables[LAYERS])
    assert set(decode_study.PREDICTED_MS) == set(RUNGS)


def steps(record: Record, times: dict[str, tuple[float, float]]) -> None:
    for rung, pair in times.items():
        for row, moved, ms in zip((800, 4096), (3.0e9, 3.4e9), pair, strict=True):
            record.measure(at("m", row), rung, "step_ms", "ms", [ms], bytes=moved, ceiling=Roof(4e12))


def test_extra_positions_are_held_against_their_bytes(checked):
    steps(checked, {LAYERS: (1.0, 1.1), WHOLE: (1.1, 1.3)})
    table = decode_study.extra(checked, "m", [800, 4096], copy_rate=4e12)
    assert [row["step"] for row in table] == [LAYERS, WHOLE]
    assert [row["allowed"] for row in table] == pytest.approx([0.4e9 / 3e12 * 1e3] * 2)
    assert [row["stands"] for row in table] == ["good", "above what its bytes allow"]


def test_the_faster_rival_wins_and_the_other_is_kept_as_lost(checked):
    steps(checked, {REFERENCES: (4.0, 4.5), "+ products": (4.2, 4.4), LAYERS: (1.0, 1.1), WHOLE: (1.1, 1.2)})
    case = at("m", 800)
    checked.predict(decode_study.predicted(LAYERS, case), 1.06, "ms")
    decode_study.settle(checked, case)
    assert checked.predictions[0]["measured"] == 1.0
    decode_study.lose(checked, case, [])
    assert [entry["what"] for entry in checked.lost] == [WHOLE, "+ products"]
    answer, verdict = decode_study.conclude(checked, case, decode_study.extra(checked, "m", [800, 4096], 4e12))
    assert answer.startswith(
        "Five launches a layer: 1 ms a step (m at 800), 75 % of the read rate, against 1.1 for one"
    )
    assert verdict == "five launches a layer wins; more positions cost what their bytes do."
    checked.measure("steps", LAYERS, "flat_share", "share", [0.98])
    assert "only 98.0% of single steps" in decode_study.conclude(checked, case, [])[1]


def test_a_rival_whose_further_positions_cost_too_much_is_not_kept(checked):
    steps(checked, {REFERENCES: (4.0, 4.5), LAYERS: (1.0, 1.5), WHOLE: (1.1, 1.2)})
    case, table = at("m", 800), decode_study.extra(checked, "m", [800, 4096], 4e12)
    assert decode_study.kept(checked, case, table) == WHOLE and decode_study.kept(checked, case, []) == LAYERS
    decode_study.lose(checked, case, table)
    assert checked.lost[0]["what"] == LAYERS
    assert checked.lost[0]["lesson"].endswith("but further positions cost it more than their bytes")
    answer, verdict = decode_study.conclude(checked, case, table)
    assert answer.startswith("Five launches a layer: 1 ms")
    assert verdict.startswith("One launch is what the table of ops has. But five launches a layer, m at 4,096: above")


def test_a_rival_that_is_faster_at_every_length_is_kept_whatever_its_further_positions_cost(checked):
    steps(checked, {REFERENCES: (4.0, 4.5), LAYERS: (1.0, 1.19), WHOLE: (1.1, 1.2)})
    case, table = at("m", 800), decode_study.extra(checked, "m", [800, 4096], 4e12)
    assert {row["step"]: row["stands"] == "good" for row in table} == {REFERENCES: False, LAYERS: False, WHOLE: True}
    assert decode_study.kept(checked, case, table) == LAYERS
    decode_study.lose(checked, case, table)
    assert checked.lost[0]["what"] == WHOLE
    verdict = decode_study.conclude(checked, case, table)[1]
    assert verdict.startswith(
        "Five launches a layer is what the table of ops has. But five launches a layer, m at 4,096"
    )


def test_a_record_from_a_cpu_claims_no_speed(checked):
    steps(checked, {REFERENCES: (4.0, 4.5)})
    answer, verdict = decode_study.conclude(checked, at("m", 800), [])
    assert "the references take 4 ms a step" in answer and "no speed is claimed" in verdict


def test_the_timeline_starts_with_its_first_span():
    x = torch.randn(8, 8)
    spans = decode_study.timeline(lambda: [x @ x for _ in range(6)], torch.device("cpu"), 1, 3)
    assert len(spans) == 3 and spans[0][1] == 0
    assert all(name == "matmul" and start < end for name, start, end in spans)


def contender(model) -> end_to_end.Contender:
    return end_to_end.Contender("exact", model, "exact", {}, None)


def test_the_cache_checks_hold_and_see_a_cache_that_is_read_too_far(tiny):
    vlmopt.optimize(tiny.model, "exact")
    sample = end_to_end.longest_sample(open_samples(ROOT / "data"))
    found = cache_study.checks("exact", contender(tiny), sample, [1, 3, 8])
    assert [name.split(": ")[1] for name, *_ in found] == ["differing ids"] * 5
    assert [value for _, _, value, _ in found] == [0] * 5
    vlmopt.optimize(tiny.model, "exact")
    ENGINES[tiny.model].ops = Ops(decode_attention=lambda q, k, v, length: decode_attention_ref(q, k, v, k.shape[1]))
    values = {name: value for name, _, value, _ in cache_study.checks("exact", contender(tiny), sample, [1, 3, 8])}
    assert values["exact, NaN behind the live rows: differing ids"] > 0
    vlmopt.revert(tiny.model)


def test_a_call_that_gives_other_ids_when_made_again_is_noticed(tiny, monkeypatch):
    sample = end_to_end.longest_sample(open_samples(ROOT / "data"))
    assert cache_study.noise(contender(tiny), sample, 4) == 0
    answers = iter([[1, 2, 3], [1, 2, 3], [1, 5, 6], [1, 2, 4]])
    monkeypatch.setattr(cache_study, "new_ids", lambda *_: next(answers))
    assert cache_study.noise(contender(tiny), sample, 3, rounds=3) == 2


def test_memory_steps_with_the_capacity(checked, tiny):
    weights = cache_study.text_weights(tiny)
    cache_study.measure_memory(checked, weights, "smoke")
    live = [row["p50"] for row in checked.find("live_mb")]
    capacity = [row["p50"] for row in checked.find("capacity_mb")]
    assert len(live) == 16 and all(a <= b for a, b in zip(live, capacity, strict=True))
    assert live[-1] == capacity[-1] == pytest.approx(4096 * 4 * 2 * 2 * 128 * 4 / 1e6)
    assert len(set(capacity)) == 4


def test_a_peak_above_stock_s_a_tenth_and_the_cache_is_named(checked):
    for name, gb in (("stock", 4.0), ("exact", 4.5), ("fast", 4.7)):
        checked.measure("c", name, "peak_memory_gb", "GB", [gb])
        checked.measure("c", name, "decode_ms_per_token", "ms", [1.0])
    checked.measure("capacity 8", "static", "grow_ms", "ms", [1.0])
    table = cache_study.peaks(checked, "c", int(0.2e9))
    assert [(row["provider"], row["stands"]) for row in table] == [("exact", "good"), ("fast", "above it")]
    assert table[0]["allowed"] == pytest.approx(4.6)
    assert cache_study.conclude(checked, "c", table)[1] == "fast peaks at 4.7 GB where 4.6 are allowed."
    assert cache_study.conclude(checked, "c", table[:1])[1] == "Kept."
    assert cache_study.peaks(checked, "another", 0) == []


def test_a_slow_optimize_and_a_slow_host_are_named(checked):
    checked.measure("no kernel compiled before", "fast", "optimize_s", "s", [91.0])
    checked.measure("compiled kernels kept", "fast", "optimize_s", "s", [19.0])
    checked.measure("c", "stock", "decode_ms_per_token", "ms", [1.0])
    checked.measure("capacity 8", "static", "grow_ms", "ms", [1.0])
    checked.measure("c", "fast", "host_before_launch_ms", "ms", [0.7])
    slow, host = cache_study.conclude(checked, "c", [])[1].split("; ")
    assert slow == "`optimize` takes 91 s with no kernel compiled before where 90 are allowed"
    assert host.startswith("fast takes 0.7 ms to the first launch")
