"""The frames of one job on their way to one client.

The channel is the fast path and the log is the truth. A stream takes from the channel only what
follows its last frame; on a gap, after a reconnect, when its buffer overflowed or after a silence
it reads the log from where it stands, at the client's pace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from gateway.turn import Turn
from shared.errors import Diverged, HeadraceError, JobLost, QueueUnavailable, RequestTimeout
from shared.logs import Log
from shared.outcomes import LogPage
from shared.protocol import End, Envelope, Head, Item, Usage, open_message
from shared.queries import LOG_PAGE

log = Log("gateway")

SILENCE_S = 1.0
MAX_SILENCE_S = 5.0
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_FIRST_PAGE = 20
"""Log entries read at once, until it is known how large they are."""


class _Relayed(msgspec.Struct, frozen=True, array_like=True):
    """What a gateway needs of a `Frame`: its first fields. The tokens behind them stay encoded."""

    items: list[Item] = []
    head: Head | None = None
    template: tuple[bytes, bytes] | None = None
    end: End | None = None


_decode = msgspec.msgpack.Decoder(_Relayed).decode


class Part(msgspec.Struct, frozen=True):
    """Everything of an answer that was ready at one moment."""

    head: Head | None
    data: bytes
    before: int
    """Bytes of `data` that came before `head`: another attempt's."""
    items: int
    end: End | None


class JobStream:
    """A job's frames in order, each once. A sink of the pub/sub connection."""

    __slots__ = (
        "_backoff_s",
        "_behind",
        "_buffer_bytes",
        "_count_read",
        "_due",
        "_empty_reads",
        "_heard",
        "_heard_at",
        "_limit_bytes",
        "_loop",
        "_owner",
        "_page",
        "_part",
        "_prefix",
        "_queue",
        "_read_log",
        "_retry_at",
        "_silence_s",
        "_subscribed",
        "_suffix",
        "_taking",
        "_turn",
        "_waiter",
        "abandoned",
        "counted_for",
        "cursor",
        "deadline",
        "ended",
        "failure",
        "idle",
        "job_id",
        "joined",
        "lane",
        "patience_s",
        "reader",
        "request_id",
        "usage",
        "write",
    )

    def __init__(
        self,
        job_id: str,
        lane: str,
        *,
        read_log: Callable[[str, int, int], Awaitable[LogPage]],
        limit_bytes: int,
        deadline: float,
        count_read: Callable[[str], None] = lambda _: None,
        reader: str = "",
        patience_s: float | None = 0.0,
        after: int = 0,
        turn: Turn | None = None,
    ) -> None:
        self.job_id = job_id
        self.lane = lane
        self.reader = reader
        """Its name among the job's readers."""
        self.request_id = ""
        """For log lines."""
        self.patience_s = patience_s
        """How long the job goes on without readers; None: to its end."""
        self.joined = ""
        """Of a job that had ended before: its outcome."""
        self.deadline = deadline
        """By the loop's clock."""
        self.cursor = after
        """Sequence number of the last frame given to the client."""
        self.ended = False
        """The terminal frame was given."""
        self.usage: Usage | None = None
        """Of a job that has ended."""
        self.failure: HeadraceError | None = None
        self.idle = False
        """Set to make `next` return, though there is nothing."""
        self.abandoned = False
        """Its cancel was asked for."""
        self.counted_for = ""
        """The API key among whose jobs in flight it counts, if it does."""
        self.write: Callable[[Part, float], bool] | None = None
        """Gives the client a part that came while `next` waited, or declines it: then `next` has
        it. Spares the waking of a task for each frame."""
        self._part: Part | None = None
        """What was declined."""
        self._turn = turn or Turn()
        self._due = False
        """It has a place in the turn."""
        self._read_log = read_log
        self._limit_bytes = limit_bytes
        self._count_read = count_read
        self._loop = asyncio.get_running_loop()
        self._queue: list[Envelope] = []
        """Frames that follow each other without a gap."""
        self._buffer_bytes = 0
        self._behind = ""
        """Why the log must be read, if it must."""
        self._taking = False
        """The log is being read: what the channel brings meanwhile is joined to it."""
        self._retry_at = 0.0
        self._backoff_s = 0.0
        self._empty_reads = 0
        self._page = _FIRST_PAGE
        self._owner: bytes | None = None
        self._prefix = self._suffix = b""
        self._heard = False
        self._heard_at = self._loop.time()
        self._silence_s = SILENCE_S
        self._subscribed = after > 0
        self._waiter: asyncio.Future[None] | None = None

    # What the pub/sub connection calls

    def on_message(self, message: bytes) -> None:
        """Take a frame from the channel, if it follows; never blocks, never decodes it."""
        envelope = open_message(message)
        queue = self._queue
        self._heard = True
        last = queue[-1].seq if queue else self.cursor
        if envelope.seq <= last:
            return
        if envelope.seq != last + 1 and (queue or not self._taking):
            self._drop("gap")
        self._buffer_bytes += len(message)
        if self._buffer_bytes > self._limit_bytes:
            self._drop("overflow")
        else:
            queue.append(envelope)
        if not self._due:
            self._due = True
            self._turn.add(self)

    def on_subscribed(self) -> None:
        """After the first time: the link was lost, and what came meanwhile is only in the log."""
        if self._subscribed:
            self._fall_behind("resubscribed")
        self._subscribed = True

    def join(self, outcome: str = "") -> None:
        """Begin with what the log holds: the job was there before this stream."""
        self.joined = outcome
        self._subscribed = True
        self._fall_behind("joined")

    # What the sweeper and the answer call

    def tick(self, now: float) -> None:
        """Notice silence and the deadline. Called a few times a second."""
        if self._heard:
            self._heard = False
            self._heard_at = now
            self._silence_s = SILENCE_S
        elif now - self._heard_at >= self._silence_s:
            self._heard_at = now
            self._silence_s = min(2 * self._silence_s, MAX_SILENCE_S)
            self._fall_behind("silence")
        if now >= self.deadline:
            self.fail(RequestTimeout())
        elif self._behind and self._retry_at <= now:
            self.wake()

    def fail(self, error: HeadraceError) -> None:
        """End the stream with an error, unless it has ended."""
        if self.failure is None and not self.ended:
            self.failure = error
            self.wake()

    def deliver(self, now: float) -> None:
        """At the end of a turn that brought something: write it, or have `next` look at it.

        Nothing is written past `next` but while it waits, so that the order is kept.
        """
        self._due = False
        waiter, queue = self._waiter, self._queue
        if waiter is None or waiter.done():
            return
        ready = queue and queue[0].seq == self.cursor + 1 and not self._behind
        if self.write is None or not ready or self.failure is not None:
            waiter.set_result(None)
            return
        try:
            part = self._join(queue)
            queue.clear()
            self._buffer_bytes = 0
            if not self.write(part, now):
                self._part = part
                self.wake()
        except Exception:
            log.error("relay.failed", exc=True, job=self.job_id)
            self.fail(HeadraceError())

    def wake(self) -> None:
        """Let `next` look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Part | None:
        """Wait for what comes next; None if it is time for a sign of life. Raises the failure."""
        while True:
            if (declined := self._part) is not None:
                self._part = None
                return declined
            if self.failure is not None:
                raise self.failure
            if self._queue and self._queue[0].seq == self.cursor + 1:
                ready = self._join(self._queue)
                self._queue.clear()
                self._buffer_bytes = 0
                return ready
            if self._behind and self._retry_at <= self._loop.time():
                part = await self._catch_up()
                if part is not None:
                    return part
            elif self.idle:
                self.idle = False
                return None
            else:
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None

    # Inside

    def _drop(self, reason: str) -> None:
        self._queue.clear()
        self._buffer_bytes = 0
        self._behind = self._behind or reason

    def _fall_behind(self, reason: str) -> None:
        self._behind = self._behind or reason
        self.wake()

    async def _catch_up(self) -> Part | None:
        """Read one page of the log; None if it brought nothing new."""
        reason, self._behind = self._behind, ""
        self._taking = True
        try:
            page = await self._read_log(self.job_id, self.cursor, self._page)
        except QueueUnavailable:
            self._behind = reason
            self._backoff_s = min(max(2 * self._backoff_s, _FIRST_BACKOFF_S), _MAX_BACKOFF_S)
            self._retry_at = self._loop.time() + self._backoff_s
            return None
        finally:
            self._taking = False
        self._count_read(reason)
        self._backoff_s = 0.0
        part = self._join(page.envelopes) if page.envelopes else None
        if part is not None:
            self._fit_page(part, len(page.envelopes))
        self._meet_queue(reason, progressed=part is not None)
        if page.more and not self._queue:
            self._behind = self._behind or reason
        self._check_state(page, reason)
        return part

    def _fit_page(self, part: Part, frames: int) -> None:
        """Read about as much at once as the buffer may hold."""
        size = len(part.data) // frames + 1
        self._page = min(LOG_PAGE, max(1, self._limit_bytes // size))

    def _meet_queue(self, reason: str, *, progressed: bool) -> None:
        """Join what the channel brought meanwhile to what the log gave."""
        queue = self._queue
        known = next((at for at, one in enumerate(queue) if one.seq > self.cursor), len(queue))
        del queue[:known]
        if not queue:
            self._buffer_bytes = 0
        elif queue[0].seq != self.cursor + 1:
            if progressed:
                self._behind = self._behind or reason
            else:  # The server lost what it had sent. Whoever owns the job sends it again.
                queue.clear()
                self._buffer_bytes = 0

    def _check_state(self, page: LogPage, reason: str) -> None:
        """See whether anything can still come."""
        if self.ended:
            return
        if page.state is None:
            self.fail(JobLost())
        elif page.state == "done" and not page.envelopes:
            # The job may have ended between the two reads of one page, but not twice.
            self._empty_reads += 1
            if self._empty_reads > 1:
                self.fail(JobLost())
            else:
                self._behind = self._behind or reason
        else:
            self._empty_reads = 0

    def _join(self, envelopes: Iterable[Envelope]) -> Part:
        """Decode frames and put together what they hold."""
        parts: list[bytes] = []
        head: Head | None = None
        before = items = 0
        end: End | None = None
        for envelope in envelopes:
            same = envelope.owner == self._owner and envelope.seq == self.cursor + 1
            if not same and not self._follows(envelope):
                break
            self.cursor = envelope.seq
            frame = _decode(envelope.body)
            if frame.head is not None:
                head, before = frame.head, sum(map(len, parts))
            if frame.template is not None:
                self._prefix, self._suffix = frame.template
            prefix, suffix = self._prefix, self._suffix
            for item in frame.items:
                items += 1
                if isinstance(item, bytes):
                    parts += (prefix, item, suffix)
                else:
                    parts.append(item[0])
            if frame.end is not None:
                end = frame.end
                self.usage = end.usage
                self.ended = True
                break
        return Part(head, b"".join(parts), before, items, end)

    def _follows(self, envelope: Envelope) -> bool:
        """Refuse to splice: a new owner must have begun where this client stands."""
        if envelope.seq != self.cursor + 1:
            self.fail(Diverged())
            return False
        if envelope.owner != self._owner:
            if self._owner is not None and envelope.base != self.cursor:
                self.fail(Diverged())
                return False
            self._owner = envelope.owner
        return True
