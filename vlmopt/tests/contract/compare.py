"""Two `generate` calls compared: whatever came back, or the type of what was raised."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache

import vlmopt
from vlmopt.workbook.contract_study import outcome


def same(first: Any, second: Any) -> bool:
    """Whether two outcomes are equal: tensors bit for bit, containers entry by entry, caches by their type."""
    if torch.is_tensor(first):
        return torch.is_tensor(second) and torch.equal(first, second)
    if type(first) is not type(second) or isinstance(first, Cache):
        return type(first) is type(second)
    if isinstance(first, Mapping):
        return list(first) == list(second) and all(same(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return first == second


def both(ours: Any, stock: Any, inputs: Mapping[str, Any], **options: Any) -> tuple[Any, Any]:
    """The outcomes of our model and of stock's for the same call."""
    return tuple(outcome(partial(model.generate, **inputs, **options)) for model in (ours, stock))


def served(model: Any) -> dict[str, int]:
    """Calls by who served them, those with none left out, kernels aside."""
    return {name: n for name, n in vlmopt.status(model).calls.items() if n and name != "kernels"}
