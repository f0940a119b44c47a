"""The gateway's settings, read from `HEADRACE_*` variables."""

from __future__ import annotations

import os
import re
import socket
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode

from gateway.patience import patience
from shared.settings import RedisSettings, Seconds

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s,]+")

Bytes = Annotated[int, Field(ge=1024, le=4 << 30)]


def _own_id() -> str:
    return f"{socket.gethostname()[:40]}-{os.getpid()}"


class GatewaySettings(RedisSettings):
    """What a gateway needs to know."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65_535)
    """Port to listen on; 0 takes a free one."""
    processes: int = Field(1, ge=1, le=64)
    """Processes that share the port; on the command line `--processes`."""
    auth: Literal["auto", "keys", "open"] = "auto"
    """`keys`: none but callers with an API key; `open`: anybody; `auto`: keys, if there are any."""
    auth_cache_s: Annotated[float, Field(ge=0.1, le=60)] = 5
    """How long a key is known without being looked up again, and a disabled one may be taken."""
    gateway_id: str = Field(default_factory=_own_id, pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """This gateway's name in jobs and log lines."""
    max_body_bytes: Bytes = 32 << 20
    """Largest request body; above it 413."""
    max_header_bytes: Bytes = 64 << 10
    """Largest request target and headers; above it 431."""
    max_choices: int = Field(128, ge=1, le=65_536)
    """Most answers that one request can ask for, `n`; above this and what follows 400."""
    max_request_logprobs: int = Field(1000, ge=0, le=1_000_000)
    """Most log probabilities per token that a request can ask for."""
    max_stops: int = Field(256, ge=1, le=65_536)
    """Most stop strings, stop tokens or bad words of a request."""
    max_logit_bias: int = Field(32_768, ge=1, le=1_000_000)
    """Most tokens that a request can weigh in `logit_bias`."""
    max_list_items: int = Field(4096, ge=1, le=1_000_000)
    """Most messages, parts of one, tools or inputs of a request, and inputs times choices."""
    max_schema_bytes: Bytes = 256 << 10
    """Largest schema or grammar that an answer is to follow, and largest tool."""
    max_json_depth: int = Field(100, ge=8, le=500)
    """Deepest nesting of a request's JSON."""
    max_json_values: int = Field(1_000_000, ge=1000, le=100_000_000)
    """Most values in a request's JSON, tokens of a prompt among them."""
    body_timeout_s: Seconds = 60
    """Longest wait for a request's body."""
    request_timeout_s: Seconds = 600
    """Time limit of a request, queueing included, unless it sends `X-Request-Timeout`."""
    max_request_timeout_s: Seconds = 3600
    """Highest time limit that `X-Request-Timeout` can ask for."""
    submit_timeout_s: Annotated[float, Field(gt=0, le=60)] = 1.8
    """Longest wait for the queue to take a job; above it 503."""
    redis_replicas: int = Field(0, ge=0, le=16)
    """Replicas that must have a job before it counts as accepted; with fewer, 503."""
    no_worker_wait_s: Annotated[float, Field(ge=0, le=86_400)] = 60
    """How long requests wait while no worker of their pool is there, nor any is starting; with 0
    they are refused at once."""
    first_byte_grace_s: Seconds = 5
    """How long a stream's status waits for the engine's before it becomes 200."""
    keepalive_s: Seconds = 10
    """Longest silence in a stream; then a comment is sent."""
    max_queue_depth: int = Field(1000, ge=0, le=10_000_000)
    """Most jobs that may wait in one lane of a pool, beyond those its seats hold; above it 503."""
    tenant_queue_limit: int = Field(0, ge=0, le=10_000_000)
    """Most jobs of one tenant that may wait in one lane of a pool; above it 429; 0: no limit."""
    max_streams: int = Field(4096, ge=1, le=1_000_000)
    """Most requests that one process relays at once; above it 503."""
    stream_buffer_bytes: Bytes = 256 << 10
    """Most bytes held for a client that reads slowly; what is beyond is read from the log later."""
    max_answer_bytes: Bytes = 128 << 20
    """Largest answer that is not a stream."""
    stall_timeout_s: Seconds = 60
    """How long a client may take nothing of what was sent before it is cut."""
    force_cancel_s: Seconds = 5
    """How long a worker has to end a cancelled job before it is ended over its head."""
    registry_refresh_s: Annotated[float, Field(ge=0.05, le=60)] = 0.5
    """How often the list of workers and the depth of the queue are read."""
    drain_timeout_s: Seconds = 30
    """How long open requests may go on after SIGTERM; then they end with an error."""
    drain_delay_s: float = Field(0, ge=0, le=3600)
    """How long after SIGTERM the port stays open, not ready and refusing, before the drain."""
    on_disconnect: str = "cancel"
    """What becomes of a job whose client has left, unless it sends `X-On-Disconnect`."""
    resume_grace_s: Seconds = 30
    """Grace of clients that can come back, where `on_disconnect` is `cancel`."""
    max_grace_s: Seconds = 600
    """Highest grace that `X-On-Disconnect` can ask for."""
    gateway_lease_s: Annotated[float, Field(ge=0.5, le=3600)] = 10
    """How long workers believe in a gateway, and in its clients, without a sign of it."""
    max_pending_body_bytes: Bytes = 512 << 20
    """Most bytes of request bodies that one process holds before they are submitted; then 503."""
    http_keepalive_s: int = Field(75, ge=1, le=3600)
    """How long an idle client connection is kept, and a request's head is waited for."""
    root_path: str = Field("", pattern=r"^(/[A-Za-z0-9._~-]+)*$")
    """Prefix under which a proxy has the gateway, which it may take off or leave on."""
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Origins, separated by commas, whose web pages may read answers; `*`: all."""

    @field_validator("on_disconnect")
    @classmethod
    def _policy(cls, value: str) -> str:
        patience(value)
        return value

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = tuple(one.strip() for one in value.split(",") if one.strip())
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError("must be `*` or origins like https://chat.example.com, no path")
        return value

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_request_timeout_s < self.request_timeout_s:
            raise ValueError(
                "HEADRACE_MAX_REQUEST_TIMEOUT_S must not be below HEADRACE_REQUEST_TIMEOUT_S"
            )
        return self
