"""Several gateway processes on one port: spread, counted together, started again, never left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from shared.keys import Keys
from tests.support import sse
from tests.support.processes import GatewayProcess, Pool
from tests.support.sse import fetch
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

PROCESSES = 3
STREAMS = 16
TOKENS = 40
BODY = {
    "messages": [{"role": "user", "content": "tell me of the river"}],
    "max_tokens": TOKENS,
    "stream": True,
}


def members(gateway: GatewayProcess) -> list[int]:
    return [pid for pid in gateway.family() if pid != gateway.pid]


async def figure(gateway: GatewayProcess, name: str) -> float:
    """Return the sum of a metric's series, as whichever process tells it that is asked."""
    _, raw = await fetch(f"{gateway.url}/metrics")
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", raw.decode(), re.M)
    return sum(map(float, found))


def members_of(valkey: ValkeyServer, job_ids: list[str]) -> list[int]:
    """Return the number of the process that reads each job's answer."""
    readers = [valkey.command("HGET", Keys().job(job_id), "readers") for job_id in job_ids]
    return [int(reader.split(b"-")[1]) for reader in readers]


async def rest(response: sse.Response) -> str:
    """Read to the end, and say how it ended."""
    try:
        await response.all_events()
    except ConnectionError:
        return "reset"
    return response.ending or ""


async def test_processes_share_work_and_metrics_and_one_that_dies_is_replaced(
    own_valkey: ValkeyServer,
) -> None:
    settings = {"processes": PROCESSES, "gateway_id": "g", "registry_refresh_s": 0.1}
    async with (
        Pool(own_valkey.url, gateway=settings, simulated={"tpot_ms": 40}) as pool,
        AsyncExitStack() as stack,
    ):
        gateway = pool.gateways[0]
        url = f"{gateway.url}/v1/chat/completions"
        await until(lambda: _ready(gateway, PROCESSES), "all are ready", timeout=15)
        names = own_valkey.command("SMEMBERS", Keys().gateways())
        assert sorted(name.split(b"-")[1] for name in names) == [b"1", b"2", b"3"]
        responses = await asyncio.gather(
            *(stack.enter_async_context(sse.open_response(url, BODY)) for _ in range(STREAMS))
        )
        places = members_of(own_valkey, [one.headers["x-job-id"] for one in responses])
        assert len(set(places)) > 1
        await until(
            lambda: _is(gateway, "headrace_gateway_open_streams", STREAMS), "all are counted"
        )

        before = members(gateway)
        assert len(before) == PROCESSES
        victim = Counter(places).most_common(1)[0][0]
        os.kill(_pid_of(before, victim), signal.SIGKILL)
        endings = await asyncio.gather(*(rest(response) for response in responses))
        for place, ending in zip(places, endings, strict=True):
            assert ending in (("cut", "reset") if place == victim else ("complete",))
        await until(lambda: _ready(gateway, PROCESSES + 1), "it is replaced", timeout=15)
        assert len(members(gateway)) == PROCESSES
        assert len(set(before) & set(members(gateway))) == PROCESSES - 1
        assert gateway.log.count("process.died") == 1

        completed = endings.count("complete")
        for _ in range(4):
            response, _ = await fetch(url, {**BODY, "max_tokens": 2})
            assert response.status == 200
        await until(
            lambda: _is(gateway, "headrace_gateway_requests_total", completed + 4),
            "each is counted",
        )
        await until(lambda: _is(gateway, "headrace_gateway_open_streams", 0), "all have ended")
        for _ in range(2 * PROCESSES):
            assert await _is(gateway, "headrace_gateway_requests_total", completed + 4)
            assert await _is(gateway, "headrace_gateway_open_streams", 0)
            assert await _is(gateway, "headrace_gateway_ready_workers", 1)
            count = await figure(gateway, "headrace_gateway_request_duration_seconds_count")
            assert count == completed + 4


async def _ready(gateway: GatewayProcess, starts: int) -> bool:
    """Tell whether all are, from what those say that happen to be asked."""
    started = gateway.log.count("gateway.started") == starts
    return started and all([(await gateway.readiness())[0] == 200 for _ in range(8 * PROCESSES)])


async def _is(gateway: GatewayProcess, name: str, value: float) -> bool:
    return await figure(gateway, name) == value


def _pid_of(pids: list[int], number: int) -> int:
    """Return the process with a number: they are started in order."""
    return sorted(pids)[number - 1]


async def test_asked_to_end_they_finish_what_is_open_and_leave_nothing(
    valkey: ValkeyServer,
) -> None:
    settings = {"processes": 2, "gateway_id": "g", "key_prefix": "drained"}
    async with (
        Pool(
            valkey.url,
            gateway=settings,
            worker={"key_prefix": "drained"},
            simulated={"tpot_ms": 20},
        ) as pool,
        AsyncExitStack() as stack,
    ):
        gateway = pool.gateways[0]
        url = f"{gateway.url}/v1/chat/completions"
        responses = await asyncio.gather(
            *(stack.enter_async_context(sse.open_response(url, BODY)) for _ in range(4))
        )
        (folder,) = {found for pid in members(gateway) if (found := _metrics_folder(pid))}
        assert folder.is_dir()
        gateway.terminate()
        endings = await asyncio.gather(*(rest(response) for response in responses))
        assert endings == ["complete"] * 4
        assert await gateway.wait(30) == 0
        assert gateway.family() == []
        assert not folder.exists()


def _metrics_folder(pid: int) -> Path | None:
    """Return where a process keeps its metrics: its files are mapped into its memory."""
    found = re.search(r"(/\S*/headrace-metrics-[^/]+)/", Path(f"/proc/{pid}/maps").read_text())
    return None if found is None else Path(found[1])


@pytest.fixture
def gateway(valkey: ValkeyServer, tmp_path: Path) -> GatewayProcess:
    made = GatewayProcess(valkey.url, "gateway", tmp_path / "log", processes=2, key_prefix="two")
    made._environment["TMPDIR"] = str(tmp_path)  # A killed supervisor leaves its folder behind.
    return made


async def test_none_outlives_a_supervisor_that_is_killed(gateway: GatewayProcess) -> None:
    gateway.start()
    await gateway.wait_ready()
    await until(lambda: len(members(gateway)) == 2, "both are there")
    gateway.kill()
    await until(lambda: not gateway.family(), "none is left", timeout=5)
    await gateway.wait()


async def test_a_port_that_is_taken_is_not_shared(
    gateway: GatewayProcess, valkey: ValkeyServer, tmp_path: Path
) -> None:
    gateway.start()
    await gateway.wait_ready()
    other = GatewayProcess(valkey.url, "other", tmp_path / "other", processes=2)
    other._environment["HEADRACE_PORT"] = str(gateway.port)
    other.start()
    assert await other.wait(15) == 2
    assert "gateway.not_listening" in other.log
    await gateway.close()
