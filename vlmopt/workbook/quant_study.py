"""What quantised copies cost in answers, measured part by part on the embedded model, and what they save in bytes.

python -m vlmopt.workbook.quant_study                the record of task costs, over all samples (20 minutes)
python -m vlmopt.workbook.quant_study --samples 20   a look at a few, printed and not written
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

import vlmopt
from vlmopt.bench import models, vqa
from vlmopt.bench.dataset import open_samples
from vlmopt.config import OptimizeConfig
from vlmopt.errors import VlmoptError
from vlmopt.files import require_writable, write_atomic
from vlmopt.ops import Ops, table
from vlmopt.quant import costs
from vlmopt.quant.calibration import GPTQ, hessians
from vlmopt.quant.products import over_copies
from vlmopt.runtime.cache import KVCache
from vlmopt.runtime.generate import ENGINES, Engine
from vlmopt.runtime.request import read
from vlmopt.runtime.stock import NEUTRAL, merged
from vlmopt.stages.decode import decode_step
from vlmopt.stages.vision import encode
from vlmopt.workbook.answers import ANSWER_TOKENS
from vlmopt.workbook.quant_variants import KV, NONE, STUDIED, Variant, calibration_batches, variants
from vlmopt.workbook.record import ROOT

Start = tuple[Tensor, int, int, Tensor]
"""A prompt's last hidden row [1, hidden], its length and its mRoPE delta, and the cache that holds it."""
CALIBRATION = 256
"""Samples that copies are calibrated by, of strings that training may see; none is among those it is judged by."""
LONG_TOKENS, LONG_PROMPTS, NGRAM = 1024, 2, 8
CONFIG = OptimizeConfig.preset("exact", packed=True)


@dataclass
class Tally:
    """What one variant answered: ids and accuracy a sample, and the KL divergence of steps after the same ids."""

    ids: list[list[int]] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)


@torch.no_grad()
def follow(
    engine: Engine, variant: Variant, ops: Ops, start: Start, tokens: int, eos: frozenset[int]
) -> tuple[list[int], list[Tensor]]:
    """Greedy ids from a prompt's last hidden row on, and the fp32 logits of every step."""
    h, length, delta, cache = start
    ids: list[int] = []
    seen: list[Tensor] = []
    norm, head = variant.text.norm, variant.text.head.weight
    while True:
        seen.append(ops.lm_head_logits(h, norm.weight, norm.eps, head)[0].float())
        token = ops.lm_head_argmax(h, norm.weight, norm.eps, head)
        ids.append(token.item())
        if ids[-1] in eos or len(ids) == tokens:
            return ids, seen
        angles = tuple(table[length + delta : length + delta + 1] for table in engine.rope_table)
        row = torch.tensor([length], device=engine.device)
        length += 1
        attend = partial(ops.decode_attention, length=length)
        h = decode_step(token, angles, cache, row, attend, variant.text, ops)


class Subject:
    """The embedded model behind the stages, whose prefill serves the variants of one sample that read the same."""

    def __init__(self, target: models.Loaded):
        self.target = target
        vlmopt.optimize(target.model, CONFIG)
        self.engine = ENGINES[target.model]
        self.ops = over_copies(table(CONFIG.model_copy(update={"kv_cache_dtype": "fp8"})), ())
        self._fp8 = KVCache(self.engine.weights.text, fp8=True)

    @torch.no_grad()
    def start(self, sample: Mapping[str, Any], tokens: int, variant: Variant) -> tuple[Start, frozenset[int]]:
        """Prefill the sample's prompt as `variant` reads it, with room for `tokens` more: the start, and the ends."""
        inputs = models.prompt(self.target.processor, sample["image"], sample["question"]).to(self.target.device)
        options = {**inputs, "max_new_tokens": tokens, "do_sample": False}
        model, engine = self.target.model, self.engine
        request = read(merged(model, options), NEUTRAL, engine.device, engine.weights, False)
        engine.reserve(len(request.id_list) + tokens)
        self._fp8.reserve(len(request.id_list) + tokens)
        cache = (self._fp8 if variant.kv else engine.cache).buffer
        if variant.vision is not None:
            request = replace(request, seen=encode(request.pixels, engine.grids.get(request.grids), *variant.vision))
        own = engine.weights
        engine.weights = replace(own, originals=variant.prompt)
        try:
            h, delta = engine.prefill(model, request, cache)
        finally:
            engine.weights = own
        return (h, len(request.id_list), delta, cache), frozenset(request.eos)

    def starts(
        self, chosen: Mapping[str, Variant], sample: Mapping[str, Any], tokens: int
    ) -> Iterator[tuple[str, Variant, Start, frozenset[int]]]:
        """Every variant, ready to be followed: prefilled anew where the cache holds what another has read."""
        held: Variant | None = None
        for name, variant in chosen.items():
            if held is None or variant.prompt is not held.prompt or variant.vision is not held.vision:
                start, eos = self.start(sample, tokens, variant)
            held = variant
            yield name, variant, start, eos


def answers(subject: Subject, chosen: Mapping[str, Variant], samples: Sequence[Any]) -> dict[str, Tally]:
    """Every variant's answer to every sample; the KL is to the first variant's logits, where the ids so far agree."""
    tallies = {name: Tally() for name in chosen}
    for sample in tqdm(samples, desc="samples", leave=False):
        plain: tuple[list[int], list[Tensor]] | None = None
        for name, variant, start, eos in subject.starts(chosen, sample, ANSWER_TOKENS):
            ids, logits = follow(subject.engine, variant, subject.ops, start, ANSWER_TOKENS, eos)
            plain = plain or (ids, logits)
            tally = tallies[name]
            text = subject.target.processor.decode(ids, skip_special_tokens=True)
            tally.ids.append(ids)
            tally.accuracy.append(vqa.accuracy(text, sample["answers"]))
            tally.kl += _divergences(plain, ids, logits)
    return tallies


def _divergences(plain: tuple[list[int], list[Tensor]], ids: list[int], logits: list[Tensor]) -> list[float]:
    found = []
    for step, (theirs, ours) in enumerate(zip(plain[1], logits, strict=False)):
        if plain[0][:step] != ids[:step]:
            break
        p, q = (row.double().log_softmax(-1) for row in (theirs, ours))
        found.append((p.exp() * (p - q)).sum().item())
    return found


def repeated(ids: Sequence[int], n: int = NGRAM) -> float:
    """The share of n-grams that occurred before: near 1 for a loop."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def loops(subject: Subject, chosen: Mapping[str, Variant], samples: Sequence[Any]) -> dict[str, list[float]]:
    """`repeated` of answers that are not let end before 1,024 tokens, a value a sample."""
    found: dict[str, list[float]] = {name: [] for name in chosen}
    for sample in tqdm(samples, desc="long answers", leave=False):
        for name, variant, start, _ in subject.starts(chosen, sample, LONG_TOKENS):
            ids, _ = follow(subject.engine, variant, subject.ops, start, LONG_TOKENS, frozenset())
            found[name].append(repeated(ids))
    return found


def row(name: str, chosen: Mapping[str, Variant], tallies: Mapping[str, Tally]) -> dict[str, float]:
    """One variant's results as numbers: accuracy, share of answers and of tokens as without copies, KL, bytes."""
    own, plain = tallies[name], tallies[NONE]
    pairs = list(zip(plain.ids, own.ids, strict=True))
    tokens = [(a, b) for theirs, ours in pairs for a, b in zip(theirs, ours, strict=False)]
    return {
        "accuracy": sum(own.accuracy) / len(own.accuracy),
        "ids_equal": sum(theirs == ours for theirs, ours in pairs) / len(pairs),
        "tokens_equal": sum(a == b for a, b in tokens) / sum(max(map(len, pair)) for pair in pairs),
        "kl": sum(own.kl) / len(own.kl),
        "kl_steps": len(own.kl),
        "bytes_per_token": chosen[name].bytes,
    }


def measure(
    samples: Sequence[Any],
    long_prompts: int = LONG_PROMPTS,
    schemes: Sequence[str] = STUDIED,
    calibration: int = CALIBRATION,
) -> dict[str, Any]:
    """The whole record of task costs over these samples of the embedded data set, in fp32."""
    target = models.load(models.TINY, dtype=torch.float32)
    batches = tqdm(calibration_batches(target, calibration), "calibration", calibration, leave=False)
    found = hessians(target.model, batches) if GPTQ.name in schemes else {}
    subject = Subject(target)
    chosen = variants(subject.engine.weights, schemes, found)
    tallies = answers(subject, chosen, samples)
    whole = {name: variant for name, variant in chosen.items() if name in (NONE, KV) or name.endswith(" all")}
    repeats = loops(subject, whole, samples[:long_prompts]) if long_prompts else {}
    rows = {name: row(name, chosen, tallies) for name in chosen}
    for name, shares in repeats.items():
        rows[name] |= {f"repeated_{NGRAM}_grams": sum(shares) / len(shares)}
    about = {
        "model": subject.target.name,
        "samples": len(samples),
        "dtype": "float32",
        "calibration_samples": calibration,
    }
    return {**about, "device": subject.target.device.type, "long_answers": long_prompts, "rows": rows}


def main(arguments: list[str] | None = None) -> int:
    """The command-line door: 0, or 2 after one sentence about what to put right."""
    parser = argparse.ArgumentParser(prog=costs.COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, help="only so many, and print instead of writing the record")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the embedded model is too small for more to help
    try:
        require_writable(costs.RECORD)
        data = open_samples(ROOT / "data")
        found = measure([data[i] for i in range(options.samples or len(data))])
        text = json.dumps(found, indent=1) + "\n"
        print(text if options.samples else write_atomic(costs.RECORD, text))
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
