"""Gateways that die or leave, and their connections to the queue that break."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shared.errors import Draining, QueueUnavailable
from tests.faults.clients import CUT, EXACT
from tests.faults.scene import MIXED, STREAMED, Row, Scene
from tests.support.sse import fetch

Stage = Callable[..., Scene]


async def test_killed(stage: Stage) -> None:
    row = Row("gateway SIGKILL, one of two", allowed=[CUT])
    async with stage(row, gateways=2, workers=2) as scene:
        victim, other = scene.gateways
        cut = scene.send(25, gateways=[victim])
        scene.send(25, gateways=[other])
        await scene.flowing()
        scene.kill(victim)
        result = await scene.prove()
        assert {client.outcome() for client in cut} == {CUT}
        assert result.outcomes[EXACT] == 25


@pytest.mark.slow
async def test_asked_to_leave(stage: Stage) -> None:
    row = Row("gateway SIGTERM, one of two, answers shorter than its drain")
    async with stage(row, gateways=2, workers=2) as scene:
        leaving, other = scene.gateways
        scene.send()
        await scene.flowing()
        leaving.terminate()
        await scene.wait_gone(leaving, 0)
        with pytest.raises(ConnectionError):
            await fetch(f"{leaving.url}/healthz")
        scene.send(10, gateways=[other])
        await scene.prove()


@pytest.mark.slow
async def test_asked_to_leave_at_once(stage: Stage) -> None:
    row = Row("gateway SIGTERM, answers longer than its drain", allowed=[Draining.code])
    async with stage(row, gateways=2, workers=2, gateway={"drain_timeout_s": 1}) as scene:
        leaving, other = scene.gateways
        cut = scene.send(25, gateways=[leaving])
        scene.send(25, gateways=[other])
        await scene.flowing()
        leaving.terminate()
        await scene.wait_gone(leaving, 0, timeout=4)
        await scene.prove()
        assert {client.outcome() for client in cut} == {Draining.code}


async def test_subscriptions_killed(stage: Stage) -> None:
    row = Row("CLIENT KILL TYPE pubsub, 16 times")
    async with stage(row, gateways=2, workers=2) as scene:
        scene.send()
        await scene.flowing(2)
        for _ in range(16):
            assert scene.server.command("CLIENT", "KILL", "TYPE", "pubsub") > 0
            await asyncio.sleep(0.15)
        await scene.prove()


@pytest.mark.slow
async def test_all_connections_killed(stage: Stage) -> None:
    row = Row("all of a gateway's connections killed, 8 times")
    async with stage(row, workers=2) as scene:
        scene.send()
        await scene.flowing(2)
        for _ in range(8):
            listed = scene.server.command("CLIENT", "LIST").decode().splitlines()
            for line in listed:
                facts = dict(fact.split("=", 1) for fact in line.split())
                if facts["name"].startswith("gateway-"):
                    scene.server.command("CLIENT", "KILL", "ID", facts["id"])
            await asyncio.sleep(0.25)
        await scene.prove()


async def test_half_open_link(stage: Stage) -> None:
    row = Row("gateway's link half open", stall_s=4.0)
    async with stage(row, workers=2, gateway_proxy=True) as scene:
        scene.send()
        await scene.flowing()
        assert scene.gateway_link.strand() > 0
        await scene.prove()


@pytest.mark.slow
async def test_link_swallows(stage: Stage) -> None:
    """Nothing gets through, new connections included, for longer than any reply is waited for."""
    row = Row("gateway's link swallows everything for 4 s", stall_s=6.5)
    async with stage(row, workers=2, gateway_proxy=True) as scene:
        scene.send()
        await scene.flowing()
        scene.gateway_link.swallow()
        refused = scene.send(5, tokens=5)
        await asyncio.sleep(4)
        assert {client.outcome() for client in refused} == {QueueUnavailable.code}
        for client in refused:
            scene.clients.remove(client)
        scene.gateway_link.heal()
        scene.gateway_link.cut()
        await scene.prove()


@pytest.mark.slow
async def test_link_delayed(stage: Stage) -> None:
    row = Row("100 ms more each way between gateway and queue")
    async with stage(row, workers=2, gateway_proxy=True) as scene:
        scene.send()
        await scene.flowing()
        scene.gateway_link.delay(0.1)
        scene.send(10, tokens=20)
        await scene.prove()


@pytest.mark.slow
async def test_frozen(stage: Stage) -> None:
    """Long enough for the server to give up its subscriber, had it anything to send."""
    row = Row("gateway SIGSTOP 10 s, SIGCONT", stall_s=11.0)
    async with stage(row, workers=2) as scene:
        scene.send(mix=STREAMED)
        await scene.flowing()
        scene.gateways[0].pause()
        await asyncio.sleep(10)
        scene.gateways[0].resume()
        await scene.prove()


@pytest.mark.slow
async def test_replies_to_submissions_lost(stage: Stage) -> None:
    """The job is there, and the gateway can't know: the client may be told no, but not both."""
    row = Row("replies to submissions lost", allowed=[QueueUnavailable.code])
    async with stage(row, workers=2, gateway_proxy=True) as scene:
        scene.gateway_link.cut_after(scene.script("submit"), times=20)
        for _ in range(40):
            scene.send(1, tokens=20, mix=MIXED[:1])
            await asyncio.sleep(0.05)
        result = await scene.prove()
        assert result.outcomes[QueueUnavailable.code] == 20
        jobs = await scene.inspector.jobs(await scene.inspector.job_ids())
        assert sum(job.outcome == "completed" for job in jobs.values()) == 20
        refused = [job for job in jobs.values() if job.outcome != "completed"]
        assert {job.outcome for job in refused} <= {"cancelled"}
