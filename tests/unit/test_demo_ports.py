"""Ports that are free, and answers from those that aren't."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from compose.ports import HOST, Ports, PortTaken, http_get, valkey_answers


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_usual_port_is_passed_over_when_somebody_listens(taken: int) -> None:
    picked = Ports().pick(taken)
    assert picked != taken


def test_no_port_is_handed_out_twice() -> None:
    ports = Ports()
    first = ports.pick(20_000)
    assert ports.pick(first) != first
    with pytest.raises(PortTaken):
        ports.claim(first)


def test_claim_of_a_taken_port_is_refused(taken: int) -> None:
    with pytest.raises(PortTaken, match=str(taken)):
        Ports().claim(taken)


def test_search_ends_at_the_last_port() -> None:
    ports = Ports()
    assert {ports.pick(65_535), ports.pick(65_535)} != {65_535}


async def test_answers_are_read_whole() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        reply = b"+PONG\r\n" if line == b"PING\r\n" else b"HTTP/1.1 503 No\r\nA: b\r\n\r\nwhy: not"
        writer.write(reply)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await http_get(port, "/readyz") == (503, b"why: not")
        assert await valkey_answers(port)


async def test_nobody_there_is_no_answer(taken: int) -> None:
    free = Ports().pick(20_000)
    assert await http_get(free, "/") == (0, b"")
    assert not await valkey_answers(free)
