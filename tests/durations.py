"""A pytest plugin: the folders of tests in a fixed order, and how long each took.

python -m pytest -p tests.durations
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

ORDER = ("unit", "wire", "integration", "faults", "e2e")
"""The quick and telling ones first; a folder that isn't named here comes last."""


def folder_of(path: Path) -> str:
    """Return the folder below `tests/` that a test file lies in."""
    parts = path.parts
    return parts[parts.index("tests") + 1] if "tests" in parts[:-2] else "."


class Durations:
    """Adds up what the tests of each folder took, set-up and clean-up included."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, int] = defaultdict(int)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        rank = {folder: place for place, folder in enumerate(ORDER)}
        items.sort(key=lambda item: rank.get(folder_of(item.path), len(ORDER)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = folder_of(Path(report.nodeid.partition("::")[0]))
        self._seconds[folder] += report.duration
        self._counts[folder] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time per group")
        for folder, seconds in self._seconds.items():
            line = f"tests/{folder:<12} {self._counts[folder]:>5} tests {seconds:>7.1f} s"
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(), "headrace-durations")
