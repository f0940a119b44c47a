"""The worker's settings. What the engine itself takes are the arguments of `vllm serve`."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Literal, Self

from pydantic import Field, model_validator

from shared.settings import RedisSettings, Seconds


def _worker_id() -> str:
    return f"{socket.gethostname()[:24]}-{os.getpid()}-{secrets.token_hex(3)}"


class WorkerSettings(RedisSettings):
    """One worker: one engine."""

    engine: Literal["vllm", "simulated"] = "vllm"
    """What answers the jobs."""
    worker_id: str = Field(default_factory=_worker_id, pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Unique in the pool; by default host, process and a random part."""
    pool: str = ""
    """Workers of one pool share a queue and serve the same models; by default the first model."""
    shards: int = Field(1, ge=1, le=256)
    """Parts of the pool's queue, spread over a cluster; the same for all its workers."""
    interactive_reserve: float = Field(0.25, ge=0, le=1)
    """Share of the seats that batch work may not take, rounded down."""
    batch_max_wait_s: float = Field(600, ge=0, le=86_400)
    """How long batch work may wait; then every other seat that it may take is its; 0: for ever."""
    kv_high: float = Field(0.95, gt=0, le=1)
    """Share of the KV cache in use above which nothing more is claimed."""
    default_max_tokens: int = Field(4096, ge=1, le=10_000_000)
    """Longest answer of a request that sets no limit, tokens."""
    max_tokens_ceiling: int = Field(32_768, ge=1, le=10_000_000)
    """Longest answer of any request, tokens."""
    lease_s: Seconds = 3
    """How long the pool believes in a worker, and a job in its owner, without a beat."""
    beat_s: Seconds = 0.8
    """Time between beats; at most half a lease, so that one may be lost."""
    drain_grace_s: Seconds = 5
    """How long running jobs may finish after SIGTERM before they move to other workers."""
    drain_timeout_s: Seconds = 120
    """Longest wait for running jobs after SIGTERM, where no other worker has room."""
    start_timeout_s: Seconds = 1800
    """Longest wait for the engine to load and to answer its warm-up request."""
    stall_s: Seconds = 60
    """An engine that has work and makes no step for this long has failed."""
    metrics_host: str = Field("127.0.0.1", min_length=1)
    """Address on which `/metrics` is served."""
    metrics_port: int = Field(0, ge=0, le=65_535)
    """Port on which `/metrics` is served; 0: not at all."""

    @model_validator(mode="after")
    def _beats_often(self) -> Self:
        if self.beat_s > self.lease_s / 2:
            raise ValueError("HEADRACE_BEAT_S must be at most half of HEADRACE_LEASE_S")
        return self
