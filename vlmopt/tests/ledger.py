"""A pytest plugin that prints last where the time went, file by file (`./run.sh test` loads it)."""

import time
from collections import Counter

import pytest


class Ledger:
    """Seconds spent in each test file (set-up, test and tear-down), and in collecting them."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.collecting = 0.0
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()

    def pytest_collection_finish(self) -> None:
        self.collecting = time.perf_counter() - self.started

    def pytest_runtest_logreport(self, report) -> None:
        file = report.nodeid.split("::")[0]
        self.seconds[file] += report.duration
        self.tests[file] += report.when == "setup"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter):
        result = yield
        terminalreporter.section("where the time went")
        for line in self.lines():
            terminalreporter.write_line(line)
        return result

    def lines(self) -> list[str]:
        """One line a file, the slowest first, then the collection and the whole."""
        rows = [
            f"{seconds:8.1f} s  {self.tests[file]:4d} tests  {file}" for file, seconds in self.seconds.most_common()
        ]
        total = time.perf_counter() - self.started
        rows.append(f"{self.collecting:8.1f} s              collecting")
        rows.append(f"{total:8.1f} s  {self.tests.total():4d} tests  in all")
        return rows


def pytest_configure(config) -> None:
    config.pluginmanager.register(Ledger(), "ledger")
