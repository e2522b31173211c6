"""Memory for what a prompt needs on its way, kept between calls.

The contest's harness empties torch's cache before every measurement, after which each of a prompt's buffers would wait
for the driver. What is allocated inside `held` comes from a pool that an emptied cache leaves alone, and goes back to
it; it grows to what the largest prompt so far needed, and goes with the arena.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vlmopt.errors import PartFailed
from vlmopt.runtime.request import HandedToStock


class Arena:
    """One pool on one device; on a CPU `held` does nothing."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.MemPool() if device.type == "cuda" else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """This thread allocates from the pool. No graph may be captured in here: it has a pool of its own."""
        if self._pool is None:
            yield
            return
        with no_collection(), torch.cuda.use_mem_pool(self._pool, self._device):
            yield


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected in here, where memory comes from a pool or goes into a capture.

    An engine that was dropped is a cycle, and has a pool: torch ends the process where one is freed meanwhile.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def within_memory(part: str) -> Iterator[None]:
    """Running out of memory in here is the failure of `part`."""
    try:
        yield
    except (HandedToStock, torch.OutOfMemoryError) as error:
        raise PartFailed(part, f"there is not enough memory: {str(error).splitlines()[0]}") from error
