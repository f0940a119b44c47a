"""Calls an ASGI application in the test's own process, with hand-written `receive` and `send`.

The test sees each message as the application sent it and decides when the client leaves.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self

from worker.engine.interface import CURRENT, App, Call, Message

JSON_TYPE = {"content-type": "application/json"}


class AppCall:
    """One request to an application: running inside `async with`, finished or cancelled after."""

    def __init__(
        self,
        app: App,
        path: str,
        body: object = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] = JSON_TYPE,
        call: Call | None = None,
    ) -> None:
        """A body of bytes goes as it is, anything else as JSON. `call` becomes `CURRENT`."""
        self._app = app
        self._content = body if isinstance(body, bytes) else json.dumps(body).encode()
        if body is None:
            self._content = b""
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "client": None,
            "server": None,
        }
        self.call = call
        self.messages: list[Message] = []
        self.times: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._asked = False
        self._left = asyncio.Event()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._news = asyncio.Event()

    # --- what the client does ---

    def disconnect(self) -> None:
        """Leave: the application hears `http.disconnect`."""
        self._left.set()

    def hold(self) -> None:
        """Stop reading: `send` blocks from now on."""
        self._flowing.clear()

    def release(self) -> None:
        self._flowing.set()

    # --- what the application sent ---

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def events(self) -> list[bytes]:
        """The SSE events so far, without their `data: ` and blank line; `[DONE]` is one."""
        parts = self.body.split(b"\n\n")
        return [part.removeprefix(b"data: ") for part in parts if part]

    @property
    def finished(self) -> bool:
        """Whether the application said that its answer is complete."""
        return len(self.messages) > 1 and not self.messages[-1].get("more_body", False)

    @property
    def returned(self) -> bool:
        return self._task is not None and self._task.done()

    def json(self) -> Any:
        return json.loads(self.body)

    async def wait_events(self, count: int, timeout: float = 5) -> list[bytes]:
        """Wait until there are so many events, or the application has returned."""
        async with asyncio.timeout(timeout):
            while len(self.events) < count and not self.returned:
                self._news.clear()
                await self._news.wait()
        return self.events

    async def wait(self, timeout: float = 10) -> Self:
        """Wait until the application returns, and raise what it raised."""
        assert self._task is not None
        async with asyncio.timeout(timeout):
            await asyncio.shield(self._task)
        return self

    async def __aenter__(self) -> Self:
        context = copy_context()
        if self.call is not None:
            context.run(CURRENT.set, self.call)
        work = self._app(self._scope, self._receive, self._send)
        self._task = asyncio.get_running_loop().create_task(_run(work), context=context)
        self._task.add_done_callback(lambda _: self._news.set())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._content, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self._flowing.wait()
        self.messages.append(message)
        self.times.append(time.monotonic())
        self._news.set()


async def _run(work: Any) -> None:
    await work


async def request(app: App, path: str, body: object = None, **options: Any) -> AppCall:
    """Make a request and return it once the application has returned."""
    async with AppCall(app, path, body, **options) as call:
        return await call.wait()
