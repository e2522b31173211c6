"""The library is built once, into the folder where every other process finds it too."""

from collections.abc import Callable

import pytest

from vlmopt.cpp_runtime import build
from vlmopt.cpp_runtime.bridge import CppRuntime
from vlmopt.weights import Weights


@pytest.fixture(scope="session")
def runtime() -> Callable[[Weights], CppRuntime]:
    """Makes the C++ runtime of some weights."""
    if build.compiler() is None:
        pytest.skip("no C++ compiler is installed")
    return CppRuntime
