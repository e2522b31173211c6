"""What each scheme was measured to cost in answers: a preset above near runs only where that is recorded."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from vlmopt.errors import VlmoptError

RECORD = Path(__file__).with_name("costs.json")
COMMAND = "python -m vlmopt.workbook.quant_study"


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


def obstacle(scheme: str, prompt: bool = False) -> str:
    """Why a scheme may not run, as words for a plan; empty where its cost is recorded."""
    what = f"{scheme}{' read by the prompt too' * prompt}"
    return "" if cost_of(scheme, prompt) else f"has no recorded task cost for {what}; measure it with {COMMAND}"


def told(scheme: str, prompt: bool = False) -> str:
    """The recorded cost in a few words, with what it was measured on."""
    record, cost = recorded(), cost_of(scheme, prompt)
    own, plain, readers = cost["accuracy"], record["rows"]["none"]["accuracy"], ("decode reads", "all rows read")
    return (
        f"{readers[prompt]} {scheme} copies; accuracy {own:.2%} against {plain:.2%}, {cost['ids_equal']:.1%} of the "
        f"answers the same ({record['model']}, {record['samples']} samples, {record['dtype']})"
    )
