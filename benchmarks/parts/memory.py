"""The gateway's memory per open stream."""

from __future__ import annotations

import asyncio

from benchmarks.accounts import Account, resident_kib
from benchmarks.figures import Bar, Options, Part
from benchmarks.layout import Layout, on_core
from benchmarks.load import Connection, chat_request, connect
from benchmarks.rounds import all_begun, hold
from benchmarks.targets import Target, pool

_STREAMS = 1000
_SIMULATED = {
    "ttft_ms": 0,
    "tpot_ms": 1000,
    "seats": _STREAMS,
    "stamps": True,
    "faults": False,
}


async def run(options: Options) -> Part:
    layout = Layout.here()
    part = Part("memory", f"The gateway's memory, {_STREAMS:,} streams with a token a second")
    grown: list[float] = []
    again: list[float] = []
    base: list[float] = []
    for _ in range(options.rounds(3)):
        async with pool(layout, _SIMULATED) as target:
            with on_core(layout.client):
                account = Account(target.pids)
                # What the first requests bring into memory is the process's, not theirs.
                await hold(target, 20, tokens_per_s=1, ramp_s=0.2, window_s=0.5)
                before = resident_kib(target.pids["gateway"])
                open_kib = await _open_many(target)
                after_kib = await _open_many(target)
                bill = account.close()
        base.append(before / 1024)
        grown.append((open_kib - before) / _STREAMS)
        again.append((after_kib - before) / _STREAMS)
        kib = {"before": before, "open": open_kib, "open_again": after_kib}
        part.record({"target": target.name, "gateway_kib": kib, **bill.summary()})
    part.add("gateway without streams", "MiB", base)
    part.add("per open stream", "KiB", grown, Bar("<", 64))
    part.add("per open stream, the second time", "KiB", again)
    part.notes.append(
        "Growth of the resident memory of a gateway in its first minute; the sockets' buffers, "
        "which are the kernel's, aren't in it."
    )
    return part


async def _open_many(target: Target) -> int:
    """Return the gateway's memory with all streams open and at rest."""
    connections: list[Connection] = []
    for index in range(_STREAMS):
        connection = await connect(target.port)
        connections.append(connection)
        fields = {"max_tokens": 100, "messages": [{"role": "user", "content": f"stream {index}"}]}
        connection.ask(chat_request(target.port, fields))
        if index % 20 == 19:
            await asyncio.sleep(0.04)
    await all_begun(connections)
    await asyncio.sleep(2)
    resident = resident_kib(target.pids["gateway"])
    for connection in connections:
        connection.close()
    await asyncio.sleep(1.5)
    return resident
