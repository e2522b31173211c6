"""What each scheme was measured to cost in answers: a preset above near runs only where that is recorded."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from vlmopt.errors import VlmoptError

RECORD = Path(__file__).with_name("costs.json")
COMMAND = "python -m vlmopt.workbook.quant_study"
KV = "kv fp8"
"""The row of a cache in eight bits; with copies of the body beside it, it follows their scheme's name."""


@cache
def recorded(path: Path = RECORD) -> dict[str, Any]:
    """The record that `COMMAND` wrote: model, samples, dtype, and a row of results for each scheme and part.

    Raises:
        VlmoptError: it is missing or cannot be read.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise VlmoptError(f"the record of task costs {path.name} cannot be read; make it with {COMMAND}") from error


def cost_of(scheme: str, prompt: bool = False) -> dict[str, float] | None:
    """What the whole body in this scheme, with the int8 head, was measured to cost; None where it was not.

    With `prompt` the prompt reads the copies too.
    """
    return recorded()["rows"].get(f"{scheme} {'prompt' if prompt else 'all'}")


def kv_cost_of(scheme: str = "none", prompt: bool = False) -> dict[str, float] | None:
    """What keys and values in eight bits were measured to cost beside copies of this scheme; None where not."""
    return None if prompt else recorded()["rows"].get(KV if scheme == "none" else f"{scheme} {KV}")


def obstacle(scheme: str, prompt: bool = False) -> str:
    """Why a scheme may not run, as words for a plan; empty where its cost is recorded."""
    return _missing(cost_of(scheme, prompt), _read(scheme, prompt))


def kv_obstacle(scheme: str = "none", prompt: bool = False) -> str:
    """Why keys and values may not be in eight bits beside this scheme; empty where the cost of both is recorded."""
    beside = f" beside {_read(scheme, prompt)}" if scheme != "none" else ""
    return _missing(kv_cost_of(scheme, prompt), KV + beside)


def _read(scheme: str, prompt: bool) -> str:
    return f"{scheme}{' read by the prompt too' * prompt}"


def _missing(cost: dict[str, float] | None, what: str) -> str:
    return "" if cost else f"has no recorded task cost for {what}; measure it with {COMMAND}"


def told(scheme: str, prompt: bool = False) -> str:
    """The recorded cost in a few words, with what it was measured on."""
    readers = "decode reads", "all rows read"
    return f"{readers[prompt]} {scheme} copies; {_cost(cost_of(scheme, prompt))}"


def kv_told(scheme: str = "none") -> str:
    """The recorded cost of keys and values in eight bits, as `told`."""
    beside = "" if scheme == "none" else f"beside {scheme} copies "
    return beside + _cost(kv_cost_of(scheme))


def _cost(cost: dict[str, float]) -> str:
    record = recorded()
    own, plain = cost["accuracy"], record["rows"]["none"]["accuracy"]
    return (
        f"accuracy {own:.2%} against {plain:.2%}, {cost['ids_equal']:.1%} of the answers the same "
        f"({record['model']}, {record['samples']} samples, {record['dtype']})"
    )
