"""One HTTP request and its answer: who it is, how it went, and the line that says so."""

from __future__ import annotations

import re
import secrets
import time
from typing import TYPE_CHECKING, Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.cors import Cors, RawHeaders
from gateway.error_forms import form_of
from gateway.metrics import Metrics
from gateway.rates import rate_headers
from shared.in_flight import Admission
from shared.logs import Log
from shared.trace import TraceContext, read_trace

if TYPE_CHECKING:
    from shared.otel import Span, Spans

log = Log("gateway")

PROBES = frozenset({"/health", "/healthz", "/readyz", "/metrics"})
"""Asked every few seconds, by machines."""
_SCOPE_KEY = "headrace.exchange"
_CLIENTS_OWN = frozenset({"disconnected", "stalled", "cancelled"})
_SHOWN_PATH = 100
_SECRET = re.compile(r"sk-[\w-]{8,}")
"""An API key, ours or another's, in a path by mistake."""
_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Exchange:
    """Lives as long as its request. Its `send` adds the headers that every answer has.

    A relayed answer goes past it, straight to `raw_send`, and sets the same fields itself.
    """

    __slots__ = (
        "_common",
        "_unasked",
        "answer",
        "answered_at",
        "content_at",
        "done_at",
        "endpoint",
        "form",
        "items",
        "job_id",
        "key_id",
        "lane",
        "limits",
        "method",
        "model",
        "outcome",
        "output_tokens",
        "path",
        "probe",
        "prompt_tokens",
        "raw_send",
        "request_id",
        "span",
        "started_at",
        "status",
        "tenant",
    )

    def __init__(self, scope: Scope, send: Send, cors: Cors) -> None:
        self.raw_send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.probe = self.path in PROBES
        self.form = form_of(self.path)
        """Of its errors."""
        self.span: Span | None = None
        self.request_id = request_id(scope["headers"])
        self._common = [
            (b"x-request-id", self.request_id.encode()),
            *cors.headers(scope["headers"]),
        ]
        self._unasked = any(name == b"expect" for name, _ in scope["headers"])
        """The client holds its body back, and nobody has asked for it."""
        self.answer: ASGIApp | None = None
        """Relays a job, outside of the framework: none of it is kept while a stream is open."""
        self.endpoint = ""
        self.model = ""
        self.lane = ""
        self.job_id = ""
        self.tenant = ""
        self.key_id = ""
        """Id of the caller's API key."""
        self.limits: RawHeaders = []
        """Headers that tell of the key's limits."""
        self.status = 0
        self.outcome = ""
        self.started_at = time.perf_counter()
        self.content_at = 0.0
        """When the first content left."""
        self.done_at = 0.0
        """When the last content left."""
        self.items = 0
        """Parts of the answer sent."""
        self.output_tokens = 0
        self.prompt_tokens = 0
        scope[_SCOPE_KEY] = self

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that every answer has."""
        if not self.job_id:
            return [*self._common, *self.limits]
        return [*self._common, *self.limits, (b"x-job-id", self.job_id.encode())]

    def note_limits(self, admission: Admission) -> None:
        """Have the answer tell of the key's limits."""
        self.limits = rate_headers(admission)

    def watch(self, receive: Receive) -> Receive:
        """Return `receive`, so that it is known whether a body that was held back was asked for."""
        if not self._unasked:
            return receive

        async def watched() -> Message:
            self._unasked = False
            return await receive()

        return watched

    async def send(self, message: Message) -> None:
        """Send a message of an ordinary answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), *self.headers()]
            # Whether the body comes all the same, nobody can know.
            if self._unasked and not any(name == b"connection" for name, _ in headers):
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        await self.raw_send(message)

    def begin_span(self, spans: Spans, scope: Scope) -> None:
        """Begin a span, which the job's belong to."""
        parent = read_trace(scope["headers"])
        self.span = spans.begin(self.method, parent, kind="server")

    def trace(self, scope: Scope) -> TraceContext:
        """Return what the job belongs to: this request's span, or else whatever its client's is."""
        return read_trace(scope["headers"]) if self.span is None else self.span.trace

    def about(self) -> dict[str, Any]:
        """Return the fields by which a line is found."""
        fields = {
            "job": self.job_id,
            "request": self.request_id,
            "tenant": self.tenant,
            "key": self.key_id,
            "model": self.model,
        }
        return {name: value for name, value in fields.items() if value}

    async def send_empty(self, status: int, headers: RawHeaders) -> None:
        """Answer with headers alone."""
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": b""})

    def finish(self, metrics: Metrics) -> None:
        """Count the request and write its line in the log."""
        outcome = self.outcome or _outcome_of(self.status)
        if self.span is not None:
            self._end_span(self.span, outcome)
        duration_s = time.perf_counter() - self.started_at
        ttft_s = self.content_at - self.started_at if self.content_at else None
        if self.endpoint:
            metrics.finished(self, outcome, duration_s=duration_s, ttft_s=ttft_s)
        facts = {
            "endpoint": self.endpoint,
            "path": "" if self.endpoint else _SECRET.sub("sk-...", self.path)[:_SHOWN_PATH],
            "lane": self.lane,
            "status": self.status,
            "outcome": outcome,
            "ttft_s": None if ttft_s is None else round(ttft_s, 4),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
        }
        say = log.debug if self.probe or self.method == "OPTIONS" else log.info
        say(
            "request.finished",
            method=self.method,
            **self.about(),
            **{name: value for name, value in facts.items() if value},
            duration_s=round(duration_s, 4),
        )

    def _end_span(self, span: Span, outcome: str) -> None:
        facts: dict[str, str | int | float | bool] = {
            "http.request.method": self.method,
            "http.route": self.endpoint,
            "http.response.status_code": self.status,
            "headrace.lane": self.lane,
            "headrace.outcome": outcome,
            "gen_ai.usage.input_tokens": self.prompt_tokens,
            "gen_ai.usage.output_tokens": self.output_tokens,
            **{f"headrace.{name}": value for name, value in self.about().items()},
        }
        if self.content_at:
            facts["headrace.time_to_first_token_s"] = round(self.content_at - self.started_at, 4)
        served = outcome == "completed" or outcome in _CLIENTS_OWN or 400 <= self.status < 500
        name = f"{self.method} {self.endpoint}".rstrip()
        span.end(facts, name=name, failed="" if served else outcome)


def _outcome_of(status: int) -> str:
    if not status:  # The process ended first.
        return "cut"
    return "completed" if status < 400 else "invalid_request"


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange that a scope belongs to."""
    return cast(Exchange, scope[_SCOPE_KEY])


def request_id(headers: RawHeaders) -> str:
    """Return the client's own id where it is sane, else a new one."""
    for name, value in headers:
        if name == b"x-request-id":
            if _SANE_ID.fullmatch(value):
                return value.decode()
            break
    return f"req-{secrets.token_hex(12)}"
