"""What a worker makes of the adapters that are wanted, whatever its engine does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shared.adapters import AdapterStore
from shared.protocol import AdapterRecord
from tests.unit.test_presence import Bench
from worker.adapters import Adapters
from worker.engine.interface import AdapterError


class Wishes(AdapterStore):
    def __init__(self) -> None:
        self.now: dict[str, AdapterRecord] = {}

    async def wanted(self, pool: str, *, renew: bool = False) -> dict[str, AdapterRecord]:
        return self.now


class Stage:
    """A worker's adapters between wishes and an engine that are set from outside."""

    def __init__(self) -> None:
        bench = Bench()
        self.engine, self.presence, self.wishes = bench.engine, bench.presence, Wishes()
        self.adapters = Adapters(bench.settings, bench.engine, self.wishes, bench.presence)

    async def want(self, asked_ms: int) -> str:
        """Have one wanted; return why it isn't there, empty if it is."""
        self.wishes.now = {"tone": AdapterRecord(name="tone", source="/a", asked_ms=asked_ms)}
        await self.adapters.load()
        return self.presence.adapters["tone"][1]

    async def unwant(self) -> None:
        self.wishes.now = {}
        await self.adapters.load()

    def names(self) -> Sequence[str]:
        return [model.name for model in self.engine.models]


@pytest.mark.parametrize("error", [AdapterError("no"), RuntimeError("no"), OSError("no")])
async def test_a_load_that_fails_is_told_and_can_be_asked_for_again(error: Exception) -> None:
    stage = Stage()
    stage.engine.adapter_error = error
    assert "no" in await stage.want(1)
    stage.engine.adapter_error = None
    assert "no" in await stage.want(1)  # Dealt with already.
    assert await stage.want(2) == ""


@pytest.mark.parametrize("error", [AdapterError("no"), RuntimeError("no")])
async def test_an_unload_that_fails_is_tried_again_at_the_next_look(error: Exception) -> None:
    stage = Stage()
    assert await stage.want(1) == ""
    stage.engine.adapter_error = error
    await stage.unwant()
    assert "tone" in stage.names()
    stage.engine.adapter_error = None
    await stage.unwant()
    assert "tone" not in stage.names()
    assert await stage.want(2) == ""
