"""The worker's metrics, beside vLLM's own in the default registry."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

_WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_WAIT_BUCKETS_LONG = (*_WAIT_BUCKETS, 300, 1800, 7200)


class WorkerMetrics:
    """Everything that a worker counts."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.queue_wait = Histogram(
            "headrace_worker_queue_wait_seconds",
            "Time from a job's submission to its adoption.",
            ["lane"],
            buckets=_WAIT_BUCKETS_LONG,
            registry=registry,
        )
        self.jobs = Counter(
            "headrace_worker_jobs",
            "Jobs that ended here.",
            ["lane", "outcome"],
            registry=registry,
        )
        self.cancels = Counter(
            "headrace_worker_cancels",
            "Jobs stopped before their end, by phase: prefill or decode.",
            ["phase", "reason"],
            registry=registry,
        )
        self.tokens = Counter(
            "headrace_worker_tokens",
            "Tokens of ended jobs, by kind: prompt, completion or cached.",
            ["kind"],
            registry=registry,
        )
        self.running = Gauge("headrace_worker_running_jobs", "Jobs running.", registry=registry)
        self.waiting = Gauge(
            "headrace_worker_waiting_sequences",
            "Sequences waiting inside the engine.",
            registry=registry,
        )
        self.seats = Gauge(
            "headrace_worker_seats", "Sequences that the engine runs at once.", registry=registry
        )
        self.kv_usage = Gauge(
            "headrace_worker_kv_usage_ratio",
            "Share of the KV cache in use, 0 to 1.",
            registry=registry,
        )
        self.publish_calls = Counter(
            "headrace_worker_publish_calls",
            "Calls that wrote frames, each for all running jobs.",
            registry=registry,
        )
        self.frames = Counter("headrace_worker_frames", "Frames written.", registry=registry)
        self.ready = Gauge(
            "headrace_worker_ready", "1 while the worker takes jobs.", registry=registry
        )
