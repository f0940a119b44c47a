"""Clients that read slowly, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import pytest

from tests.faults.clients import Client
from tests.faults.scene import Row, Scene
from tests.support.sse import Response, open_response
from tests.support.waiting import until

Stage = Callable[..., Scene]

STALL_TIMEOUT_S = 4
FAT = {"logprobs": True, "top_logprobs": 20}
"""Events of about 2 kB, so that the sockets' buffers, some megabytes, are full in seconds."""


@pytest.mark.slow
async def test_readers_that_stall(stage: Stage) -> None:
    row = Row("10 clients that never read")
    gateway = {"stall_timeout_s": STALL_TIMEOUT_S}
    async with stage(row, workers=1, gateway=gateway, simulated={"tpot_ms": 8}) as scene:
        scene.send(10, tokens=100)
        await scene.finished()
        before = memory(scene.gateways[0].pid)
        async with AsyncExitStack() as stack:
            responses = [await stack.enter_async_context(open_fat(scene, at)) for at in range(10)]
            ids = [response.headers["x-job-id"] for response in responses]
            await until(lambda: all_done(scene, ids), "jobs cancelled", timeout=40)
            grown = memory(scene.gateways[0].pid) - before
        assert grown < 10, f"{grown:.0f} MiB more for 10 stalled readers"
        scene.send(10, tokens=20)
        result = await scene.prove(record=False)
        scene.add(result, "cancelled", 10)


@pytest.mark.slow
async def test_readers_that_are_slow(stage: Stage) -> None:
    """They are never cut, and what they haven't read yet waits in the queue's log."""
    row = Row("10 clients that read 20 kB/s")
    gateway = {"stall_timeout_s": STALL_TIMEOUT_S}
    async with stage(row, workers=1, gateway=gateway, simulated={"tpot_ms": 8}) as scene:
        scene.send(10, tokens=100)
        await scene.finished()
        before = memory(scene.gateways[0].pid)
        async with AsyncExitStack() as stack:
            responses = [await stack.enter_async_context(open_fat(scene, at)) for at in range(10)]
            reads = (response.read_slowly(20_000, for_s=30) for response in responses)
            received = await asyncio.gather(*reads)
            grown = memory(scene.gateways[0].pid) - before
            assert all(response.ending is None for response in responses), "cut"
        assert min(received) >= 300_000
        assert grown < 10, f"{grown:.0f} MiB more for 10 slow readers"
        result = await scene.prove(record=False)
        scene.add(result, "cancelled", 10)


def open_fat(scene: Scene, at: int) -> AbstractAsyncContextManager[Response]:
    """Ask for an answer that goes on and on."""
    client = Client(scene.pool.url, f"long {at}", 20_000, extra=FAT)
    return open_response(client.endpoint, client.body, receive_buffer=8192)


async def all_done(scene: Scene, ids: list[str]) -> bool:
    jobs = await scene.inspector.jobs(ids)
    return all(job.outcome == "cancelled" for job in jobs.values())


def memory(pid: int) -> float:
    """Return a process's resident memory, MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20
