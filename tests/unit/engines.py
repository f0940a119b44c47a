"""An engine whose application is a function of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from worker.engine.interface import CURRENT, App, Call, Load, Message, Model, Receive, Send

Answer = Callable[[Call, bytes, Receive, Send], Awaitable[None]]
"""What an application does with a job's body."""


class ScriptedEngine:
    """Fulfils `worker.engine.interface.Engine`; everything can be set from outside."""

    def __init__(self, answer: Answer | None = None, *, seats: int = 4) -> None:
        self.app: App = self._app
        self.models: Sequence[Model] = [Model("test-model", 4096)]
        self.seats = seats
        self.version = "scripted 1"
        self.answer = answer or complete
        self.loaded = asyncio.Event()
        """Set to let `start()` end."""
        self.loaded.set()
        self.start_error: Exception | None = None
        self.adapter_error: Exception | None = None
        self.now = Load(0, 0, 0.0)
        self.steps = 0
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.aborted: list[str] = []
        self.scopes: list[Message] = []
        self.started = self.stopped = 0

    async def _app(self, scope: Message, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        request = await receive()
        await self.answer(CURRENT.get(), request["body"], receive, send)

    async def start(self) -> None:
        self.started += 1
        await self.loaded.wait()
        if self.start_error is not None:
            raise self.start_error

    def resumable(self, path: str, body: bytes) -> bool:
        return False

    def load(self) -> Load:
        return self.now

    def progress(self) -> int:
        return self.steps

    async def wait_failed(self) -> str:
        return await asyncio.shield(self.failure)

    async def load_adapter(self, name: str, source: str) -> None:
        if self.adapter_error is not None:
            raise self.adapter_error
        self.models = [*self.models, Model(name, 4096, self.models[0].name)]

    async def unload_adapter(self, name: str) -> None:
        if self.adapter_error is not None:
            raise self.adapter_error
        self.models = [model for model in self.models if model.name != name]

    async def abort(self, job_id: str) -> None:
        self.aborted.append(job_id)

    async def stop(self) -> None:
        self.stopped += 1


async def start(send: Send, content_type: str = "application/json", status: int = 200) -> None:
    headers = [(b"content-type", content_type.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def part(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def complete(call: Call, body: bytes, receive: Receive, send: Send) -> None:
    """Answer with the request's own body."""
    call.usage.prompt_tokens, call.usage.completion_tokens = 3, 2
    await start(send)
    await part(send, body, more=False)


async def gone(receive: Receive) -> None:
    """Wait for the client to leave."""
    assert (await receive())["type"] == "http.disconnect"
