"""Errors as HTTP answers and as events of a stream."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway.error_forms import OPENAI, Form
from shared.errors import (
    BY_CODE,
    Cancelled,
    Draining,
    EngineFailed,
    HeadraceError,
    InvalidRequest,
    JobLost,
    MethodNotAllowed,
    RequestTimeout,
    Unavailable,
    UnknownRoute,
)
from shared.protocol import End

_BY_OUTCOME: dict[str, type[HeadraceError]] = {
    "cancelled": Cancelled,
    "expired": RequestTimeout,
    "lost": JobLost,
}
_DEFAULT_RETRY_S = 2.0
_MOST_RETRY_S = 60
"""SDKs pass over a longer one."""


class ClientGone(HeadraceError):
    """The client closed the connection."""

    code = "disconnected"
    status = 499


class ClientStalled(HeadraceError):
    """The client did not read its answer."""

    code = "stalled"
    status = 499


class Overloaded(Unavailable):
    """This server relays as many requests as it can. Try again later."""

    code = "overloaded"


class RateLimited(Unavailable):
    """This API key has sent more than it may. Try again later."""

    code = "rate_limit_exceeded"
    type = "rate_limit_error"
    status = 429


class TokensAboveLimit(InvalidRequest):
    """The request may take more tokens than its API key has in a minute."""

    code = "tokens_above_limit"


class BrokenOff(Draining):
    """This server is shutting down. The request goes on: come back for its answer."""


class HeadTooLarge(InvalidRequest):
    """The request's headers are too large."""

    code = "headers_too_large"
    status = 431


class InvalidApiKey(InvalidRequest):
    """Incorrect API key provided."""

    code = "invalid_api_key"
    status = 401


class AboveLimit(InvalidRequest):
    """The request asks for more than one request may."""

    code = "above_limit"


class Forbidden(InvalidRequest):
    """This API key may not do that."""

    code = "permission_denied"
    status = 403


class IdempotencyConflict(InvalidRequest):
    """This `Idempotency-Key` was sent before with another request."""

    code = "idempotency_conflict"
    status = 409


class NotStored(InvalidRequest):
    """Responses are not stored here: read the answer of the request that made it."""

    code = "not_stored"
    status = 404


class AnswerGone(InvalidRequest):
    """The job's answer is not kept any more."""

    code = "answer_gone"
    status = 410


def error_of(end: End) -> HeadraceError:
    """Return the error that a terminal frame tells of."""
    kind = BY_CODE.get(end.code) or _BY_OUTCOME.get(end.outcome, EngineFailed)
    return kind(end.message)


def error_json(error: HeadraceError, form: Form = OPENAI) -> bytes:
    """Return an error's body, in ASCII: some clients split lines at U+2028."""
    return json.dumps(form.body(error), separators=(",", ":")).encode()


def error_headers(error: HeadraceError) -> dict[str, str]:
    """Return what tells a client whether and when to try again."""
    if not error.retryable:
        login = {"www-authenticate": "Bearer"} if error.status == 401 else {}
        return {"x-should-retry": "false", **login}
    if error.status not in (429, 503):
        return {}
    seconds = _DEFAULT_RETRY_S if error.retry_after_s is None else error.retry_after_s
    seconds = min(_MOST_RETRY_S, seconds)
    return {
        "retry-after": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, math.ceil(seconds * 1000))),
    }


def error_response(
    error: HeadraceError, headers: Mapping[str, str] | None = None, form: Form = OPENAI
) -> Response:
    """Return an error as a whole answer."""
    return Response(
        error_json(error, form),
        error.status,
        {**error_headers(error), **(headers or {})},
        "application/json",
    )


def from_http(error: HTTPException) -> HeadraceError:
    """Return the framework's own error as one of ours."""
    if error.status_code == 404:
        return UnknownRoute()
    if error.status_code == 405:
        return MethodNotAllowed()
    kind = InvalidRequest if error.status_code < 500 else HeadraceError
    return kind(str(error.detail))
