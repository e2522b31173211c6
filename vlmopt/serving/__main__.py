"""`python -m vlmopt.serving`: evaluate policies on the models of a `models.json`; see `--help`.

Exit status: 0 when every run finished, 1 when one did not, 2 when nothing was run since what was asked makes no sense,
130 when it was stopped. The results that are there stay in every case.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmopt.errors import VlmoptError
from vlmopt.serving.admission import parse_policy
from vlmopt.serving.controller import ModelController
from vlmopt.serving.evaluate import Plan, evaluate
from vlmopt.serving.models import MODELS, ModelEntry, choose, engine_arguments, load_models
from vlmopt.serving.prompts import load_prompts
from vlmopt.serving.results import Record, table

# The policy is switched by messages; nothing may be reused between runs; the worker says how much memory it took.
CONTROL = {"policy": "vllm", "control": True}
FIXED = {"enable_prefix_caching": False, "worker_extension_cls": "vlmopt.serving.worker.Gauge"}


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    records: list[Record] = []
    try:
        models, plans = _asked(options)
        failures = _run(models, plans, records)
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; what had finished is in the result files", file=sys.stderr)
        _show(records)
        return 130
    _show(records)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vlmopt.serving",
        description="Evaluate admission policies under load in vLLM: one result file a run, under results/.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--models", type=Path, default=MODELS, metavar="PATH", help="a models.json (default: the package's)")
    add("--models-to-test", nargs="+", metavar="NAME", help="models of that file (default: all)")
    add("--test_cases_path", "--test-cases-path", type=Path, metavar="PATH", help="prompts in JSON (default: embedded)")
    add("--use-slo-aware-policy", action="store_true", help="the policy `reserve` (default: `batch`, the naive mode)")
    add(
        "--policy",
        nargs="+",
        metavar="POLICY",
        help="policies, each on the same trace, such as `vllm fcfs brakes reserve:predict=most`; wins over the former",
    )
    add("--disable-spec-decoding", action="store_true", help="leave out the speculative decoding of models.json")
    add("--attention_backend", "--attention-backend", metavar="NAME", help="vLLM's attention backend")
    add(
        "--load",
        nargs="+",
        type=float,
        default=[0.9],
        help="multiples of plain vLLM's saturation, in this order; one given again gets another trace (default: 0.9)",
    )
    add("--saturation", type=float, help="requests per second, where it is known (default: measured first)")
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="a result file whose saturation and unloaded latencies hold here too (default: measured first)",
    )
    add("--requests", nargs="+", type=int, default=[300], help="in a run: one number, or one a load (default: 300)")
    add("--repeats", type=int, default=1, help="of each run, each with another trace (default: 1)")
    add("--resume", action="store_true", help="leave out what has finished in --output, and take its calibration")
    add("--seed", type=int, default=42, help="of the traces (default: 42)")
    add("--bert-model", type=Path, metavar="FOLDER", help="encoder for BERTScore (default: not computed)")
    add("--output", type=Path, default=Path("results"), metavar="FOLDER", help="of the result files (default: results)")
    return parser


def _asked(options: argparse.Namespace) -> tuple[dict[str, ModelEntry], dict[str, Plan]]:
    """The models and what to run on each; whatever is wrong with them is said before anything starts."""
    for name, values in (("requests", options.requests), ("repeats", [options.repeats])):
        if min(values) < 1:
            raise VlmoptError(f"--{name} is {min(values)}; give 1 or more")
    if len(options.requests) not in (1, len(options.load)):
        raise VlmoptError(f"--requests has {len(options.requests)} numbers; give one, or one for each --load")
    for rate in [*options.load, *([] if options.saturation is None else [options.saturation])]:
        if not 0 < rate < float("inf"):
            raise VlmoptError(f"--load and --saturation take numbers above 0, not {rate:g}")
    policies = options.policy or (["reserve"] if options.use_slo_aware_policy else ["batch"])
    for policy in policies:
        parse_policy(policy)
    models = choose(load_models(options.models), options.models_to_test)
    plan = Plan(
        policies=policies,
        loads=options.load,
        requests=options.requests if len(options.requests) > 1 else options.requests[0],
        repeats=options.repeats,
        seed=options.seed,
        saturation=options.saturation,
        calibration=None if options.calibration is None else _calibration_in(options.calibration),
        resume=options.resume,
        prompts=None if options.test_cases_path is None else load_prompts(options.test_cases_path),
        bert_model=options.bert_model,
        output=options.output,
    )
    engine = _vllm()
    plans = {}
    for name, entry in models.items():
        speculate, backend = not options.disable_spec_decoding, options.attention_backend
        made = engine_arguments(entry, CONTROL, speculate=speculate, attention_backend=backend) | FIXED
        engine.check_arguments(made)
        plans[name] = replace(plan, arguments=made)
    return models, plans


def _calibration_in(path: Path) -> dict[str, Any]:
    """Of a result file, as the record of another run names it."""
    try:
        return {**json.loads(path.read_bytes())["calibration"], "measured": False}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VlmoptError(f"cannot take a calibration from {path} ({error}); pass the result file of a run") from error


def _run(models: Mapping[str, ModelEntry], plans: Mapping[str, Plan], records: list[Record]) -> list[str]:
    """Run every model's plan; what went wrong with one does not keep the others from running."""
    engine = _vllm()

    def start(name: str, entry: ModelEntry) -> Any:
        return engine.Engine(plans[name].arguments, entry.max_tokens, hidden=entry.load_format == "dummy")

    failures: list[str] = []
    with ModelController(models, start) as controller:
        for name, entry in models.items():
            before = len(records)
            try:
                loaded = controller.load(name)
                asyncio.run(_until_stopped(evaluate(loaded, name, entry, plans[name], records)))
            except VlmoptError as error:
                failures.append(f"{name}: {error}")
            try:
                unloaded = controller.unload()
            except VlmoptError as error:
                return [*failures, f"{error}; no other model was loaded"]
            if unloaded is not None:
                print(unloaded, file=sys.stderr)
                for record in records[before:]:
                    record.content["unloaded"] = vars(unloaded)
                    record.write()
    return failures


async def _until_stopped(work: Any) -> None:
    """The work, which SIGTERM stops as Ctrl-C does."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _show(records: list[Record]) -> None:
    if records:
        print(table(records))
        print("\n".join(str(record.path) for record in records))


def _vllm() -> Any:
    try:
        from vlmopt.serving import engine
    except ModuleNotFoundError as error:
        raise VlmoptError(
            f"the package {error.name} is missing here; run this as ./run.sh evaluate, which has vLLM"
        ) from error
    return engine


if __name__ == "__main__":
    sys.exit(main())
