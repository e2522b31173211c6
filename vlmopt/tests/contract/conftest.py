"""Fixtures of the contract: one optimised model beside the untouched reference, its counts at zero for each test."""

import pytest
import torch
from torch import nn

import vlmopt
from vlmopt.bench.models import TINY, load


@pytest.fixture(scope="session")
def _second_model() -> nn.Module:
    return load(TINY, "cpu", torch.float32).model


@pytest.fixture
def ours(_second_model: nn.Module) -> nn.Module:
    """The embedded model under `exact`; a test that changes the model takes `tiny` instead."""
    vlmopt.optimize(_second_model, "exact")
    return _second_model


@pytest.fixture(scope="session")
def stock(reference) -> nn.Module:
    """The same weights, never optimised nor changed."""
    return reference.model


@pytest.fixture(scope="session")
def ours_for_all(_second_model: nn.Module) -> nn.Module:
    """The same model for tests that hypothesis calls many times; its counts go on."""
    vlmopt.optimize(_second_model, "exact")
    return _second_model
