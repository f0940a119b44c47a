"""The stage for each row, and which rows `make test` runs.

Rows marked `slow` run with `make faults` only: it loads the plugin `tests.faults.report`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.scene import Row, Scene


@pytest.fixture
def stage(record_property: Callable[[str, object], None]) -> Callable[..., Scene]:
    """Return what makes a scene for a row; its result goes into the table."""

    def make(row: Row, **options: Any) -> Scene:
        return Scene(row, record_property, **options)

    return make


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.has_plugin("tests.faults.report"):
        return
    here = [item for item in items if "tests/faults" in item.path.as_posix()]
    slow = {item for item in here if item.get_closest_marker("slow")}
    if slow:
        config.hook.pytest_deselected(items=list(slow))
        items[:] = [item for item in items if item not in slow]
