"""Workers that die, freeze, wake up or are asked to leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.faults.scene import STREAMED, Row, Scene

Stage = Callable[..., Scene]


async def test_killed(stage: Stage) -> None:
    async with stage(Row("worker SIGKILL", stall_s=4.0)) as scene:
        scene.send(mix=STREAMED)
        await scene.flowing()
        scene.kill(await scene.busiest())
        await scene.prove()


async def test_frozen_beyond_its_lease(stage: Stage) -> None:
    row = Row("worker SIGSTOP 8 s, SIGCONT", stall_s=4.0)
    async with stage(row, simulated={"seats": 32}) as scene:
        scene.send(mix=STREAMED)
        await scene.flowing()
        zombie = await scene.busiest()
        zombie.pause()
        await asyncio.sleep(8)
        zombie.resume()
        await scene.prove()
        # Its seats are free again: alone, it runs as many as it has at once.
        for other in scene.workers:
            if other is not zombie:
                other.terminate()
                await scene.wait_gone(other, 0)
        again = scene.send(32, tokens=40)
        await scene.flowing(clients=again)
        await scene.finished()
        scene.judge(again)
        await scene.settle()


async def test_asked_to_leave(stage: Stage) -> None:
    async with stage(Row("worker SIGTERM under load", stall_s=1.0)) as scene:
        scene.send(mix=STREAMED)
        await scene.flowing()
        leaving = await scene.busiest()
        leaving.terminate()
        await scene.wait_gone(leaving, 0)
        await scene.prove()


@pytest.mark.slow
async def test_all_killed_one_after_the_other(stage: Stage) -> None:
    async with stage(Row("each of 3 workers SIGKILLed in turn", stall_s=4.0)) as scene:
        scene.send(mix=STREAMED, tokens=700)
        await scene.flowing()
        for worker in list(scene.workers):
            scene.kill(worker)
            scene.pool.add_worker()
            await asyncio.sleep(5)
        await scene.prove(timeout=60)
