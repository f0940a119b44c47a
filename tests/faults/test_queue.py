"""The server of the queue dies, freezes, forgets, or is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shared.errors import JobLost, QueueFull
from tests.faults.clients import EXACT
from tests.faults.scene import Row, Scene
from tests.faults.test_links import check_one_attempt_each
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

Stage = Callable[..., Scene]


async def test_restarted_with_its_data(stage: Stage) -> None:
    row = Row("queue SIGKILLed, restarted with its AOF", stall_s=4.0)
    async with stage(row, gateways=2, workers=2, server=ValkeyServer(appendonly=True)) as scene:
        scene.send()
        await scene.flowing()
        scene.server.kill()
        await asyncio.sleep(0.5)
        scene.server.start()
        await scene.prove()


async def test_restarted_empty(stage: Stage) -> None:
    row = Row("queue SIGKILLed, restarted empty", allowed=[JobLost.code], forgotten=True)
    async with stage(row, gateways=2, workers=2) as scene:
        lost = scene.send()
        await scene.flowing()
        scene.server.kill()
        await asyncio.sleep(0.5)
        scene.server.start()
        await check_lost_and_recovered(scene)
        assert {client.outcome() for client in lost} == {JobLost.code}


@pytest.mark.slow
async def test_flushed(stage: Stage) -> None:
    row = Row("FLUSHALL", allowed=[JobLost.code], forgotten=True)
    async with stage(row, gateways=2, workers=2) as scene:
        lost = scene.send()
        await scene.flowing()
        scene.server.command("FLUSHALL")
        await check_lost_and_recovered(scene)
        assert {client.outcome() for client in lost} == {JobLost.code}


async def check_lost_and_recovered(scene: Scene) -> None:
    """Check that all end soon, in errors, and that new work runs without anybody's help."""
    await scene.finished(timeout=8)
    await scene.pool.wait_ready()
    scene.send(20, tokens=20)
    result = await scene.prove()
    assert result.outcomes[EXACT] == 20


async def test_frozen(stage: Stage) -> None:
    row = Row("queue SIGSTOP 6 s, SIGCONT", stall_s=8.0)
    async with stage(row, gateways=2, workers=3) as scene:
        scene.send(tokens=260)
        await scene.flowing()
        scene.server.pause()
        await asyncio.sleep(6)
        scene.server.resume()
        await scene.prove()
        await check_one_attempt_each(scene)


@pytest.mark.slow
async def test_out_of_memory(stage: Stage) -> None:
    row = Row("queue at maxmemory", allowed=[QueueFull.code])
    async with stage(row, gateways=2, workers=2) as scene:
        running = scene.send()
        await scene.flowing()
        scene.server.command("CONFIG", "SET", "maxmemory", "1mb")
        refused = scene.send(20, tokens=5)
        await until(lambda: all(client.ending for client in refused), "refusals", timeout=4)
        await scene.finished()
        scene.judge()
        assert {client.outcome() for client in running} == {EXACT}
        assert {client.status for client in refused} == {503}
        assert all(1 <= int(client.answer_headers["retry-after"]) <= 60 for client in refused)
        await asyncio.sleep(4)  # Longer than a lease: the workers are still known.
        scene.server.command("CONFIG", "SET", "maxmemory", "0")
        again = scene.send(20, tokens=5)
        await scene.prove()
        assert {client.outcome() for client in again} == {EXACT}
