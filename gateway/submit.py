"""From a job to its open stream: subscribe first, then submit, and leave nothing behind."""

from __future__ import annotations

import asyncio

from gateway.cancels import Canceller
from gateway.errors import Overloaded
from gateway.metrics import Metrics
from gateway.relay import JobStream
from gateway.settings import GatewaySettings
from shared.errors import Cancelled, Draining, QueueFull, QueueUnavailable, RequestTimeout
from shared.keys import Keys
from shared.protocol import Job
from shared.subscribers import Subscribers
from shared.transitions import Reason, Transitions

_LINK_POLL_S = 0.02


class Submitter:
    """Opens and closes the streams of this process."""

    def __init__(
        self,
        settings: GatewaySettings,
        keys: Keys,
        subscriber: Subscribers,
        transitions: Transitions,
        canceller: Canceller,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._subscriber = subscriber
        self._transitions = transitions
        self._canceller = canceller
        self._metrics = metrics
        self.open_streams = 0
        self.draining = False

    def check_room(self) -> None:
        """Refuse at once what can't be relayed."""
        if self.draining:
            raise Draining(retry_after_s=1)
        if self.open_streams >= self._settings.max_streams:
            raise Overloaded(retry_after_s=1)

    async def open(self, job: Job, *, limit: int, timeout_s: float) -> JobStream:
        """Submit a job and return its stream, subscribed before anything could be published.

        Raises `QueueUnavailable` within `submit_timeout_s`, `QueueFull`, `Cancelled`, `Overloaded`.
        """
        self.check_room()
        loop = asyncio.get_running_loop()
        stream = JobStream(
            job.id,
            job.lane,
            read_log=self._transitions.read_log,
            limit_bytes=self._settings.stream_buffer_bytes,
            deadline=loop.time() + timeout_s,
            count_read=self._metrics.log_read,
        )
        self.open_streams += 1
        try:
            async with asyncio.timeout(min(self._settings.submit_timeout_s, timeout_s)):
                await self._subscribe(stream)
                await self._submit(job, limit, timeout_s)
        except BaseException as error:
            self.close(stream)
            if isinstance(error, TimeoutError):
                raise QueueUnavailable from error
            raise
        return stream

    async def _subscribe(self, stream: JobStream) -> None:
        while not self._subscriber.connected:  # noqa: ASYNC110 (a short cut is nobody's fault)
            await asyncio.sleep(_LINK_POLL_S)
        await self._subscriber.subscribe(self._keys.channel(stream.job_id), stream)

    async def _submit(self, job: Job, limit: int, timeout_s: float) -> None:
        try:
            submitted = await self._transitions.submit(job, limit=limit, timeout_s=timeout_s)
        except QueueFull:
            raise
        except BaseException:  # It may have been done all the same.
            self._canceller.request(job.id, job.lane, early=True)
            raise
        if submitted.verdict == "full":
            raise QueueFull(retry_after_s=5)
        if submitted.verdict == "cancelled":
            raise Cancelled

    def abandon(self, stream: JobStream) -> None:
        """See to it that the job ends, because nobody wants its answer any more."""
        if stream.ended or stream.abandoned:
            return
        stream.abandoned = True
        expired = isinstance(stream.failure, RequestTimeout)
        reason: Reason = "expired" if expired else "cancelled"
        self._canceller.request(stream.job_id, stream.lane, reason)

    def close(self, stream: JobStream) -> None:
        """Detach a stream from its channel."""
        self.open_streams -= 1
        self._subscriber.unsubscribe(self._keys.channel(stream.job_id), stream)
