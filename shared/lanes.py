"""Taking entries out of a pool's lanes, at once or when there is something."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from shared.border import translated
from shared.connection import Clients, clients_of
from shared.keys import LANES
from shared.outcomes import Claimed
from shared.queries import Queries

LANE_TTL_MS = 7 * 24 * 3600 * 1000

Call = tuple[str, Sequence[str] | Sequence[bytes], Sequence[Any]]
"""Script, keys and arguments."""


class Lanes(Queries):
    """How workers claim. Raises `QueueUnavailable`, and `LanesLost` after data loss: create the
    lanes again."""

    async def create_lanes(self, tags: Iterable[str]) -> None:
        """Create the consumer groups, at 0 so that nothing that waits is passed over."""
        for job_tag in tags:
            await self._call("create_lanes", list(self._streams(job_tag)), [LANE_TTL_MS])

    async def claim(
        self,
        job_tag: str,
        limits: dict[str, int],
        worker: str,
        *,
        returned: bool = True,
        batch_turn: int = 0,
        batch_max_wait_s: float = 0,
    ) -> list[Claimed]:
        """Take entries at once, lane by lane. `limits`: lane → the most to have in all after it.

        `returned`: also those that were handed back. `batch_turn`: the most to take from the batch
        lane before all others, of what waits there for longer than `batch_max_wait_s`.
        """
        streams = self._streams(job_tag, limits, returned=returned)
        call = self._claim_call(streams, limits, worker, batch_turn, batch_max_wait_s)
        return _claims(job_tag, streams, await self._call(*call))

    async def wait_claim(
        self,
        blocking: Redis | Clients,
        job_tag: str,
        limits: dict[str, int],
        worker: str,
        block_s: float,
        *,
        returned: bool = True,
        batch_turn: int = 0,
        batch_max_wait_s: float = 0,
    ) -> list[Claimed]:
        """Claim when a lane's bell is rung, on a connection of its own, or after `block_s`.

        Ends early when another connection unblocks this one. Both commands are sent at once, so
        that what comes is claimed without another round trip.
        """
        streams = self._streams(job_tag, limits, returned=returned)
        script, names, args = self._claim_call(
            streams, limits, worker, batch_turn, batch_max_wait_s
        )
        bells = [
            self._keys.bell(job_tag, lane, returned=back)
            for lane, back in streams.values()
            if limits[lane] > 0
        ]

        async def read(redis: Redis) -> Any:
            pipeline = redis.pipeline(transaction=False)
            pipeline.blpop(bells, timeout=block_s)
            self._scripts[script].add(pipeline, names, args)
            rung, reply = await pipeline.execute(raise_on_error=False)
            if isinstance(rung, Exception):
                raise rung
            if isinstance(reply, NoScriptError):
                return await self._scripts[script](redis, names, args)
            if isinstance(reply, Exception):
                raise reply
            return reply

        async with translated():
            reply = await clients_of(blocking).run(job_tag, read)
        return _claims(job_tag, streams, reply)

    def _claim_call(
        self,
        streams: dict[str, tuple[str, bool]],
        limits: dict[str, int],
        worker: str,
        batch_turn: int,
        batch_max_wait_s: float,
    ) -> tuple[str, list[str], list[Any]]:
        args: list[Any] = [worker, LANE_TTL_MS, int(batch_max_wait_s * 1000)]
        for lane, back in streams.values():
            args += [limits[lane], int(not back), batch_turn if lane == LANES[-1] else 0]
        return "claim", list(streams), args


def _claims(job_tag: str, streams: dict[str, tuple[str, bool]], reply: Any) -> list[Claimed]:
    places = list(streams.values())
    claimed = []
    for index, entry, job_id in reply:
        lane, back = places[index - 1]
        claimed.append(Claimed(job_tag, lane, back, entry, job_id.decode()))
    return claimed
