"""The simulated engine's HTTP side: a raw ASGI application, and one exchange over it.

It behaves towards a client that leaves as vLLM's does: a stream ends with no further message, and
a request that wanted one piece is still answered, with 200 and `null`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from worker.engine.interface import CURRENT, Call, Receive, Send
from worker.engine.simulated_requests import RequestError

T = TypeVar("T")
_MISSING_TYPE = "Unsupported Media Type: Only 'application/json' is allowed"


@dataclass(frozen=True)
class Exchange:
    """One request: its id and body, whose call it is, and the two ways to its client."""

    request_id: str
    body: bytes
    call: Call | None
    receive: Receive
    send: Send

    async def send_json(self, fields: object, status: int = 200) -> None:
        await self.send_body(msgspec.json.encode(fields), status)

    async def send_body(self, body: bytes, status: int = 200) -> None:
        await _send_json_body(self.send, body, status)

    async def start_stream(self) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send_event(self, event: bytes) -> None:
        await self.send({"type": "http.response.body", "body": event, "more_body": True})

    async def end_stream(self) -> None:
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Run `work` and return its result, or cancel it and return None if the client leaves."""
        working = asyncio.ensure_future(work)
        listening = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
            listening.cancel()
            await asyncio.gather(working, listening, return_exceptions=True)
        return None if working.cancelled() else working.result()

    async def _disconnected(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


Endpoint = Callable[[Exchange], Awaitable[None]]


class SimulatedApp:
    """Finds a request's endpoint, reads its body, and answers refusals."""

    def __init__(self, endpoints: Mapping[tuple[str, str], Endpoint]) -> None:
        self._endpoints = endpoints
        self._paths = {path for _, path in endpoints}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"the simulated engine answers http, not {scope['type']}")
        headers = dict(scope["headers"])
        call = CURRENT.get(None)
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = request_id or (call.job_id if call else uuid.uuid4().hex)
        try:
            endpoint = self._endpoint(scope["method"], scope["path"], headers)
            body = await _read_body(receive)
            if body is not None:
                await endpoint(Exchange(request_id, body, call, receive, send))
        except RequestError as error:
            await _send_json_body(send, msgspec.json.encode(error.body()), error.status)

    def _endpoint(self, method: str, path: str, headers: dict[bytes, bytes]) -> Endpoint:
        if path not in self._paths:
            raise RequestError(404, "Not Found", kind="Not Found")
        endpoint = self._endpoints.get((method, path))
        if endpoint is None:
            raise RequestError(405, "Method Not Allowed", kind="Method Not Allowed")
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if method == "POST" and media_type != b"application/json":
            raise RequestError(400, _MISSING_TYPE, kind="Bad Request")
        return endpoint


async def _read_body(receive: Receive) -> bytes | None:
    """Return the request's body, or None if the client left before it was complete."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _send_json_body(send: Send, body: bytes, status: int) -> None:
    headers = [
        (b"content-length", str(len(body)).encode()),
        (b"content-type", b"application/json"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
