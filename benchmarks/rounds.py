"""The rounds that several parts share: streams held open at a pace, and short answers in turn."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.accounts import Account, Bill
from benchmarks.figures import quantile
from benchmarks.load import Answer, Connection, chat_request, check, connect
from benchmarks.targets import Target

_SEED = 20_240_601
_OPENED_AT_ONCE = 16
_BEGIN_S = 30.0
"""Longest wait for the first token of the last stream."""
_SETTLE_S = 1.0
_SECOND_NS = 1_000_000_000


@dataclass
class Held:
    """What many streams showed in the time in which all of them were open."""

    bill: Bill
    begun_s: float
    """From the last request to the moment when all streams had begun."""
    tokens: int
    chunks: int
    wanted: float
    """Tokens that the engine's pace gives in that time."""
    delays_ms: list[list[float]] = field(default_factory=list)
    """From a token's step in the engine to the client, in order of size; second by second."""

    @property
    def all_ms(self) -> list[float]:
        return sorted(delay for second in self.delays_ms for delay in second)

    def growth(self, share: float) -> float:
        """Return how a quantile of the delay has grown from the first third to the last.

        It is taken of each second, and of a third's seconds the median: a rewrite of the queue's
        file is a burst, which the quantiles of the whole show, and not growth.
        """
        of_seconds = [quantile(second, share) for second in self.delays_ms if second]
        third = len(of_seconds) // 3
        return median(of_seconds[-third:]) / median(of_seconds[:third])

    def summary(self) -> dict[str, Any]:
        shares = {f"p{p}_ms": quantile(self.all_ms, p / 100) for p in (50, 95, 99)}
        rounded = {name: round(value, 2) for name, value in shares.items()}
        return {
            "tokens": self.tokens,
            "begun_s": round(self.begun_s, 2),
            **rounded,
            **self.bill.summary(),
        }


async def hold(
    target: Target, streams: int, *, tokens_per_s: float, ramp_s: float, window_s: float
) -> Held:
    """Open streams over `ramp_s`, watch them for `window_s` once all have begun, and leave."""
    limit = int((ramp_s + _BEGIN_S + window_s + 5) * tokens_per_s)
    connections: list[Connection] = []
    chooser = random.Random(_SEED)
    for index in range(streams):
        if index % _OPENED_AT_ONCE == 0:
            await asyncio.sleep(ramp_s * _OPENED_AT_ONCE / streams)
        connection = await connect(target.port)
        connections.append(connection)
        content = f"stream {index} of {chooser.getrandbits(32)}"
        fields = {"max_tokens": limit, "messages": [{"role": "user", "content": content}]}
        connection.ask(chat_request(target.port, fields))
    begun_s = await all_begun(connections)
    await asyncio.sleep(_SETTLE_S)
    account = Account(target.pids)
    begin_ns, chunks = time.monotonic_ns(), sum(each.answer.chunks for each in connections)
    await asyncio.sleep(window_s)
    bill = account.close()
    end_ns, chunks = time.monotonic_ns(), sum(each.answer.chunks for each in connections) - chunks
    if faults := [each.answer.fault for each in connections if each.answer.fault]:
        raise RuntimeError(f"{len(faults)} of {streams} streams failed: {faults[0]}")
    for connection in connections:
        connection.close()
    held = _sort(connections, begin_ns, end_ns)
    tokens = sum(map(len, held))
    return Held(bill, begun_s, tokens, chunks, streams * tokens_per_s * bill.wall_s, held)


async def all_begun(connections: list[Connection]) -> float:
    """Wait until every stream has had a token; return how long the last one took."""
    asked = time.monotonic()
    waiting = connections
    while waiting := [each for each in waiting if not each.answer.first_ns]:
        if time.monotonic() - asked > _BEGIN_S:
            raise RuntimeError(f"{len(waiting)} streams haven't begun after {_BEGIN_S:g} s")
        await asyncio.sleep(0.02)
    return time.monotonic() - asked


def _sort(connections: list[Connection], begin_ns: int, end_ns: int) -> list[list[float]]:
    """Return the delays of the tokens that arrived in an interval, by its seconds."""
    seconds: list[list[float]] = [[] for _ in range((end_ns - begin_ns) // _SECOND_NS)]
    for connection in connections:
        answer = connection.answer
        for stamp, arrival in zip(answer.stamps, answer.arrivals, strict=True):
            if begin_ns <= arrival < end_ns:
                second = min((arrival - begin_ns) // _SECOND_NS, len(seconds) - 1)
                seconds[second].append((arrival - stamp) / 1e6)
    for delays in seconds:
        delays.sort()
    return seconds


@dataclass
class Paced:
    """What a few clients saw that ask, pause and ask again."""

    bill: Bill
    ttfts_ms: list[float]

    def summary(self) -> dict[str, Any]:
        shares = {f"p{p}_ms": round(quantile(self.ttfts_ms, p / 100), 3) for p in (50, 95, 99)}
        return {"requests": len(self.ttfts_ms), **shares, **self.bill.summary()}


async def pace(target: Target, clients: int, *, seconds: float, tokens: int, turn: int) -> Paced:
    """Have clients ask for short answers, with pauses, on connections that they keep."""
    account = Account(target.pids)
    until = time.monotonic() + seconds
    answers: list[Answer] = []
    async with asyncio.TaskGroup() as group:
        for client in range(clients):
            chooser = random.Random(_SEED + 1000 * turn + client)
            group.create_task(_ask_again(target, until, tokens, chooser, answers))
    bill = account.close()
    check(answers)
    return Paced(bill, sorted(answer.ttft_ms for answer in answers))


async def _ask_again(
    target: Target, until: float, tokens: int, chooser: random.Random, answers: list[Answer]
) -> None:
    connection = await connect(target.port)
    try:
        while time.monotonic() < until:
            await asyncio.sleep(chooser.uniform(0.02, 0.12))
            content = f"question {chooser.getrandbits(32)}"
            messages = [{"role": "user", "content": content}]
            fields = {"model": "simulated", "max_tokens": tokens, "messages": messages}
            async with asyncio.timeout(10):
                request = chat_request(target.port, fields, target.headers)
                answers.append(await connection.ask(request))
    finally:
        connection.close()
