"""The study of the first token: sizes, checks that can fail, and what is said of a record."""

import torch

import vlmopt
from vlmopt.workbook import end_to_end, first_token_study
from vlmopt.workbook.end_to_end import STOCK, Contender
from vlmopt.workbook.first_token_study import BUCKETS, CPP, PYTHON
from vlmopt.workbook.record import Record, Roof


def test_sizes_are_those_that_the_harness_might_draw():
    sizes = first_token_study.unseen_sizes("full", 0)
    assert len(sizes) == 200 and len(set(sizes)) > 195
    assert all(448 <= side <= 1344 for size in sizes for side in size)
    assert sizes == first_token_study.unseen_sizes("full", 0) != first_token_study.unseen_sizes("full", 1)


def test_the_tower_check_sees_a_wrong_tower(monkeypatch):
    assert [value for _, _, value, _ in first_token_study.tower_check(0)] == [0, 0, 0]
    encode = first_token_study.encode
    monkeypatch.setattr(first_token_study, "encode", lambda *args: (encode(*args)[0] + 1e-3, encode(*args)[1]))
    assert all(value > 0 for _, _, value, _ in first_token_study.tower_check(0))


def test_drivers_differ_in_one_switch():
    for on_gpu in (False, True):
        configs = first_token_study.drivers(on_gpu)
        python, by_buckets, cpp = (configs[name].model_dump() for name in (PYTHON, BUCKETS, CPP))
        assert {key for key in python if python[key] != cpp[key]} == {"cpp_runtime"}
        assert {key for key in python if python[key] != by_buckets[key]} == {"prompt_graphs"}


def unseen(record: Record, first: dict[str, list[float]], again: dict[str, float], made: int = 0) -> None:
    for name, values in first.items():
        record.measure("4 sizes never seen", name, "unseen_ms", "ms", values)
        record.measure("4 sizes never seen", name, "compilations", "kernels", [made])
        if name != STOCK:
            record.measure("4 sizes never seen", name, "unseen_ratio", "×", [value / again[name] for value in values])


def test_the_driver_with_the_lower_median_and_tail_is_chosen(checked):
    first = {STOCK: [60.0], PYTHON: [24.0, 25, 25, 26], BUCKETS: [12.0, 12, 12, 40], CPP: [12.0, 12, 12, 12.5]}
    unseen(checked, first, {PYTHON: 24.5, BUCKETS: 12, CPP: 12})
    names = [PYTHON, BUCKETS, CPP]
    assert first_token_study.chosen(checked, names) == CPP
    answer, verdict = first_token_study.conclude_unseen(checked, names)
    assert answer.startswith("Over 4 sizes never seen: `from C++` 12 ms, 95 % within") and "`stock` 60 ms" in answer
    assert verdict == "`from C++` is chosen; a size never seen costs what a repeated one does, and compiles nothing."
    table = {row["provider"]: row["stands"] for row in first_token_study.standing(checked)}
    assert list(table) == names
    assert table[CPP] == "good" and "largest above 2.0" in table[BUCKETS]


def test_a_fault_of_the_chosen_driver_is_named(checked):
    unseen(checked, {STOCK: [60.0], CPP: [12.0, 12, 12, 40]}, {CPP: 12}, made=3)
    checked.measure("4 sizes never seen", "all", "memory_growth_mb", "MB", [900.0])
    _, verdict = first_token_study.conclude_unseen(checked, [CPP])
    assert "largest above 2.0, 3 kernels compiled; memory grows by 900 MB" in verdict


def test_memory_that_stays_is_no_fault(checked):
    unseen(checked, {STOCK: [60.0], CPP: [12.0, 12, 12, 12]}, {CPP: 12})
    checked.measure("4 sizes never seen", "all", "memory_growth_mb", "MB", [4.0])
    assert "costs what a repeated one does" in first_token_study.conclude_unseen(checked, [CPP])[1]


def test_a_host_bound_first_token_is_named(checked):
    for name, ms, busy in ((STOCK, 56.0, 20.0), ("fast", 24.0, 10.6)):
        checked.measure("m 768x1024", name, "ttft_ms", "ms", [ms], flops=1e12, ceiling=Roof(4e12, 8e14))
        checked.measure("m 768x1024", name, "ttft_busy_ms", "ms", [busy])
        checked.measure("m 768x1024", name, "ttft_launches", "launches", [639])
    checked.measure("m 768x1024", "floor", "ttft_ms", "ms", [6.7])
    answer, verdict = first_token_study.conclude(checked, "m", [(768, 1024)])
    assert answer == "The first token comes at 768x1024 in 24 ms (`fast`, stock 56, floor 6.7)."
    assert verdict == "m 768x1024: the device works 10.6 ms in 639 launches, the rest is the host's."


def test_sizes_are_measured_on_every_provider(checked, tiny):
    copy = end_to_end.contenders(tiny, ["exact"], checked)
    first_token_study.measure_sizes(checked, copy, [(64, 96)], Roof(1e10, 1e11), 0, rounds=2)
    first_token_study.measure_unseen(checked, copy, [(64, 70), (80, 64)], 0)
    for metric in ("ttft_ms", "ttft_busy_ms", "ttft_launches", "unseen_ms", "compilations"):
        assert {STOCK, "exact"} <= {row["provider"] for row in checked.find(metric)}
    for metric in ("repeated_ms", "unseen_ratio"):  # stock's calls are long, and nothing is asked of their ratio
        assert [row["provider"] for row in checked.find(metric)] == ["exact"]
    assert checked.find("unseen_ms", STOCK)[0]["n"] == checked.find("unseen_ratio", "exact")[0]["n"] == 2
    assert checked.value("compilations", "exact") == 0
    assert vlmopt.status(copy["exact"].target.model).calls["stock"] == 0


def test_an_answer_that_differs_is_counted(tiny, monkeypatch):
    field = {name: Contender(name, tiny, "near", {}, None) for name in (STOCK, CPP)}
    values = iter(range(100))
    monkeypatch.setattr(first_token_study.answers, "new_ids", lambda *_: next(values))
    ((name, _, differing, _),) = first_token_study.driver_checks(field, list(range(50)), 0)
    assert differing == 6 and name.endswith(CPP)
    monkeypatch.setattr(first_token_study.answers, "new_ids", lambda target, sample, tokens: torch.Size([sample]))
    assert first_token_study.driver_checks(field, list(range(50)), 0)[0][2] == 0
