"""What answers say of limits, and which errors tell a client not to try again."""

from __future__ import annotations

import pytest

from gateway.errors import RateLimited, error_headers
from gateway.rates import duration, rate_headers
from shared.errors import HeadraceError
from shared.in_flight import Admission, Window

COMES_AGAIN = {
    "above_limit",
    "answer_gone",
    "answer_too_large",
    "body_too_large",
    "cancelled",
    "disconnected",
    "headers_too_large",
    "idempotency_conflict",
    "internal_error",
    "invalid_api_key",
    "invalid_json",
    "invalid_request",
    "job_not_found",
    "method_not_allowed",
    "model_not_found",
    "not_stored",
    "permission_denied",
    "poisoned",
    "request_timeout",
    "stalled",
    "tokens_above_limit",
    "transition_failed",
    "unknown_url",
    "unsupported_media_type",
}
"""Codes of which a retry can't help."""
PASSES = {
    "diverged",
    "draining",
    "engine_error",
    "job_lost",
    "lanes_lost",
    "no_worker",
    "overloaded",
    "queue_full",
    "queue_unavailable",
    "rate_limit_exceeded",
    "unavailable",
    "worker_lost",
}
SAYS_WHEN = PASSES - {"diverged", "engine_error", "job_lost", "worker_lost"}


def _tree(root: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [root, *(c for child in root.__subclasses__() for c in _tree(child))]


ERRORS = [
    one for one in _tree(HeadraceError) if one.__module__ in ("shared.errors", "gateway.errors")
]


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_says_whether_to_try_again(kind: type[HeadraceError]) -> None:
    assert kind.code in COMES_AGAIN ^ PASSES, "say which of them it is"
    headers = error_headers(kind())
    assert headers.get("x-should-retry") == ("false" if kind.code in COMES_AGAIN else None)
    told = {"retry-after", "retry-after-ms"}
    assert headers.keys() & told == (told if kind.code in SAYS_WHEN else set())


@pytest.mark.parametrize(
    ("retry_after_s", "seconds", "milliseconds"),
    [
        (None, "2", "2000"),
        (0.02, "1", "20"),
        (0, "1", "1"),
        (3.2, "4", "3200"),
        (61, "60", "60000"),
    ],
)
def test_when_to_come_back(retry_after_s: float | None, seconds: str, milliseconds: str) -> None:
    headers = error_headers(RateLimited(retry_after_s=retry_after_s))
    assert headers == {"retry-after": seconds, "retry-after-ms": milliseconds}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0204, "20ms"),
        (0.9996, "1s"),
        (1, "1s"),
        (8.64, "8.64s"),
        (59.9999, "1m0s"),
        (60.5, "1m0.5s"),
        (360, "6m0s"),
    ],
)
def test_times_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_limit_that_a_key_lacks_is_not_told() -> None:
    assert rate_headers(Admission("in_flight")) == []
    spent = Window(limit=100, used=130, wait_s=0.5, reset_s=61)
    assert dict(rate_headers(Admission("tokens", tokens=spent))) == {
        b"x-ratelimit-limit-tokens": b"100",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"1m1s",
    }
