"""The answer to a relayed request: a job's frames as one HTTP response, on ASGI directly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

from gateway import sse
from gateway.errors import (
    BrokenOff,
    ClientGone,
    ClientStalled,
    error_of,
    error_response,
)
from gateway.events import Numbering
from gateway.exchange import Exchange
from gateway.models import no_worker
from gateway.relay import JobStream, Part
from gateway.settings import GatewaySettings
from gateway.submit import Submitter
from gateway.sweeper import Sweeper
from gateway.wire import Wire
from shared.errors import (
    AnswerTooLarge,
    Diverged,
    Draining,
    EngineFailed,
    HeadraceError,
    WorkerLost,
)
from shared.keys import tag_of
from shared.logs import Log
from shared.protocol import Head

log = Log("gateway")

_SLICE_BYTES = 64 << 10
_COMPLETED = "completed"


class RelayedAnswer:
    """Relays a job's frames; owns its stream and, whatever happens, closes it.

    The status is the worker's. A stream that has nothing to say for `first_byte_grace_s` is begun
    as 200 all the same, and kept alive by comments. What fails after that ends in an error event,
    and the body is broken off rather than ended: a clean end would be taken for success.
    """

    __slots__ = (
        "_asked_stream",
        "_between_events",
        "_buffer",
        "_buffered_bytes",
        "_comment",
        "_exchange",
        "_gave_up",
        "_head",
        "_numbering",
        "_send",
        "_sending",
        "_settings",
        "_since",
        "_started",
        "_stream",
        "_stuck_since",
        "_submitter",
        "_sweeper",
        "_task",
        "_unchunked",
        "_unsent",
        "_whole_only",
        "_wire",
        "_wrote",
        "_wrote_at",
    )

    def __init__(
        self,
        exchange: Exchange,
        stream: JobStream,
        *,
        asked_stream: bool,
        settings: GatewaySettings,
        submitter: Submitter,
        sweeper: Sweeper,
        numbering: Numbering | None = None,
    ) -> None:
        self._exchange = exchange
        self._stream = stream
        self._asked_stream = asked_stream
        self._settings = settings
        self._submitter = submitter
        self._sweeper = sweeper
        self._since = asyncio.get_running_loop().time()
        self._numbering = numbering
        """Of a stream with ids, or one that doesn't begin at its beginning."""
        ids = numbering is not None and numbering.ids
        self._comment = sse.KEEP_ALIVE_BETWEEN_IDS if ids else sse.KEEP_ALIVE
        self._send: Send = exchange.raw_send
        self._wire = Wire(exchange.raw_send)
        self._task: asyncio.Task[None] | None = None
        self._head: Head | None = None
        self._started = False
        """A stream's status is out."""
        self._unchunked = False
        self._whole_only = False
        """A stream that this client's connection can only take as a whole."""
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0
        self._between_events = True
        self._sending = False
        self._gave_up = False
        self._wrote = True
        self._wrote_at = 0.0
        self._stuck_since = 0.0
        self._unsent: int | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI application. `send` is passed by: see `Exchange`."""
        self._task = asyncio.current_task()
        if scope["http_version"] == "1.0":
            self._unchunked = self._wire.can_unchunk()
            self._whole_only = not self._unchunked
        self._wrote_at = asyncio.get_running_loop().time()
        self._sweeper.swept.add(self)
        try:
            async with asyncio.TaskGroup() as group:
                listener = group.create_task(self._listen(receive))
                try:
                    await self._answer()
                finally:
                    listener.cancel()
        finally:
            self._stream.write = None  # They would hold each other.
            self._sweeper.swept.discard(self)
            self._submitter.abandon(self._stream)
            self._submitter.close(self._stream)

    async def _listen(self, receive: Receive) -> None:
        """Notice that the client has gone, in every phase."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stream.fail(ClientGone())
        self._submitter.abandon(self._stream)

    def tick(self, now: float) -> None:
        """Keep the client's side alive, or give it up. Called by the sweeper."""
        self._stream.tick(now)
        if self._stream.failure is not None:  # Its client may be slow to hear of it.
            self._submitter.abandon(self._stream)
        if self._wrote:
            self._wrote = False
            self._wrote_at = now
        elif self._asked_stream and not self._sending and not self._whole_only:
            settings = self._settings
            limit_s = settings.keepalive_s if self._started else settings.first_byte_grace_s
            if now - self._wrote_at >= limit_s:
                self._stream.idle = True
                self._stream.wake()
        if self._sending:
            self._watch_reader(now)
        else:
            self._stuck_since = 0.0

    def _watch_reader(self, now: float) -> None:
        unsent = self._wire.unsent()
        if not self._stuck_since or unsent != self._unsent:
            self._stuck_since = now
            self._unsent = unsent
        elif now - self._stuck_since >= self._settings.stall_timeout_s and not self._gave_up:
            self._give_up_reader()

    def cut(self) -> None:
        """End the answer at once: with an error, or, if its job goes on, so that it is resumed."""
        if self._sending:
            self._give_up_reader()
        else:
            self._stream.fail(Draining() if self._stream.patience_s == 0 else BrokenOff())

    def give_up(self, deserted: Mapping[str, float], now: float) -> None:
        """End the answer if its pool has had no worker for too long, and so has this request.

        `deserted`: tag of a pool → since when it has had none.
        """
        stream = self._stream
        since = deserted.get(tag_of(stream.job_id))
        if since is None or now - max(since, self._since) < self._settings.no_worker_wait_s:
            return
        stream.fail(WorkerLost() if stream.cursor > 0 else no_worker())

    def _give_up_reader(self) -> None:
        self._gave_up = True
        self._stream.fail(ClientStalled())
        if self._task is not None:
            self._task.cancel()

    async def _answer(self) -> None:
        """Relay to the end, and say how it ended."""
        exchange = self._exchange
        try:
            try:
                await self._relay()
            except ClientGone as error:
                exchange.outcome = error.code
            except HeadraceError as error:
                await self._fail(error)
            except Exception:
                log.error("relay.failed", exc=True, **exchange.about())
                await self._fail(HeadraceError())
        except asyncio.CancelledError:
            if not self._gave_up:
                exchange.outcome = "cut"
                raise
            if self._task is not None:
                self._task.uncancel()
            exchange.outcome = ClientStalled.code
            self._wire.abort()

    async def _relay(self) -> None:
        while True:
            part = await self._stream.next()
            if part is None:
                await self._keep_alive()
                continue
            if part.head is not None:
                await self._on_head(part.head)
            if self._streams():
                await self._relay_events(part)
            else:
                self._keep(part)
            if part.end is not None:
                if part.end.usage is not None:
                    self._exchange.prompt_tokens = part.end.usage.prompt_tokens
                    self._exchange.output_tokens = part.end.usage.completion_tokens
                if part.end.outcome != _COMPLETED:
                    raise error_of(part.end)
                if not self._streams():
                    await self._send_whole()
                return
            part = None  # Not kept while the next is waited for.

    def _streams(self) -> bool:
        """Tell whether the answer's parts are events of a stream that is being sent."""
        head = self._head
        if head is None or self._whole_only:
            return False
        return head.status < 300 and sse.is_stream(head.content_type)

    async def _on_head(self, head: Head) -> None:
        """Take a status. A second one is another attempt's, which begins the answer anew."""
        before, self._head = self._head, head
        if before is not None and self._started and before != head:
            raise Diverged
        self._buffer.clear()
        self._buffered_bytes = 0
        if not self._streams():
            return
        if not self._started:
            await self._start(head.status, head.content_type)
        if self._wire.can_write():
            self._stream.write = self._write

    async def _start(self, status: int, content_type: str) -> None:
        headers = [(b"content-type", content_type.encode("latin-1")), *sse.HEADERS]
        if self._unchunked:
            self._wire.unchunk()
        self._started = True
        await self._message(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *self._exchange.headers()],
            }
        )
        self._exchange.status = status

    async def _keep_alive(self) -> None:
        """Send a sign of life, never into the middle of an event."""
        if not self._started:
            await self._start(200, sse.CONTENT_TYPE)
        if self._between_events:
            await self._body(self._comment)

    async def _relay_events(self, part: Part) -> None:
        data = part.data
        last = part.end is not None and part.end.outcome == _COMPLETED
        if self._numbering is not None:
            data = self._numbering.pass_on(data)
            if last:
                data += self._numbering.rest()
        if data:
            self._note_content(part.items, time.perf_counter())
            self._between_events = data.endswith(b"\n\n")
        if data or last:
            await self._body(data, last=last)

    def _write(self, part: Part, now: float) -> bool:
        """Give a part of a stream to the client at once; False where it needs the task."""
        if part.head is not None or part.end is not None or not self._wire.flows():
            return False
        data = part.data
        if self._numbering is not None:
            data = self._numbering.pass_on(data)
        if data:
            self._between_events = data.endswith(b"\n\n")
            self._note_content(part.items, now)
            self._wire.write(data)
            self._wrote = True
        return True

    def _note_content(self, items: int, now: float) -> None:
        exchange = self._exchange
        if not exchange.content_at:
            exchange.content_at = now
        exchange.done_at = now
        exchange.items += items

    def _keep(self, part: Part) -> None:
        """Keep a part of an answer that is sent as a whole."""
        data = part.data[part.before :]
        self._buffered_bytes += len(data)
        if self._buffered_bytes > self._settings.max_answer_bytes:
            raise AnswerTooLarge
        if data:
            self._buffer.append(data)

    async def _send_whole(self) -> None:
        """Send an answer with its length, in slices: a reader that stalls is noticed by them."""
        head, body = self._head, b"".join(self._buffer)
        if head is None:
            raise EngineFailed
        self._buffer.clear()
        exchange = self._exchange
        if head.status >= 400:
            exchange.outcome = "invalid_request" if head.status < 500 else "engine_error"
        if self._started:
            event = sse.answer_event(head.status, body, exchange.form)
            await self._body(event, last=head.status < 400)
            return
        self._note_content(0, time.perf_counter())
        headers = [
            (b"content-type", head.content_type.encode("latin-1")),
            (b"content-length", str(len(body)).encode()),
        ]
        start = {
            "type": "http.response.start",
            "status": head.status,
            "headers": [*headers, *exchange.headers()],
        }
        exchange.status = head.status
        self._unchunked = False
        await self._message(start)
        if len(body) <= _SLICE_BYTES:
            await self._body(body, last=True)
            return
        for at in range(0, len(body), _SLICE_BYTES):
            await self._body(body[at : at + _SLICE_BYTES])
        await self._body(b"", last=True)

    async def _fail(self, error: HeadraceError) -> None:
        """Say that the request failed, in the form that its client can still understand."""
        exchange = self._exchange
        exchange.outcome = error.code
        if self._started and isinstance(error, BrokenOff):
            return
        if self._started:
            rest = b"" if self._between_events else b"\n\n"
            await self._body(rest + sse.error_event(error, exchange.form))
            return  # Without the last message: the server breaks the body off.
        response = error_response(error, form=exchange.form)
        exchange.status = response.status_code
        await self._message(
            {
                "type": "http.response.start",
                "status": response.status_code,
                "headers": [*response.raw_headers, *exchange.headers()],
            }
        )
        self._unchunked = False
        await self._body(bytes(response.body), last=True)

    async def _body(self, data: bytes, *, last: bool = False) -> None:
        if last and self._unchunked:
            self._wire.end_unchunked(len(data))
        await self._message({"type": "http.response.body", "body": data, "more_body": not last})

    async def _message(self, message: dict[str, object]) -> None:
        self._sending = True
        await self._send(message)
        self._sending = False
        self._wrote = True
