"""vLLM's own server and a whole pool, on one engine: whatever differs lies between, not in it.

The engine is the worker's. vLLM's application is built on it a second time, without the worker's
proxy, and served by uvicorn as `vllm serve` does; gateway, queue and worker are the real ones, in
the test's own event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from tests.support import vllm as real
from tests.support.gateway import RunningGateway
from tests.support.waiting import until
from worker.engine import vllm_build
from worker.engine.interface import Engine
from worker.engine.vllm import VllmEngine
from worker.metrics import WorkerMetrics
from worker.settings import WorkerSettings
from worker.worker import Worker


@dataclass(frozen=True)
class Sides:
    """Base URLs."""

    vllm: str
    pool: str


class Started:
    """An engine that runs already, and whose end is somebody else's business."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


@asynccontextmanager
async def running_sides(redis_url: str, *args: str) -> AsyncIterator[Sides]:
    """Start both on vLLM with these arguments, which takes most of a minute."""
    async with (
        real.running_engine(*args) as engine,
        _served(engine, args) as vllm,
        _pooled(engine, redis_url) as pool,
    ):
        yield Sides(vllm, pool)


@asynccontextmanager
async def _served(engine: VllmEngine, args: tuple[str, ...]) -> AsyncIterator[str]:
    llm, parsed = engine._llm, vllm_build.parse_args(args)
    tasks = await llm.get_supported_tasks()
    app: Any = vllm_build.find("build_app")(parsed, tasks, llm.model_config)
    await vllm_build.find("init_app_state")(llm, app.state, parsed, tasks)
    app.state.server = SimpleNamespace(should_exit=False)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    await until(lambda: server.started, "vLLM's own server", timeout=20)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def _pooled(engine: VllmEngine, redis_url: str) -> AsyncIterator[str]:
    prefix = f"t{secrets.token_hex(6)}"
    settings = WorkerSettings(redis_url=SecretStr(redis_url), key_prefix=prefix)
    metrics = WorkerMetrics(CollectorRegistry())
    worker = Worker(settings, cast(Engine, Started(engine)), metrics)
    working = asyncio.ensure_future(worker.run())
    try:
        async with RunningGateway(redis_url, key_prefix=prefix) as gateway:
            yield gateway.url
    finally:
        worker.stop()
        await working
