"""Settings that gateways and workers have in common, read from `HEADRACE_*` variables.

Each process reads its settings once, in its `__main__`, and passes them down.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal, NoReturn, TypeVar

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.servers import parse

Seconds = Annotated[float, Field(gt=0, le=86_400)]

_SCHEMES = (
    "redis://",
    "rediss://",
    "unix://",
    "redis+sentinel://",
    "rediss+sentinel://",
    "redis+cluster://",
    "rediss+cluster://",
)


class RedisSettings(BaseSettings):
    """How to reach the queue, and what both sides must agree on."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_", extra="ignore")

    redis_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    """Servers of the Redis protocol: `redis://`, `rediss://`, `unix://`, `redis+sentinel://` or
    `redis+cluster://`; see `shared.servers`."""
    redis_timeout_s: Seconds = 1.5
    """Longest wait for a connection or a reply."""
    redis_connections: int = Field(32, ge=4, le=10_000)
    """Most connections for commands, per process."""
    key_prefix: str = Field("headrace", pattern=r"^[A-Za-z0-9_.-]{1,32}$")
    """First part of every key and channel."""
    result_ttl_s: Seconds = 300
    """How long a finished job's answer is kept."""
    log_format: Literal["console", "json"] = "console"
    """Form of the log lines."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe lines that are logged."""
    tracing: bool = False
    """Whether spans go to an OpenTelemetry collector, as the `OTEL_*` variables say."""

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, url: SecretStr) -> SecretStr:
        text = url.get_secret_value()
        if not text.startswith(_SCHEMES):
            raise ValueError(f"must begin with one of {', '.join(_SCHEMES)}")
        parse(text)
        return url


S = TypeVar("S", bound=BaseSettings)
WRONG_SETTING = 2
"""Exit status of a process that can't start with what it was told."""


def read(settings: type[S]) -> S:
    """Read settings from the environment, or leave with a line for each wrong variable."""
    try:
        return settings()
    except ValidationError as error:
        _leave(settings, error)


def _leave(settings: type[BaseSettings], error: ValidationError) -> NoReturn:
    prefix = settings.model_config.get("env_prefix", "")
    for fault in error.errors(include_url=False, include_input=False):
        name = "_".join(str(part) for part in fault["loc"]).upper()
        variable = f" {prefix}{name}" if name else ""  # What is wrong with several names them.
        sys.stderr.write(f"headrace: wrong setting{variable}: {fault['msg']}\n")
    sys.exit(WRONG_SETTING)
