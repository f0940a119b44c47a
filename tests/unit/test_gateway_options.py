"""What headers ask for, and what is refused."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from gateway import options
from gateway.options import Options
from gateway.settings import GatewaySettings
from shared.errors import InvalidRequest

SETTINGS = GatewaySettings(
    request_timeout_s=60, max_request_timeout_s=100, resume_grace_s=30, max_grace_s=200
)


def read(stream: bool = True, settings: GatewaySettings = SETTINGS, **headers: str) -> Options:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return options.read(Headers(named), settings, stream=stream)


def test_without_headers_nothing_is_special() -> None:
    assert read() == Options(60, False, 0.0, "continue", None)


@pytest.mark.parametrize(
    ("policy", "patience_s"),
    [("cancel", 0), ("continue", None), ("grace=7", 7), ("GRACE=1.5", 1.5), ("grace=9999", 200)],
)
def test_policies(policy: str, patience_s: float | None) -> None:
    assert read(x_on_disconnect=policy).patience_s == patience_s


def test_who_can_come_back_has_a_grace() -> None:
    assert read(x_stream_resumable="true").patience_s == 30
    assert read(stream=False, x_stream_resumable="true").patience_s == 0
    assert read(stream=False, idempotency_key="k").patience_s == 30
    assert read(x_stream_resumable="true", x_on_disconnect="cancel").patience_s == 0
    goes_on = SETTINGS.model_copy(update={"on_disconnect": "continue"})
    assert read(settings=goes_on, x_stream_resumable="true").patience_s is None
    assert read(settings=goes_on).patience_s is None
    waits = SETTINGS.model_copy(update={"on_disconnect": "grace=5"})
    assert read(settings=waits, idempotency_key="k").patience_s == 5


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Request-Timeout", "0"),
        ("X-Request-Timeout", "nan"),
        ("X-Request-Timeout", "soon"),
        ("X-Request-Timeout", ""),
        ("X-Request-Timeout", "1_0"),
        ("X-Request-Timeout", "1e1"),
        ("X-Request-Timeout", "+1"),
        ("X-Request-Timeout", "-1"),
        ("X-Request-Timeout", "0.0"),
        ("X-Request-Timeout", "infinity"),
        ("X-Request-Timeout", "0x10"),
        ("X-On-Disconnect", "grace=1_0"),
        ("X-On-Disconnect", "grace= 1"),
        ("X-On-Disconnect", "stay"),
        ("X-On-Disconnect", "grace"),
        ("X-On-Disconnect", "grace=-1"),
        ("X-On-Disconnect", "grace=inf"),
        ("X-On-Disconnect", "cancel=3"),
        ("X-Stream-Resumable", "yes"),
        ("X-Failover", "maybe"),
        ("Idempotency-Key", ""),
        ("Idempotency-Key", "two words"),
        ("Idempotency-Key", "é"),
        ("Idempotency-Key", "k" * 256),
    ],
)
def test_wrong_values_are_named(header: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        options.read(Headers({header: value}), SETTINGS, stream=True)
    assert refused.value.param == header


@pytest.mark.parametrize(("header", "timeout_s"), [("10", 10), ("0.5", 0.5), ("9999999999", 100)])
def test_time_limits(header: str, timeout_s: float) -> None:
    assert read(x_request_timeout=header).timeout_s == timeout_s


@pytest.mark.parametrize("policy", ["cancel", "Continue", " grace=7", "GRACE=1.5", "grace=9999999"])
def test_setting_and_header_take_the_same_policies(policy: str) -> None:
    given = SETTINGS.model_copy(
        update={"on_disconnect": GatewaySettings(on_disconnect=policy).on_disconnect}
    )
    assert read(settings=given) == read(x_on_disconnect=policy)


@pytest.mark.parametrize("policy", ["", "stay", "grace", "grace=0", "grace=-1", "grace=1_0"])
def test_a_policy_that_is_none_stops_the_start(policy: str) -> None:
    with pytest.raises(ValueError, match="must be `cancel`, `continue`"):
        GatewaySettings(on_disconnect=policy)


def test_failover_and_key_are_passed_on() -> None:
    read_options = read(x_failover="Error", idempotency_key="k" * 255)
    assert read_options.failover == "error"
    assert read_options.key == "k" * 255


@pytest.mark.parametrize(
    ("query", "header", "after"),
    [
        (None, None, 0),
        ("17", None, 17),
        (None, "3", 3),
        ("5", "9", 5),
        (None, "", 0),
        ("0", "1", 0),
    ],
)
def test_after(query: str | None, header: str | None, after: int) -> None:
    assert options.after(query, header) == after


@pytest.mark.parametrize("text", ["", "-1", "1.0", "x", "²", "9" * 11, "99999999999999999999"])
def test_after_that_is_no_number(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        options.after(text, None)
    assert refused.value.param == "after"


def test_last_event_id_that_is_no_number() -> None:
    with pytest.raises(InvalidRequest) as refused:
        options.after(None, "chunk-1")
    assert refused.value.param == "Last-Event-ID"
