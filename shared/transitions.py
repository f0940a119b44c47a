"""The queue: every change of a job's state, one Lua script and one method of the same name each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from shared import protocol
from shared.errors import (
    Cancelled,
    HeadraceError,
    Poisoned,
    QueueUnavailable,
    RequestTimeout,
)
from shared.keys import tag_of, written
from shared.lanes import LANE_TTL_MS, Call, Lanes
from shared.outcomes import (
    Adopted,
    Append,
    Attached,
    CancelOutcome,
    Claimed,
    Finish,
    Left,
    Submitted,
    Verdict,
)
from shared.protocol import End, Frame, Job

MAX_TIMEOUT_S = 24 * 3600
"""The longest that a job may wait and run."""
EARLY_CANCEL_TTL_MS = 60_000
DEAD_LENGTH = 1000
"""Jobs that are kept in a pool's dead-letter."""

T = TypeVar("T")

Reason = Literal["cancelled", "expired"]


def _end_body(outcome: str, error: type[HeadraceError]) -> bytes:
    end = End(outcome=outcome, code=error.code, message=error().message)
    return protocol.encode(Frame(end=end))


_END_BODIES: dict[Reason, bytes] = {
    "cancelled": _end_body("cancelled", Cancelled),
    "expired": _end_body("expired", RequestTimeout),
}
_POISONED_BODY = _end_body("failed", Poisoned)


class Transitions(Lanes):
    """Typed calls of the scripts. Raises `QueueUnavailable`, `QueueFull`, `TransitionFailed`."""

    async def submit(
        self,
        job: Job,
        *,
        limit: int,
        timeout_s: float,
        tenant_limit: int = 0,
        reader: str = "",
        replicas: int = 0,
        wait_s: float = 1,
    ) -> Submitted:
        """Put a job into its lane unless the lane holds `limit` jobs, queued and running, or
        `tenant_limit` of the job's tenant that wait, if that is above 0.

        With a `reader` the job lives while it, or another one, is there, and for its patience.
        Where fewer `replicas` than these have it within `wait_s`, `QueueUnavailable` is raised, and
        it is there all the same.
        """
        keys = self._keys
        names = [keys.job(job.id), keys.lane(tag_of(job.id), job.lane), keys.cancel(job.id)]
        args: list[Any] = [
            job.id,
            protocol.encode(job),
            job.lane,
            limit,
            int(timeout_s * 1000),
            self._result_ttl_ms,
            LANE_TTL_MS,
            job.model,
            int(job.stream),
            job.tenant,
            reader,
            -1 if job.patience_s is None else int(job.patience_s * 1000),
            job.weight,
            tenant_limit,
        ]
        if replicas:
            calls, wait = [("submit", names, args)], (replicas, int(wait_s * 1000))
            reply, had = await self._at(
                tag_of(job.id), lambda redis: self._pipelined(redis, calls, wait)
            )
        else:
            reply, had = await self._call("submit", names, args), 0
        verdict = reply[0].decode()
        if had < replicas and verdict in ("queued", "known"):
            raise QueueUnavailable("The queue has too few copies of its data. Try again later.")
        if verdict in ("full", "tenant_full"):
            return Submitted(verdict, entries=reply[1], oldest_s=reply[2] / 1000)
        return Submitted(verdict)

    async def adopt(
        self, claimed: Claimed, owner: str, worker: str, *, idle_s: float = 0
    ) -> Adopted | str:
        """Become a job's owner, or learn why it doesn't run: `expired`, `cancelled`, `poisoned` or
        `gone`. With `idle_s` take it over from an owner who is that late, or learn `held`.
        """
        keys, job_id = self._keys, claimed.job_id
        key = keys.returned if claimed.returned else keys.lane
        reply = await self._call(
            "adopt",
            [
                keys.job(job_id),
                keys.log(job_id),
                key(claimed.tag, claimed.lane),
                keys.dead(claimed.tag),
            ],
            [
                claimed.entry,
                owner,
                worker,
                keys.channel(job_id),
                self._result_ttl_ms,
                _END_BODIES["expired"],
                _END_BODIES["cancelled"],
                _POISONED_BODY,
                int(idle_s * 1000),
                self._max_strikes,
                DEAD_LENGTH,
                LANE_TTL_MS,
            ],
        )
        word = reply[0].decode()
        if word != "adopted":
            return str(word)
        record, attempts, base, left_ms, waited_ms, strikes, readers = reply[1:]
        return Adopted(
            protocol.decode_job(record),
            claimed,
            owner,
            attempts,
            base,
            left_ms / 1000,
            waited_ms / 1000,
            strikes,
            tuple(readers.decode().split()),
        )

    async def write(
        self, appends: Sequence[Append], finishes: Sequence[Finish]
    ) -> tuple[list[Verdict], list[Verdict]]:
        """Publish and finish in one round trip, in this order. All jobs share one tag.

        Idempotent: the same call may be sent again after a lost reply.
        """
        if not appends and not finishes:
            return [], []
        calls: list[Call] = [("publish", *self._publish_call(appends))] if appends else []
        calls += [("finish", *self._finish_call(finish)) for finish in finishes]
        job_tag = tag_of((appends or finishes)[0].job_id)
        replies = await self._at(job_tag, lambda redis: self._pipelined(redis, calls))
        verdicts = [Verdict(word.decode(), seq) for word, seq in (replies[0] if appends else ())]
        ended = [
            Verdict(reply[0].decode(), reply[1] if len(reply) > 1 else 0)
            for reply in replies[1 if appends else 0 :]
        ]
        return verdicts, ended

    async def _pipelined(
        self,
        redis: Redis,
        calls: Sequence[Call],
        wait: tuple[int, int] | None = None,
    ) -> list[Any]:
        """Call scripts in one round trip. Raises the first error that one of them answered.

        `wait`: then wait until so many replicas have all of it, for so many ms; their number comes
        last.
        """
        for _ in range(2):
            pipeline = redis.pipeline(transaction=False)
            for name, keys, args in calls:
                self._scripts[name].add(pipeline, keys, args)
            if wait is not None:
                pipeline.execute_command("WAIT", *wait)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            if not any(isinstance(reply, NoScriptError) for reply in replies):
                break
            for name in {name for name, _, _ in calls}:
                await self._scripts[name].teach(redis)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def _publish_call(self, appends: Sequence[Append]) -> tuple[list[bytes], list[Any]]:
        names: list[bytes] = []
        args: list[Any] = []
        prefix = self._keys.prefix
        for append in appends:
            job, log, channel = written(prefix, append.job_id)
            names += (job, log)
            messages = append.messages
            args += (append.owner, channel, append.first, len(messages), *messages)
        return names, args

    def _finish_call(self, finish: Finish) -> tuple[list[str], list[Any]]:
        keys, job_id = self._keys, finish.job_id
        names = [keys.job(job_id), keys.log(job_id), *self._lanes(job_id, finish.lane)]
        usage = protocol.encode(finish.usage) if finish.usage else b""
        args = [finish.owner, keys.channel(job_id), finish.seq, finish.body, finish.outcome]
        return names, [*args, usage, self._result_ttl_ms]

    async def cancel(
        self,
        job_id: str,
        lane: str,
        reason: Reason = "cancelled",
        *,
        force: bool = False,
        early: bool = False,
    ) -> CancelOutcome:
        """End a queued job; ask a running job's worker to end it, or with `force` end it here.

        `early`: where the job isn't known (yet), see to it that it can't be submitted.
        """
        keys = self._keys
        reply = await self._call(
            "cancel",
            [keys.job(job_id), keys.log(job_id), keys.cancel(job_id), *self._lanes(job_id, lane)],
            [
                job_id,
                keys.channel(job_id),
                keys.control(tag_of(job_id), ""),
                reason,
                _END_BODIES[reason],
                self._result_ttl_ms,
                int(force),
                EARLY_CANCEL_TTL_MS if early else 0,
            ],
        )
        word = reply[0].decode()
        if word != "finished":
            return CancelOutcome(word)
        usage = protocol.decode_usage(reply[2]) if reply[2] else None
        return CancelOutcome(word, reply[1].decode(), usage)

    async def attach(
        self, job_id: str, reader: str, *, tenant: str | None = None
    ) -> Attached | None:
        """Begin to read a job's answer; None if there is no such job, of this tenant if one is
        given."""
        args = [reader] if tenant is None else [reader, tenant]
        reply = await self._call("attach", [self._keys.job(job_id), self._keys.log(job_id)], args)
        if not reply:
            return None
        state, outcome, lane, stream, left_ms, frames = reply
        return Attached(
            state.decode(),
            outcome.decode(),
            lane.decode(),
            stream == b"1",
            left_ms / 1000,
            frames,
        )

    async def leave(
        self, job_id: str, lane: str, readers: Iterable[str] = (), *, doubtful: bool = False
    ) -> Left:
        """Say that readers have gone, and cancel the job if it has nobody left to wait for.

        `doubtful`: they are only thought to have gone; where one still listens nothing is done.
        """
        keys = self._keys
        reply = await self._call(
            "leave",
            [keys.job(job_id), keys.log(job_id), *self._lanes(job_id, lane)],
            [
                job_id,
                keys.channel(job_id),
                keys.control(tag_of(job_id), ""),
                _END_BODIES["cancelled"],
                self._result_ttl_ms,
                int(doubtful),
                *readers,
            ],
        )
        word = reply[0].decode()
        return Left(word, reply[1] / 1000 if word == "waiting" else 0)

    async def remember(
        self, digest: str, fingerprint: str, job_id: str, *, ttl_s: float, instead: str = ""
    ) -> str | None:
        """Return the job that answers an idempotency key, `job_id` if there is none yet; None if
        the key was given to another request. `instead`: a job whose place `job_id` takes.
        """
        reply = await self._call(
            "remember",
            [self._keys.request(digest)],
            [fingerprint, job_id, int(ttl_s * 1000), instead],
        )
        word = reply[0].decode()
        if word == "conflict":
            return None
        return job_id if word == "new" else str(reply[1].decode())

    async def beat(self, job_tag: str, worker: str, owned: Sequence[Adopted]) -> list[str]:
        """Renew the leases on a worker's jobs of one tag; per job `ok`, `cancelled`, `expired` or
        `fenced`."""
        streams = self._streams(job_tag)
        places = list(streams.values())
        args: list[Any] = [worker, len(streams)]
        for one in owned:
            args += [one.owner, 1 + places.index((one.claimed.lane, one.claimed.returned))]
        names = [*streams] + [self._keys.job(one.job.id) for one in owned]
        return [word.decode() for word in await self._call("beat", names, args)]

    async def hand_back(self, adopted: Adopted, *, blame: bool = False, begun: bool = True) -> bool:
        """Give a job back to the pool; False if it was no longer this worker's.

        `blame` counts a strike against it: its engine failed while it ran. One that was never
        `begun` leaves no line in its history.
        """
        job = adopted.job
        reply = await self._call(
            "hand_back",
            [
                self._keys.job(job.id),
                *self._lanes(job.id, job.lane),
                self._keys.log(job.id),
            ],
            [job.id, adopted.owner, LANE_TTL_MS, int(blame), int(begun)],
        )
        return bool(reply[0] == b"ok")
