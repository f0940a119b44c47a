"""Clients that leave, at every moment and in every way."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest

from shared.errors import RequestTimeout
from tests.faults.clients import Client
from tests.faults.scene import Row, Scene
from tests.support.sse import Wire, connect, fetch, read_head, request_bytes
from tests.support.waiting import until

Stage = Callable[..., Scene]

SEED = 20
WAYS = ("fin", "rst", "cancel", "cancel twice", "cancel after the end")


async def leave(scene: Scene, way: str, after_s: float, stream: bool) -> str:
    """Make a request and be rid of it; return what became of it, as far as this client knows."""
    url = scene.pool.url
    tokens = 2 if way == "cancel after the end" else 2000
    fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": tokens}
    chat = f"{url}/v1/chat/completions"
    wire = await connect(url)
    try:
        await wire.send(request_bytes(chat, {**fields, "stream": stream}))
        await asyncio.sleep(after_s)
        if way in ("fin", "rst"):
            wire.close(reset=way == "rst")
            return "left"
        return await cancel(url, wire, times=2 if way == "cancel twice" else 1, at_end=tokens == 2)
    finally:
        wire.close()


async def cancel(url: str, wire: Wire, *, times: int, at_end: bool) -> str:
    """Cancel by the job's id; return the outcome that was acknowledged."""
    response = await read_head(wire)
    if at_end:
        await response.body()
    route = f"{url}/v1/jobs/{response.headers['x-job-id']}/cancel"
    told = [await fetch(route, b"") for _ in range(times)]
    assert [answer.status for answer, _ in told] == [200] * times, told
    outcomes = [body.partition(b'"outcome":"')[2].split(b'"')[0].decode() for _, body in told]
    assert outcomes[1:] == ["already_finished"] * (times - 1), outcomes
    return outcomes[0]


@pytest.mark.parametrize(
    "count", [130, pytest.param(520, marks=pytest.mark.slow)], ids=["some", "all"]
)
async def test_at_all_moments(stage: Stage, count: int) -> None:
    """While other streams go on, and with too few seats for all, so that many are queued."""
    row = Row(f"{count} cancels, 0 to 200 ms after the request, in 5 ways")
    options = {"first_byte_grace_s": 0.02}
    async with stage(row, workers=2, gateway=options, simulated={"seats": 24}) as scene:
        scene.send(20, tokens=400)
        await scene.flowing(2)
        chance, room = random.Random(SEED), asyncio.Semaphore(40)
        outcomes: Counter[str] = Counter()

        async def one(at: int) -> None:
            async with room:
                way = WAYS[at % len(WAYS)]
                stream = way not in ("fin", "rst") or chance.random() < 0.5
                outcomes[await leave(scene, way, chance.uniform(0, 0.2), stream)] += 1

        await asyncio.gather(*(one(at) for at in range(count)))
        share = count // len(WAYS)
        assert outcomes["left"] == 2 * share
        assert outcomes["cancelled_queued"] + outcomes["cancelled_running"] >= 2 * share - 5
        await scene.finished()
        await scene.inspector.wait_idle([one.name for one in scene.workers], timeout=2)
        ended = await ends(scene)
        assert set(ended) <= {"cancelled", "completed"}, ended
        assert ended["cancelled"] >= 4 * share - 5, ended
        scene.send(20, tokens=20)
        result = await scene.prove(record=False)
        scene.add(result, "cancelled", ended["cancelled"])


async def ends(scene: Scene) -> Counter[str]:
    """Return how all jobs ended."""
    jobs = await scene.inspector.jobs(await scene.inspector.job_ids())
    return Counter(job.outcome for job in jobs.values())


@pytest.mark.slow
async def test_500_disconnects_on_a_slow_link(stage: Stage) -> None:
    row = Row("500 disconnects with 100 ms more each way between gateway and queue")
    async with stage(row, workers=2, gateway_proxy=True, simulated={"seats": 256}) as scene:
        scene.gateway_link.delay(0.1)
        chance, room = random.Random(SEED), asyncio.Semaphore(25)

        async def one(at: int) -> None:
            async with room:
                await leave(scene, ("fin", "rst")[at % 2], chance.uniform(0, 1), at % 3 > 0)

        await asyncio.gather(*(one(at) for at in range(500)))
        await scene.inspector.wait_idle([one.name for one in scene.workers])
        ended = await ends(scene)
        assert set(ended) == {"cancelled"}, ended
        # What a client resets at once may not have reached the gateway at all.
        assert ended["cancelled"] >= 490, ended
        scene.gateway_link.heal()
        scene.send(20, tokens=20)
        result = await scene.prove(record=False)
        scene.add(result, "cancelled", ended["cancelled"])


async def test_clients_gone_before_a_worker_comes(stage: Stage) -> None:
    """Half of them left, and the others' time has run out: nothing is decoded for any."""
    row = Row("50 requests given up while no worker runs", [RequestTimeout.code])
    async with stage(row, workers=1) as scene:
        scene.kill(scene.workers[0])
        late = scene.send(25, headers={"x-request-timeout": "2"})
        wires = []
        for _ in range(25):
            client = Client(scene.pool.url, "x", 50)
            wire = await connect(client.url)
            await wire.send(request_bytes(client.endpoint, client.body))
            wires.append(wire)
        await until(lambda: waiting(scene, 50), "50 jobs in the lane", timeout=2)
        await asyncio.sleep(2)
        for wire in wires:
            wire.close()
        await scene.finished(timeout=3)
        assert {client.outcome() for client in late} == {RequestTimeout.code}
        worker = scene.pool.add_worker()
        await scene.pool.wait_ready()
        result = await scene.prove(record=False)
        jobs = await scene.inspector.jobs(await scene.inspector.job_ids())
        assert len(jobs) == 50
        assert {job.attempts for job in jobs.values()} == {0}
        assert "job.adopted" not in worker.log
        scene.add(result, "cancelled", (await ends(scene))["cancelled"])


async def waiting(scene: Scene, count: int) -> bool:
    lanes = await scene.inspector.lanes()
    return sum(entries for entries, _ in lanes.values()) == count
