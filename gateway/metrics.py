"""The gateway's metrics: base units, and no label whose values a client can make up.

Where several processes share a port they share a folder too, in which each keeps its figures, and
any of them tells the sum: prometheus_client's multi-process mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from gateway.errors import ClientGone

if TYPE_CHECKING:
    from gateway.exchange import Exchange

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2.5)
DURATION_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800, 3600)


class Pools(Collector):
    """What every process knows of the pools: told once, not summed."""

    def __init__(self) -> None:
        self.ready_workers = 0
        self.depths: dict[tuple[str, str], int] = {}
        """Jobs by pool and lane."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return them as metrics."""
        yield GaugeMetricFamily(
            "headrace_gateway_ready_workers",
            "Workers that take jobs, as this gateway knows them.",
            value=self.ready_workers,
        )
        depths = GaugeMetricFamily(
            "headrace_queue_depth",
            "Jobs in a lane, queued and running.",
            labels=("pool", "lane"),
        )
        for place, depth in self.depths.items():
            depths.add_metric(place, depth)
        yield depths


class Metrics:
    """One registry per application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.pools = Pools()
        self.registry.register(self.pools)
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
        self.open_streams = self._gauge("open_streams", "Requests being relayed.")
        self.pending_cancels = self._gauge(
            "pending_cancels", "Cancels that the queue has not taken yet."
        )
        self.reconnects = self._gauge(
            "pubsub_reconnects", "Times that the pub/sub link was lost.", "sum"
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

    def _gauge(self, name: str, text: str, mode: Literal["sum", "livesum"] = "livesum") -> Gauge:
        """`livesum`: of the processes that live."""
        return Gauge(
            f"headrace_gateway_{name}", text, registry=self.registry, multiprocess_mode=mode
        )

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
        """Return the metrics, of all processes that share the port, in Prometheus' text form."""
        if _FOLDER not in os.environ:
            return generate_latest(self.registry)
        everyones = CollectorRegistry()
        MultiProcessCollector(everyones)  # type: ignore[no-untyped-call]
        everyones.register(self.pools)
        return generate_latest(everyones)
