"""The gateway and other relays in its place: what a token costs them, and what they add to it.

The relay has a core of its own; all else is on one other. Behind the relays is a backend in C,
behind the gateway Valkey and a publisher in a worker's place: see `benchmarks.publisher`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from benchmarks import environments
from benchmarks.accounts import resident_kib
from benchmarks.figures import Bar, Options, Part, quantile
from benchmarks.layout import Layout, on_core
from benchmarks.native import Load, backend, load
from benchmarks.relays import RELAYS, SLOW
from benchmarks.rounds import Paced, pace
from benchmarks.targets import Target, fed

STREAMS = 512
STEP_MS = 20.0
_FEW = 8
"""Streams of a peer that can't carry more, and clients that ask, pause and ask again."""
_RAMP_S = 2.0
_AFTER_S = 2.0
"""For the streams that were left to be cancelled."""
DIRECT, HEADRACE = "direct", "headrace"


class Seen:
    """What was measured of one target, round by round."""

    def __init__(self) -> None:
        self.held: list[Load] = []
        self.paced: list[Paced] = []
        self.kib: list[float] = []

    @property
    def cpu_us(self) -> list[float]:
        return [each.bill.us_per("gateway", each.tokens) for each in self.held]

    @property
    def delays_ms(self) -> list[float]:
        return [each.p50_ms for each in self.held]

    @property
    def ttfts_ms(self) -> list[float]:
        return [quantile(each.ttfts_ms, 0.5) for each in self.paced]


async def run(options: Options) -> Part:
    layout = Layout.relay_apart()
    part = Part(
        "peers", f"Relays: {STREAMS} streams at {STEP_MS:g} ms a token, in step; paced clients"
    )
    found = environments.programs(RELAYS)
    names = (DIRECT, HEADRACE, *found)
    seen = {name: Seen() for name in names}
    for turn in range(1, 1 + options.rounds(3)):
        for name in names:
            async with open_target(name, found.get(name, ""), layout, STEP_MS) as target:
                await _round(target, layout, options, turn, seen[name], part)
    _report(part, seen)
    versions = ", ".join(f"{name} {environments.version(name)}" for name in found)
    part.notes.append(
        f"Peers: {versions}. The relay on core {layout.gateway}, all else on "
        f"core {layout.worker}. Of {', '.join(SLOW)} {_FEW} streams."
    )
    part.notes += [f"{name} can't be had here" for name in RELAYS if name not in found]
    return part


@asynccontextmanager
async def open_target(
    name: str, program: str, layout: Layout, step_ms: float
) -> AsyncIterator[Target]:
    """Run one of the peers, the gateway, or the backend alone."""
    if name == HEADRACE:
        async with fed(layout, step_ms) as target:
            yield target
        return
    async with backend(layout, step_ms) as engine:
        if name == DIRECT:
            yield engine
            return
        async with RELAYS[name](program, layout, engine) as target:
            yield target


async def _round(
    target: Target, layout: Layout, options: Options, turn: int, seen: Seen, part: Part
) -> None:
    relay = target.pids.get("gateway")
    seconds = options.seconds(9)
    with on_core(layout.client):  # First: what many streams leave behind isn't in it.
        paced = await pace(target, _FEW, seconds=seconds / 2, tokens=4, turn=turn)
    seen.paced.append(paced)
    before = resident_kib(relay) if relay else 0
    streams = _FEW if target.name in SLOW else STREAMS
    held = await load(
        target, layout, streams=streams, step_ms=STEP_MS, ramp_s=_RAMP_S, window_s=seconds
    )
    if relay:
        seen.kib.append((resident_kib(relay) - before) / streams)
    seen.held.append(held)
    ttft = round(quantile(paced.ttfts_ms, 0.5), 3)
    part.record({"target": target.name, "streams": streams, "ttft_ms": ttft, **held.summary()})
    await asyncio.sleep(_AFTER_S)


def _report(part: Part, seen: dict[str, Seen]) -> None:
    ours = seen[HEADRACE]
    for name, of in seen.items():
        if name != DIRECT:
            part.add(f"CPU per token, {name}", "µs", of.cpu_us)
            part.add(f"tokens received of those due, {name}", "x", _due(of))
    for role in ("valkey", "publisher"):
        used = [each.bill.us_per(role, each.tokens) for each in ours.held]
        part.add(f"CPU per token, headrace's {role}", "µs", used)
    for name, of in seen.items():
        part.add(f"delay p50, {name}", "ms", of.delays_ms)
    for name, of in seen.items():
        part.add(f"TTFT p50, {name}", "ms", of.ttfts_ms)
    for name, of in seen.items():
        if of.kib:
            part.add(f"memory per busy stream, {name}", "KiB", of.kib)
    busy = [each.bill.cores["generator"] for each in seen[DIRECT].held]
    part.add("load generator's use of its core, direct", "x", busy)
    busy = [each.bill.cores["backend"] for each in seen[DIRECT].held]
    part.add("backend's use of its core, direct", "x", busy)
    _compare(part, seen)


def _compare(part: Part, seen: dict[str, Seen]) -> None:
    ours, direct, rust = seen[HEADRACE], seen[DIRECT], seen.get("vllm-router")
    if "nginx" in seen:
        part.add(
            "CPU per token, of nginx's",
            "x",
            _ratios(ours.cpu_us, seen["nginx"].cpu_us),
            Bar("<=", 1.0),
        )
    added_ttft = _less(ours.ttfts_ms, direct.ttfts_ms)
    if rust is not None:
        part.add(
            "CPU per token, of vllm-router's",
            "x",
            _ratios(ours.cpu_us, rust.cpu_us),
            Bar("<=", 0.75),
        )
        theirs = _less(rust.delays_ms, direct.delays_ms)
        added = _ratios(_less(ours.delays_ms, direct.delays_ms), theirs)
        part.add("added delay p50, of vllm-router's", "x", added, Bar("<=", 1.0))
        theirs = _less(rust.ttfts_ms, direct.ttfts_ms)
        part.add(
            "added TTFT p50, of vllm-router's", "x", _ratios(added_ttft, theirs), Bar("<=", 1.5)
        )
    if "litellm" in seen:
        theirs = _less(seen["litellm"].ttfts_ms, direct.ttfts_ms)
        part.add("added TTFT p50, of LiteLLM's", "x", _ratios(added_ttft, theirs), Bar("<=", 0.05))


def _due(of: Seen) -> list[float]:
    return [each.tokens / each.wanted for each in of.held]


def _less(values: Sequence[float], base: Sequence[float]) -> list[float]:
    return [value - under for value, under in zip(values, base, strict=True)]


def _ratios(values: Sequence[float], of: Sequence[float]) -> list[float]:
    return [value / max(other, 0.001) for value, other in zip(values, of, strict=True)]
