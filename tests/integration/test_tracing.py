"""One trace from the client, through gateway, queue and worker, to the engine."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from gateway.settings import GatewaySettings
from shared import spans as spans_module
from shared.otel import Spans
from shared.trace import TraceContext
from tests.support import sse
from tests.support.gateway import RunningGateway, pool
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until
from tests.unit.engines import ScriptedEngine
from worker.metrics import WorkerMetrics
from worker.settings import WorkerSettings
from worker.worker import Worker

WHOLE = {"model": "test-model", "messages": []}
TRACE = "a" * 32
CLIENT = {"traceparent": f"00-{TRACE}-{'b' * 16}-01", "tracestate": "v=1"}


class Collector:
    """Takes spans in this process."""

    def __init__(self) -> None:
        self._memory = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.spans = Spans(provider)

    def named(self, name: str) -> list[ReadableSpan]:
        return [one for one in self._memory.get_finished_spans() if one.name == name]

    @property
    def names(self) -> list[str]:
        return sorted(one.name for one in self._memory.get_finished_spans())


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """Return the span's trace, parent and own id."""
    assert span.context is not None
    assert span.parent is not None
    return (
        f"{span.context.trace_id:032x}",
        f"{span.parent.span_id:016x}",
        f"{span.context.span_id:016x}",
    )


async def test_a_trace_goes_through_the_whole_pool(valkey: ValkeyServer) -> None:
    collector = Collector()
    prefix = f"t{secrets.token_hex(6)}"
    settings = WorkerSettings(redis_url=SecretStr(valkey.url), key_prefix=prefix)
    engine = ScriptedEngine()
    worker = Worker(settings, engine, WorkerMetrics(CollectorRegistry()), collector.spans)
    working = asyncio.create_task(worker.run())
    async with RunningGateway(valkey.url, key_prefix=prefix, spans=collector.spans) as gateway:
        response, _ = await sse.fetch(gateway.chat, WHOLE, headers=CLIENT)
        assert response.status == 200
        await sse.fetch(f"{gateway.url}/healthz", headers=CLIENT)
        await until(lambda: len(collector.names) == 3, "all spans have ended")
    worker.stop()
    await working
    assert collector.names == ["POST /v1/chat/completions", "headrace.attempt", "headrace.queue"]
    (request,) = collector.named("POST /v1/chat/completions")
    (wait,) = collector.named("headrace.queue")
    (attempt,) = collector.named("headrace.attempt")
    assert ids(request)[:2] == (TRACE, "b" * 16)
    assert ids(wait)[:2] == ids(attempt)[:2] == (TRACE, ids(request)[2])
    facts: Any = request.attributes
    assert facts["headrace.job"] == response.headers["x-job-id"]
    assert facts["headrace.request"] == response.headers["x-request-id"]
    assert (facts["http.response.status_code"], facts["headrace.outcome"]) == (200, "completed")
    assert facts["headrace.time_to_first_token_s"] > 0
    theirs: Any = attempt.attributes
    assert theirs["headrace.job"] == facts["headrace.job"]
    assert (theirs["gen_ai.usage.input_tokens"], theirs["headrace.attempt"]) == (3, 1)
    assert wait.start_time is not None
    assert wait.end_time is not None
    assert wait.start_time <= wait.end_time
    headers = dict(engine.scopes[-1]["headers"])
    assert headers[b"traceparent"].decode() == f"00-{TRACE}-{ids(attempt)[2]}-01"
    assert headers[b"tracestate"] == b"v=1"


async def test_what_failed_is_marked(valkey: ValkeyServer) -> None:
    collector = Collector()
    async with pool(valkey.url, spans=collector.spans) as (gateway, worker):
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, {"model": "tiny"}))
        await (await worker.take()).end("failed", code="engine_error")
        assert (await answering)[0].status == 500
        await sse.fetch(gateway.chat, b"[]")
    failed, refused = collector.named("POST /v1/chat/completions")
    assert (failed.status.status_code, failed.status.description) == (
        StatusCode.ERROR,
        "engine_error",
    )
    assert refused.status.status_code is StatusCode.UNSET


def test_a_collector_gets_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            taken.append((self.path, body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    try:
        spans = spans_module.start(GatewaySettings(tracing=True), "headrace-gateway", "g1")
        assert spans is not None
        parent = Collector().spans.begin("x", TraceContext())
        spans.begin("POST /v1/chat/completions", parent.trace).end({"headrace.lane": "batch"})
        spans.close()
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    ((path, body),) = taken
    assert path == "/v1/traces"
    for text in (b"headrace-gateway", b"g1", b"POST /v1/chat/completions", b"batch"):
        assert text in body
    assert parent.trace.parent.split("-")[1] in body.hex()


def test_nothing_of_it_is_loaded_unless_asked_for() -> None:
    code = (
        "import sys; import gateway.server as g; import worker.__main__;"
        "from gateway.settings import GatewaySettings; from shared import spans;"
        "assert spans.start(GatewaySettings(), 'a', 'b') is None;"
        "g.build_server(GatewaySettings());"
        # Its metrics are loaded by redis-py where they are installed.
        "ours = ('shared.otel', 'opentelemetry.sdk.trace', 'opentelemetry.exporter');"
        "print([name for name in sys.modules if name.startswith(ours)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"


def test_what_is_asked_for_and_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shared.otel", None)
    with pytest.raises(SystemExit) as leaving:
        spans_module.start(GatewaySettings(tracing=True), "a", "b")
    assert leaving.value.code == 2
    told = capsys.readouterr().err
    assert "HEADRACE_TRACING" in told
    assert "headrace[tracing]" in told
