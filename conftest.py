"""Runs before the package is imported: Triton decides where a kernel is defined whether it is to be interpreted."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.MonkeyPatch().setenv("TRITON_INTERPRET", "1")

pytest_plugins = ["vlmopt.tests.ledger"]
