"""The error tree: stable codes, OpenAI's body."""

from __future__ import annotations

import pytest

from shared.errors import BY_CODE, EngineFailed, HeadraceError, InvalidJSON, QueueFull, tree

CODES = {
    "internal_error": 500,
    "invalid_request": 400,
    "invalid_json": 400,
    "model_not_found": 404,
    "unknown_url": 404,
    "job_not_found": 404,
    "method_not_allowed": 405,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "unavailable": 503,
    "queue_full": 503,
    "no_worker": 503,
    "queue_unavailable": 503,
    "lanes_lost": 503,
    "draining": 503,
    "request_timeout": 504,
    "cancelled": 499,
    "engine_error": 500,
    "worker_lost": 500,
    "job_lost": 500,
    "diverged": 500,
    "answer_too_large": 500,
}
"""Clients and other versions rely on these: only ever add."""


@pytest.mark.parametrize("code", CODES)
def test_codes_and_statuses_stay(code: str) -> None:
    assert BY_CODE[code].status == CODES[code]


def test_no_two_errors_share_a_code() -> None:
    classes = [c for c in tree(HeadraceError) if c.__module__ == "shared.errors"]
    assert len({c.code for c in classes}) == len(classes)


@pytest.mark.parametrize("kind", BY_CODE.values())
def test_the_docstring_is_the_message(kind: type[HeadraceError]) -> None:
    error = kind()
    assert error.message
    assert str(error) == error.message == kind.__doc__
    assert error.message.endswith(".")


@pytest.mark.parametrize("kind", BY_CODE.values())
def test_what_may_be_sent_again_is_no_fault_of_the_request(kind: type[HeadraceError]) -> None:
    if kind.retryable:
        assert kind.status >= 500
    if kind.status < 500:
        assert not kind.retryable


def test_the_body_is_openais() -> None:
    body = InvalidJSON("Line 3.", param="messages").body()
    assert body == {
        "error": {
            "message": "Line 3.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "invalid_json",
        }
    }
    assert EngineFailed().body()["error"]["type"] == "server_error"


def test_a_hint_is_kept() -> None:
    assert QueueFull(retry_after_s=2.5).retry_after_s == 2.5
    assert QueueFull().retry_after_s is None
