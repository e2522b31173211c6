"""The ablation: what is built up and taken away, how answers are held to their class, what a record says of it."""

import itertools

import pytest

import vlmopt
from vlmopt.bench.dataset import open_samples
from vlmopt.config import PRESETS, OptimizeConfig
from vlmopt.errors import VlmoptError
from vlmopt.ops import KERNELS
from vlmopt.workbook import ablation, end_to_end
from vlmopt.workbook.ablation import Sizes
from vlmopt.workbook.record import ROOT

EXACT = OptimizeConfig.preset("exact")
COPIES = OptimizeConfig.make(**PRESETS["exact"], weights="int4", head8=True)


@pytest.fixture(scope="module")
def sample():
    return end_to_end.longest_sample(open_samples(ROOT / "data"))


def test_the_ladder_ends_with_the_whole_and_each_rung_has_more():
    ladder = ablation.ladder(on_gpu=True)
    assert set(ablation.PREDICTED_MS) == set(ladder) | {"fast8", "fast4"}
    kernels = [set(config.kernels) for config in ladder.values() if config and isinstance(config.kernels, tuple)]
    assert all(a < b for a, b in itertools.pairwise(kernels))
    assert "decode_layer" in kernels[-1] and kernels[-1] <= set(KERNELS)
    assert set(KERNELS) - kernels[-1] == {"lm_head_logits"}
    assert next(iter(ablation.ladder(on_gpu=False))) == "stock"
    assert list(ladder)[-2:] == [ablation.whole(on_gpu=True), "fast"] and ladder["fast"].kernels == "all"
    assert list(ablation.ladder(on_gpu=False))[-1] == ablation.whole(on_gpu=False)


def test_one_thing_at_a_time_is_taken_away():
    away = ablation.without(on_gpu=True)
    whole = OptimizeConfig.make(**{**PRESETS["fast"], "cpp_runtime": False}).model_dump()
    groups = {name.removeprefix("+ "): set(kernels) for name, kernels in ablation.GROUPS.items()}
    for name, config in away.items():
        what = name.removeprefix("without ")
        values = config.model_dump()
        if what in groups:
            assert set(KERNELS) - set(values.pop("kernels")) == groups.pop(what)
            assert values == {key: value for key, value in whole.items() if key != "kernels"}
        else:
            assert values == {**whole, what: False}
    assert not groups
    assert not any("decode_graph" in name for name in ablation.without(on_gpu=False))


def test_every_kernel_that_a_greedy_call_reaches_can_be_taken_away_alone():
    alone = ablation.kernel_by_kernel(on_gpu=True)
    missing = {name.removeprefix("without "): set(KERNELS) - set(config.kernels) for name, config in alone.items()}
    assert missing == {name: {name} for name in set(KERNELS) - {"lm_head_logits"}}
    assert ablation.kernel_by_kernel(on_gpu=False) == {}


def test_nothing_that_is_taken_away_is_needed_by_what_is_left(tiny):
    every = ablation.ladder(on_gpu=True) | ablation.without(on_gpu=True) | ablation.kernel_by_kernel(on_gpu=True)
    parts = [part for config in every.values() if config for part in vlmopt.plan(tiny.model, config).parts]
    skipped = {part.name for part in parts if part.state == "skipped" and "a CUDA device" not in part.reason}
    assert not skipped
    lacking = OptimizeConfig.preset("fast", vision=False)
    assert any("needs the vision" in part.reason for part in vlmopt.plan(tiny.model, lacking).parts)


def test_presets_over_copies_are_skipped_by_name_where_there_is_no_gpu(tiny, checked):
    assert ablation.lossy(tiny, checked) == {}
    assert [entry["what"] for entry in checked.skipped] == ["preset fast8 on tiny", "preset fast4 on tiny"]
    assert all("decode_graph needs a CUDA device" in entry["reason"] for entry in checked.skipped)


def test_presets_over_copies_stand_above_the_ladder_where_they_run(tiny, checked, monkeypatch):
    monkeypatch.setattr(vlmopt, "plan", lambda *_: vlmopt.Plan(EXACT, "lossy", [], {}))
    assert ablation.lossy(tiny, checked) == {name: OptimizeConfig.preset(name) for name in ("fast8", "fast4")}
    assert checked.skipped == []


def test_every_config_but_stock_has_its_class(tiny, checked):
    checked.config["providers"] = ablation.classes(tiny.model, {"stock": None, "exact": EXACT, "copies": COPIES})
    assert [checked.label(name) for name in ("stock", "exact", "copies")] == [
        "stock",
        "exact",
        "copies (lossy)",
    ]
    assert "fast8 (lossy), case" in ablation.predicted("fast8", "case")


def answering(monkeypatch, change) -> None:
    """Puts what `change` makes of the ids in the place of what an optimised model answers."""
    generate = ablation.protocol.generate

    def other(target, inputs, tokens):
        ids = generate(target, inputs, tokens)
        return change(ids, inputs["input_ids"].shape[1]) if vlmopt.status(target.model).active else ids

    monkeypatch.setattr(ablation.protocol, "generate", other)


def last_id_changed(ids, length):
    ids[0, -1] += 1
    return ids


def all_ids_changed(ids, length):
    ids[0, length:] += 1
    return ids


def test_configs_that_answer_as_stock_does_pass(tiny, sample, checked):
    ablation.check_answers(checked, tiny, sample, {"stock": None, "exact": EXACT, "copies": COPIES}, tokens=4)
    near, lossy = checked.checks[1:]
    assert (near["class"], near["measured"], near["bound"]) == ("near", 0, 0)
    assert (lossy["class"], lossy["bound"]) == ("lossy", 0.5)
    assert lossy["name"] == f"copies: share of other ids than stock's, sample {sample['question_id']}"
    assert not vlmopt.status(tiny.model).active


def test_one_other_id_is_too_many_for_a_config_that_is_not_lossy(tiny, sample, checked, monkeypatch):
    answering(monkeypatch, last_id_changed)
    with pytest.raises(VlmoptError, match="failed: 1 is above its bound 0"):
        ablation.check_answers(checked, tiny, sample, {"exact": EXACT, "copies": COPIES}, tokens=4)


def test_a_lossy_config_may_differ_in_an_id_but_not_in_all(tiny, sample, checked, monkeypatch):
    answering(monkeypatch, last_id_changed)
    ablation.check_answers(checked, tiny, sample, {"copies": COPIES}, tokens=4)
    assert checked.checks[-1]["measured"] == 0.25
    answering(monkeypatch, all_ids_changed)
    with pytest.raises(VlmoptError, match="copies: share of other ids"):
        ablation.check_answers(checked, tiny, sample, {"copies": COPIES}, tokens=4)


def test_an_answer_of_another_length_counts_as_other(tiny, sample, monkeypatch):
    answering(monkeypatch, lambda ids, length: ids[:, : length + 1])
    assert ablation.other_ids(tiny, sample, {"exact": EXACT}, 4) == {"exact": 0.75}


def test_each_config_is_timed_so_often_and_the_model_given_back(tiny, sample):
    found = ablation.measure(tiny, sample, {"stock": None, "exact": EXACT}, "exact", Sizes(1, 1), seed=0)
    assert {name: len(times) for name, times in found["ttft_ms"].items()} == {"stock": 2, "exact": 6}
    assert {name: len(times) for name, times in found["decode_ms_per_token"].items()} == {"stock": 1, "exact": 3}
    assert not vlmopt.status(tiny.model).active


def test_what_others_are_held_against_comes_first_in_the_middle_and_last():
    orders = [ablation._order("abcdefg", "d", seed) for seed in (0, 1)]
    for order in orders:
        assert [i for i, name in enumerate(order) if name == "d"] == [0, 4, 8]
        assert sorted(order) == sorted("abcdefgdd")
    assert orders[0] != orders[1] and orders[0] == ablation._order("abcdefg", "d", 0)


def test_the_time_of_a_further_token_is_the_long_call_less_the_first_token(tiny, sample, monkeypatch):
    asked = []

    def timed(fn, device):
        asked.append(fn().shape[1])
        return fn(), 10.0 if len(asked) % 2 == 0 else 40.0

    monkeypatch.setattr(ablation, "timed", timed)
    inputs = ablation.protocol.prepare(tiny, sample)
    firsts, steps = ablation._times(tiny, inputs, None, Sizes(0, 1))
    later = asked[-1] - inputs["input_ids"].shape[1] - 1
    assert firsts == [10.0] and 0 < later < ablation.EAGER_TOKENS
    assert steps == [pytest.approx(30.0 / later)]


def test_a_call_that_went_to_stock_is_not_timed_as_ours(tiny, sample):
    handle = tiny.model.register_forward_hook(lambda *_: None)
    with pytest.raises(VlmoptError, match="exact handed 3 calls to stock"):
        ablation.measure(tiny, sample, {"exact": EXACT}, "exact", Sizes(0, 1), seed=0)
    handle.remove()
    vlmopt.revert(tiny.model)


def test_an_answer_of_one_token_cannot_time_a_further_one(tiny, sample, monkeypatch):
    monkeypatch.setattr(ablation, "EAGER_TOKENS", 1)
    with pytest.raises(VlmoptError, match="one token long"):
        ablation.measure(tiny, sample, {"stock": None}, "stock", Sizes(0, 1), seed=0)


def test_what_costs_nothing_when_taken_away_is_kept_as_lost(checked):
    samples = {
        "ttft_ms": {"stock": [30.0], "all": [10.0, 11.0], "fast8": [9.0], "without a": [15, 16], "without b": [10, 11]},
        "decode_ms_per_token": {
            **{"stock": [30.0], "all": [1.0, 1.1], "fast8": [0.63]},
            **{"without a": [1.0, 1.0], "without b": [1.0, 1.1]},
        },
    }
    checked.config["providers"] = {"all": {"class": "near"}, "fast8": {"class": "lossy"}}
    for metric, values in samples.items():
        for name in ("stock", "all", "fast8"):
            checked.measure("case", name, metric, "ms", values[name])
    ablation.measure_losses(checked, "case", samples, ["without a", "without b"], "all")
    assert checked.value("ttft_lost_ms", "without a") == 5
    ablation.lose(checked, "case")
    assert [entry["what"] for entry in checked.lost] == ["b"]
    answer, verdict = ablation.conclude(checked, "case")
    assert "From stock to `all` (near) a further token falls from 30 to 1.05 ms" in answer
    assert "the first from 30 to 10.5" in answer and "a for the first token (5 ms)" in answer
    assert answer.endswith(" Over quantised copies a further token takes `fast8` (lossy) 0.63 ms.")
    assert verdict == "Nothing measurable comes from b."
