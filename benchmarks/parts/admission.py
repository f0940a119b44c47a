"""What keys and limits add to the time to the first token: a gateway with, one without, in turn."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

from pydantic import SecretStr

from benchmarks.figures import Bar, Options, Part, quantile
from benchmarks.layout import Layout, on_core
from benchmarks.rounds import Paced, pace
from benchmarks.targets import Target, pool
from shared.connection import Connections
from shared.keys import Keys
from shared.settings import RedisSettings
from tests.support.apikeys import make_key

_CLIENTS = 8
_SIMULATED = {"ttft_ms": 0, "tpot_ms": 10, "stamps": True, "faults": False}
_TOKENS = 8
_MAX_IN_FLIGHT = 1000
"""Never reached: it is the counting that is measured."""


async def run(options: Options) -> Part:
    layout = Layout.here()
    part = Part("admission", f"Time to first token with a key that has limits, {_CLIENTS} clients")
    rounds: dict[str, list[Paced]] = {"open": [], "keys": []}
    async with AsyncExitStack() as stack:
        unkeyed = await stack.enter_async_context(
            pool(layout, _SIMULATED, settings={"auth": "open"})
        )
        keyed = await stack.enter_async_context(pool(layout, _SIMULATED, settings={"auth": "keys"}))
        targets = {"open": unkeyed, "keys": await _with_key(keyed)}
        with on_core(layout.client):
            for target in targets.values():
                await pace(target, _CLIENTS, seconds=1, tokens=_TOKENS, turn=0)
            for turn in range(1, 1 + options.rounds(5)):
                for name, target in targets.items():
                    done = await pace(
                        target, _CLIENTS, seconds=options.seconds(5), tokens=_TOKENS, turn=turn
                    )
                    part.record({"target": name, **done.summary()})
                    rounds[name].append(done)
    _report(part, rounds["open"], rounds["keys"])
    return part


async def _with_key(target: Target) -> Target:
    assert target.valkey is not None
    settings = RedisSettings(redis_url=SecretStr(target.valkey.url))
    clients = Connections(settings, name="bench", connections=4)
    key = await make_key(clients, Keys(settings.key_prefix), max_in_flight=_MAX_IN_FLIGHT)
    await clients.aclose()
    return replace(target, headers=f"authorization: Bearer {key.secret}\r\n")


def _report(part: Part, unkeyed: list[Paced], keyed: list[Paced]) -> None:
    for name, rounds in (("open", unkeyed), ("with a key", keyed)):
        part.add(f"p50, {name}", "ms", [quantile(each.ttfts_ms, 0.5) for each in rounds])
    added = [
        quantile(k.ttfts_ms, 0.5) - quantile(o.ttfts_ms, 0.5)
        for o, k in zip(unkeyed, keyed, strict=True)
    ]
    part.add("p50, added by keys and limits", "ms", added, Bar("<=", 0.5))
    part.add("p99, with a key", "ms", [quantile(each.ttfts_ms, 0.99) for each in keyed])
