"""Streams that are open and quiet: what one takes of the gateway's memory, and of its peers'."""

from __future__ import annotations

import asyncio

from benchmarks import environments
from benchmarks.accounts import Account, resident_kib
from benchmarks.figures import Bar, Options, Part
from benchmarks.layout import Layout, on_core
from benchmarks.parts.peers import HEADRACE, open_target
from benchmarks.quiet import open_quiet

_STREAMS, _FEW = 4000, 20
_PEERS = ("nginx", "vllm-router")
_STEP_MS = 20.0
_REST_S = 2.0


async def run(options: Options) -> Part:
    layout = Layout.relay_apart()
    part = Part("idle", f"{_STREAMS:,} streams that had one token, and no other")
    found = environments.programs(_PEERS)
    whole: dict[str, list[float]] = {}
    each: dict[str, list[float]] = {}
    for _ in range(options.rounds(3)):
        for name in (HEADRACE, *found):
            async with open_target(name, found.get(name, ""), layout, _STEP_MS) as target:
                relay = target.pids["gateway"]
                with on_core(layout.client):
                    # What the first requests bring into memory is the process's, not theirs.
                    for connection in await open_quiet(target, _FEW):
                        connection.close()
                    await asyncio.sleep(_REST_S)
                    account, before = Account(target.pids), resident_kib(relay)
                    connections = await open_quiet(target, _STREAMS)
                    await asyncio.sleep(_REST_S)
                    kib, bill = resident_kib(relay), account.close()
                    for connection in connections:
                        connection.close()
                    await asyncio.sleep(_REST_S)
            whole.setdefault(name, []).append(kib / 1024)
            each.setdefault(name, []).append((kib - before) / _STREAMS)
            kibs = {"before_kib": before, "open_kib": kib}
            part.record({"target": name, **kibs, **bill.summary()})
    for name in whole:
        bar = Bar("<", 120) if name == HEADRACE else None
        part.add(f"{_STREAMS:,} streams, whole process, {name}", "MiB", whole[name], bar)
    for name in each:
        bar = Bar("<=", 16) if name == HEADRACE else None
        part.add(f"per open stream, {name}", "KiB", each[name], bar)
    if "vllm-router" in each:
        pairs = zip(each[HEADRACE], each["vllm-router"], strict=True)
        ratios = [ours / max(theirs, 0.001) for ours, theirs in pairs]
        part.add("per open stream, of vllm-router's", "x", ratios, Bar("<=", 0.25))
    return part
