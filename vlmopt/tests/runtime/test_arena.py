"""The pool of what a prompt needs: what may not happen while memory comes from it."""

import contextlib
import gc

import pytest
import torch

from vlmopt.runtime import arena
from vlmopt.runtime.arena import Arena, no_collection


@pytest.fixture(autouse=True)
def collecting():
    yield
    gc.enable()


def test_garbage_waits_and_is_collected_afterwards_whatever_happens():
    with no_collection(), no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError), no_collection():
        raise ValueError
    assert gc.isenabled()


def test_who_collects_nothing_by_choice_goes_on_so():
    gc.disable()
    with no_collection():
        pass
    assert not gc.isenabled()


def test_nothing_is_collected_while_memory_comes_from_a_pool(monkeypatch):
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: contextlib.nullcontext())
    with arena.Arena(torch.device("cuda", 0)).held():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.gpu
def test_a_dropped_pool_outlives_the_use_of_another():
    """Freed inside, it would end the process."""
    device = torch.device("cuda", 0)
    dropped = Arena(device)
    with dropped.held():
        torch.empty(1 << 20, device=device)
    cycle = [dropped]
    cycle.append(cycle)
    del dropped, cycle
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with Arena(device).held():
            torch.empty(1 << 20, device=device)
            assert len([[i] for i in range(1000)]) == 1000
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
