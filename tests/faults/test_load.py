"""No fault but the load itself: races between subscription and answer, connections, long jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.faults.clients import EXACT
from tests.faults.scene import Row, Scene
from tests.faults.test_cancels import leave
from tests.faults.test_links import check_one_attempt_each

Stage = Callable[..., Scene]


@pytest.mark.parametrize(
    "count", [500, pytest.param(2000, marks=pytest.mark.slow)], ids=["some", "all"]
)
async def test_one_token_at_once(stage: Stage, count: int) -> None:
    """An answer that is there before anybody could have subscribed late."""
    row = Row(f"{count} requests of one token, 0 ms to the first", stall_s=2.0)
    async with stage(row, workers=2, simulated={"ttft_ms": 0}) as scene:
        for _ in range(count // 50):
            scene.send(50, tokens=1)
            await scene.finished()
        result = await scene.prove()
        assert result.outcomes[EXACT] == count


@pytest.mark.slow
async def test_connections_to_the_queue(stage: Stage) -> None:
    row = Row("300 streams, 2,000 clients that come and go", stall_s=5.0)
    async with stage(row, workers=2, simulated={"seats": 400, "tpot_ms": 100}) as scene:
        scene.send(300, tokens=150, mix=("chat",))
        await scene.flowing(1)
        before = connections(scene)
        room, most = asyncio.Semaphore(20), before

        async def one(at: int) -> None:
            nonlocal most
            async with room:
                await leave(scene, ("fin", "rst")[at % 2], 0.01, stream=True)
            if at % 100 == 0:
                most = max(most, connections(scene))

        await asyncio.gather(*(one(at) for at in range(2000)))
        assert most <= before + 40, f"{before} connections grew to {most}"
        await scene.prove(timeout=60)
        assert connections(scene) <= before + 40


def connections(scene: Scene) -> int:
    return len(scene.server.command("CLIENT", "LIST").splitlines())


@pytest.mark.slow
async def test_job_longer_than_its_lease(stage: Stage) -> None:
    row = Row("job of 20 s with a lease of 3 s")
    async with stage(row, workers=3) as scene:
        scene.send(5, tokens=800, mix=("chat", "whole"))
        await scene.prove()
        await check_one_attempt_each(scene)
