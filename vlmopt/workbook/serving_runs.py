"""Runs of the real engine for the workbook: read from result files, which the serving environment makes if they lack.

The workbook's environment has no vLLM. `python -m vlmopt.serving` runs in `.venv-serving` as a child process and leaves
one result file a run in RESULTS; those that are there already, from another sitting or another machine, are taken as
they are, and the record's environment is theirs.
"""

import dataclasses
import json
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vlmopt.errors import VlmoptError
from vlmopt.serving import fit
from vlmopt.serving.policy import Options
from vlmopt.serving.replica import StepTime
from vlmopt.serving.results import finished
from vlmopt.serving.shapes import write_shapes
from vlmopt.workbook.record import ROOT, Record
from vlmopt.workbook.serving_study import Contender, Site, measure_latencies, run_requests

RESULTS = ROOT / "results" / "serving"
PYTHON = ROOT / ".venv-serving" / "bin" / "python"
SITE = "{} in vLLM"
_ALONE = ("in_process", "async_scheduling", "prompt_tokens")
_OPTIONS = [option.name for option in dataclasses.fields(Options)]
Result = dict[str, Any]


def results(
    model: str, policies: Sequence[str], loads: Sequence[float], repeats: int = 1, like: str | None = None
) -> list[Result]:
    """The finished runs of `model` (a name of `serving.shapes`) with these policies and loads.

    Runs the evaluation where a policy lacks a load, once for all that lack one. `like` names a model that has runs: its
    saturation and objectives hold here too. None lets the evaluation measure them.

    Raises:
        VlmoptError: there is no serving environment to make them, or the evaluation failed.
    """
    found = finished(RESULTS, model)
    missing = [p for p in policies if any(sum(map(_is(p, load), found)) < repeats for load in loads)]
    if missing:
        _evaluate(model, missing, loads, repeats, like)
        found = finished(RESULTS, model)
    return _chosen(found, policies, loads)


def present(rec: Record, model: str, policies: Sequence[str], loads: Sequence[float]) -> list[Result]:
    """The runs of `model` that are there; the record says where there are none."""
    found = _chosen(finished(RESULTS, model), policies, loads)
    if not found:
        rec.skip(f"{model} in vLLM", "there are no runs of it in results/serving")
    return found


def machine(runs: Sequence[Result]) -> dict[str, Any] | None:
    """The environment that the runs were made in, for their record; None of no runs.

    Raises:
        VlmoptError: they were made in several.
    """
    found = [result["environment"] for result in runs]
    for name in ("device", "gpu_name", "vllm", "torch", "commit"):
        if len(values := {str(environment[name]) for environment in found}) > 1:
            raise VlmoptError(f"the runs differ in {name}: {', '.join(sorted(values))}; keep those of one sitting")
    return found[0] if found else None


def fitted(runs: Sequence[Result]) -> StepTime | None:
    """The step time fitted to the runs without preemptions; None of no runs: it stays assumed.

    Raises:
        VlmoptError: every run preempted.
    """
    if not runs:
        return None
    calm = [result for result in runs if not result["metrics"]["preemptions"]]
    return fit.fit([work for result in calm for work in fit.work_of(fit.answers_of(result))])


def contender_of(result: Result) -> Contender:
    """The simulator's counterpart of the policy of a measured run."""
    values = dict(result["config"]["policy"])
    name = values.pop("policy")
    chosen = {option: values[option] for option in _OPTIONS if option in values}
    quantile = None if values.get("predict") == "most" else result["admission"]["settings"]["quantile"]
    return Contender(_policy(result), "fcfs" if name == "vllm" else name, Options(**chosen), quantile)


class Replay(NamedTuple):
    """A measured run, the seconds that its requests took, and those of the same requests in the simulator."""

    result: Result
    measured: list[float]
    simulated: list[float]


def replay(where: Site, runs: Iterable[Result]) -> list[Replay]:
    """Simulate the requests of measured runs with `where`'s step time."""
    return [_replay(where, result) for result in runs]


def _replay(where: Site, result: Result) -> Replay:
    asked = fit.requests_of(result)
    measured = [row["end"] - row["arrival"] for row in result["requests"] if row["outcome"] == "finished"]
    ran = run_requests(where, contender_of(result), asked)
    return Replay(result, measured, [o.end - r.arrival for r, o in zip(asked, ran.outcomes, strict=True)])


def check_results(rec: Record, replays: Sequence[Replay]) -> None:
    """Check that the simulator agrees with each policy's measured runs at each load.

    Repeats count as one: what else the host does moves the step time of a single run by some percent, and in overload
    its mean latency by several times as much.

    Raises:
        VlmoptError: a mean latency is off by more than `fit.WITHIN`.
    """
    groups: dict[str, list[Replay]] = {}
    for run in replays:
        groups.setdefault(f"{run.result['model']} {run.result['mode']}", []).append(run)
    for name, group in groups.items():
        measured = [seconds for run in group for seconds in run.measured]
        simulated = [seconds for run in group for seconds in run.simulated]
        rec.check(f"simulated mean latency of {name}", "near", fit.mean_error(measured, simulated), fit.WITHIN)


def single_runs(replays: Sequence[Replay]) -> str:
    """A sentence with how far the simulated mean latency of one run lies from the measured one, for an answer."""
    if not replays:
        return ""
    off = max(fit.mean_error(run.measured, run.simulated) for run in replays)
    return f" The simulated mean latency of a single run lies within {off:.0%} of the measured one."


def measure_results(rec: Record, model: str, runs: Sequence[Result]) -> None:
    """Put measured runs into the record as `serving_study.measure_runs` puts simulated ones, a sample a repeat."""
    groups: dict[tuple[str, float], list[Result]] = {}
    for result in runs:
        groups.setdefault((_policy(result), result["config"]["load"]), []).append(result)
    for (policy, load), group in groups.items():
        case = f"{SITE.format(model)} load {load:g}"
        for metric, unit, key in (
            ("mean_latency_s", "s", "avg_latency"),
            ("p99_latency_s", "s", "p99_latency"),
            ("slo_attainment_rate", "share", "slo_attainment_rate"),
            ("preemptions", "preemptions", "preemptions"),
        ):
            rec.measure(case, policy, metric, unit, [result["metrics"][key] for result in group])
        ended = [row for result in group for row in result["requests"] if row["outcome"] == "finished"]
        measure_latencies(rec, case, policy, [row["end"] - row["arrival"] for row in ended])


def measure_alone(rec: Record) -> list[dict[str, Any]]:
    """Put vLLM's times of one request at a time into the record, those of its best settings; rows of all to show."""
    found = [json.loads(path.read_bytes()) for path in sorted(RESULTS.glob("alone_*.json"))]
    if not found:
        rec.skip("one request at a time in vLLM", "there is no measurement of it in results/serving")
        return []
    best = min(found, key=_decode_ms)
    first, more, case = statistics.median(best["ttft_ms"]), best["tokens"] - 1, best["case"]
    rec.measure(case, "vllm", "ttft_ms", "ms", best["ttft_ms"])
    rec.measure(case, "vllm", "decode_ms_per_token", "ms", [(total - first) / more for total in best["total_ms"]])
    rec.measure(case, "vllm", "tokens_per_s", "tokens/s", [1e3 * best["tokens"] / total for total in best["total_ms"]])
    on_gpu = [result["gpu_ms_per_token"] for result in found if "gpu_ms_per_token" in result]
    if on_gpu:
        rec.measure(case, "vllm", "gpu_ms_per_token", "ms", [min(on_gpu)])
    rec.config["vllm alone"] = {**best["settings"], **{name: best[name] for name in _ALONE}}
    return [
        {**{name: result[name] for name in _ALONE}, "first token, ms": statistics.median(result["ttft_ms"]),
         "a token, ms": _decode_ms(result), "of it on the GPU, ms": result.get("gpu_ms_per_token")}
        for result in found
    ]  # fmt: skip


def measured(rec: Record, model: str, load: float) -> str:
    """A sentence with what was measured of `model` at one load, for an answer; nothing where nothing was."""
    case = f"{SITE.format(model)} load {load:g}"
    kept = [
        f"{row['provider']} {row['p50']:.1%} of its objectives at a mean of "
        f"{rec.value('mean_latency_s', row['provider'], case):.2f} s"
        for row in rec.find("slo_attainment_rate", case=case)
    ]
    return f"Measured at load {load:g} with {model}: {'; '.join(kept)}. " if kept else ""


def _decode_ms(result: Result) -> float:
    return (statistics.median(result["total_ms"]) - statistics.median(result["ttft_ms"])) / (result["tokens"] - 1)


def _chosen(found: Sequence[Result], policies: Sequence[str], loads: Sequence[float]) -> list[Result]:
    return [result for result in found if any(_is(p, load)(result) for p in policies for load in loads)]


def _is(policy: str, load: float) -> Any:
    return lambda result: _policy(result) == policy and result["config"]["load"] == load


def _policy(result: Result) -> str:
    """The policy as the command line writes it."""
    values = dict(result["config"]["policy"])
    name = values.pop("policy")
    written = (f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items())
    return name + ":" * bool(values) + ",".join(written)


def _evaluate(model: str, policies: Sequence[str], loads: Sequence[float], repeats: int, like: str | None) -> None:
    options = ["--models-to-test", model, "--policy", *policies, "--load", *map(str, loads), "--repeats", str(repeats)]
    options += ["--seed", "0", "--resume"]
    if like is not None:
        options += ["--calibration", *map(str, sorted(RESULTS.glob(f"eval_{like}_*.json"))[:1])]
    if not PYTHON.exists():
        raise VlmoptError(
            f"there are no runs of {model} in results/serving and no vLLM to make them; on a machine with both run "
            f"./run.sh evaluate {' '.join(options)} --output results/serving"
        )
    models = write_shapes(RESULTS / "shapes")
    command = [str(PYTHON), "-m", "vlmopt.serving", "--models", str(models), *options, "--output", str(RESULTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise VlmoptError(f"the evaluation of {model} ended with {done.returncode}: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
