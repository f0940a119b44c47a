"""Workers that die, freeze, wake up or are asked to leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shared.errors import Poisoned
from tests.faults.clients import EXACT
from tests.faults.scene import STREAMED, Row, Scene
from worker.worker import Exit

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


@pytest.mark.slow
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
            await asyncio.sleep(6)  # The new one is sound: it may take over.
        await scene.prove(timeout=60)


async def test_asked_to_leave_with_long_answers(stage: Stage) -> None:
    """They move on to workers with room, and the worker is gone long before they end."""
    row = Row("worker SIGTERM, answers longer than its grace", stall_s=1.0)
    async with stage(row, worker={"drain_grace_s": 0.5}) as scene:
        clients = scene.send(tokens=400, mix=STREAMED)
        await scene.flowing()
        leaving = await scene.busiest()
        leaving.terminate()
        await scene.wait_gone(leaving, 0, timeout=5)
        assert any(client.ending is None for client in clients)
        await scene.prove()


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "stall_s"), [("die@60", 2.5), ("hang@60", 9.0)])
async def test_engine_fails(stage: Stage, fault: str, stall_s: float) -> None:
    """A whole engine is lost to one request, and its worker leaves; others go on with the rest."""
    row = Row(f"engine fails ({fault}) under 4 workers", [Poisoned.code], stall_s)
    async with stage(row, workers=4, worker={"stall_s": 1.5}) as scene:
        innocents = scene.send(30, tokens=300, mix=STREAMED)
        await scene.flowing(4)
        scene.send(1, prompt=f"[[fault:{fault}]]", mix=("chat",))
        await scene.finished(60)
        for worker in scene.workers:
            if not worker.running:
                await scene.wait_gone(worker, Exit.ENGINE_FAILED)
        assert len(scene.gone) == 3
        await scene.prove()
        assert {client.outcome() for client in innocents} == {EXACT}
