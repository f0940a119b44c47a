"""Time to the first token at low load: through the whole pool, and from the engine alone."""

from __future__ import annotations

from benchmarks.figures import Bar, Options, Part, quantile
from benchmarks.layout import Layout, on_core
from benchmarks.rounds import Paced, pace
from benchmarks.targets import Target, direct, pool

_CLIENTS = 8
_SIMULATED = {"ttft_ms": 0, "tpot_ms": 10, "stamps": True, "faults": False}
_TOKENS = 8


async def run(options: Options) -> Part:
    layout = Layout.here()
    part = Part("ttft", f"Time to first token, {_CLIENTS} clients that pause between requests")
    rounds: dict[str, list[Paced]] = {"direct": [], "pool": []}
    async with direct(layout, _SIMULATED) as engine, pool(layout, _SIMULATED) as whole:
        with on_core(layout.client):
            for target in (engine, whole):
                await pace(target, _CLIENTS, seconds=1, tokens=_TOKENS, turn=0)
            for turn in range(1, 1 + options.rounds(5)):
                for target in (engine, whole):
                    rounds[target.name].append(await _round(target, options, turn, part))
    _report(part, rounds["direct"], rounds["pool"])
    return part


async def _round(target: Target, options: Options, turn: int, part: Part) -> Paced:
    done = await pace(target, _CLIENTS, seconds=options.seconds(5), tokens=_TOKENS, turn=turn)
    part.record({"target": target.name, **done.summary()})
    return done


def _report(part: Part, alone: list[Paced], whole: list[Paced]) -> None:
    for name, rounds in (("engine alone", alone), ("whole pool", whole)):
        part.add(f"p50, {name}", "ms", [quantile(each.ttfts_ms, 0.5) for each in rounds])
    added = [
        quantile(w.ttfts_ms, 0.5) - quantile(a.ttfts_ms, 0.5)
        for a, w in zip(alone, whole, strict=True)
    ]
    part.add("p50, added by the pool", "ms", added, Bar("<=", 5))
    part.add("p99, whole pool", "ms", [quantile(each.ttfts_ms, 0.99) for each in whole])
    part.notes.append("The engine's own time to the first token is set to 0: all of it is path.")
