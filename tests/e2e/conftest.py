"""Which tests `make test` runs: not those marked `slow`, unless `-m` says something of its own."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("markexpr"):
        return
    here = [item for item in items if "tests/e2e" in item.path.as_posix()]
    slow = {item for item in here if item.get_closest_marker("slow")}
    if slow:
        config.hook.pytest_deselected(items=list(slow))
        items[:] = [item for item in items if item not in slow]
