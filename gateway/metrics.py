"""The gateway's metrics: base units, and no label whose values a client can make up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.errors import ClientGone

if TYPE_CHECKING:
    from gateway.exchange import Exchange

FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2.5)
DURATION_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """One registry per application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "headrace_gateway_requests",
            "Requests answered.",
            ("endpoint", "model", "lane", "outcome"),
            registry=self.registry,
        )
        self.first_token = self._histogram(
            "time_to_first_token", "From the request to its answer's first content.", FIRST_TOKEN_S
        )
        self.per_token = self._histogram(
            "time_per_output_token", "Mean over a stream's tokens but the first.", PER_TOKEN_S
        )
        self.duration = self._histogram(
            "request_duration", "From the request to its answer's end.", DURATION_S
        )
        self.open_streams = self._gauge("headrace_gateway_open_streams", "Requests being relayed.")
        self.ready_workers = self._gauge(
            "headrace_gateway_ready_workers", "Workers that take jobs, as this gateway knows them."
        )
        self.pending_cancels = self._gauge(
            "headrace_gateway_pending_cancels", "Cancels that the queue has not taken yet."
        )
        self.reconnects = self._gauge(
            "headrace_gateway_pubsub_reconnects", "Times that the pub/sub link was lost."
        )
        self.queue_depth = Gauge(
            "headrace_queue_depth",
            "Jobs in a lane, queued and running.",
            ("pool", "lane"),
            registry=self.registry,
        )
        self.log_reads = Counter(
            "headrace_gateway_log_reads",
            "Pages of job logs read, by why the channel did not do.",
            ("reason",),
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"headrace_gateway_{name}_seconds",
            text,
            ("endpoint", "model"),
            buckets=buckets,
            registry=self.registry,
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def log_read(self, reason: str) -> None:
        """Count a page of a job's log."""
        self.log_reads.labels(reason).inc()

    def finished(
        self, exchange: Exchange, outcome: str, *, duration_s: float, ttft_s: float | None
    ) -> None:
        """Observe a request once, at its end."""
        endpoint, model = exchange.endpoint, exchange.model
        self.requests.labels(endpoint, model, exchange.lane, outcome).inc()
        if not exchange.job_id or outcome == ClientGone.code:
            return
        self.duration.labels(endpoint, model).observe(duration_s)
        if ttft_s is None or exchange.status >= 400:
            return
        self.first_token.labels(endpoint, model).observe(ttft_s)
        tokens = exchange.output_tokens or exchange.items
        if tokens > 1 and exchange.done_at > exchange.content_at:
            mean_s = (exchange.done_at - exchange.content_at) / (tokens - 1)
            self.per_token.labels(endpoint, model).observe(mean_s)

    def render(self) -> bytes:
        """Return the registry in Prometheus' text form."""
        return generate_latest(self.registry)
