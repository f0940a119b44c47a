"""Publishing: what log, sequence and fencing cost the queue's server beside a bare publish."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from benchmarks.accounts import Account, Bill
from benchmarks.figures import Bar, Options, Part
from benchmarks.layout import Layout, on_core
from shared.keys import Keys, new_job_id, tag
from shared.outcomes import Append
from shared.protocol import Frame, encode, seal_message, stamp
from shared.transitions import Transitions
from tests.support.valkey import ValkeyServer

_JOBS = (8, 32, 128)
"""Running jobs: so many frames go with a call."""
_FRAMES = 48_000
_OWNER = "0123456789abcdef"
_BODY = encode(Frame(items=[b" word"], tokens=[([1234], None, None)]))
_LEAST_SCRIPT = """
for at = 1, #KEYS, 2 do
  local job = (at - 1) / 2 * 4
  if redis.call('HGET', KEYS[at], 'owner') ~= ARGV[job + 1] then return 0 end
  redis.call('XADD', KEYS[at + 1], ARGV[job + 2] .. '-0', 'f', ARGV[job + 3])
  redis.call('PUBLISH', ARGV[job + 4], ARGV[job + 3])
end
return 1
"""
_TIMES_OF_MULTI = 2.25
"""As the prototype had it: up to 9 µs for a fenced frame, 8 to 32 in a call, where MULTI took 4."""

Way = Callable[[int], Awaitable[object]]
"""Writes one frame of each job, with the given number."""


class Ways:
    """The same frames written in different ways to one server."""

    def __init__(self, redis: Redis, jobs: int) -> None:
        self._redis = redis
        self._keys = Keys()
        self._transitions = Transitions(redis, self._keys, result_ttl_s=60)
        self._ids = [new_job_id(tag("bench", 0)) for _ in range(jobs)]
        self._least: AsyncScript = redis.register_script(_LEAST_SCRIPT)

    async def begin(self) -> dict[str, Way]:
        for job_id in self._ids:
            await self._redis.hset(self._keys.job(job_id), "owner", _OWNER)
            await self._redis.pexpire(self._keys.job(job_id), 600_000)
        return {
            "PUBLISH alone": self._publish,
            "XADD and PUBLISH in MULTI": self._multi,
            "the least fenced script": self._script,
            "the worker's publish": self._fenced,
        }

    async def _publish(self, seq: int) -> object:
        pipeline = self._redis.pipeline(transaction=False)
        for job_id in self._ids:
            pipeline.publish(self._keys.channel(job_id), self._message(seq))
        return await pipeline.execute()

    async def _multi(self, seq: int) -> object:
        pipeline = self._redis.pipeline(transaction=True)
        for job_id in self._ids:
            pipeline.xadd(f"multi:{job_id}", {"f": self._message(seq)}, id=f"{seq}-0")
            pipeline.publish(self._keys.channel(job_id), self._message(seq))
        return await pipeline.execute()

    async def _script(self, seq: int) -> object:
        names: list[str] = []
        args: list[Any] = []
        for job_id in self._ids:
            names += (self._keys.job(job_id), f"least:{{{job_id[:10]}}}:{job_id}")
            args += (_OWNER, seq, self._message(seq), self._keys.channel(job_id))
        return await self._least(keys=names, args=args)

    async def _fenced(self, seq: int) -> object:
        appends = [Append(one, _OWNER, seq, [self._message(seq)]) for one in self._ids]
        verdicts, _ = await self._transitions.write(appends, [])
        if any(verdict.word != "ok" for verdict in verdicts):
            raise RuntimeError(f"not written: {verdicts[0]}")
        return verdicts

    @staticmethod
    def _message(seq: int) -> bytes:
        return seal_message(seq, stamp(_OWNER, 0), _BODY)


async def run(options: Options) -> Part:
    layout = Layout.relay_apart()
    part = Part("publish", "What the server pays for a frame, by how it is written")
    frames = _FRAMES // (3 if options.quick else 1)
    for jobs in _JOBS:
        found: dict[str, list[float]] = {}
        ratios: list[float] = []
        for _ in range(options.rounds(5)):
            costs = await _round(layout, jobs, frames // jobs, part)
            for name, cost in costs.items():
                found.setdefault(name, []).append(cost)
            ratios.append(costs["the worker's publish"] / costs["XADD and PUBLISH in MULTI"])
        for name, values in found.items():
            part.add(f"{name}, {jobs} frames a call", "µs", values)
        part.add(
            f"the worker's publish, {jobs} frames a call, to MULTI",
            "x",
            ratios,
            Bar("<=", _TIMES_OF_MULTI) if jobs <= 32 else None,
        )
    part.notes.append(
        "Processor time of the server, append-only file on, one call after the other, each way on "
        "the same server in turn. Nobody listens to the channels. The least script checks an owner "
        "and no sequence: it is the floor of what a fenced frame costs."
    )
    return part


async def _round(layout: Layout, jobs: int, calls: int, part: Part) -> dict[str, float]:
    with on_core(layout.gateway):
        server = ValkeyServer("--appendonly", "yes", "--appendfsync", "everysec")
        server.start()
    try:
        with on_core(layout.client):
            async with Redis.from_url(server.url) as redis:
                ways = await Ways(redis, jobs).begin()
                return {
                    name: await _cost(way, server, jobs, calls, name, part)
                    for name, way in ways.items()
                }
    finally:
        server.stop()


async def _cost(
    way: Way, server: ValkeyServer, jobs: int, calls: int, name: str, part: Part
) -> float:
    """Return the server's microseconds per frame."""
    warm = 50
    await _write(way, range(1, warm + 1))
    account = Account({"valkey": server.pid})
    await _write(way, range(warm + 1, warm + calls + 1))
    bill: Bill = account.close()
    cost = bill.us_per("valkey", jobs * calls)
    part.record({"way": name, "frames_a_call": jobs, "us": round(cost, 2), **bill.summary()})
    return cost


async def _write(way: Way, numbers: Sequence[int]) -> None:
    for seq in numbers:
        await way(seq)
