"""The main job of `./run.sh`: benchmark stock and ours side by side, run notebooks 61 and 90, show a table.

Takes the real weights and data where they are (`./run.sh fetch` brings them), else the embedded tiny model and its
data, and says which. Nothing that git tracks is changed.
"""

import shlex
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vlmopt import fetch
from vlmopt.config import Settings, settings
from vlmopt.errors import VlmoptError

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED_DATA = ROOT / "data"
RESULT, RESULT_RANDOM = ROOT / "result.json", ROOT / "result-random-2b.json"
NOTEBOOKS = "61,90"
LARGE_BYTES = 10**9  # weights beyond this take minutes a sample on a CPU
EMBEDDED_CAVEAT = (
    "a model of a few million parameters: its score compares stock with ours, not with the contest's entries"
)
RANDOM_CAVEAT = "the 2B shapes with random weights: its speed means something, its answers do not and are not made"


@dataclass(frozen=True)
class Job:
    """One benchmark of the first run: what is measured, on what, and why this was chosen."""

    title: str
    model: str
    data: Path
    samples: int
    output: Path
    because: str
    caveat: str = ""


def choose_jobs(places: Settings, on_gpu: bool) -> list[Job]:
    """The benchmarks that fit to what is here.

    Raises:
        VlmoptError: a weight or data folder that is there but not complete.
    """
    from vlmopt.bench.models import TINY

    real_data = _complete(places.data_dir, fetch.is_data, "data set")
    if _complete(places.model_dir, fetch.is_model, "weights"):
        data = places.data_dir if real_data else EMBEDDED_DATA
        large = sum(file.stat().st_size for file in places.model_dir.glob("*.safetensors")) > LARGE_BYTES
        samples = 100 if on_gpu else 3 if large else 60
        because = f"{places.model_dir} and {data} are there"
        if not on_gpu and large:
            because += "; few samples, since weights of this size take minutes a sample on a CPU"
        return [Job("the real weights", str(places.model_dir), data, samples, RESULT, because)]
    because = f"there are no weights in {places.model_dir}; ./run.sh fetch brings them"
    if not on_gpu:
        return [Job("the embedded model", str(TINY), EMBEDDED_DATA, 60, RESULT, because, EMBEDDED_CAVEAT)]
    return [
        Job("the embedded model, for answers", str(TINY), EMBEDDED_DATA, 100, RESULT, because, EMBEDDED_CAVEAT),
        Job("random-2b, for speed", "random-2b", EMBEDDED_DATA, 20, RESULT_RANDOM, because, RANDOM_CAVEAT),
    ]


def _complete(folder: Path, check, what: str) -> bool:
    if check(folder):
        return True
    if folder.exists():
        raise VlmoptError(f"{folder} holds no complete {what}; run ./run.sh fetch to complete it, or move it away")
    return False


def benchmark(job: Job) -> dict:
    """Measure stock and ours on `job`, interleaved; returns the content of its result file."""
    from evaluation_wrapper import VLMModel
    from vlmopt.bench import protocol

    options = protocol.Options(
        job.model, str(job.data), str(job.output), num_samples=job.samples, mode=protocol.COMPARE
    )
    try:
        return protocol.run(options, VLMModel)
    except KeyboardInterrupt:
        print(f"\nstopped; what is measured is kept, go on with: {resume_command(job)}", file=sys.stderr)
        raise


def resume_command(job: Job) -> str:
    """The command that goes on where a stopped benchmark of `job` was."""
    flags = ["--compare", "--model-path", job.model, "--dataset-path", str(job.data), "--output", str(job.output)]
    return shlex.join(["./run.sh", "bench", *flags, "--num-samples", str(job.samples), "--resume"])


def notebooks(profile: str) -> list[str]:
    """Run the notebooks; returns one sentence for each that failed."""
    from vlmopt.workbook import batch, series

    output = "" if profile == "smoke" else str(ROOT / "results" / profile)
    outcomes = batch.run(series.select(NOTEBOOKS, series.entries()), batch.Batch(profile, output))
    return [
        f"notebook {outcome.slug} failed in {outcome.error}; see {outcome.path}"
        for outcome in outcomes
        if outcome.error
    ]


def results_table(job: Job, result: dict) -> Table:
    """Stock beside ours, for the terminal."""
    from vlmopt.bench.score import score

    stock, ours = result["baseline"], result
    environment = result["environment"]
    where = environment.get("gpu_name") or environment.get("cpu_model") or environment["device"]
    table = Table(
        title=f"{job.title}: {len(ours['samples'])} samples of {job.data.name} on {where}", title_justify="left"
    )
    table.add_column("")
    for name in ("stock", f"ours ({ours['settings']['preset']})"):
        table.add_column(name, justify="right")

    def row(label: str, *values: float | None, digits: int) -> None:
        table.add_row(label, *("–" if value is None else f"{value:,.{digits}f}" for value in values))

    def performance(label: str, key: str) -> None:
        row(label, stock["performance"][key], ours["performance"][key], digits=2)

    performance("TTFT, ms", "avg_ttft_ms")
    performance("TTFT with preprocessing, ms", "ttft_with_preprocessing_ms")
    performance("tokens/s, prefill included", "avg_throughput_tokens_per_sec")
    row("accuracy", stock["accuracy"], ours["accuracy"], digits=4)
    speed = (stock["performance"][key] for key in ("avg_ttft_ms", "avg_throughput_tokens_per_sec"))
    row("score, contest baseline", score(stock["accuracy"], *speed), ours["score"], digits=4)
    row("score, stock as baseline", None, ours["score_vs_stock"], digits=4)
    for label, kind in (("served by stages", "stages"), ("served by kernels", "kernels"), ("handed to stock", "stock")):
        row(f"calls {label}", None, ours["calls"][kind], digits=0)
    if ours["answers_given"]:
        table.add_row("same answer as stock", "–", f"{ours['same_predictions']} of {ours['compared_samples']}")
    table.add_row("failed samples", *(str(column["performance"]["failed_samples"]) for column in (stock, ours)))
    return table


def notes(job: Job, result: dict) -> list[str]:
    """What the table alone would leave open: what ours consisted of, what it did not run, and what went to stock."""
    plan = result["plan"]
    lines = [f"ours is {plan['class']}: {', '.join(part['name'] for part in plan['parts'] if part['state'] == 'on')}"]
    lines += [f"not run here: {part['name']}, {part['reason']}" for part in plan["parts"] if part["state"] == "skipped"]
    lines += [f"handed to stock {count} times: {reason}" for reason, count in result["stock_reasons"].items()]
    return [*lines, f"note: {job.caveat}"] if job.caveat else lines


def written_since(start: float, folders: Iterable[Path]) -> list[Path]:
    """Figures and reports in `folders` that were written after `start` (seconds since the epoch)."""
    kinds = {".svg", ".png", ".md"}
    found = {path for folder in folders for path in folder.rglob("*") if path.suffix in kinds and path.is_file()}
    return sorted(path for path in found if path.stat().st_mtime >= start)


def run(console: Console) -> int:
    """The whole first run; returns the exit status. What was measured is shown even where a later part failed."""
    import torch

    start, clock = time.time(), time.monotonic()
    on_gpu = torch.cuda.is_available()
    profile = "full" if on_gpu else "smoke"
    jobs = choose_jobs(settings(), on_gpu)
    steps = len(jobs) + 1
    results = []
    for number, job in enumerate(jobs, 1):
        console.print(
            f"\n{number} of {steps} · benchmark, stock and ours side by side: {job.title} ({job.because})",
            soft_wrap=True,
        )
        results.append(benchmark(job))
    console.print(f"\n{steps} of {steps} · notebooks {NOTEBOOKS}, {profile} profile")
    failures = notebooks(profile)
    for job, result in zip(jobs, results, strict=True):
        console.print()
        console.print(results_table(job, result))
        for note in notes(job, result):
            console.print(note, soft_wrap=True)
        console.print(f"result: {_short(job.output)}", soft_wrap=True)
    for path in written_since(start, [ROOT / "results"]):
        console.print(f"{'report' if path.suffix == '.md' else 'figure'}: {_short(path)}", soft_wrap=True)
    console.print(f"done in {(time.monotonic() - clock) / 60:.1f} minutes")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    measured = all(result["performance"]["measured_samples"] for result in results)
    return 1 if failures or not measured else 0


def _short(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def main() -> int:
    """The command line; returns the exit status."""
    try:
        return run(Console(highlight=False))
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
