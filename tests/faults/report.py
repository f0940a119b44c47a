"""A pytest plugin: runs every row of the fault suite, and writes the table of what they showed.

python -m pytest -p tests.faults.report tests/faults tests/e2e/test_vllm_failover_processes.py

The rows of a run replace those of earlier ones in docs/guarantees.md. A run of the whole suite
replaces all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.clients import EXACT
from tests.faults.scene import Result

PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"
BEGIN = "<!-- faults: written by make faults -->"
END = "<!-- faults: end -->"

SUITE = {"tests/faults", "tests/e2e/test_vllm_failover_processes.py"}

HEAD = (
    "| fault | requests | exact | otherwise | stall p50 | p95 | max |",
    "|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Line:
    """What one test showed."""

    fault: str
    result: Result | None
    """None if the row doesn't hold."""

    def text(self) -> str:
        if self.result is None:
            return f"| {self.fault} | | | **failed** | | | |"
        outcomes = self.result.outcomes
        rest = [f"{n} `{code}`" for code, n in sorted(outcomes.items()) if code != EXACT]
        stalls = (_stall(self.result.stalls, share) for share in (0.5, 0.95, 1.0))
        cells = [str(outcomes.total()), str(outcomes[EXACT]), ", ".join(rest), *stalls]
        return f"| {self.fault} | {' | '.join(cells)} |"


def _stall(stalls: Sequence[float], share: float) -> str:
    """Return a percentile of sorted values, as the table shows it."""
    if not stalls:
        return ""
    at = min(len(stalls) - 1, int(share * len(stalls)))
    return f"{stalls[at]:.2f} s"


class Table:
    """Collects the rows of a run."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._complete = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        options = session.config.option
        self._complete = not (options.keyword or options.markexpr or _narrowed(session.config))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = dict(report.user_properties)
        if report.when == "call" and "fault" in told:
            result = told.get("result") if report.passed else None
            self._lines.append(Line(str(told["fault"]), result))  # type: ignore[arg-type]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rows = {line.fault: line.text() for line in self._lines}
        terminalreporter.section("faults")
        terminalreporter.write_line("\n".join([*HEAD, *rows.values()]))
        if rows:
            write(rows if self._complete else {**written(), **rows})


def _narrowed(config: pytest.Config) -> bool:
    """Tell whether only a part of the suite was asked for."""
    return bool(set(config.args) != SUITE or config.option.lf)


def written() -> dict[str, str]:
    """Return the rows that stand in the page, by their fault."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    lines = rest.partition(END)[0].splitlines()
    rows = [line for line in lines if line.startswith("| ") and line not in HEAD]
    return {row[2:].partition(" |")[0]: row for row in rows}


def write(rows: Mapping[str, str]) -> None:
    """Replace the table in the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join([*HEAD, *rows.values()])
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Table(), "headrace-faults")
