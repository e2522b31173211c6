"""Stock against the presets on one machine, in one process, interleaved: speed, memory and answers."""

import copy
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm.auto import tqdm

import vlmopt
from vlmopt.bench import models, protocol, roofline
from vlmopt.bench.timing import alternate, clear_cache, timed
from vlmopt.config import OptimizeConfig, settings
from vlmopt.errors import VlmoptError
from vlmopt.processor import on_device
from vlmopt.quant.pack import bytes_of
from vlmopt.quant.schemes import SCHEMES
from vlmopt.runtime.generate import ENGINES
from vlmopt.weights import collect
from vlmopt.workbook import plots
from vlmopt.workbook.record import Record, Roof, measurement

QUESTION = "what is the number written on the player's shirt in this picture?"
STOCK = "stock"
PHOTO = (768, 1024)  # height and width of the measured image


@dataclass(frozen=True)
class Contender:
    """One provider: its own copy of the model, what runs on it, and the device memory that it holds at rest.

    `target` has `.processor`, `.model` and `.device`; `resident` is in bytes, None on a CPU.
    """

    name: str
    target: Any
    cls: str
    parts: dict[str, str]
    resident: int | None

    def describe(self) -> dict[str, Any]:
        """Class and parts, for a record's config."""
        return {"class": self.cls, "parts": self.parts}


def contenders(
    base: Any, presets: Sequence[str] | Mapping[str, OptimizeConfig], record: Record
) -> dict[str, Contender]:
    """`base` as `stock` and a copy of it for each preset, or config by name, that can run here; the others are recorded
    as skipped."""
    found = {STOCK: Contender(STOCK, base, "exact", {}, _parameter_bytes(base))}
    configs = presets if isinstance(presets, Mapping) else {name: name for name in presets}
    for preset, config in configs.items():
        before = _reserved(base.device)
        target = dataclasses.replace(base, model=copy.deepcopy(base.model))
        try:
            status = vlmopt.optimize(target.model, config)
        except VlmoptError as error:
            record.skip(f"preset {preset} on {base.name}", str(error))
            continue
        parts = {part.name: part.state for part in status.parts}
        if parts["preprocessing"] == "on":
            target = dataclasses.replace(target, processor=on_device(target.processor, target.device))
        after = _reserved(base.device)
        resident = None if after is None else after - before
        found[preset] = Contender(preset, target, status.cls, parts, resident)
    return found


def _parameter_bytes(target: Any) -> int | None:
    if torch.device(target.device).type != "cuda":
        return None
    return sum(parameter.numel() * parameter.element_size() for parameter in target.model.parameters())


def _reserved(device: Any) -> int | None:
    """Bytes that PyTorch holds of the device, private pools of captured graphs included."""
    clear_cache(device)
    return torch.cuda.memory_reserved(device) if torch.device(device).type == "cuda" else None


@dataclass(frozen=True)
class Subject:
    """What is measured: a model and what to load it by, one sample, and the name of the case."""

    target: Any
    model: str
    sample: dict[str, Any]
    case: str


def subject(profile: str, samples: Any, seed: int) -> Subject:
    """The model and image to measure speed on.

    `smoke` takes the embedded model and the embedded sample with the longest answer. `full` takes the real weights
    where they are there, else the 2B shapes with random weights, and one image of 768 by 1,024 random pixels.
    """
    if profile == "smoke":
        model, sample = str(models.TINY), longest_sample(samples)
    else:
        real = settings().model_dir
        model, sample = str(real) if real.is_dir() else models.RANDOM_2B, synthetic_sample(*PHOTO, seed)
    target = models.load(model)
    width, height = sample["image"].size
    return Subject(target, model, sample, f"{target.name} {height}x{width}")


def synthetic_sample(height: int, width: int, seed: int) -> dict[str, Any]:
    """One question about an image of random pixels, for measuring speed on weights that cannot answer."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return {"question_id": seed, "image": Image.fromarray(pixels), "question": QUESTION}


def longest_sample(samples: Any) -> dict[str, Any]:
    """The sample with the longest expected answer, so that decoding has something to do."""
    lengths = [max(map(len, samples.text(i)["answers"])) for i in range(len(samples))]
    return samples[lengths.index(max(lengths))]


def speed(
    field: Mapping[str, Contender], sample: Mapping[str, Any], rounds: int, first_token_rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Samples by metric, then provider, in the order A B B A.

    `first_token_rounds` measure preprocessing and the first token alone; `rounds` go on to the whole call of 128 tokens
    as the contest's harness does. Metrics: ttft_ms, preprocessing_ms, ttft_with_preprocessing_ms, tokens_per_s, and
    decode_ms_per_token where more than one token came.

    Raises:
        VlmoptError: a contender handed a call to stock.
    """
    names = list(field)
    found: dict[str, dict[str, list[float]]] = {}

    def add(name: str, **values: float) -> None:
        for metric, value in values.items():
            found.setdefault(metric, {n: [] for n in names})[name].append(value)

    with protocol.quiet_generation():
        for contender in field.values():
            protocol.warm_up(contender.target, [sample])
        for number in tqdm(range(first_token_rounds), desc="first token", leave=False):
            for name in alternate(names, number):
                preprocess, ttft = first_token(field[name].target, sample)
                add(name, ttft_ms=ttft, preprocessing_ms=preprocess, ttft_with_preprocessing_ms=preprocess + ttft)
        for number in tqdm(range(rounds), desc="128 tokens", leave=False):
            for name in alternate(names, number):
                add(name, **_whole_call(field[name].target, sample))
    refuse_stock_calls(field)
    return found


def _whole_call(target: Any, sample: Mapping[str, Any]) -> dict[str, float]:
    one = protocol.measure_sample(target, sample, answer=False)
    found = {
        "ttft_ms": one.ttft_ms,
        "preprocessing_ms": one.preprocess_ms,
        "ttft_with_preprocessing_ms": one.preprocess_ms + one.ttft_ms,
        "tokens_per_s": one.tokens_per_s,
    }
    if one.n_tokens > 1:
        whole = one.n_tokens / one.tokens_per_s * 1e3
        found["decode_ms_per_token"] = (whole - one.ttft_ms) / (one.n_tokens - 1)
    return found


def refuse_stock_calls(field: Mapping[str, Contender]) -> None:
    """Makes sure that what was timed ran on the stages.

    Raises:
        VlmoptError: a contender handed a call to stock; its numbers would be stock's.
    """
    for name, contender in field.items():
        status = vlmopt.status(contender.target.model)
        if status.calls["stock"]:
            raise VlmoptError(f"{name} handed {status.calls['stock']} calls to stock ({status.stock_reasons})")


def calls(field: Mapping[str, Contender]) -> dict[str, dict[str, int]]:
    """Calls served by the stages, by kernels, and handed to stock, of each preset."""
    return {name: vlmopt.status(c.target.model).calls for name, c in field.items() if name != STOCK}


def first_token(target: Any, sample: Mapping[str, Any]) -> tuple[float, float]:
    """Preprocessing and time to first token in ms, measured as the harness does."""
    clear_cache(target.device)
    inputs, preprocess = timed(lambda: protocol.prepare(target, sample), target.device)
    clear_cache(target.device)
    _, ttft = timed(lambda: protocol.generate(target, inputs, protocol.TTFT_TOKENS), target.device)
    return preprocess, ttft


def one_first_token(contender: Contender, height: int, width: int, roof: Roof) -> dict[str, Any]:
    """Three first tokens of a random image as a measurement, for a panel."""
    target, sample = contender.target, synthetic_sample(height, width, 0)
    inputs = protocol.prepare(target, sample)
    grid, tokens = tuple(inputs["image_grid_thw"][0].tolist()), inputs["input_ids"].shape[1]
    flops = roofline.prefill_flops(target.model.config, tokens, grid)
    with protocol.quiet_generation():
        times = [first_token(target, sample)[1] for _ in range(3)]
    return measurement(f"{height}x{width}", contender.name, "ttft_ms", "ms", times, flops=flops, ceiling=roof)


def host_ms(contender: Contender, sample: Mapping[str, Any], rounds: int = 20) -> list[float]:
    """Milliseconds from the call of `generate` to its first launch, the vision tower's, in `rounds` first tokens."""
    target, engine = contender.target, ENGINES[contender.target.model]
    encode, begun = engine._encode, []
    inputs, took = protocol.prepare(target, sample), []

    def noted(*args: Any) -> Any:
        begun.append(time.perf_counter())
        return encode(*args)

    engine._encode = noted  # on the instance, in front of the class's own
    try:
        with protocol.quiet_generation():
            for _ in range(1 + rounds):
                clear_cache(target.device)
                called = time.perf_counter()
                protocol.generate(target, inputs, protocol.TTFT_TOKENS)
                took.append(1e3 * (begun[-1] - called))
    finally:
        del engine._encode
    return took[1:]


def measure_host(record: Record, case: str, field: Mapping[str, Contender], sample: Mapping[str, Any]) -> None:
    """Adds `host_before_launch_ms` of every provider but stock."""
    for name, contender in field.items():
        if name != STOCK:
            record.measure(case, name, "host_before_launch_ms", "ms", host_ms(contender, sample))


def measure_speed(
    record: Record,
    case: str,
    samples: Mapping[str, Mapping[str, Sequence[float]]],
    model: torch.nn.Module,
    configs: Mapping[str, OptimizeConfig | None],
    grid: tuple[int, int, int],
    tokens: int,
    roof: Roof,
) -> None:
    """Adds what `speed` found; the first token and the decode step with their share of the roofline.

    `configs` are what the providers ran, None for stock: one that reads copies of the weights reads fewer bytes.
    """
    flops = roofline.prefill_flops(model.config, tokens, grid)
    for metric, providers in samples.items():
        unit = "tokens/s" if metric == "tokens_per_s" else "ms"
        for name, values in providers.items():
            work = {}
            if metric == "ttft_ms":
                work = {"flops": flops, "ceiling": roof}
            elif metric == "decode_ms_per_token":
                work = {"bytes": step_bytes(model, configs[name], tokens), "ceiling": roof}
            if values:
                record.measure(case, name, metric, unit, values, **work)


def step_bytes(model: torch.nn.Module, config: OptimizeConfig | None, tokens: int) -> int:
    """Bytes that a decode step reads after `tokens` positions: every weight or the copy in its place, and the cache."""
    found = roofline.decode_bytes(model.config, tokens)
    if config is None or not config.has_copies:
        return found
    text, scheme = collect(model, packed=False).text, SCHEMES.get(config.weights)
    head = text.head.weight.numel() * roofline.element_bytes(model.config)
    replaced = head * config.head8 + (roofline.decode_bytes(model.config) - head) * (scheme is not None)
    return found - replaced + bytes_of(text, scheme, config.head8)


def configs(field: Mapping[str, Contender]) -> dict[str, OptimizeConfig]:
    """What each provider runs."""
    return {name: vlmopt.status(contender.target.model).config for name, contender in field.items()}


def settle(record: Record, case: str, providers: Sequence[str]) -> None:
    """Puts the measured ratios to stock beside those predicted for `providers`; one that did not run has none."""
    for name in providers:
        if record.find("ttft_ms", name, case):
            label, decode = record.label(name), gain(record, case, name, "decode_ms_per_token")
            record.settle(f"{label}: first token, times faster than stock", gain(record, case, name, "ttft_ms"))
            record.settle(f"{label}: decode, times faster than stock", decode)


def gain(record: Record, case: str, provider: str, metric: str) -> float:
    """Stock's median over the provider's: how many times faster it is, for a time."""
    return record.value(metric, STOCK, case) / record.value(metric, provider, case)


def conclude(record: Record, case: str) -> tuple[str, str]:
    """Answer and verdict of the comparison, from the record alone; lossy presets stand apart from those that keep the
    answers."""
    names = [m["provider"] for m in record.find("tokens_per_s", case=case)]
    lossy = [name for name in names if record.class_of(name) == "lossy"]
    kept = [name for name in names if name not in lossy]
    best = max(kept, key=lambda name: record.value("tokens_per_s", name, case))
    n = plots.number
    ttft, decode, rate = (
        [n(record.value(metric, name, case)) for name in (best, STOCK)]
        for metric in ("ttft_ms", "decode_ms_per_token", "tokens_per_s")
    )
    answer = (
        f"{named(record, best)} takes {ttft[0]} ms to the first token against stock's {ttft[1]}, {decode[0]} ms a "
        f"further token against {decode[1]}, and makes {rate[0]} tokens/s over a whole call against {rate[1]}; "
        f"{_agreement(record, best)}"
    )
    for name in lossy:
        ms, per_second = (n(record.value(metric, name, case)) for metric in ("decode_ms_per_token", "tokens_per_s"))
        answer += (
            f" {named(record, name)} takes {ms} ms a further token and makes {per_second} tokens/s; "
            f"{_agreement(record, name)}"
        )
    slower = [
        f"{named(record, name)} is behind stock in {label}"
        for name in names
        for metric, label in (("ttft_ms", "the first token"), ("decode_ms_per_token", "decode"))
        if name != STOCK and gain(record, case, name, metric) < 1
    ]
    slower += [
        f"{named(record, name)} takes longer a further token than {named(record, best)}, which reads more bytes"
        for name in lossy
        if record.value("decode_ms_per_token", name, case) > record.value("decode_ms_per_token", best, case)
    ]
    verdict = "; ".join(slower) + "." if slower else "Every preset that runs here is faster than stock in both parts."
    return answer, verdict


def named(record: Record, provider: str) -> str:
    """A provider as a sentence names it: its name as code, then its class."""
    return f"`{provider}`{record.label(provider).removeprefix(provider)}"


def _agreement(record: Record, provider: str) -> str:
    """What is known of a provider's answers, as the end of a sentence."""
    equal, accuracy = record.find("ids_equal", provider), record.find("accuracy", provider)
    if not equal:
        return "its answers could not be asked here."
    own, stock = accuracy[0]["p50"], record.value("accuracy", STOCK)
    return (
        f"{equal[0]['p50']:.1%} of its answers have stock's ids ({equal[0]['case']}), accuracy {own:.1%} against "
        f"stock's {stock:.1%}."
    )
