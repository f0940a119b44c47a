"""Fixtures that all kinds of tests share."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.support.processes import last_words
from tests.support.valkey import ValkeyServer


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """One server for the whole run. Tests share it: use keys that no other test uses."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def own_valkey() -> Iterator[ValkeyServer]:
    """A server for this test alone, empty, to be broken at will."""
    with ValkeyServer() as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failure what the processes under test said last."""
    report = yield
    if report.failed and (words := last_words()):
        report.sections.append(("Logs of the processes", words))
    return report
