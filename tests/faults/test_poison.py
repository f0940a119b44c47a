"""Requests that kill whoever runs them, among innocent ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shared.errors import Poisoned
from tests.faults.clients import EXACT, Kind
from tests.faults.scene import MIXED, STREAMED, Row, Scene

Stage = Callable[..., Scene]


@pytest.mark.parametrize(
    "fault",
    ["exit@0", pytest.param("exit@20", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "mix", [STREAMED, pytest.param(("whole",), marks=pytest.mark.slow)], ids=["streams", "whole"]
)
async def test_exit(stage: Stage, fault: str, mix: tuple[Kind, ...]) -> None:
    """Streams among the innocents go on elsewhere, and answers in one piece begin anew."""
    name = f"poison job ({fault}, process exits), 24 innocents, 4 workers, "
    row = Row(name + ("streams" if mix is STREAMED else "not streamed"), [Poisoned.code], 9.0)
    async with stage(row, workers=4) as scene:
        innocents = scene.send(24, mix=mix)
        await scene.flowing(4)
        (poison,) = scene.send(1, prompt=f"[[fault:{fault}]]", mix=mix[:1], tokens=400)
        await scene.finished(60)
        dead = [worker for worker in scene.workers if not worker.running]
        assert len(dead) == 3, f"it cost {len(dead)} workers"
        scene.gone.update(dead)
        await scene.prove()
        assert {client.outcome() for client in innocents} == {EXACT}
        assert poison.outcome() == Poisoned.code
        await check_dead_letter(scene, [poison.job_id])


async def check_dead_letter(scene: Scene, job_ids: list[str]) -> None:
    """Check that these jobs, and no others, were put aside, each with the workers that it cost."""
    redis = scene.inspector.redis
    (name,) = await scene.inspector.keys("*:dead")
    entries: Any = await redis.xrange(name)
    assert [fields[b"j"].decode() for _, fields in entries] == job_ids
    for _, fields in entries:
        history = fields[b"history"].decode().split("\n")[:-1]
        assert len(history) == 3, history
        assert fields[b"rec"]


@pytest.mark.slow
async def test_mixed_with_a_batch(stage: Stage) -> None:
    row = Row("poison job among streamed and whole innocents", [Poisoned.code], 15.0)
    async with stage(row, workers=4) as scene:
        innocents = scene.send(24, mix=MIXED, tokens=80)
        await scene.flowing(4)
        scene.send(1, prompt="[[fault:exit@2]]", mix=("chat",))
        await scene.finished(60)
        scene.gone.update(worker for worker in scene.workers if not worker.running)
        await scene.prove()
        assert {client.outcome() for client in innocents} == {EXACT}
