"""Runs stock and the stages over a data set, comparing ids and logits bit by bit."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from vlmopt import optimize, status
from vlmopt.bench.models import Loaded, prompt
from vlmopt.bench.vqa import accuracy
from vlmopt.config import OptimizeConfig
from vlmopt.runtime.generate import ENGINES

LONGEST = 72


@dataclass
class Pass:
    """Per-sample results; `first_difference` names a sample and a step whose logits differ in any bit."""

    stock_ids: list[list[int]] = field(default_factory=list)
    our_ids: list[list[int]] = field(default_factory=list)
    stock_accuracy: list[float] = field(default_factory=list)
    our_accuracy: list[float] = field(default_factory=list)
    steps: int = 0
    differing_steps: int = 0
    first_difference: str | None = None
    calls: dict[str, int] = field(default_factory=dict)


def record_logits(model: Any) -> list[Tensor]:
    """Make an optimised model note the fp32 logits of every step in the returned list."""
    engine, seen = ENGINES[model], []

    def argmax(h: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        logits = engine.ops.lm_head_logits(h, norm, eps, weight).to(torch.float32)
        seen.append(logits)
        return logits.argmax(dim=-1)

    engine.ops = replace(engine.ops, lm_head_argmax=argmax)
    return seen


def run_pass(loaded: Loaded, samples: Any, config: str | OptimizeConfig = "exact") -> Pass:
    """Greedy answers of stock and of `config` to every sample, each step's logits compared."""
    model, result = loaded.model, Pass()
    optimize(model, config)
    seen = record_logits(model)
    stock = type(model).generate
    options = {"max_new_tokens": LONGEST, "do_sample": False}
    for sample in tqdm(samples, desc=f"stock and {model.dtype}", leave=False):
        inputs = prompt(loaded.processor, sample["image"], sample["question"])
        length = inputs["input_ids"].shape[1]
        expected = stock(model, **inputs, **options, output_logits=True, return_dict_in_generate=True)
        seen.clear()
        ids = model.generate(**inputs, **options)
        result.stock_ids.append(expected.sequences[0, length:].tolist())
        result.our_ids.append(ids[0, length:].tolist())
        for step, (theirs, ours) in enumerate(zip(expected.logits, seen, strict=False)):
            result.steps += 1
            if not torch.equal(theirs, ours):
                result.differing_steps += 1
                place = f"sample {sample['question_id']}, step {step}"
                result.first_difference = result.first_difference or place
        for ids_of, scores in ((result.stock_ids, result.stock_accuracy), (result.our_ids, result.our_accuracy)):
            answer = loaded.processor.decode(ids_of[-1], skip_special_tokens=True)
            scores.append(accuracy(answer, sample["answers"]))
    result.calls = status(model).calls
    return result
