"""Spans by OpenTelemetry, which `shared.spans` imports if it is asked for, and nobody else.

Contexts are passed by hand, and the provider is not the process's global one: what else in the
process makes spans (vLLM) is left as it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Literal, Self

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.trace import TraceContext

Facts = Mapping[str, str | int | float | bool]

_FLUSH_S = 3.0
"""Longest wait, at the end of the process, for a collector to take the last spans."""
_KINDS = {
    "server": SpanKind.SERVER,
    "consumer": SpanKind.CONSUMER,
    "internal": SpanKind.INTERNAL,
}
_propagator = TraceContextTextMapPropagator()


class Span:
    """Something that has begun."""

    def __init__(self, span: OtelSpan) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, context=set_span_in_context(span, Context()))
        self.trace = TraceContext(carrier.get("traceparent", ""), carrier.get("tracestate", ""))
        """For what it leads to."""

    def end(self, facts: Facts, *, name: str = "", failed: str = "") -> None:
        """`failed`: why. `name`: a better one than the first."""
        if name:
            self._span.update_name(name)
        self._span.set_attributes(facts)
        if failed:
            self._span.set_status(Status(StatusCode.ERROR, failed))
        self._span.end()


class Spans:
    """Where a process's spans begin."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("headrace")

    @classmethod
    def exporting(cls, service: str, instance: str) -> Self:
        """Send them to a collector, as the `OTEL_*` variables say."""
        name = os.environ.get("OTEL_SERVICE_NAME", service)
        resource = Resource.create({"service.name": name, "service.instance.id": instance})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(_exporter()))
        return cls(provider)

    def begin(
        self,
        name: str,
        parent: TraceContext,
        *,
        kind: Literal["server", "consumer", "internal"] = "internal",
        ago_s: float = 0.0,
    ) -> Span:
        """Begin a span; `ago_s` after it really began."""
        carrier = {"traceparent": parent.parent, "tracestate": parent.state}
        context = _propagator.extract(carrier, context=Context())
        at = time.time_ns() - int(ago_s * 1e9)
        return Span(
            self._tracer.start_span(name, context=context, kind=_KINDS[kind], start_time=at)
        )

    def close(self) -> None:
        """Let the last spans out, if a collector takes them."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_FLUSH_S)


def _exporter() -> SpanExporter:
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    if next((os.environ[name] for name in names if os.environ.get(name)), "") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as OverGrpc,
        )

        return OverGrpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    return OverHttp()
