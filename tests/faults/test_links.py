"""Workers' links to the queue that break, lose replies or are slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.faults.scene import STREAMED, Row, Scene

Stage = Callable[..., Scene]


async def test_cut(stage: Stage) -> None:
    row = Row("worker's link cut, 8 times")
    async with stage(row, workers=2, worker_proxy=True) as scene:
        scene.send()
        await scene.flowing(2)
        for _ in range(8):
            assert scene.worker_link.cut() > 0
            await asyncio.sleep(0.3)
        await scene.prove()
        await check_one_attempt_each(scene)


async def test_half_open(stage: Stage) -> None:
    row = Row("worker's link half open", stall_s=4.0)
    async with stage(row, workers=2, worker_proxy=True) as scene:
        scene.send(mix=STREAMED)
        await scene.flowing()
        assert scene.worker_link.strand() > 0
        await scene.prove()


@pytest.mark.slow
async def test_gone_for_longer_than_a_lease(stage: Stage) -> None:
    row = Row("worker's link gone for 6 s", stall_s=4.0)
    async with stage(row, workers=2, worker_proxy=True) as scene:
        scene.send(mix=STREAMED)
        await scene.flowing()
        scene.worker_link.swallow()
        await asyncio.sleep(6)
        scene.worker_link.heal()
        scene.worker_link.cut()
        await scene.prove()


@pytest.mark.slow
async def test_delayed(stage: Stage) -> None:
    row = Row("100 ms more each way between worker and queue")
    async with stage(row, workers=1, worker_proxy=True) as scene:
        scene.send()
        await scene.flowing()
        scene.worker_link.delay(0.1)
        await scene.prove()


@pytest.mark.parametrize(
    "script",
    [
        "publish",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("claim", "adopt", "finish", "beat")
        ),
    ],
)
async def test_replies_lost(stage: Stage, script: str) -> None:
    """What the worker asked for was done, and it can't know."""
    row = Row(f"worker's replies to {script} lost, 4 times")
    async with stage(row, workers=1, worker_proxy=True) as scene:
        for _ in range(4):
            scene.worker_link.cut_after(scene.script(script))
            scene.send(12, tokens=60)
            await asyncio.sleep(1.7)
        await scene.prove()


async def check_one_attempt_each(scene: Scene) -> None:
    """Check that no job was taken from its worker."""
    jobs = await scene.inspector.jobs([client.job_id for client in scene.clients])
    attempts = {job_id: job.attempts for job_id, job in jobs.items()}
    assert set(attempts.values()) == {1}, attempts
