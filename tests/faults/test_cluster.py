"""A cluster of three primaries: one of them dies, or a slot moves to another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shared.keys import REGISTRY, tags
from shared.servers import slot
from tests.faults.clients import EXACT, Client
from tests.faults.scene import STREAMED, Result, Row, Scene
from tests.support.cluster import Cluster

Stage = Callable[..., Scene]

SHARDS = 3
TAGS = tags("simulated", SHARDS)
WORKER = {"shards": SHARDS}


def shard_of(client: Client) -> str:
    return client.job_id[: len(TAGS[0])]


def untouched(scene: Scene, cluster: Cluster, tag: str) -> Result:
    """Judge the streams of the shards that live elsewhere."""
    port = cluster.owner(tag).port
    touched = {one for one in TAGS if cluster.owner(one).port == port}
    return scene.judge([client for client in scene.clients if shard_of(client) not in touched])


def away_from_registry() -> str:
    """Return a shard whose primary isn't the registry's."""
    third = 16_384 // 3
    return next(one for one in TAGS if slot(one) // third != slot(REGISTRY) // third)


async def test_primary_killed(stage: Stage) -> None:
    """Its replica takes over: streams of its shards wait for that, and no others do."""
    row = Row("cluster of 3 primaries, one SIGKILLed, its replica promoted", stall_s=5.0)
    cluster, tag = Cluster(replicas=True), away_from_registry()
    async with stage(row, gateways=2, workers=2, server=cluster, worker=WORKER) as scene:
        scene.send(mix=STREAMED, tokens=240)
        await scene.flowing()
        _, replica = cluster.fail(tag)
        await asyncio.to_thread(cluster.wait_owner, tag, replica)
        scene.send(10, tokens=20)
        await scene.finished()
        others = untouched(scene, cluster, tag)
        assert len(others.stalls) > 5
        assert others.stalls[-1] < 1.5
        await scene.prove()


@pytest.mark.slow
async def test_registrys_primary_killed(stage: Stage) -> None:
    row = Row("cluster, the registry's primary SIGKILLed", stall_s=5.0)
    cluster = Cluster(replicas=True)
    async with stage(row, workers=2, server=cluster, worker=WORKER) as scene:
        scene.send(mix=STREAMED, tokens=240)
        await scene.flowing()
        _, replica = cluster.fail(REGISTRY)
        await asyncio.to_thread(cluster.wait_owner, REGISTRY, replica)
        await scene.pool.wait_ready()
        scene.send(10, tokens=20)
        await scene.prove()


async def test_slot_moved_by_hand(stage: Stage) -> None:
    """Key by key, as `reshard` does it; half of a job's keys are here and half there meanwhile."""
    row = Row("cluster, a shard's slot moved key by key, and the registry's", stall_s=1.5)
    cluster = Cluster()
    async with stage(row, gateways=2, workers=2, server=cluster, worker=WORKER) as scene:
        scene.send(mix=STREAMED)
        await scene.flowing()
        for tag in (TAGS[0], REGISTRY):
            assert await asyncio.to_thread(cluster.move, tag, cluster.other(tag)) > 0
        scene.send(10, tokens=20)
        await scene.prove()


@pytest.mark.slow
async def test_slot_moved_whole(stage: Stage) -> None:
    row = Row("cluster, each shard's slot moved by CLUSTER MIGRATESLOTS", stall_s=1.5)
    cluster = Cluster()
    async with stage(row, gateways=2, workers=2, server=cluster, worker=WORKER) as scene:
        scene.send(mix=STREAMED)
        await scene.flowing()
        for tag in TAGS:
            await asyncio.to_thread(cluster.move_whole, tag, cluster.other(tag))
        scene.send(10, tokens=20)
        await scene.prove()


@pytest.mark.slow
async def test_worker_killed(stage: Stage) -> None:
    row = Row("cluster, worker SIGKILL", stall_s=4.5)
    async with stage(row, workers=3, server=Cluster(), worker=WORKER) as scene:
        scene.send(mix=STREAMED)
        await scene.flowing()
        scene.kill(await scene.busiest())
        await scene.prove()


@pytest.mark.slow
async def test_worker_asked_to_leave(stage: Stage) -> None:
    row = Row("cluster, worker SIGTERM, answers longer than its grace", stall_s=1.5)
    worker = {"drain_grace_s": 0.5, **WORKER}
    async with stage(row, workers=2, server=Cluster(), worker=worker) as scene:
        clients = scene.send(tokens=400, mix=STREAMED)
        await scene.flowing()
        leaving = await scene.busiest()
        leaving.terminate()
        await scene.wait_gone(leaving, 0, timeout=5)
        await scene.prove()
        assert {client.outcome() for client in clients} == {EXACT}
