"""How many kernels Triton compiles while something runs."""

from collections.abc import Callable, Iterable
from typing import Any

import triton


def compiled(calls: Iterable[Callable[[], Any]]) -> list[str]:
    """The kernels, by signature, that Triton made (compiled or loaded from its disk cache) during `calls`."""
    made: list[str] = []
    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = lambda **told: made.append(told["repr"])
    try:
        for call in calls:
            call()
    finally:
        triton.knobs.runtime.jit_cache_hook = before
    return made
