"""The contest's measuring protocol: warm-up, three calls a sample, and a run over a data set that survives a kill."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from vlmopt.bench import result as results
from vlmopt.bench import vqa
from vlmopt.bench.dataset import Samples, open_samples
from vlmopt.bench.entrants import OURS, STOCK, Entrant, enter, find_device
from vlmopt.bench.journal import Journal, Row
from vlmopt.bench.models import RANDOM_2B, prompt
from vlmopt.bench.system_info import device_slug, environment, system_info
from vlmopt.bench.timing import alternate, clear_cache, timed
from vlmopt.config import OptimizeConfig, settings
from vlmopt.errors import VlmoptError
from vlmopt.files import require_writable, write_atomic

TTFT_TOKENS = 1
THROUGHPUT_TOKENS = 128
ANSWER_TOKENS = 1024
WARM_UP_SAMPLES = 10
WARM_UP_TOKENS = 10

COMPARE = "compare"
ENTRANTS = {OURS: [OURS], STOCK: [STOCK], COMPARE: [STOCK, OURS]}
SECONDS_BETWEEN_WRITES = 30.0


@dataclass(frozen=True)
class Options:
    """A run, as the flags of benchmark.py describe it. `mode` is "ours", "stock" or "compare"."""

    model_path: str
    dataset_path: str
    output: str = "result.json"
    num_samples: int = 100
    seed: int = 42
    mode: str = OURS
    preset: str | None = None
    device: str | None = None
    resume: bool = False


@dataclass(frozen=True)
class SampleResult:
    """One sample measured on one model.

    ttft_ms times `generate` alone for one token; preprocess_ms the processor call and the copy to the device before it;
    tokens_per_s and n_tokens belong to the call of 128 tokens, prefill included; answer_tokens to the answer. A failed
    sample has an empty prediction, no measurement, and the reason in `error`.
    """

    question_id: int | str
    prediction: str = ""
    ttft_ms: float | None = None
    preprocess_ms: float | None = None
    tokens_per_s: float | None = None
    n_tokens: int | None = None
    answer_tokens: int | None = None
    error: str | None = None

    @classmethod
    def failed(cls, question_id: int | str, error: Exception) -> "SampleResult":
        reason = (str(error).strip().split("\n")[0])[:300]
        return cls(question_id, error=f"{type(error).__name__}: {reason}")


def prepare(target: Any, sample: Mapping[str, Any]) -> Any:
    """The model's inputs for one sample, on its device: one user message with the image and the question."""
    return prompt(target.processor, sample["image"], sample["question"]).to(target.device)


def generate(target: Any, inputs: Any, max_new_tokens: int) -> torch.Tensor:
    """The harness's call, word for word; returns prompt and new ids, [1, length]."""
    with torch.no_grad():
        return target.model.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, temperature=0.0, use_cache=True
        )


def measure_sample(target: Any, sample: Mapping[str, Any], *, answer: bool = True) -> SampleResult:
    """The three calls of the harness on one sample; the first two share their inputs, the third prepares its own.

    `target` has `.processor`, `.model` and `.device`; `sample` has `question_id`, `image` and `question`. Without
    `answer` the third call, whose text means nothing on random weights, is left out. Raises what the model raises.
    """
    device = target.device
    clear_cache(device)
    inputs, preprocess_ms = timed(lambda: prepare(target, sample), device)
    clear_cache(device)
    _, ttft_ms = timed(lambda: generate(target, inputs, TTFT_TOKENS), device)
    clear_cache(device)
    ids, total_ms = timed(lambda: generate(target, inputs, THROUGHPUT_TOKENS), device)
    n_tokens = _new_tokens(inputs, ids).shape[0]
    prediction, answer_tokens = _answer(target, sample) if answer else ("", None)
    return SampleResult(
        question_id=sample["question_id"],
        prediction=prediction,
        ttft_ms=ttft_ms,
        preprocess_ms=preprocess_ms,
        tokens_per_s=n_tokens / total_ms * 1e3,
        n_tokens=n_tokens,
        answer_tokens=answer_tokens,
    )


def _answer(target: Any, sample: Mapping[str, Any]) -> tuple[str, int]:
    clear_cache(target.device)
    inputs = prepare(target, sample)
    new = _new_tokens(inputs, generate(target, inputs, ANSWER_TOKENS))
    return target.processor.decode(new, skip_special_tokens=True), new.shape[0]


def _new_tokens(inputs: Any, ids: torch.Tensor) -> torch.Tensor:
    return ids[0, inputs["input_ids"].shape[1] :]


def warm_up(target: Any, samples: Samples | Sequence[Mapping[str, Any]]) -> None:
    """Answer the first ten samples with ten tokens. One that fails here will fail and be counted when measured."""
    for index in range(min(WARM_UP_SAMPLES, len(samples))):
        try:
            generate(target, prepare(target, samples[index]), WARM_UP_TOKENS)
        except Exception as error:
            logging.getLogger(__name__).debug("warm-up of sample %d failed: %s", index, error)


@contextmanager
def quiet_generation() -> Iterator[None]:
    """Keep back one log line of transformers: that the harness's `temperature=0.0` has no effect without sampling."""
    logger = logging.getLogger("transformers.generation.configuration_utils")

    def wanted(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not ("generation flags are not valid" in message and "temperature" in message)

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def run(options: Options, wrapper: Callable[..., Any]) -> dict:
    """Measure as `options` say, write `options.output`, and return its content.

    `wrapper` is `evaluation_wrapper.VLMModel`. Everything that can be checked without the model is checked before it
    is loaded.

    Raises:
        VlmoptError: an option, the data set, the model or the output path will not do.
        KeyboardInterrupt: what was measured lies in the journal; run again with `resume`.
    """
    device = _checked_device(options)
    samples = open_samples(options.dataset_path)
    identity = _identity(options, samples, device)
    journal = Journal(options.output, identity)
    rows = journal.start(options.resume)
    try:
        return _Run(options, samples, identity, journal, rows).finish(wrapper)
    finally:
        journal.close()


def _checked_device(options: Options) -> str:
    if options.num_samples < 1:
        raise VlmoptError(f"--num-samples {options.num_samples} is too few; ask for 1 or more")
    if options.preset is not None:
        OptimizeConfig.preset(options.preset)
    _check_writable(Path(options.output))
    return find_device(options.device)


def _check_writable(output: Path) -> None:
    if output.is_dir():
        raise VlmoptError(f"output path {output} is a folder; pass --output a file name")
    require_writable(output)


def _identity(options: Options, samples: Samples, device: str) -> dict:
    """What two runs must share so that one can go on where the other was."""
    random = options.model_path == RANDOM_2B
    return {
        "model": RANDOM_2B if random else str(Path(options.model_path).resolve()),
        "data set": samples.identity,
        "mode": options.mode,
        "preset": None if options.mode == STOCK else options.preset or settings().preset,
        "seed": options.seed,
        "device": device,
        "hardware": device_slug(device),
    }


class _Run:
    """A run under way: its rows so far, and how they are measured and written."""

    def __init__(self, options: Options, samples: Samples, identity: dict, journal: Journal, rows: list[Row]):
        self.options, self.samples, self.identity = options, samples, identity
        self.journal, self.rows = journal, rows
        self.count = max(min(options.num_samples, len(samples)), len(rows))
        self.names = ENTRANTS[options.mode]
        self.answer = options.model_path != RANDOM_2B
        self.last_write = time.monotonic()

    def finish(self, wrapper: Callable[..., Any]) -> dict:
        self._say_what_is_special()
        torch.manual_seed(self.options.seed)
        options = self.options
        entrants = enter(self.names, options.model_path, self.identity["device"], options.preset, wrapper)
        with quiet_generation():
            if len(self.rows) < self.count:
                for entrant in entrants:
                    warm_up(entrant.target, self.samples)
            self._measure(entrants)
        result = self._write(entrants, complete=True)
        self.journal.remove()
        return result

    def _say_what_is_special(self) -> None:
        asked, there = self.options.num_samples, len(self.samples)
        if asked > there:
            print(f"the data set has {there} samples, fewer than the {asked} asked for: all of them are measured")
        if self.rows:
            print(f"resuming: {len(self.rows)} samples are already measured")
        if not self.answer:
            print("random weights: speed is measured, answers mean nothing and are not made or scored")

    def _measure(self, entrants: Sequence[Entrant]) -> None:
        done = len(self.rows)
        by_name = {entrant.name: entrant for entrant in entrants}
        label = " and ".join(self.names)
        for index in tqdm(range(done, self.count), initial=done, total=self.count, desc=label, unit="sample"):
            text = self.samples.text(index)
            row: Row = {"index": index, "question_id": text["question_id"]}
            for name in alternate(self.names, index):
                row[name] = self._attempt(by_name[name], index, text)
            self.journal.append(row)
            self.rows.append(row)
            if time.monotonic() - self.last_write > SECONDS_BETWEEN_WRITES:
                self._write(entrants, complete=False)

    def _attempt(self, entrant: Entrant, index: int, text: Mapping[str, Any]) -> Row:
        before = entrant.counts()
        try:
            measured = measure_sample(entrant.target, self.samples[index], answer=self.answer)
        except Exception as error:  # whatever one sample raises is that sample's failure, kept and counted
            measured = SampleResult.failed(text["question_id"], error)
        return asdict(measured) | {
            "accuracy": self._accuracy(measured, text.get("answers")),
            "calls": dict(entrant.counts() - before),
        }

    def _accuracy(self, measured: SampleResult, answers: Sequence[str] | None) -> float | None:
        if not answers or not self.answer:
            return None
        return 0.0 if measured.error else vqa.accuracy(measured.prediction, answers)

    def _write(self, entrants: Sequence[Entrant], complete: bool) -> dict:
        facts = self._facts(entrants[-1]) | {"complete": complete}
        result = results.build(self.rows, names=self.names, settings=self.identity, facts=facts)
        write_atomic(self.options.output, json.dumps(result, indent=1))
        self.last_write = time.monotonic()
        return result

    def _facts(self, main: Entrant) -> dict:
        plan = {name: value for name, value in main.status().items() if name not in ("calls", "stock_reasons")}
        return {
            "system_info": system_info(),
            "environment": environment(self.identity["device"]),
            "mode": self.options.mode,
            "model_path": self.options.model_path,
            "dataset_path": self.options.dataset_path,
            "dtype": str(getattr(main.target.model, "dtype", None)).removeprefix("torch."),
            "answers_given": self.answer,
            "plan": plan,
        }
