"""Streams that say little: opened in bulk, and left one by one."""

from __future__ import annotations

import asyncio

from benchmarks.load import Answer, Connection, chat_request, connect
from benchmarks.rounds import all_begun
from benchmarks.targets import Target

_OPENED_AT_ONCE = 20
_PAUSE_S = 0.03


def ask(connection: Connection, target: Target, kind: str, number: int) -> asyncio.Future[Answer]:
    """Ask for a stream of a kind that the backend knows: `busy`, `quiet`, `prefill`."""
    messages = [{"role": "user", "content": f"mark {kind} {number} "}]
    fields = {"model": "simulated", "max_tokens": 100_000, "messages": messages}
    return connection.ask(chat_request(target.port, fields))


async def open_quiet(target: Target, streams: int) -> list[Connection]:
    """Return streams that have had one token and will have no other."""
    connections: list[Connection] = []
    for number in range(streams):
        connection = await connect(target.port)
        connections.append(connection)
        ask(connection, target, "quiet", number)
        if number % _OPENED_AT_ONCE == _OPENED_AT_ONCE - 1:
            await asyncio.sleep(_PAUSE_S)
    await all_begun(connections)
    return connections
