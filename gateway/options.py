"""What a request's headers ask for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.datastructures import Headers

from gateway.patience import patience, seconds
from gateway.settings import GatewaySettings
from shared.errors import InvalidRequest

MAX_AFTER = 10**9
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_NUMBER = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True)
class Options:
    """How a job is to be handled."""

    timeout_s: float
    resumable: bool
    """Events are to carry ids."""
    patience_s: float | None
    """How long the job goes on without its client; None: to its end."""
    failover: str
    key: str | None
    """The request's idempotency key."""


def read(
    headers: Headers, settings: GatewaySettings, *, stream: bool, on_disconnect: str = ""
) -> Options:
    """Return the options of a request. `on_disconnect`: its caller's. Raises `InvalidRequest`."""
    policy = on_disconnect or settings.on_disconnect
    resumable = wants_ids(headers)
    key = _key(headers.get("idempotency-key"))
    returns = key is not None or (resumable and stream)
    return Options(
        timeout_s=_timeout(headers.get("x-request-timeout"), settings),
        resumable=resumable,
        patience_s=_patience(headers.get("x-on-disconnect"), policy, settings, returns=returns),
        failover=_failover(headers.get("x-failover")),
        key=key,
    )


def wants_ids(headers: Headers) -> bool:
    """Tell whether a stream's events are to carry ids."""
    asked = headers.get("x-stream-resumable", "false").lower()
    if asked not in ("true", "false"):
        raise _invalid("X-Stream-Resumable", "`true` or `false`")
    return asked == "true"


def after(query: str | None, last_event_id: str | None) -> int:
    """Return the id of the last event that a client has had, 0 for none."""
    name, text = ("after", query) if query is not None else ("Last-Event-ID", last_event_id or "0")
    if not _NUMBER.fullmatch(text) or int(text) > MAX_AFTER:
        raise _invalid(name, "the id of an event, a whole number")
    return int(text)


def _timeout(header: str | None, settings: GatewaySettings) -> float:
    if header is None:
        return settings.request_timeout_s
    asked_s = seconds(header)
    if asked_s is None:
        raise _invalid("X-Request-Timeout", "a number of seconds above 0")
    return min(asked_s, settings.max_request_timeout_s)


def _patience(
    header: str | None, default: str, settings: GatewaySettings, *, returns: bool
) -> float | None:
    """`returns`: the client has the means to come back."""
    try:
        asked_s = patience(default if header is None else header)
    except ValueError as error:
        raise InvalidRequest(f"`X-On-Disconnect` {error}.", param="X-On-Disconnect") from error
    if asked_s is None:
        return None
    if header is None and returns and asked_s == 0:
        asked_s = settings.resume_grace_s
    return min(asked_s, settings.max_grace_s)


def _failover(header: str | None) -> str:
    policy = "continue" if header is None else header.strip().lower()
    if policy not in ("continue", "error"):
        raise _invalid("X-Failover", "`continue` or `error`")
    return policy


def _key(header: str | None) -> str | None:
    if header is not None and not _KEY.fullmatch(header):
        raise _invalid("Idempotency-Key", "1 to 255 visible ASCII characters")
    return header


def _invalid(name: str, form: str) -> InvalidRequest:
    return InvalidRequest(f"`{name}` must be {form}.", param=name)
