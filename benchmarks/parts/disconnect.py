"""A client that leaves: how soon what makes its tokens knows, whatever its stream was doing.

The worker's side is the publisher, which hears the same nudge as a worker; the peers' is the
backend's connection, which they close.
"""

from __future__ import annotations

import asyncio
import time

from benchmarks import environments
from benchmarks.accounts import Account
from benchmarks.figures import Bar, Options, Part, quantile
from benchmarks.layout import Layout, on_core
from benchmarks.load import connect
from benchmarks.parts.peers import HEADRACE, open_target
from benchmarks.quiet import ask
from benchmarks.targets import Target

_KINDS = ("busy", "quiet", "prefill")
_PEERS = ("nginx", "vllm-router", "smg")
_STEP_MS = 20.0
_CLIENTS = 20
_SETTLED_S = 0.5
_BETWEEN_S = 0.02
_PATIENCE_S = 12.0
"""Longest wait for the last one to be noticed."""


async def run(options: Options) -> Part:
    layout = Layout.relay_apart()
    part = Part("disconnect", f"{_CLIENTS} clients of each kind leave, one by one")
    found = environments.programs(_PEERS)
    seen: dict[tuple[str, str], list[list[float]]] = {}
    for _ in range(options.rounds(3)):
        for name in (HEADRACE, *found):
            async with open_target(name, found.get(name, ""), layout, _STEP_MS) as target:
                for number, kind in enumerate(_KINDS):
                    account = Account(target.pids)
                    with on_core(layout.client):
                        delays = await _leave(target, kind, 1000 * (number + 1))
                    seen.setdefault((name, kind), []).append(delays)
                    shown = {"seen": len(delays), "p50_ms": round(quantile(delays, 0.5), 2)}
                    longest = {"max_ms": round(max(delays, default=0), 2)}
                    bill = account.close().summary()
                    part.record({"target": name, "kind": kind, **shown, **longest, **bill})
    for (name, kind), rounds in seen.items():
        ours = name == HEADRACE
        what = f"{name}, {kind} stream"
        counted = [each + [_PATIENCE_S * 1000] * (_CLIENTS - len(each)) for each in rounds]
        middles = [quantile(each, 0.5) for each in counted]
        part.add(f"{what}, p50", "ms", middles, Bar("<=", 2) if ours else None)
        longest_ms = [max(each) for each in counted]
        part.add(f"{what}, longest", "ms", longest_ms, Bar("<=", 10) if ours else None)
        share = [len(each) / _CLIENTS for each in rounds]
        within = f"{what}, seen within {_PATIENCE_S:g} s"
        part.add(within, "x", share, Bar(">=", 1) if ours else None)
    part.notes.append(f"One that was not seen counts as {_PATIENCE_S:g} s.")
    return part


async def _leave(target: Target, kind: str, first: int) -> list[float]:
    """Return how long each took to be noticed, ms, in order of size; those that were."""
    connections = {}
    for number in range(first, first + _CLIENTS):
        connections[number] = await connect(target.port)
        ask(connections[number], target, kind, number)
    await asyncio.sleep(_SETTLED_S)
    left_ns: dict[int, int] = {}
    for number, connection in connections.items():
        left_ns[number] = time.monotonic_ns()
        connection.close()
        await asyncio.sleep(_BETWEEN_S)
    until = time.monotonic() + _PATIENCE_S
    noticed: dict[int, int] = {}
    while len(noticed) < _CLIENTS and time.monotonic() < until:
        await asyncio.sleep(0.1)
        noticed = _noticed(target, left_ns)
    return sorted((at - left_ns[number]) / 1e6 for number, at in noticed.items())


def _noticed(target: Target, among: dict[int, int]) -> dict[int, int]:
    """Return the numbers of those whose leaving was noticed, and when, ns."""
    assert target.told is not None
    lines = (line.split() for line in target.told.read_text().splitlines())
    told = {int(words[1]): int(words[2]) for words in lines if words[:1] == ["gone"]}
    return {number: at for number, at in told.items() if number in among}
