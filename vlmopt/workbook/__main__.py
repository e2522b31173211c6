"""`python -m vlmopt.workbook [RANGE]`: runs the notebooks of a range in order."""

import argparse
import ast
import sys
from typing import Any

from vlmopt.errors import VlmoptError
from vlmopt.workbook import batch, record, series

MOST_MOVES = 8


def main(argv: list[str] | None = None) -> int:
    """0 when every notebook ran, 1 when one failed, 2 when nothing could start."""
    try:
        options = _parser().parse_args(argv)
        chosen = series.select(options.range, series.entries())
        settings = batch.Batch(
            options.profile, options.output, options.in_place, dict(options.set), device=options.device
        )
        outcomes = batch.run(chosen, settings)
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for outcome in outcomes:
        state = f"FAILED in {outcome.error}" if outcome.error else "ok"
        print(f"{outcome.slug:32s} {state}" + (f" ({outcome.note})" if outcome.note else ""))
        print(f"{'':32s} {outcome.path}")
        for move in outcome.moves[:MOST_MOVES]:
            print(f"{'':32s} moved: {move}")
        if len(outcome.moves) > MOST_MOVES:
            print(f"{'':32s} and {len(outcome.moves) - MOST_MOVES} more; the notebook's last output lists them")
    return 1 if any(outcome.error for outcome in outcomes) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vlmopt.workbook", description=__doc__)
    parser.add_argument("range", nargs="?", default="", help="61, 11,12,61 or 20-29; all notebooks when left out")
    parser.add_argument("--profile", choices=record.PROFILES, default="smoke")
    parser.add_argument("--output", default="", metavar="DIR", help="folder for records, figures and notebooks")
    parser.add_argument("--in-place", action="store_true", help="replace the notebooks by their executed form")
    parser.add_argument("--device", default="", help="that was measured elsewhere, such as nvidia-h200 (for 50-52)")
    parser.add_argument("--set", action="append", default=[], type=_assignment, metavar="NAME=VALUE")
    return parser


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    sys.exit(main())
