"""Stock against an optimised model on random conversations: the same ids or exception type, each difference explained.

python -m vlmopt.workbook.contract_study --cases 2000 --preset fast    on a GPU; writes figures/<device>/contract.json
"""

import argparse
import copy
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

import vlmopt
from vlmopt.bench.models import TINY, Loaded, load
from vlmopt.bench.protocol import quiet_generation
from vlmopt.bench.system_info import environment
from vlmopt.errors import VlmoptError
from vlmopt.files import require_writable, write_atomic
from vlmopt.workbook.conversations import PLAIN, Case, draw, prepare
from vlmopt.workbook.record import folder

FILE = "contract.json"
COLUMNS = ("cases", "served", "handed_to_stock", "near_ties", "differences")
LEAST_SERVED = 0.95
"""Share of plain image-and-text cases that the stages must serve."""


@dataclass(frozen=True)
class Verdict:
    """What became of one case: who served it, and how its outcome compares with stock's."""

    kind: str
    served: bool
    near_tie: bool
    differs: bool


def outcome(call: Callable[[], Any]) -> Any:
    """What the call returns, or the type of its exception; random numbers start at the same place in every call."""
    torch.manual_seed(0)
    try:
        return call()
    except Exception as error:
        return type(error)


def compare(case: Case, stock: Loaded, ours: nn.Module, reference: nn.Module | None) -> Verdict:
    """Both models' outcomes for one case.

    Args:
        ours: an optimised model of the same weights.
        reference: stock's model in float32 where a near-tie is no difference (class near), else None.
    """
    inputs, alone = prepare(stock.processor, case, stock.device)
    before = vlmopt.status(ours).calls["stages"]
    theirs, mine = (outcome(partial(model.generate, **inputs, **case.options)) for model in (stock.model, ours))
    served = vlmopt.status(ours).calls["stages"] > before
    if theirs is mine or (torch.is_tensor(mine) and torch.is_tensor(theirs) and torch.equal(mine, theirs)):
        return Verdict(case.kind, served, False, False)
    tie = reference is not None and torch.is_tensor(mine) and torch.is_tensor(theirs)
    for row, prompt in enumerate(alone if tie else ()):
        answers = (ids[row, inputs["input_ids"].shape[1] :] for ids in (theirs, mine))
        tie = tie and _near_tie(stock.model, reference, prompt, case.options, *answers)
    return Verdict(case.kind, served, tie, not tie)


def _near_tie(
    stock: nn.Module, reference: nn.Module, prompt: dict[str, Tensor], options: dict[str, Any], a: Tensor, b: Tensor
) -> bool:
    """Whether two answers are equal, or part where the scores of both choices are closer than stock's own error there.

    Twice the largest error of stock's scores against float32 is allowed, since two roundings can meet.
    """
    differing = [i for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=False)) if x != y]
    if not differing:
        return len(a) == len(b)
    step = differing[0]
    more = extended(prompt, a[:step])
    asked = {**options, "max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    own, exact = (model.generate(**more, **asked).scores[0][0].double() for model in (stock, reference))
    error = (own - exact)[own.isfinite() & exact.isfinite()].abs().max()
    return bool((exact[a[step]] - exact[b[step]]).abs() <= 2 * error)


def extended(inputs: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """The inputs of one prompt with `ids` [n] behind it as text."""
    fill = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
    fill["mm_token_type_ids"] = torch.zeros_like(ids)[None]
    longer = {name: torch.cat([inputs[name], tail.to(inputs[name].dtype)], dim=1) for name, tail in fill.items()}
    return {**inputs, **longer}


def case_of(seed: int, number: int, sampling: bool) -> Case:
    """The case of this number in the series of this seed; the same on every machine."""
    return draw(Random(f"{seed}/{number}"), sampling)


def study(
    stock: Loaded, ours: nn.Module, cases: int, seed: int, progress: Callable = tqdm
) -> tuple[list[dict[str, Any]], list[int]]:
    """One row a kind with `COLUMNS`, and the numbers of the cases that differ.

    A model of class near is not asked to draw at random: draws from other roundings cannot be compared.
    """
    near = vlmopt.status(ours).cls != "exact"
    reference = copy.deepcopy(stock.model).float() if near else None
    counts: dict[str, Counter[str]] = {}
    differing = []
    for number in progress(range(cases), desc="conversations", leave=False):
        verdict = compare(case_of(seed, number, sampling=not near), stock, ours, reference)
        row = counts.setdefault(verdict.kind, Counter())
        row.update(cases=1, served=verdict.served, handed_to_stock=not verdict.served)
        row.update(near_ties=verdict.near_tie, differences=verdict.differs)
        if verdict.differs:
            differing.append(number)
    rows = [{"kind": kind, **{name: counts[kind][name] for name in COLUMNS}} for kind in sorted(counts)]
    return rows, differing


def require(rows: list[dict[str, Any]], differing: list[int], seed: int) -> None:
    """Holds a study to the contract.

    Raises:
        VlmoptError: a case differs, or the stages served too few of the plain ones.
    """
    if differing:
        shown = ", ".join(map(str, differing[:10]))
        raise VlmoptError(f"{len(differing)} cases differ from stock: case_of({seed}, number) for the numbers {shown}")
    share = plain_share(rows)
    if share < LEAST_SERVED:
        raise VlmoptError(
            f"the stages served {share:.1%} of the plain cases, at least {LEAST_SERVED:.0%} are asked for"
        )


def plain_share(rows: list[dict[str, Any]]) -> float:
    """The share of the plain image-and-text cases that the stages served."""
    (row,) = [row for row in rows if row["kind"] == PLAIN]
    return row["served"] / row["cases"]


def write(rows: list[dict[str, Any]], stock: Loaded, status: vlmopt.Status, seed: int, output: str | Path = "") -> Path:
    """Writes the record beside the notebooks' records of this device, or into `output`/<device>."""
    machine = environment(stock.device)
    total = {name: sum(row[name] for row in rows) for name in COLUMNS}
    content = {"schema": 1, "weights": stock.name, "preset": status.config.name, "class": status.cls, "seed": seed}
    content |= {**total, "plain_share": plain_share(rows), "kinds": rows, "environment": machine}
    content["skipped"] = [{"what": p.name, "reason": p.reason} for p in status.parts if p.state == "skipped"]
    path = folder("full", machine["device"], output) / FILE
    write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def read(path: Path) -> dict[str, Any]:
    """The record at `path`.

    Raises:
        VlmoptError: it is none, or its totals are not those of its kinds.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        totals = {name: sum(row[name] for row in content["kinds"]) for name in COLUMNS}
        whole = all(content[name] == total for name, total in totals.items()) and content["environment"]["device"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VlmoptError(f"cannot read the record {path} ({error!r}); run contract_study again") from error
    if not whole:
        raise VlmoptError(f"the totals of {path} are not those of its kinds; run contract_study again")
    return content


def told(content: dict[str, Any]) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Of a record: what it is, one row a kind and one for all, and what was not run."""
    rows = [*content["kinds"], {"kind": "all", **{name: content[name] for name in COLUMNS}}]
    lead = (
        f"Random conversations answered by stock and by `{content['preset']}` ({content['class']}) with the weights "
        f"{content['weights']}. The stages served {content['plain_share']:.1%} of the plain greedy cases of images and "
        f"text. A near-tie is a difference where stock's scores are as close as its own error."
    )
    return lead, rows, [f"Not run: {entry['what']} ({entry['reason']})." for entry in content["skipped"]]


def main(argv: list[str] | None = None) -> int:
    """0 when the record is written, 1 when a case differs or too few are served, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m vlmopt.workbook.contract_study", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--output", default="", metavar="DIR", help="folder for the record, instead of figures/")
    options = parser.parse_args(argv)
    try:
        stock, ours = (load(TINY) for _ in range(2))
        require_writable(folder("full", environment(stock.device)["device"], options.output) / FILE)
        vlmopt.optimize(ours.model, vlmopt.OptimizeConfig.preset(options.preset, strict=False))
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with quiet_generation():
        rows, differing = study(stock, ours.model, options.cases, options.seed)
    try:
        require(rows, differing, options.seed)
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(write(rows, stock, vlmopt.status(ours.model), options.seed, options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
