"""Writing past the server: the same bytes as through it, and only where that is safe."""

from __future__ import annotations

from typing import Any, cast

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway import wire
from gateway.wire import Wire
from tests.support.cycle import FakeTransport, make_cycle, unchunked

START: Any = {"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]}


def body(data: bytes, *, more: bool = True) -> Any:
    return {"type": "http.response.body", "body": data, "more_body": more}


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
async def cycle(transport: FakeTransport) -> RequestResponseCycle:
    return make_cycle(transport)


def wire_of(cycle: RequestResponseCycle) -> Wire:
    return Wire(cast(Any, cycle.send))


async def test_what_is_written_past_the_server_is_what_it_would_have_written(
    transport: FakeTransport, cycle: RequestResponseCycle
) -> None:
    parts = [b"data: 1\n\n", b"x" * 4096, b"\r\n0\r\n\r\n", b"last"]
    plain = FakeTransport()
    through = make_cycle(plain)
    past = wire_of(cycle)
    await through.send(START)
    await cycle.send(START)
    for number, part in enumerate(parts):
        await through.send(body(part))
        if number % 2:
            await cycle.send(body(part))
        else:
            assert past.can_write()
            assert past.flows()
            past.write(part)
    await through.send(body(b"", more=False))
    await cycle.send(body(b"", more=False))
    assert transport.writes == plain.writes
    assert unchunked(b"".join(transport.writes))[1] == b"".join(parts)


async def test_only_an_open_body_in_chunks_is_written_past_the_server(
    cycle: RequestResponseCycle,
) -> None:
    past = wire_of(cycle)
    assert not past.can_write()
    await cycle.send(START)
    assert past.can_write()
    await cycle.send(body(b"", more=False))
    assert not past.can_write()


async def test_a_body_whose_length_is_told_goes_through_the_server(
    cycle: RequestResponseCycle,
) -> None:
    start: Any = {**START, "headers": [(b"content-length", b"3")]}
    await cycle.send(start)
    assert not wire_of(cycle).can_write()


async def test_a_body_without_chunks_goes_through_the_server(transport: FakeTransport) -> None:
    cycle = make_cycle(transport, "1.0")
    past = wire_of(cycle)
    assert past.can_unchunk()
    past.unchunk()
    await cycle.send(START)
    assert not past.can_write()


async def test_nothing_flows_to_a_client_that_is_slow_or_gone(
    transport: FakeTransport, cycle: RequestResponseCycle
) -> None:
    past = wire_of(cycle)
    await cycle.send(START)
    cycle.flow.pause_writing()
    assert not past.flows()
    cycle.flow.resume_writing()
    assert past.flows()
    cycle.disconnected = True
    assert not past.flows()
    cycle.disconnected = False
    transport.close()
    assert not past.flows()


async def test_another_server_is_written_to_by_asgi_alone() -> None:
    async def send(message: Any) -> None: ...

    assert not Wire(send).can_write()


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.30.0", True),
        ("0.54.1", True),
        ("0.29.0", False),
        ("0.99", False),
        ("1.0", False),
        ("x", False),
    ],
)
def test_only_known_versions_are_written_past(version: str, known: bool) -> None:
    assert wire._is_known(version) is known
