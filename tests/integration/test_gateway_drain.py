"""A gateway that is told to stop: unready at once, and each answer ends as its policy says."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.integration.test_resume import IDS, WHOLE, Bench, answer, benched, numbered
from tests.support import sse
from tests.support.fake_worker import DONE
from tests.support.processes import Pool
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until


@pytest.mark.parametrize("policy", ["cancel", "grace=20", "continue"])
async def test_long_stream_is_ended_by_its_policy(valkey: ValkeyServer, policy: str) -> None:
    async with benched(valkey.url, drain_timeout_s=0.4) as bench:
        wire = await bench.send(ids=True, policy=policy)
        job = await bench.worker.take()
        await answer(job, 6)
        response = await sse.read_head(wire)
        reading = asyncio.ensure_future(response.all_events())
        begun = time.monotonic()
        await bench.gateways[0].stop()
        assert time.monotonic() - begun < 4
        events = await reading
        wire.close()
        assert response.ending == "cut"
        if policy == "cancel":
            assert events[-1].json()["error"]["code"] == "draining"
            await until(lambda: _asked(bench, job.job.id), "the job is cancelled")
            await job.end("cancelled")
            return
        assert [event.id for event in events] == [str(number) for number in range(1, 7)]
        assert not await _asked(bench, job.job.id)
        rest = asyncio.ensure_future(bench.rest(job.job.id, 1, "?after=6"))
        await job.items(b"7")
        await job.end(items=[DONE])
        assert (await rest)[1] == numbered(7, 7) + b"id: 8\n" + DONE[0]


async def _asked(bench: Bench, job_id: str) -> bool:
    return "cancel" in await bench.worker.job_state(job_id)


async def test_answer_in_one_piece_that_goes_on_is_refused_with_its_id(
    valkey: ValkeyServer,
) -> None:
    async with benched(valkey.url, drain_timeout_s=0.3) as bench:
        wire = await bench.send(WHOLE, policy="continue")
        job = await bench.worker.take()
        await bench.gateways[0].stop()
        response = await sse.read_head(wire)
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "draining"
        assert response.headers["x-job-id"] == job.job.id
        await job.whole(b'{"a": 1}')
        assert (await bench.rest(job.job.id))[1] == b'{"a": 1}'
        wire.close()


async def test_drain_of_a_process_in_order(own_valkey: ValkeyServer) -> None:
    settings = {"drain_delay_s": 1, "drain_timeout_s": 3}
    async with Pool(own_valkey.url, gateway=settings, simulated={"tpot_ms": 20}) as pool:
        (gateway,) = pool.gateways
        url = f"{gateway.url}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        short = asyncio.ensure_future(sse.fetch(url, {**body, "max_tokens": 100}))
        async with sse.open_response(url, {**body, "max_tokens": 10_000}, headers=IDS) as long:
            await asyncio.sleep(0.3)
            gateway.terminate()
            begun = time.monotonic()
            await until(lambda: "drain.began" in gateway.log, "the drain has begun", timeout=1)
            status, ready = await gateway.readiness()
            assert (status, ready["draining"], ready["ready"]) == (503, True, False)
            response, refused = await sse.fetch(url, body)
            assert (response.status, json.loads(refused)["error"]["code"]) == (503, "draining")
            response, answered = await short
            assert response.ending == "complete"
            assert answered.endswith(b"data: [DONE]\n\n")
            with pytest.raises(ConnectionError):
                await sse.fetch(url, body)
            await long.body()
            assert long.ending == "cut"
            assert await gateway.wait(8) == 0
            pool.workers[0].kill()  # It would finish the long answer first.
            assert 3.5 < time.monotonic() - begun < 8
