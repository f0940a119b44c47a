"""From a job to its open stream: subscribe first, then submit, and leave nothing behind."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from dataclasses import dataclass
from functools import partial

from gateway.cancels import Canceller
from gateway.channels import Channels
from gateway.errors import AnswerGone, Overloaded, RateLimited
from gateway.in_flight import InFlight, Told
from gateway.metrics import Metrics
from gateway.relay import JobStream
from gateway.settings import GatewaySettings
from gateway.turn import Turn
from shared.errors import (
    Cancelled,
    Draining,
    QueueFull,
    QueueUnavailable,
    RequestTimeout,
    UnknownJob,
)
from shared.in_flight import tokens_of
from shared.keys import Keys, is_job_id
from shared.outcomes import Attached, Submitted
from shared.protocol import Job, KeyRecord
from shared.subscribers import Subscribers
from shared.transitions import Transitions

_MADE_ROOM = 0.1
"""Share of a full lane's jobs that shall have ended when a client comes back."""
_RETRY_S = (1, 60)
_TENANT_FULL = "Too many requests of this API key's tenant are waiting. Try again later."


@dataclass(frozen=True)
class Limits:
    """What may be in the lane of a shard."""

    lane: int
    """Jobs, queued and running."""
    tenant: int = 0
    """Jobs of one tenant that wait; 0: any number."""


class Submitter:
    """Opens and closes the streams of this process. `name` is its name among readers."""

    def __init__(
        self,
        settings: GatewaySettings,
        name: str,
        keys: Keys,
        subscriber: Subscribers,
        transitions: Transitions,
        canceller: Canceller,
        in_flight: InFlight,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._name = name
        self._keys = keys
        self._channels = Channels(subscriber)
        self._transitions = transitions
        self._canceller = canceller
        self._in_flight = in_flight
        self._metrics = metrics
        self._numbers = itertools.count(1)
        self._turn = Turn()
        self.open_streams = 0
        self.draining = False

    def check_room(self) -> None:
        """Refuse at once what can't be relayed."""
        if self.draining:
            raise Draining(retry_after_s=1)
        if self.open_streams >= self._settings.max_streams:
            raise Overloaded(retry_after_s=1)

    async def open(
        self,
        job: Job,
        caller: KeyRecord,
        *,
        limits: Limits,
        timeout_s: float,
        told: Told = lambda _: None,
        shared: bool = False,
    ) -> JobStream:
        """Submit a job and return its stream, subscribed before anything could be published.

        Where the job is there already, its answer comes from its beginning. `shared`: others may
        submit the same one. `told` hears of the caller's limits. Raises `QueueUnavailable` within
        `submit_timeout_s`, `RequestTimeout` where the request has less, `RateLimited`, `QueueFull`,
        `Cancelled`, `Overloaded`.
        """
        self.check_room()
        deadline = asyncio.get_running_loop().time() + timeout_s
        stream = self._stream(job.id, job.lane, deadline, job.patience_s)
        self.open_streams += 1
        try:
            async with asyncio.timeout(min(self._settings.submit_timeout_s, timeout_s)):
                await self._admit(stream, caller, told)
                await self._subscribe(stream)
                await self._submit(stream, job, limits, timeout_s, shared=shared)
        except BaseException as error:
            if not shared or isinstance(
                error, QueueFull | RateLimited
            ):  # Else others may have submitted it.
                self._uncount(stream)
            self.close(stream)
            if isinstance(error, TimeoutError):
                short = timeout_s < self._settings.submit_timeout_s
                raise (RequestTimeout if short else QueueUnavailable) from error
            raise
        return stream

    async def join(self, job_id: str, tenant: str) -> tuple[JobStream, Attached]:
        """Return a stream of a tenant's job that was submitted before, from its beginning.

        Raises `UnknownJob`, `AnswerGone`, `QueueUnavailable`, `Overloaded`.
        """
        self.check_room()
        if not is_job_id(job_id):
            raise UnknownJob
        stream = self._stream(job_id, "", math.inf, None)
        self.open_streams += 1
        try:
            async with asyncio.timeout(self._settings.submit_timeout_s):
                attached = await self._attach(stream, tenant)
                if attached.state != "done":
                    await self._subscribe(stream)
        except BaseException as error:
            if stream.lane:
                self.abandon(stream)
            self.close(stream)
            if isinstance(error, TimeoutError):
                raise QueueUnavailable from error
            raise
        return stream, attached

    def _stream(
        self, job_id: str, lane: str, deadline: float, patience_s: float | None
    ) -> JobStream:
        return JobStream(
            job_id,
            lane,
            read_log=self._transitions.read_log,
            limit_bytes=self._settings.stream_buffer_bytes,
            deadline=deadline,
            count_read=self._metrics.log_read,
            reader=f"{self._name}/{next(self._numbers)}",
            patience_s=patience_s,
            turn=self._turn,
        )

    async def _admit(self, stream: JobStream, caller: KeyRecord, told: Told) -> None:
        to_settle = caller.max_in_flight or caller.tokens_per_minute
        if not (to_settle or caller.requests_per_minute):
            return
        if to_settle:
            stream.counted_for = caller.id
        try:
            await self._in_flight.admit(caller, stream.job_id, told)
        except RateLimited:
            stream.counted_for = ""
            raise

    def _uncount(self, stream: JobStream, tokens: int | None = None) -> None:
        if stream.counted_for:
            self._in_flight.release(stream.counted_for, stream.job_id, tokens)

    async def _subscribe(self, stream: JobStream) -> None:
        await self._channels.open(self._keys.channel(stream.job_id), stream)

    async def _submit(
        self, stream: JobStream, job: Job, limits: Limits, timeout_s: float, *, shared: bool
    ) -> None:
        try:
            submitted = await self._transitions.submit(
                job,
                limit=limits.lane,
                tenant_limit=limits.tenant,
                timeout_s=timeout_s,
                reader=stream.reader,
                replicas=self._settings.redis_replicas,
                wait_s=self._settings.redis_timeout_s / 2,
            )
            if submitted.verdict == "known":
                await self._attach(stream, job.tenant)
        except QueueFull:
            raise
        except BaseException:  # It may have been done all the same.
            if shared:
                self.abandon(stream)
            else:
                self._canceller.request(job.id, job.lane, early=True, request=job.request_id)
            raise
        if submitted.verdict == "full":
            raise QueueFull(retry_after_s=retry_s(submitted))
        if submitted.verdict == "tenant_full":
            raise RateLimited(_TENANT_FULL, retry_after_s=retry_s(submitted))
        if submitted.verdict == "cancelled":
            raise Cancelled

    async def _attach(self, stream: JobStream, tenant: str) -> Attached:
        """Have a stream begin with what its job's log holds, and live by the job's deadline."""
        attached = await self._transitions.attach(stream.job_id, stream.reader, tenant=tenant)
        if attached is None:
            raise UnknownJob
        stream.lane = attached.lane
        done = attached.state == "done"
        if done and not attached.frames:
            raise AnswerGone
        left_s = math.inf if done else attached.left_s
        stream.deadline = asyncio.get_running_loop().time() + left_s
        stream.join(attached.outcome)
        return attached

    def abandon(self, stream: JobStream) -> None:
        """See to it that the job goes by its policy, because a reader doesn't want its answer."""
        if stream.ended or stream.abandoned:
            return
        stream.abandoned = True
        on_over = partial(self._uncount, stream) if stream.counted_for else None
        if isinstance(stream.failure, RequestTimeout):
            self._canceller.request(
                stream.job_id,
                stream.lane,
                "expired",
                request=stream.request_id,
                on_over=on_over,
            )
        else:
            self._canceller.leave(
                stream.job_id,
                stream.lane,
                stream.reader,
                request=stream.request_id,
                on_over=on_over,
            )

    def close(self, stream: JobStream) -> None:
        """Detach a stream from its channel."""
        if stream.ended or stream.joined:
            # One that had ended before has been charged, or will be by whoever looks after it.
            self._uncount(stream, None if stream.joined else tokens_of(stream.usage))
        self.open_streams -= 1
        self._channels.close(self._keys.channel(stream.job_id), stream)


def retry_s(full: Submitted) -> float:
    """Return when to come back to a full lane, by the pace at which its jobs end.

    Spread, so that those who were refused together don't come back together.
    """
    least, most = _RETRY_S
    made_room_s = _MADE_ROOM * full.oldest_s
    return min(max(made_room_s * random.uniform(1, 2), random.uniform(least, 2 * least)), most)
