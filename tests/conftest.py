"""Fixtures that all kinds of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
