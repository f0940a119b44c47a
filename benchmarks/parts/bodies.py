"""Large bodies beside streams: the longest gap in any stream, and the longest wait of a probe."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.accounts import Account, Bill
from benchmarks.figures import Bar, Options, Part, quantile
from benchmarks.layout import Layout, on_core
from benchmarks.load import WORDS, Connection, chat_request, connect
from benchmarks.rounds import all_begun
from benchmarks.targets import Target, pool

_STREAMS = 20
_TPOT_MS = 20
_BODY_BYTES = 20_000_000
_PAUSE_S = 0.5
_PROBE_S = 0.02
_SIMULATED = {"ttft_ms": 0, "tpot_ms": _TPOT_MS, "faults": False}
_TIMEOUT_S = 30.0


@dataclass
class Seen:
    """What streams and probes met in a round, in milliseconds and in order of size."""

    bill: Bill
    gaps_ms: list[float]
    probes_ms: list[float]
    bodies_ms: list[float]
    """From the first byte of a large request to the last of its answer."""


async def run(options: Options) -> Part:
    layout = Layout.here()
    title = f"Bodies of {_BODY_BYTES // 1_000_000} MB beside {_STREAMS} streams at {_TPOT_MS} ms"
    part = Part("bodies", title)
    rounds: dict[str, list[Seen]] = {"none": [], "picture": [], "texts": []}
    async with pool(layout, _SIMULATED) as target:
        with on_core(layout.client):
            for _ in range(options.rounds(3)):
                for kind, seen in rounds.items():
                    seen.append(await _watch(target, kind, options.seconds(8)))
                    figures = {"gap_ms": seen[-1].gaps_ms[-1], "probe_ms": seen[-1].probes_ms[-1]}
                    rounded = {name: round(value, 1) for name, value in figures.items()}
                    bodies = len(seen[-1].bodies_ms)
                    summary = {"kind": kind, "bodies": bodies, **rounded, **seen[-1].bill.summary()}
                    part.record({"target": target.name, **summary})
    _report(part, rounds)
    return part


def _report(part: Part, rounds: dict[str, list[Seen]]) -> None:
    names = {"none": "without", "picture": "one long text each", "texts": "200,000 texts each"}
    for kind, name in names.items():
        seen = rounds[kind]
        bar = None if kind == "none" else Bar("<=", 250)
        part.add(f"longest gap in a stream, {name}", "ms", [one.gaps_ms[-1] for one in seen], bar)
        part.add(f"longest probe, {name}", "ms", [one.probes_ms[-1] for one in seen], bar)
        part.add(f"gap p99, {name}", "ms", [quantile(one.gaps_ms, 0.99) for one in seen])
        if kind != "none":
            answers = [quantile(one.bodies_ms, 0.5) for one in seen]
            part.add(f"answer to a large body p50, {name}", "ms", answers)
    part.notes.append(
        "The text of a picture and the fields that nobody knows are no prompt: what the simulated "
        "engine does itself with a body is to parse it."
    )


def _body(kind: str) -> bytes:
    """Return a request of the size whose prompt is short."""
    content: list[dict[str, object]] = [{"type": "text", "text": "Hi"}]
    fields: dict[str, object] = {"max_tokens": 1}
    if kind == "picture":
        url = "data:image/png;base64," + "QUJD" * (_BODY_BYTES // 4)
        content.append({"type": "image_url", "image_url": {"url": url}})
    else:
        fields["metadata"] = {"texts": ['an "unknown" text\n' * 5] * 200_000}
    return json.dumps({**fields, "messages": [{"role": "user", "content": content}]}).encode()


def _post(port: int, body: bytes) -> float:
    """Ask with a large body, on a connection of its own; return how long it took, in ms."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as wire:
        wire.sendall(head.encode() + body)
        answer = b""
        while part := wire.recv(65536):
            answer += part
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"a large body was answered with {answer[:500]!r}")
    return (time.monotonic() - began) * 1000


async def _watch(target: Target, kind: str, seconds: float) -> Seen:
    connections: list[Connection] = []
    limit = int((seconds + 10) * 1000 / _TPOT_MS)
    for index in range(_STREAMS):
        connections.append(await connect(target.port, WORDS))
        message = {"role": "user", "content": f"stream {index}"}
        connections[-1].ask(chat_request(target.port, {"max_tokens": limit, "messages": [message]}))
    await all_begun(connections)
    body = _body(kind) if kind != "none" else b""
    await asyncio.sleep(0.5)
    account, begin_ns = Account(target.pids), time.monotonic_ns()
    until = time.monotonic() + seconds
    probing = asyncio.ensure_future(_probe(target.port, until))
    bodies_ms: list[float] = []
    while body and time.monotonic() < until:
        bodies_ms.append(await asyncio.to_thread(_post, target.port, body))
        await asyncio.sleep(_PAUSE_S)
    probes_ms = await probing
    bill, end_ns = account.close(), time.monotonic_ns()
    gaps: list[float] = []
    for connection in connections:
        if connection.answer.fault:
            raise RuntimeError(f"a stream failed: {connection.answer.fault}")
        times = [at for at in connection.answer.arrivals if begin_ns <= at < end_ns]
        gaps += [(later - earlier) / 1e6 for earlier, later in pairwise([begin_ns, *times, end_ns])]
        connection.close()
    return Seen(bill, sorted(gaps), sorted(probes_ms), sorted(bodies_ms))


async def _probe(port: int, until: float) -> list[float]:
    """Ask for /healthz again and again, on one connection; return how long each took, in ms."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    took: list[float] = []
    while time.monotonic() < until:
        began = time.monotonic()
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if b"content-length" in line)
        await reader.readexactly(int(length.partition(b":")[2]))
        took.append((time.monotonic() - began) * 1000)
        await asyncio.sleep(_PROBE_S)
    writer.close()
    return took
