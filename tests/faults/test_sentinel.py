"""A master that Sentinel watches dies or freezes, and its replica takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shared.errors import Diverged, JobLost, QueueUnavailable, WorkerLost
from tests.faults.clients import EXACT
from tests.faults.scene import STREAMED, Row, Scene
from tests.support.sentinel import SERVICE, Watched
from tests.support.valkey import ValkeyServer

Stage = Callable[..., Scene]

LOSSES = [Diverged.code, JobLost.code, WorkerLost.code, QueueUnavailable.code]
"""What answers may end with where the replica lacked something of their jobs."""


async def test_master_killed(stage: Stage) -> None:
    row = Row("Sentinel: master SIGKILLed, its replica promoted", LOSSES, stall_s=6.0)
    watched = Watched()
    async with stage(row, gateways=2, workers=2, server=watched) as scene:
        scene.send(tokens=240)
        await scene.flowing()
        old = watched.master
        old.kill()
        await asyncio.to_thread(watched.wait_failover, old)
        await scene.pool.wait_ready()
        again = scene.send(10, tokens=20)
        await scene.prove()
        assert {client.outcome() for client in again} == {EXACT}


@pytest.mark.slow
async def test_master_frozen(stage: Stage) -> None:
    """It wakes up as a master; nobody may go on writing to it."""
    row = Row("Sentinel: master SIGSTOP 8 s, its replica promoted, SIGCONT", LOSSES, stall_s=8.0)
    watched = Watched()
    async with stage(row, gateways=2, workers=2, server=watched) as scene:
        scene.send(mix=STREAMED, tokens=500)
        await scene.flowing()
        old = watched.master
        old.pause()
        await asyncio.to_thread(watched.wait_failover, old)
        await asyncio.sleep(7)
        old.resume()
        await scene.prove()


@pytest.mark.slow
async def test_planned_failover(stage: Stage) -> None:
    """The old master goes on taking writes for seconds; they are lost, and sent again."""
    row = Row("Sentinel: SENTINEL FAILOVER, the old master goes on", stall_s=4.0)
    watched = Watched()
    async with stage(row, gateways=2, workers=2, server=watched) as scene:
        scene.send(mix=STREAMED, tokens=240)
        await scene.flowing()
        old = watched.master
        watched.sentinel.command("SENTINEL", "FAILOVER", SERVICE)
        await asyncio.to_thread(watched.wait_failover, old)
        await scene.prove()


async def test_failover_to_a_replica_that_lags(stage: Stage) -> None:
    """Frames that were acknowledged are lost, and their workers send them again."""
    row = Row("Sentinel: failover to a replica that lacks the last second", stall_s=6.0)
    watched = Watched()
    async with stage(row, gateways=2, workers=2, server=watched) as scene:
        scene.send(mix=STREAMED, tokens=240)
        await scene.flowing()
        old, new = watched.master, watched.replica
        new.pause()
        old.command("CLIENT", "KILL", "TYPE", "replica")
        await scene.flowing(words=60)
        acknowledged = offset(old)
        old.kill()
        new.resume()
        assert acknowledged - offset(new) > 20_000
        await asyncio.to_thread(watched.wait_failover, old)
        result = await scene.prove()
        assert set(result.outcomes) == {EXACT}


def offset(server: ValkeyServer) -> int:
    """Return how much of the stream of writes a server has, bytes."""
    told: bytes = server.command("INFO", "replication")
    name = b"slave_repl_offset:" if b"role:slave" in told else b"master_repl_offset:"
    return int(told.partition(name)[2].split(maxsplit=1)[0])
