import json
import logging

import pytest

from vlmopt.bench import protocol
from vlmopt.bench.dataset import open_samples
from vlmopt.bench.journal import journal_path
from vlmopt.errors import VlmoptError
from vlmopt.tests.bench.fakes import FakeTarget, fake_entrant

KEYWORDS = {"do_sample": False, "temperature": 0.0, "use_cache": True}


class Fakes(dict):
    """The entrants of the latest run by name; `before[name]` is called ahead of each generate call."""

    def __init__(self):
        self.before = {}

    def enter(self, names, *arguments):
        self.clear()
        self.update({name: fake_entrant(name, self.before.get(name, lambda number: None)) for name in names})
        return list(self.values())

    def tokens(self, name):
        return [keywords["max_new_tokens"] for _, keywords in self[name].target.model.calls]


@pytest.fixture
def fakes(monkeypatch):
    fakes = Fakes()
    monkeypatch.setattr(protocol, "enter", fakes.enter)
    return fakes


@pytest.fixture
def start(fakes, dataset_path, tmp_path):
    def start(**changes):
        values = {"model_path": "any", "dataset_path": str(dataset_path), "output": str(tmp_path / "result.json")}
        return protocol.run(protocol.Options(**values | {"num_samples": 6} | changes), wrapper=None)

    return start


def test_the_three_calls_of_a_sample(dataset_path, monkeypatch):
    target, order = FakeTarget(), []
    monkeypatch.setattr(protocol, "clear_cache", lambda device: order.append("clear"))
    monkeypatch.setattr(protocol, "timed", lambda fn, device: order.append("time") or (fn(), 500.0))
    measured = protocol.measure_sample(target, open_samples(dataset_path)[1])

    (first, one), (second, many), (third, answer) = target.model.calls
    assert [k["max_new_tokens"] for k in (one, many, answer)] == [1, 128, 1024]
    for keywords in (one, many, answer):
        assert {k: v for k, v in keywords.items() if k != "max_new_tokens"} == KEYWORDS
    assert first is second and third is not first  # the same inputs twice, then a fresh processor call
    assert order == ["clear", "time"] * 3 + ["clear"]
    assert measured == protocol.SampleResult(
        question_id=1001,
        prediction="green",
        ttft_ms=500.0,
        preprocess_ms=500.0,
        tokens_per_s=12.0,  # "green" and the end token in half a second
        n_tokens=6,
        answer_tokens=6,
    )


def test_the_processor_is_called_as_the_harness_calls_it(dataset_path):
    target = FakeTarget()
    sample = open_samples(dataset_path)[0]
    protocol.prepare(target, sample)
    ((messages, keywords),) = target.processor.calls
    content = [{"type": "image", "image": sample["image"]}, {"type": "text", "text": "which colour is red"}]
    assert messages == [{"role": "user", "content": content}]
    assert keywords == {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}


def test_gradients_are_off_in_generate(dataset_path):
    import torch

    seen = []
    target = FakeTarget(before=lambda number: seen.append(torch.is_grad_enabled()))
    protocol.measure_sample(target, open_samples(dataset_path)[0])
    assert seen == [False] * 3


def test_warm_up_answers_the_first_ten_with_ten_tokens(make_dataset):
    target = FakeTarget()
    samples = open_samples(make_dataset(count=12, damaged=[3]))
    protocol.warm_up(target, samples)
    assert [keywords["max_new_tokens"] for _, keywords in target.model.calls] == [10] * 9  # one image is damaged


def test_a_run_warms_up_measures_and_scores(start, fakes, tmp_path):
    result = start()
    assert fakes.tokens("ours") == [10] * 6 + [1, 128, 1024] * 6
    assert result["accuracy"] == 1.0 and result["complete"] is True
    assert [answer["prediction"] for answer in result["answers"]] == ["red", "green", "blue", "white", "black", "red"]
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_calls_are_counted_per_run_without_the_warm_up(start):
    result = start(num_samples=4)
    assert result["calls"] == {"stages": 12, "kernels": 0, "stock": 0}
    assert result["plan"] == {"active": True, "cls": "exact"}


def test_one_failing_sample_is_kept_and_the_others_go_on(start, fakes, tmp_path):
    def before(number):
        if number == 6 + 3 + 2:  # the second call of the second sample
            raise ValueError("no such\nthing")

    fakes.before["ours"] = before
    result = start()
    assert result["samples"][1]["ours"]["error"] == "ValueError: no such"
    assert result["answers"][1] == {"question_id": 1001, "prediction": ""}
    assert result["performance"]["failed_samples"] == 1
    assert result["accuracy"] == pytest.approx(5 / 6)


def test_an_unreadable_image_fails_its_sample_only(start, make_dataset):
    result = start(dataset_path=str(make_dataset(damaged=[2])))
    errors = [row["ours"]["error"] for row in result["samples"]]
    assert "cannot identify image" in errors.pop(2)
    assert errors == [None] * 5


def test_all_failed_gives_null(start, fakes):
    def before(number):
        raise RuntimeError("out of order")

    fakes.before["ours"] = before
    result = start()
    assert result["performance"]["avg_ttft_ms"] is None
    assert result["performance"]["failed_samples"] == 6
    assert result["score"] is None


def test_compare_alternates_who_goes_first(start, fakes):
    order = []
    for name in ("stock", "ours"):
        fakes.before[name] = lambda number, name=name: order.append(name)
    result = start(mode="compare", num_samples=4)
    assert order == ["stock"] * 6 + ["ours"] * 6 + (["stock"] * 3 + ["ours"] * 6 + ["stock"] * 3) * 2
    assert result["same_predictions"] == result["compared_samples"] == 4
    assert result["score_vs_stock"] is not None
    assert result["calls"]["stages"] == 12


def test_stock_alone_reports_stock(start, fakes):
    result = start(mode="stock", num_samples=2)
    assert list(fakes) == ["stock"]
    assert "ours" not in result["samples"][0] and result["plan"] == {}


def test_random_weights_are_not_asked_for_answers(start, fakes, capsys):
    result = start(model_path="random-2b", num_samples=2)
    assert fakes.tokens("ours")[6:] == [1, 128] * 2
    assert result["accuracy"] is None and result["no_score_because"] == "no answers were scored"
    assert "random weights" in capsys.readouterr().out


def test_fewer_samples_than_asked_for_are_all_taken_and_it_is_said(start, capsys):
    assert len(start(num_samples=50)["samples"]) == 6
    assert "has 6 samples, fewer than the 50 asked for" in capsys.readouterr().out


def test_without_an_answers_column_there_is_no_accuracy(start, make_dataset):
    result = start(dataset_path=str(make_dataset(drop=["answers"])), num_samples=2)
    assert result["accuracy"] is None and result["answers"][0]["prediction"] == "red"


def _interrupt_at(number):
    def before(call):
        if call == number:
            raise KeyboardInterrupt

    return before


def test_interrupted_then_resumed_every_sample_is_there_once(start, fakes, tmp_path, capsys):
    fakes.before["ours"] = _interrupt_at(6 + 3 * 4 + 2)  # in the fifth sample
    with pytest.raises(KeyboardInterrupt):
        start()
    assert not (tmp_path / "result.json").exists()
    fakes.before.clear()
    result = start(resume=True)
    assert fakes.tokens("ours") == [10] * 6 + [1, 128, 1024] * 2
    assert [answer["question_id"] for answer in result["answers"]] == list(range(1000, 1006))
    assert result["calls"]["stages"] + result["calls"]["stock"] == 18
    assert "4 samples are already measured" in capsys.readouterr().out
    assert not journal_path(tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    "change, named",
    [
        ({"seed": 1}, "seed"),
        ({"mode": "stock"}, "mode"),
        ({"preset": "exact"}, "preset"),
        ({"model_path": "b"}, "model"),
    ],
)
def test_resuming_with_other_settings_is_refused(start, fakes, change, named):
    fakes.before["ours"] = _interrupt_at(6 + 3 + 1)
    with pytest.raises(KeyboardInterrupt):
        start()
    with pytest.raises(VlmoptError, match=f"made with .*{named}"):
        start(resume=True, **change)


def test_resuming_on_another_data_set_is_refused(start, make_dataset):
    start()
    with pytest.raises(VlmoptError, match="made with data set"):
        start(resume=True, dataset_path=str(make_dataset(count=3)))


def test_a_finished_run_can_be_extended_but_never_shrinks(start, fakes):
    start(num_samples=2)
    assert len(start(num_samples=4, resume=True)["samples"]) == 4
    assert fakes.tokens("ours")[6:] == [1, 128, 1024] * 2
    assert len(start(num_samples=1, resume=True)["samples"]) == 4
    assert fakes.tokens("ours") == []  # nothing is left to do, so nothing is warmed up


def test_result_is_written_as_the_run_goes_but_not_at_every_sample(start, fakes, monkeypatch, tmp_path):
    now, writes = [0.0], []
    monkeypatch.setattr(protocol.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(protocol, "write_atomic", lambda path, text: writes.append(json.loads(text)))

    def before(number):
        now[0] += 1.0 if number <= 6 else 4.0  # seconds a call takes: 12 a sample

    fakes.before["ours"] = before
    start()
    assert [(len(result["samples"]), result["complete"]) for result in writes] == [(3, False), (6, False), (6, True)]


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"num_samples": 0}, "too few"),
        ({"num_samples": -3}, "too few"),
        ({"dataset_path": "/absent/data"}, "does not exist"),
        ({"device": "tpu:0x"}, "unknown device"),
        ({"device": "meta"}, "not supported"),
        ({"device": "cuda:97"}, "is not here"),
        ({"preset": "fats"}, "unknown preset 'fats'"),
        ({"output": "/dev/null/result.json"}, "cannot be written"),
        ({"output": "/"}, "is a folder"),
    ],
)
def test_what_can_be_checked_is_checked_before_a_model_is_loaded(start, fakes, change, sentence):
    with pytest.raises(VlmoptError, match=sentence) as caught:
        start(**change)
    assert "\n" not in str(caught.value)
    assert not fakes


def test_only_the_temperature_line_is_kept_back(caplog):
    logger = logging.getLogger("transformers.generation.configuration_utils")
    flags = "The following generation flags are not valid and may be ignored: ['temperature']."
    logger.propagate, before = True, logger.propagate
    try:
        with caplog.at_level(logging.WARNING, logger=logger.name), protocol.quiet_generation():
            logger.warning(flags)
            logger.warning("something else")
        assert caplog.messages == ["something else"]
        logger.warning(flags)
        assert flags in caplog.messages
    finally:
        logger.propagate = before
