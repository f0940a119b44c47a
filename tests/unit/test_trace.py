"""The trace context that crosses with a job."""

from __future__ import annotations

import pytest

from shared.trace import TraceContext, read_trace

PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

Headers = list[tuple[bytes, bytes]]


def test_a_trace_is_read_and_handed_on() -> None:
    headers: Headers = [(b"traceparent", PARENT), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    trace = read_trace([(b"host", b"x"), *headers])
    assert trace == TraceContext(PARENT.decode(), "a=1,b=2")
    assert trace.headers() == [(b"traceparent", PARENT), (b"tracestate", b"a=1,b=2")]
    assert read_trace([(b"traceparent", PARENT)]).headers() == [(b"traceparent", PARENT)]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"tracestate", b"a=1")],
        [(b"traceparent", PARENT), (b"traceparent", PARENT)],
        [(b"traceparent", PARENT.upper())],
        [(b"traceparent", b"ff" + PARENT[2:])],
        [(b"traceparent", b"00-" + b"0" * 32 + PARENT[35:])],
        [(b"traceparent", PARENT[:36] + b"0" * 16 + b"-01")],
        [(b"traceparent", PARENT + b"-x")],
        [(b"traceparent", PARENT + b"\n")],
        [(b"traceparent", b"")],
    ],
)
def test_what_is_not_valid_is_no_trace(headers: Headers) -> None:
    assert read_trace(headers) == TraceContext()


@pytest.mark.parametrize("state", [b"x" * 513, b"caf\xe9=1", b""])
def test_a_state_that_is_not_valid_goes_alone(state: bytes) -> None:
    headers = [(b"traceparent", PARENT), (b"tracestate", state)]
    assert read_trace(headers) == TraceContext(PARENT.decode(), "")
