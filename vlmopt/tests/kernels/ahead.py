"""Compiles what launchers launch for GPUs that are not there, in a process of its own without Triton's interpreter."""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).parents[3]
CAPABILITIES = (80, 90)


def compiled(op: str, cases: Sequence[str], capabilities: Sequence[int] = CAPABILITIES) -> list[dict[str, Any]]:
    """One entry a capability, case and kernel: name, whether it multiplies on tensor cores, bytes spilled.

    `op` is `module:launcher`; the arguments are those of the module's cases of these names, in bf16.
    """
    command = ["env", "-u", "TRITON_INTERPRET", sys.executable, "-m", "vlmopt.tests.kernels.ahead", op]
    command += [json.dumps(list(cases)), json.dumps(list(capabilities))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


class NoDriver:
    """Answers what Triton asks of a driver before it compiles."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def _compile_all(op: str, cases: Sequence[str], capabilities: Sequence[int]) -> list[dict[str, Any]]:
    path, launcher = op.split(":")
    module = importlib.import_module(path)
    found: list[dict[str, Any]] = []
    plain_run = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = plain_run(self, *args, grid=grid, warmup=True, **options)
        found.append({"kernel": self.__name__, "capability": capability, **_facts(kernel)})

    JITFunction.run = run
    users = [
        user for name, user in sys.modules.items() if name.startswith("vlmopt.") and "knows_dependents" in vars(user)
    ]
    for capability in capabilities:
        triton.runtime.driver.set_active(NoDriver(capability))
        for user in users:
            user.knows_dependents = partial(_answer, capability >= 90)
        for case in (case for case in module.CASES if case.name in cases):
            args = module.make(case.params, "cpu", torch.bfloat16, torch.Generator().manual_seed(0))
            getattr(module, launcher)(*args)
    return found


def _answer(answer: bool, x: torch.Tensor) -> bool:
    return answer


def _facts(kernel: Any) -> dict[str, Any]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    stack, registers = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("STACK", "REG"))
    return {"mma": "mma" in kernel.asm["ptx"], "spills": stack, "registers": registers}


if __name__ == "__main__":
    print(json.dumps(_compile_all(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))))
