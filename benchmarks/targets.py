"""What is measured: whole pools, and what they are compared with, each in processes of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.layout import Layout, on_core
from compose.ports import http_get
from tests.support.processes import Pool, Process
from tests.support.valkey import ValkeyServer, free_port

_PERSISTENCE = ("--appendonly", "yes", "--appendfsync", "everysec")
"""As in compose/redis.conf."""
_START_S = 20.0


@dataclass(frozen=True)
class Target:
    """Where to send requests, and the processes that answer them, by role."""

    name: str
    port: int
    pids: Mapping[str, int]
    valkey: ValkeyServer | None = None
    headers: str = ""
    """Lines that each request has besides its own."""
    told: Path | None = None
    """Where the backend, or what stands for the worker, says what it sees."""


@asynccontextmanager
async def pool(
    layout: Layout,
    simulated: Mapping[str, object],
    *,
    settings: Mapping[str, object] | None = None,
) -> AsyncIterator[Target]:
    """Run a gateway, a worker with the simulated engine, and a Valkey, as they come."""
    given = {**(settings or {})}
    with on_core(layout.valkey):
        valkey = ValkeyServer(*_PERSISTENCE)
        valkey.start()
    try:
        async with Pool(
            valkey.url, gateways=0, workers=0, simulated=simulated, gateway=given, worker=given
        ) as processes:
            with on_core(layout.worker):
                worker = processes.add_worker()
            with on_core(layout.gateway):
                gateway = processes.add_gateway()
            await processes.wait_ready()
            pids = {"gateway": gateway.pid, "worker": worker.pid, "valkey": valkey.pid}
            yield Target("pool", gateway.port, pids, valkey)
    finally:
        valkey.stop()
        shutil.rmtree(valkey.directory, ignore_errors=True)


@asynccontextmanager
async def fed(layout: Layout, step_ms: float) -> AsyncIterator[Target]:
    """Run a gateway and a Valkey, and what writes steps in a worker's place."""
    with on_core(layout.valkey):
        valkey = ValkeyServer(*_PERSISTENCE)
        valkey.start()
    try:
        async with Pool(valkey.url, gateways=0, workers=0) as processes:
            with folder() as logs, on_core(layout.worker):
                command = [sys.executable, "-m", "benchmarks.publisher", str(step_ms)]
                settings = {"redis_url": valkey.url}
                publisher = Process("publisher", command, settings, logs / "log")
                publisher.start()
                try:
                    with on_core(layout.gateway):
                        gateway = processes.add_gateway()
                    await gateway.wait_ready(workers=1)
                    pids = {
                        "gateway": gateway.pid,
                        "publisher": publisher.pid,
                        "valkey": valkey.pid,
                    }
                    yield Target("headrace", gateway.port, pids, valkey, told=publisher.log_path)
                finally:
                    publisher.kill()
                    await publisher.wait()
    finally:
        valkey.stop()
        shutil.rmtree(valkey.directory, ignore_errors=True)


@asynccontextmanager
async def direct(layout: Layout, simulated: Mapping[str, object]) -> AsyncIterator[Target]:
    """Run the simulated engine alone, served by uvicorn."""
    port = free_port()
    settings = {f"simulated_{name}": value for name, value in simulated.items()}
    command = [sys.executable, "-m", "benchmarks.direct", str(port)]
    async with running("engine", command, port, layout.worker, settings) as process:
        yield Target("direct", port, {"engine": process.pid})


@asynccontextmanager
async def running(
    name: str,
    command: Sequence[str],
    port: int,
    core: int | None = None,
    settings: Mapping[str, object] | None = None,
    *,
    path: str = "/v1/models",
    start_s: float = _START_S,
    grace_s: float = 10,
) -> AsyncIterator[Process]:
    """Run one program, from the moment on which it answers a GET."""
    with folder() as logs:
        process = Process(name, command, settings or {}, logs / "log")
        if core is None:
            process.start()
        else:
            with on_core(core):
                process.start()
        try:
            await answers(process, port, path, start_s)
            yield process
        finally:
            await process.close(grace_s)


async def answers(process: Process, port: int, path: str, within_s: float) -> None:
    """Wait until a program answers a GET at all, whatever the status but a server's error."""
    try:
        async with asyncio.timeout(within_s):
            while not 0 < (await http_get(port, path))[0] < 500:
                process.check_running()
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise RuntimeError(f"{process.name} doesn't answer:\n{process.log[-4000:]}") from None


def with_env(env: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """Return a command line that runs a program with more in its environment."""
    return ["/usr/bin/env", *(f"{name}={value}" for name, value in env.items()), *command]


@contextmanager
def environment(env: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started meanwhile."""
    before: dict[str, Any] = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as path:
        yield Path(path)
