"""A real gateway on a real socket, in the test's own event loop."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

from pydantic import SecretStr

from gateway.gateway import Gateway
from gateway.server import Server, build_server
from gateway.settings import GatewaySettings
from tests.support.fake_worker import FakeWorker
from tests.support.waiting import until

if TYPE_CHECKING:
    from shared.otel import Spans


class RunningGateway:
    """Serving inside `async with`; ready when it knows `workers` workers."""

    def __init__(
        self, redis_url: str, *, workers: int = 1, spans: Spans | None = None, **settings: Any
    ) -> None:
        settings = {"registry_refresh_s": 0.05, "drain_timeout_s": 1, **settings}
        self.settings = GatewaySettings(redis_url=SecretStr(redis_url), **settings)
        self._workers = workers
        self.server: Server = build_server(self.settings, spans)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(1024)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.chat = f"{self.url}/v1/chat/completions"
        self.task: asyncio.Task[None] | None = None

    @property
    def gateway(self) -> Gateway:
        """Its parts."""
        return self.server.application.gateway

    async def wait_ready(self, workers: int = 1, timeout_s: float = 5) -> None:
        """Wait until the queue is reached and so many workers are known."""
        gateway = self.gateway

        def ready() -> bool:
            linked = not workers or gateway.subscriber.connected
            return self.server.started and linked and gateway.models.ready_workers >= workers

        await until(ready, "the gateway is ready", timeout=timeout_s, every=0.005)

    async def __aenter__(self) -> Self:
        self.task = asyncio.get_running_loop().create_task(
            self.server.serve(sockets=[self._socket])
        )
        await self.wait_ready(self._workers)
        return self

    async def stop(self) -> None:
        """End it as SIGTERM does."""
        self.server.should_exit = True
        if self.task is not None:
            await self.task

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


@asynccontextmanager
async def pool(
    redis_url: str, *, gateway_url: str = "", seats: int = 8, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, FakeWorker]]:
    """A gateway and a fake worker with keys of their own. `gateway_url`: its way to the server."""
    prefix = f"t{secrets.token_hex(6)}"
    async with (
        FakeWorker(redis_url, key_prefix=prefix, seats=seats) as worker,
        RunningGateway(gateway_url or redis_url, key_prefix=prefix, **settings) as gateway,
    ):
        yield gateway, worker
