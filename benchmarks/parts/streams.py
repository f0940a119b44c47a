"""512 streams in step: the delay of each token, and what a chunk costs each process."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from benchmarks.accounts import Account
from benchmarks.figures import Bar, Options, Part, quantile
from benchmarks.layout import Layout, on_core
from benchmarks.load import Connection, chat_request, check, connect
from benchmarks.rounds import Held, hold
from benchmarks.targets import Target, direct, pool, running
from tests.support.valkey import free_port

STREAMS = 512
TOKENS_PER_S = 30.0
SIMULATED = {
    "ttft_ms": 0,
    "tpot_ms": 1000 / TOKENS_PER_S,
    "seats": STREAMS,
    "stamps": True,
    "faults": False,
}
_RAMP_S = 2.0


async def run(options: Options) -> Part:
    layout = Layout.here()
    part = Part("streams", f"{STREAMS} streams at {TOKENS_PER_S:g} tokens/s, all in step")
    ceiling = await measure_ceiling(layout)
    alone: list[Held] = []
    whole: list[Held] = []
    for _ in range(options.rounds(3)):
        async with direct(layout, SIMULATED) as target:
            alone.append(await measure(target, layout, options.seconds(6), part))
        async with pool(layout, SIMULATED) as target:
            whole.append(await measure(target, layout, options.seconds(45), part))
    _report(part, alone, whole, ceiling)
    return part


async def measure(target: Target, layout: Layout, window_s: float, part: Part) -> Held:
    """Run one round and keep what was used in it."""
    with on_core(layout.client):
        held = await hold(
            target, STREAMS, tokens_per_s=TOKENS_PER_S, ramp_s=_RAMP_S, window_s=window_s
        )
    part.record({"target": target.name, **held.summary()})
    return held


def _report(part: Part, alone: list[Held], whole: list[Held], ceiling: dict[str, Any]) -> None:
    rates = [each.tokens / each.wanted for each in whole]
    part.add("tokens received, of those due", "x", rates, Bar(">=", 0.98))
    for share, bar in ((0.5, Bar("<=", 1.2)), (0.95, Bar("<=", 1.2))):
        grown = [held.growth(share) for held in whole]
        part.add(f"delay p{share * 100:.0f} of a second, last third / first third", "x", grown, bar)
    for share in (0.5, 0.95, 0.99):
        name = f"delay p{share * 100:.0f}"
        part.add(f"{name}, whole pool", "ms", [quantile(h.all_ms, share) for h in whole])
        part.add(f"{name}, engine alone", "ms", [quantile(h.all_ms, share) for h in alone])
    for role in ("gateway", "worker", "valkey"):
        used = [held.bill.us_per(role, held.tokens) for held in whole]
        part.add(f"CPU per token, {role}", "µs", used)
    used = [held.bill.us_per("engine", held.tokens) for held in alone]
    part.add("CPU per token, engine alone behind uvicorn", "µs", used)
    per_write = [held.tokens / max(held.chunks, 1) for held in whole]
    part.add("tokens per write to a client", "", per_write)
    busy = [held.bill.cores["client"] for held in whole]
    part.add("load generator's use of its core", "x", busy)
    part.add("load generator's ceiling", "chunks/s", [ceiling["chunks_per_s"]])
    part.record({"target": "ceiling", **ceiling})
    part.notes.append(
        "Delay: from the beginning of the engine's step that made a token to its arrival at the "
        "client. All streams get their token in the same step, so the p50 holds the time in which "
        "the engine's process writes half of them."
    )


async def measure_ceiling(layout: Layout, seconds: float = 3.0) -> dict[str, Any]:
    """Return what the load generator takes from a server that does nothing but write."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.blast", str(port), str(seconds + 0.5)]
    async with running("blast", command, port, layout.gateway, path="/") as process:
        with on_core(layout.client):
            connections = [await connect(port) for _ in range(STREAMS)]
            request = chat_request(port, {})
            ends = [connection.ask(request) for connection in connections]
            account, before = Account({"blast": process.pid}), _chunks(connections)
            await asyncio.sleep(seconds)
            bill, chunks = account.close(), _chunks(connections) - before
            await asyncio.wait(ends, timeout=20)
            check([connection.answer for connection in connections])
            for connection in connections:
                connection.close()
    return {
        "chunks_per_s": round(chunks / bill.wall_s),
        "us_per_chunk": round(bill.us_per("client", chunks), 2),
        **bill.summary(),
    }


def _chunks(connections: list[Connection]) -> int:
    return sum(connection.answer.chunks for connection in connections)
