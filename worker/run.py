"""One attempt at one job: from its record, through the engine's application, to its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from shared.errors import (
    Cancelled,
    Diverged,
    EngineFailed,
    HeadraceError,
    RequestTimeout,
    WorkerLost,
)
from shared.logs import Log, about
from shared.outcomes import Adopted
from shared.protocol import Delta, End, Head, Usage
from shared.trace import TraceContext
from worker.engine.interface import CURRENT, Call, Engine, Message
from worker.outbox import Outbox
from worker.publisher import Publisher
from worker.resume import Past, Splice

if TYPE_CHECKING:
    from shared.otel import Span

log = Log("run")

DISCONNECT_S = 2.0
"""An application that hasn't ended so long after its client's disconnect is ended harder."""

_ENDS: dict[str, type[HeadraceError]] = {
    "cancelled": Cancelled,
    "expired": RequestTimeout,
    "drained": WorkerLost,
}
_ELSEWHERE = frozenset({"fenced", "lost", "moved"})
"""Reasons after which this isn't the place where the job is ended."""


_WRITTEN_BY_OTHERS = frozenset({"fenced", "lost"})
"""Reasons that undo even an answer that is whole."""
_LAST = (b"data: [DONE]", b"event: message_stop\n", b"event: response.completed\n")
"""How the last event of a stream begins. Its client may leave as soon as it has read that."""


class Run:
    """Calls the application as a server would, with the outbox for a socket."""

    def __init__(self, adopted: Adopted, engine: Engine, publisher: Publisher) -> None:
        job = adopted.job
        self.adopted = adopted
        self.trace = TraceContext(job.traceparent, job.tracestate)
        """What the engine's spans belong to."""
        self.span: Span | None = None
        self.call = Call(
            job.id, max_tokens_given=job.max_tokens_given, max_tokens=max(job.max_tokens, 0)
        )
        self._splice: Splice | None = None
        self._untold: list[Delta] = []
        self._diverged = False
        self.outbox = Outbox(adopted, publisher, self.stop)
        self.stopped: str | None = None
        """Why the job must not go on here: `cancelled`, `expired`, `drained` (no time is left),
        `moved` (to another worker), `fenced` (another has it) or `lost` (by the queue)."""
        self._engine = engine
        self.stopping = asyncio.Event()
        self.over = asyncio.Event()
        """Set once the engine is done with it."""
        self._body_given = False
        self._head: Head | None = None
        self._head_put = False
        self._complete = False
        self._part = b""
        """The newest part of the answer."""

    @property
    def suspect(self) -> bool:
        """Whether this job may be what killed its last worker: it hasn't got further since."""
        return self.adopted.strikes > 0 and not self.outbox.advanced

    def stop(self, reason: str) -> None:
        """End the job as if its client had left. The first reason counts, but for `fenced`.

        A reason of a newer version is a cancel.
        """
        if self.stopped is None or reason in {"fenced", "lost"}:
            known = reason in _ENDS or reason in _ELSEWHERE
            self.stopped = reason if known else "cancelled"
        if not self._whole():
            self.outbox.discard()
        self.stopping.set()

    def fail(self, reason: str) -> None:
        """End the job because its engine is of no more use."""
        if self.call.fault is None:
            self.call.fault = reason
        self.outbox.discard()
        self.stopping.set()

    def resume(self, past: Past) -> None:
        """Continue an answer instead of beginning it."""
        self.call.resume = past.tokens
        self._splice = Splice(past)

    async def execute(self) -> End | None:
        """Run to the end and return it, or None if the job is no longer this worker's."""
        CURRENT.set(self.call)
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(max(self.adopted.left_s, 0), self.stop, "expired")
        app = loop.create_task(self._application())
        stop = loop.create_task(self.stopping.wait())
        try:
            await asyncio.wait({app, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not app.done():
                await self._end_application(app)
            if self.stopped is not None:
                # What was generated and nobody read counts: the engine settles its account.
                await self._engine.abort(self.adopted.job.id)
            error = None if app.cancelled() or not app.done() else app.exception()
        finally:
            deadline.cancel()
            stop.cancel()
            app.cancel()
        if error is not None and self.stopped is None:
            log.error("job.raised", **about(self.adopted.job), error=type(error).__name__)
        return self._end()

    async def _application(self) -> None:
        await self._engine.app(self._scope(), self._receive, self._send)

    async def _end_application(self, app: asyncio.Task[None]) -> None:
        """Give the disconnect time to be heard; then abort; then cancel."""
        await asyncio.wait({app}, timeout=DISCONNECT_S)
        if not app.done():
            log.warning("job.deaf", **about(self.adopted.job))
            await self._engine.abort(self.adopted.job.id)
            await asyncio.wait({app}, timeout=DISCONNECT_S)
        if not app.done():
            app.cancel()
            await asyncio.wait({app}, timeout=DISCONNECT_S)

    def _whole(self) -> bool:
        """Tell whether all of the answer is there: then its client's leaving isn't a cancel."""
        if self.stopped in _WRITTEN_BY_OTHERS:
            return False
        return self._complete or self._part.startswith(_LAST)

    def _end(self) -> End | None:
        whole = self._whole()
        if not whole and self.stopped in _ELSEWHERE:
            return None
        counted = self.call.usage
        usage = Usage(counted.prompt_tokens, counted.completion_tokens, counted.cached_tokens)
        outcome = "failed"
        error: type[HeadraceError] | None = None
        if not whole and self.stopped is not None:
            error = _ENDS[self.stopped]
            outcome = "failed" if self.stopped == "drained" else self.stopped
        elif self._diverged:
            error = Diverged
        elif self.call.fault is not None or not whole:
            self.outbox.discard()
            error = EngineFailed
        if error is None:
            return End(outcome="completed", usage=usage)
        return End(outcome=outcome, code=error.code, message=error().message, usage=usage)

    def _scope(self) -> dict[str, Any]:
        job = self.adopted.job
        headers = [
            (b"host", b"headrace"),
            (b"content-type", job.content_type.encode("latin-1")),
            (b"content-length", str(len(job.body)).encode()),
            (b"x-request-id", job.id.encode()),
            *self.trace.headers(),
        ]
        return {
            "type": "http",
            # From 2.4 on, Starlette no longer listens for http.disconnect.
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": job.path,
            "raw_path": job.path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
        }

    async def _receive(self) -> Message:
        if not self._body_given:
            self._body_given = True
            return {"type": "http.request", "body": self.adopted.job.body, "more_body": False}
        await self.stopping.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self.stopped is not None or self.call.fault is not None or self._diverged:
            return
        if message["type"] == "http.response.start":
            content_type = next(
                (v.decode("latin-1") for k, v in message["headers"] if k == b"content-type"), ""
            )
            self._head = Head(message["status"], content_type)
        elif message["type"] == "http.response.body":
            if self._head is not None and not self._head_put:
                # Not before the first part: a fault until then can still become a status.
                self._head_put = True
                self.outbox.put_head(self._head, known=self._splice is not None)
            if body := message.get("body"):
                self._part = bytes(body)
                if self._put(self._part):
                    await self.outbox.room()
            if not message.get("more_body"):
                self._complete = True

    def _put(self, part: bytes) -> bool:
        """Add a part, unless an earlier attempt has said it already; True if it is to wait."""
        deltas = self.call.deltas
        if self._splice is not None:
            try:
                new = self._splice.pass_on(part)
            except Diverged:
                self._diverged = True
                self.stopping.set()
                return False
            self._untold += deltas
            deltas.clear()
            if new is None:
                return False
            tokens, self._untold = self._untold, []
            return self.outbox.add(new, tokens)
        full = self.outbox.add(part, deltas)
        deltas.clear()
        return full
