"""What a process of its own takes: the seconds of `optimize`, and the most device memory that a call holds.

python -m vlmopt.workbook.fresh MODEL PRESET    one line of JSON; PRESET may be "stock"

In a process where other models have lived, compiled kernels lie ready and a call takes memory that they left free.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence

import torch

import vlmopt
from vlmopt.bench import models, protocol
from vlmopt.errors import VlmoptError
from vlmopt.workbook.end_to_end import PHOTO, STOCK, synthetic_sample
from vlmopt.workbook.record import Record

LOAD_LIMITS = {"no kernel compiled before": 90, "compiled kernels kept": 20}
"""Seconds that `optimize` may take."""


def measure(model: str, preset: str) -> dict[str, float]:
    """`optimize_s`, 0 for stock; on a GPU also `peak_memory_gb`, the most that torch reserves in a call after it."""
    loaded = models.load(model)
    begun = time.perf_counter()
    if preset != STOCK:
        vlmopt.optimize(loaded.model, preset)
    found = {"optimize_s": time.perf_counter() - begun if preset != STOCK else 0.0}
    if loaded.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(loaded.device)
        with protocol.quiet_generation():
            inputs = protocol.prepare(loaded, synthetic_sample(*PHOTO, 0))
            protocol.generate(loaded, inputs, protocol.THROUGHPUT_TOKENS)
        found["peak_memory_gb"] = torch.cuda.max_memory_reserved(loaded.device) / 1e9
    return found


def ask(model: str, preset: str, home: str | None = None) -> dict[str, float]:
    """What `measure` finds in a process of its own, whose compiled kernels are kept below `home`.

    Raises:
        VlmoptError: the process failed; the message holds its last line.
    """
    command = [sys.executable, "-m", "vlmopt.workbook.fresh", model, preset]
    done = subprocess.run([*(["env", f"HOME={home}"] if home else []), *command], capture_output=True, text=True)
    if done.returncode:
        raise VlmoptError(f"a fresh process with {preset} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_load(record: Record, model: str, preset: str) -> None:
    """Adds `optimize_s` of two processes, of which the second finds what the first compiled."""
    with tempfile.TemporaryDirectory() as home:
        for case in LOAD_LIMITS:
            record.measure(case, preset, "optimize_s", "s", [ask(model, preset, home)["optimize_s"]])


def measure_memory(record: Record, case: str, model: str, providers: Iterable[str]) -> None:
    """Adds `peak_memory_gb` of stock and presets, each in a process of its own, or says that a CPU's is not counted."""
    if not torch.cuda.is_available():
        record.skip("peak_memory_gb", "device memory is counted on a GPU only")
        return
    for name in providers:
        record.measure(case, name, "peak_memory_gb", "GB", [ask(model, name)["peak_memory_gb"]])


def main(arguments: Sequence[str]) -> int:
    """0 after a line of JSON, 2 after a sentence about what to put right."""
    if len(arguments) != 2:
        print("usage: python -m vlmopt.workbook.fresh MODEL PRESET", file=sys.stderr)
        return 2
    try:
        print(json.dumps(measure(*arguments)))
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
