"""What tokens cost the queue's server: commands, bytes, calls, processor time, memory."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from benchmarks.accounts import Account
from benchmarks.figures import Options, Part
from benchmarks.layout import Layout, on_core
from benchmarks.load import WORDS, Answer, Connection, chat_request, check, connect
from benchmarks.rounds import all_begun
from benchmarks.targets import Target, pool
from tests.support.valkey import ValkeyServer

_TOKENS_PER_S = 30.0
_STREAMS = (1, 64, 512)
_SIMULATED: dict[str, object] = {
    "ttft_ms": 0,
    "tpot_ms": 1000 / _TOKENS_PER_S,
    "seats": 512,
    "faults": False,
}
_ANSWERS = 64
_ANSWER_TOKENS = 1000
_ANSWER_TPOT_MS = 10
_TTL_S = 4.0


class Asked(NamedTuple):
    """Streams under way."""

    connections: list[Connection]
    ends: list[asyncio.Future[Answer]]


async def run(options: Options) -> Part:
    layout = Layout.here()
    part = Part("redis", "What Valkey does for a token, and what an answer takes of its memory")
    for streams in _STREAMS:
        counted: list[dict[str, float]] = []
        async with pool(layout, _SIMULATED) as target:
            with on_core(layout.client):
                for _ in range(options.rounds(3)):
                    counted.append(await _count(target, streams, options.seconds(3), part))
        for name, unit in _UNITS.items():
            part.add(f"{name}, {streams} streams", unit, [each[name] for each in counted])
    fast = {**_SIMULATED, "tpot_ms": _ANSWER_TPOT_MS}
    for streams in (1, _ANSWERS):
        async with pool(layout, fast, settings={"result_ttl_s": _TTL_S}) as target:
            with on_core(layout.client):
                kept = await _remember(target, streams, part)
        for name, value in kept.items():
            label = f"memory per {_ANSWER_TOKENS:,}-token answer, {name}"
            part.add(f"{label}, {streams} at once", "KiB", [value])
    part.notes.append(
        "Commands include those inside scripts. The text is the simulated engine's words, about 6 "
        f"bytes a token. Memory after the end is that of the log, kept for `result_ttl_s` (here "
        f"{_TTL_S:g} s, by default 300)."
    )
    return part


_UNITS = {
    "commands per token": "",
    "script calls per engine step": "",
    "bytes to the server per token": "B",
    "bytes from the server per token": "B",
    "Valkey CPU per token": "µs",
}


async def _count(target: Target, streams: int, seconds: float, part: Part) -> dict[str, float]:
    """Count over a time in which all streams are open."""
    valkey = target.valkey
    assert valkey is not None
    asked = await _ask(target, streams, int((seconds + 20) * _TOKENS_PER_S))
    connections = asked.connections
    # Until then claims and adoptions would be counted with the tokens.
    await all_begun(connections)
    await asyncio.sleep(1.0)
    account, before = Account(target.pids), await asyncio.to_thread(_info, valkey)
    tokens = _arrived(connections)
    await asyncio.sleep(seconds)
    bill, after = account.close(), await asyncio.to_thread(_info, valkey)
    tokens = _arrived(connections) - tokens
    for connection in connections:
        connection.close()
    await asyncio.sleep(0.5)
    part.record({"target": f"{streams} streams", "tokens": tokens, **bill.summary()})
    used = {name: after[name] - before[name] for name in before}
    return {
        "commands per token": used["total_commands_processed"] / tokens,
        "script calls per engine step": used["evalsha"] / (bill.wall_s * _TOKENS_PER_S),
        "bytes to the server per token": used["total_net_input_bytes"] / tokens,
        "bytes from the server per token": used["total_net_output_bytes"] / tokens,
        "Valkey CPU per token": bill.us_per("valkey", tokens),
    }


async def _remember(target: Target, answers: int, part: Part) -> dict[str, float]:
    """Return the memory that an answer takes while it grows, at its end, and after its time."""
    valkey = target.valkey
    assert valkey is not None
    # A first answer brings in the scripts, and what every connection needs.
    await _finish(await _ask(target, answers, 4))
    await asyncio.sleep(_TTL_S + 2)
    account, before = Account(target.pids), await asyncio.to_thread(_memory, valkey)
    asked = await _ask(target, answers, _ANSWER_TOKENS)
    await asyncio.sleep(_ANSWER_TOKENS * _ANSWER_TPOT_MS / 2000)
    half = await asyncio.to_thread(_memory, valkey)
    await _finish(asked)
    ended = await asyncio.to_thread(_memory, valkey)
    await asyncio.sleep(_TTL_S + 2)
    gone = await asyncio.to_thread(_memory, valkey)
    part.record({"target": f"{answers} answers", **account.close().summary()})
    used = {"half-way": half, "at its end": ended, "after its time": gone}
    return {name: (bytes_used - before) / answers / 1024 for name, bytes_used in used.items()}


async def _ask(target: Target, streams: int, tokens: int) -> Asked:
    connections: list[Connection] = []
    ends: list[asyncio.Future[Answer]] = []
    for index in range(streams):
        connection = await connect(target.port, WORDS)
        fields = {
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": f"stream {index}"}],
        }
        connections.append(connection)
        ends.append(connection.ask(chat_request(target.port, fields)))
        if index % 16 == 15:
            await asyncio.sleep(0.03)
    return Asked(connections, ends)


async def _finish(asked: Asked) -> None:
    async with asyncio.timeout(60):
        check(list(await asyncio.gather(*asked.ends)))
    for connection in asked.connections:
        connection.close()


def _arrived(connections: list[Connection]) -> int:
    """Return how many tokens have come."""
    return sum(len(connection.answer.arrivals) for connection in connections)


def _info(valkey: ValkeyServer) -> dict[str, float]:
    lines = (valkey.command("INFO", "stats") + valkey.command("INFO", "commandstats")).decode()
    fields = dict(line.split(":", 1) for line in lines.splitlines() if ":" in line)
    names = ("total_commands_processed", "total_net_input_bytes", "total_net_output_bytes")
    counted = {name: float(fields[name]) for name in names}
    calls = fields.get("cmdstat_evalsha", "calls=0,").removeprefix("calls=")
    return {**counted, "evalsha": float(calls.split(",", 1)[0])}


def _memory(valkey: ValkeyServer) -> int:
    """Return the memory that keys and values take, the connections' buffers left out."""
    lines = valkey.command("INFO", "memory").decode().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["used_memory_dataset"])
