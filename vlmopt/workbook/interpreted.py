"""Kernels checked in Triton's interpreter, in a process of its own.

Triton decides when it is imported whether kernels are interpreted, and its own library with them; a notebook that has
imported it can no longer change that.
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence

import torch

from vlmopt.bench import models
from vlmopt.errors import VlmoptError
from vlmopt.kernels import oracle
from vlmopt.workbook.record import ROOT


def run(names: Sequence[str], seed: int) -> dict[str, oracle.Errors]:
    """Each kernel's worst errors in fp32, under what they were found on (see `errors_of`).

    Args:
        names: `module:op` each.

    Raises:
        VlmoptError: the process failed; the message holds its last line.
    """
    command = ["env", "TRITON_INTERPRET=1", sys.executable, "-m", "vlmopt.workbook.interpreted", str(seed), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise VlmoptError(f"the check in Triton's interpreter failed: {last}")
    return {what: oracle.Errors(*errors) for what, errors in json.loads(done.stdout.splitlines()[-1]).items()}


def errors_of(name: str, seed: int) -> dict[str, oracle.Errors]:
    """One op's worst errors on its small cases, and on the embedded model's activations if its text stages call it."""
    from vlmopt.workbook import kernel_study, text_study

    path, op = name.split(":")
    module = importlib.import_module(path)
    cases = [case for case in module.CASES if case.cpu]
    found = {f"{op} fp32, interpreter": kernel_study.worst_errors(module, op, cases, "cpu", torch.float32, seed)}
    if op in text_study.MODULES:
        model = models.load(models.TINY, "cpu", torch.float32)
        subject = text_study.prompt(model, tokens=24, visual=12, seed=seed)
        found[f"{op} fp32, interpreter, activations of {model.name}"] = text_study.captured_errors(subject, op)
    return found


def main(seed: str, *names: str) -> None:
    """Prints the errors as one line of JSON."""
    torch.set_num_threads(1)
    found = {what: errors for name in names for what, errors in errors_of(name, int(seed)).items()}
    print(json.dumps({what: (errors.rms, errors.largest) for what, errors in found.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
