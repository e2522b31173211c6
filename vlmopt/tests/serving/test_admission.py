"""Settings, what requests say of themselves, and what is learned: the part of the scheduler that needs no vLLM."""

import json

import pytest

from vlmopt.errors import VlmoptError
from vlmopt.serving.admission import Counts, Knowledge, Said, Settings, check_version, parse_policy


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.32.0+cpu", "0.33.1rc2.dev3"])
def test_supported_versions_pass(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.30.0", "0.9.2", "dev", ""])
def test_other_versions_are_refused_in_one_sentence(version):
    with pytest.raises(VlmoptError, match=r"^vLLM .* is not supported, .*\.$") as error:
        check_version(version)
    assert "\n" not in str(error.value)


def test_settings_make_a_round_trip_and_keep_what_is_not_named():
    settings = Settings.make({"policy": "brakes", "soft": 0.5, "ageing": 3, "control": True})
    assert (settings.policy, settings.options.soft, settings.options.ageing) == ("brakes", 0.5, 3)
    assert Settings.make(json.loads(json.dumps(settings.as_dict()))) == settings
    changed = Settings.make({"policy": "vllm"}, settings)
    assert (changed.policy, changed.options, changed.control) == ("vllm", settings.options, True)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"polici": "fcfs"}, "nearest is 'policy'"),
        ({"haard": 0.1}, "nearest is 'hard'"),
        ({"policy": "reserv"}, "nearest is 'reserve'"),
        ({"hard": "much"}, "takes float"),
        ({"batch": True}, "takes int"),
        ({"batch": 0}, "1 or more"),
        ({"order": 1}, "takes bool"),
        ({"predict": "all"}, "'quantile' or 'most'"),
        ({"quantile": 0.0}, r"quantile in \(0, 1\]"),
        ({"window": 0}, "at least 1"),
        ({"slo": -1.0}, "0 or more"),
    ],
)
def test_a_bad_setting_is_refused_by_name(values, said):
    with pytest.raises(VlmoptError, match=said):
        Settings.make(values)


def test_a_policy_is_written_with_its_changes():
    assert parse_policy("fcfs") == {"policy": "fcfs"}
    changed = parse_policy("reserve:predict=most,order=false,quantile=0.8")
    assert changed == {"policy": "reserve", "predict": "most", "order": False, "quantile": 0.8}
    assert Settings.make(changed).options.order is False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("reserv", "nearest is 'reserve'"),
        ("", "unknown policy ''"),
        ("reserve:order", "'order' is no change"),
        ("reserve:policy=fcfs", "is no change"),
        ("reserve:control=true", "is no change"),
        ("reserve:ordr=false", "nearest is 'order'"),
        ("reserve:order=maybe", "takes bool"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(text, said):
    with pytest.raises(VlmoptError, match=said):
        parse_policy(text)


def test_what_a_request_says_is_read():
    said = Said.read({"vlmopt_kind": "how-to", "vlmopt_slo": 30, "vlmopt_max_tokens": 64.0, "other": object()})
    assert said == Said("how-to", 30.0, 64, 0)
    assert Said.read(None) == Said.read({}) == Said()


@pytest.mark.parametrize("slo", ["soon", True, -1.0, float("inf"), float("nan"), [3]])
def test_a_malformed_entry_counts_as_not_said(slo):
    assert Said.read({"vlmopt_slo": slo, "vlmopt_kind": "a"}) == Said("a", None, None, 1)


def test_a_request_with_three_malformed_entries():
    assert Said.read({"vlmopt_slo": 0, "vlmopt_kind": 3, "vlmopt_max_tokens": float("nan")}).faults == 3


def test_expected_lies_between_one_more_token_and_the_most():
    knowledge = Knowledge(Settings())
    for _ in range(64):
        knowledge.finished("short", 20, 1.0)
    assert knowledge.expected("short", 10, 0, 500) == 30
    assert knowledge.expected("short", 10, 0, 25) == 25
    assert knowledge.expected("short", 10, 40, 500) > 10 + 40
    assert knowledge.expected("short", 10, 40, 50) == 10 + 40 + 1


def test_predicting_the_most_ignores_what_was_learned():
    knowledge = Knowledge(Settings.make({"predict": "most"}))
    for _ in range(64):
        knowledge.finished("short", 20, 1.0)
    assert knowledge.expected("short", 10, 0, 500) == 500


def test_service_follows_the_seconds_a_token_takes():
    knowledge = Knowledge(Settings())
    assert knowledge.service(100) == 0
    knowledge.finished("a", 10, 5.0)
    assert knowledge.service(100) == pytest.approx(50)
    for _ in range(200):
        knowledge.finished("a", 10, 1.0)
    assert knowledge.service(100) == pytest.approx(10, rel=0.01)
    assert knowledge.service(-3) == 0


def test_answers_of_a_few_tokens_say_little_about_the_seconds_a_token_takes():
    knowledge = Knowledge(Settings())
    for _ in range(50):
        knowledge.finished("chat", 400, 0.1 + 400 * 0.008)
        knowledge.finished("summary", 4, 0.1 + 4 * 0.008)
    assert knowledge.service(400) == pytest.approx(3.2, rel=0.1)


def test_counts_go_through_json():
    counts = Counts(started=2)
    counts.held.update(["hard brake", "hard brake"])
    counts.refused["can never fit"] += 1
    values = counts.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert (values["started"], values["held"], values["refused"]) == (2, {"hard brake": 2}, {"can never fit": 1})
