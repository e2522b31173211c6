"""An evaluation and a server as users start them, in real engines on the CPU, and what goes wrong with them.

Both start at once, since the start takes longest. The evaluation's engine and at last the server's are killed.
"""

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from vlmopt.tests.serving.engines import NEEDS_ENGINE, make_text_model, start, write_models
from vlmopt.tests.serving.fakes import PROMPTS

pytestmark = NEEDS_ENGINE

QUEUE = 6  # requests that the server takes at once
REQUESTS = 30
SLOW = "0.05"  # of saturation: a run that lasts long enough to be killed


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a models.json and test cases."""
    folder = tmp_path_factory.mktemp("serving")
    model = str(make_text_model(folder / "model"))
    broken = {"model_path": model, "engine": {"max_model_len": 10**9}}
    tiny = {"model_path": model, "max_tokens": 60, "slo": {"times_unloaded": 3}}
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    speculative = {"model_path": model, "speculative_decoding": ngram}
    write_models(folder / "models.json", broken=broken, tiny=tiny, speculative=speculative)
    cases = [{name: text for name, text in vars(prompt).items() if text} for prompt in PROMPTS]
    (folder / "cases.json").write_text(json.dumps(cases))
    for name in ("evaluation", "server"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def processes(place: Path) -> Iterator[dict[str, Any]]:
    """The two processes and the server's port; neither outlives the module."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    models = ["--models", str(place / "models.json")]
    plan = ["--test_cases_path", str(place / "cases.json"), "--requests", str(REQUESTS), "--output", "results"]
    runs = ["--models-to-test", "broken", "tiny", "--policy", "vllm", "reserve", "--load", "1.2", SLOW]
    evaluation = start(place / "evaluation", "-m", "vlmopt.serving", *models, *plan, *runs)
    limits = ["--enable-log-requests", "--max-num-queued-reqs", str(QUEUE), "--host", "127.0.0.1", "--port", str(port)]
    server = start(place / "server", "-m", "vlmopt.serving.serve", "speculative", *models, *limits)
    started = [evaluation, server]
    yield {"evaluation": evaluation, "server": server, "port": port}
    for process in started:
        for one in [*_below(process), process]:
            one.kill()
        process.wait()


def _below(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def engine_core(process: subprocess.Popen) -> psutil.Process:
    (core,) = [child for child in _below(process) if "EngineCor" in child.name()]
    return core


def wait_until(true, process: subprocess.Popen, folder: Path, seconds: float = 400.0):
    """What `true` returns once it is true; fails with the end of the log if `process` ends before or time does."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        if time.monotonic() > deadline or process.poll() is not None:
            pytest.fail((folder / "log").read_text()[-5000:])
        time.sleep(0.05)
    return found


# The evaluation


@pytest.fixture(scope="module")
def ended(processes: dict[str, Any], place: Path) -> dict[str, Any]:
    """The evaluation after its engine was killed in the third run: exit status, log, results by mode."""
    evaluation, folder = processes["evaluation"], place / "evaluation"

    def some_have_finished() -> bool:
        return bool(re.search(rf"load{SLOW}:[^\r]* (?:[3-9]|[12]\d)/{REQUESTS} ", (folder / "log").read_text()))

    wait_until(some_have_finished, evaluation, folder)
    engine_core(evaluation).send_signal(signal.SIGKILL)
    status = evaluation.wait(timeout=120)
    found = [json.loads(path.read_text()) for path in folder.glob("results/eval_*.json")]
    return {"status": status, "log": (folder / "log").read_text(), **{one["mode"]: one for one in found}}


@pytest.mark.parametrize("mode", ["vllm-load1.2", "reserve-load1.2"])
def test_a_run_in_a_real_engine_is_measured(ended, mode):
    found = ended[mode]
    numbers = found["metrics"]
    assert found["outcome"] == "finished" and numbers["requests_finished"] == REQUESTS
    assert numbers["peak_memory"] > 10**8 and numbers["system_throughput_tokens_per_sec"] > 0
    assert 0 < numbers["avg_ttft"] < numbers["avg_latency"] <= numbers["p99_latency"]
    assert found["calibration"]["measured"] and found["calibration"]["saturation"] > 0
    assert found["admission"]["settings"]["policy"] == mode.partition("-")[0]
    assert found["admission"]["counts"]["finished"] == REQUESTS
    assert found["admission"]["counts"]["preempted"] == numbers["preemptions"]
    assert found["quality"]["rouge_l"]["value"] is not None, "answers are compared with their references"
    assert "bert" in found["quality"]["bert_score"]["note"] or "model" in found["quality"]["bert_score"]["note"]
    assert found["versions"]["vllm"] and found["memory"]["device"]
    assert all(row["prompt_tokens"] > 10 for row in found["requests"])
    assert max(sample["running"] for sample in found["series"]) >= 1


def test_both_policies_had_the_same_trace_and_gave_the_same_answers(ended):
    one, other = ([(r["arrival"], r["answer"]) for r in ended[f"{p}-load1.2"]["requests"]] for p in ("vllm", "reserve"))
    assert one == other and len({answer for _, answer in one}) > 1


def test_an_engine_that_is_killed_leaves_what_had_finished_and_a_clear_outcome(ended):
    found = ended[f"vllm-load{SLOW}"]
    numbers = found["metrics"]
    assert found["outcome"] == "failed" and "the engine died" in found["error"]
    assert 0 < numbers["requests_finished"] < REQUESTS
    assert numbers["requests_finished"] + numbers["requests_failed"] + numbers["requests_unfinished"] == REQUESTS
    assert f"reserve-load{SLOW}" not in ended, "no file claims a run that did not begin"


def test_its_memory_is_proved_free_and_the_exit_status_says_that_something_failed(ended):
    assert ended["status"] == 1
    assert "tiny is unloaded: its 2 processes" in ended["log"]
    assert ended["vllm-load1.2"]["unloaded"]["processes"] == 2
    assert "error: tiny: the engine died" in ended["log"]


def test_a_model_that_does_not_start_does_not_keep_the_next_from_running(ended):
    (said,) = (line for line in ended["log"].splitlines() if line.startswith("error: broken: "))
    assert "vLLM did not start the engine" in said and "max_model_len" in said
    assert not any(mode.startswith("broken") for mode in ended)


# The server


@pytest.fixture(scope="module")
def ask(processes: dict[str, Any], place: Path):
    """Sends a request to the running server: (method, path, body) -> (status, text)."""

    def send(method: str, path: str, body: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", processes["port"], timeout=60)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def is_up() -> bool:
        try:
            return send("GET", "/health")[0] == 200
        except OSError:
            return False

    wait_until(is_up, processes["server"], place / "server")
    return send


def completion(tokens: int = 8, **more: Any) -> str:
    return json.dumps({"model": "speculative", "prompt": "abc", "max_tokens": tokens, "ignore_eos": True, **more})


def metric(ask, name: str) -> float:
    """The sum of a series at /metrics over its labels."""
    text = ask("GET", "/metrics")[1]
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def settles(ask, name: str, value: float) -> bool:
    """Whether the series comes to this value soon."""
    deadline = time.monotonic() + 20
    while (now := metric(ask, name)) != value:
        if time.monotonic() > deadline:
            pytest.fail(f"{name} is {now}, not {value}")
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def halted(processes: dict[str, Any], place: Path) -> Iterator[Callable[[int, str], None]]:
    """The server with its engine halted, so that nothing is answered in the meantime; waits for lines in its log."""
    server, log = processes["server"], place / "server" / "log"
    before = log.read_text()

    def wait_for(count: int, words: str) -> None:
        wait_until(lambda: log.read_text().count(words) >= before.count(words) + count, server, place / "server")

    core = engine_core(server)
    core.suspend()
    try:
        yield wait_for
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            core.resume()


def send(processes: dict[str, Any], body: str) -> http.client.HTTPConnection:
    """A connection on which a completion was asked for."""
    connection = http.client.HTTPConnection("127.0.0.1", processes["port"], timeout=60)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return connection


def test_the_server_counts_its_decisions_where_prometheus_reads_them(ask):
    before = {name: metric(ask, f"vlmopt_admission_{name}_total") for name in ("started", "finished", "faults")}
    for _ in range(3):
        status, text = ask("POST", "/v1/completions", completion())
        assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 8
    assert settles(ask, "vlmopt_admission_started_total", before["started"] + 3)
    assert settles(ask, "vlmopt_admission_finished_total", before["finished"] + 3)
    assert metric(ask, "vlmopt_admission_faults_total") == before["faults"]
    assert metric(ask, "vlmopt_admission_steps_total") >= 24


def test_a_request_that_waits_is_counted_with_the_reason(ask, processes, place):
    with ThreadPoolExecutor(3) as pool, halted(processes, place) as wait_for:
        pending = [pool.submit(ask, "POST", "/v1/completions", completion(700)) for _ in range(3)]
        wait_for(3, "Added request")
    assert [one.result()[0] for one in pending] == [200] * 3
    assert metric(ask, "vlmopt_admission_held_total") > 0, "two of them fill the cache"
    assert 'reason="' in ask("GET", "/metrics")[1].split("vlmopt_admission_held_total{")[1].split("\n")[0]
    assert metric(ask, "vllm:num_preemptions_total") == metric(ask, "vlmopt_admission_preempted_total")


@pytest.mark.parametrize(
    "body", ["{", "{}", completion(prompt=None), completion(-1), completion(10**6), completion(model="none")]
)
def test_a_malformed_request_is_answered_and_disturbs_nobody(ask, body):
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(ask, "POST", "/v1/completions", completion(100))
        status, text = ask("POST", "/v1/completions", body)
    assert 400 <= status < 500 and json.loads(text)["error"]
    assert good.result()[0] == 200


def test_malformed_words_for_the_policy_are_counted_and_the_request_is_answered(ask):
    before = metric(ask, "vlmopt_admission_faults_total")
    status, _ = ask("POST", "/v1/completions", completion(vllm_xargs={"vlmopt_slo": "soon"}))
    assert status == 200
    assert settles(ask, "vlmopt_admission_faults_total", before + 1)


def test_a_client_may_not_change_the_policy(ask):
    status, text = ask("POST", "/v1/completions", completion(vllm_xargs={"vlmopt_admission": '{"policy": "batch"}'}))
    assert status == 200 and "takes no messages" in text


def test_a_full_queue_is_said_and_empties_again(ask, processes, place):
    with ThreadPoolExecutor(QUEUE) as pool, halted(processes, place) as wait_for:
        taken = [pool.submit(ask, "POST", "/v1/completions", completion(40)) for _ in range(QUEUE)]
        wait_for(QUEUE, "Added request")
        status, text = ask("POST", "/v1/completions", completion(40))
    assert status == 503 and json.loads(text)["error"]
    assert [one.result()[0] for one in taken] == [200] * QUEUE
    assert ask("POST", "/v1/completions", completion())[0] == 200


def test_a_client_that_leaves_frees_its_place_and_disturbs_nobody(ask, processes, place):
    finished = metric(ask, "vlmopt_admission_finished_total")
    with ThreadPoolExecutor(1) as pool, halted(processes, place) as wait_for:
        connection = send(processes, completion(700))
        wait_for(1, "Added request")
        other = pool.submit(ask, "POST", "/v1/completions", completion(40))
        wait_for(2, "Added request")
        connection.close()
        wait_for(1, " aborted")
    assert other.result()[0] == 200
    assert settles(ask, "vllm:num_requests_running", 0)
    assert settles(ask, "vlmopt_admission_finished_total", finished + 1)


def test_the_policy_goes_with_speculation_that_cannot_be_scheduled_ahead(ask):
    assert ask("POST", "/v1/completions", completion(200))[0] == 200
    assert metric(ask, "vllm:spec_decode_num_accepted_tokens_total") > 0


def test_the_log_says_that_counts_are_exported(ask, place):
    assert "admission counts are exported" in (place / "server" / "log").read_text()


def test_a_server_whose_engine_is_killed_says_so_to_its_clients_and_ends(processes, place):
    server = processes["server"]
    with halted(processes, place) as wait_for:
        connection = send(processes, completion(700))
        wait_for(1, "Added request")
        engine_core(server).kill()
        with contextlib.suppress(OSError, http.client.HTTPException):  # the connection may be closed on it
            assert connection.getresponse().status >= 500
    assert server.wait(timeout=60) is not None
