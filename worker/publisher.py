"""Writes what all running jobs produced in one turn of the loop, in one call.

A job's frames wait in its `Outbox`. One write is under way at a time; what comes meanwhile goes
with the next, so that a busy worker makes larger calls, not more of them. Frames are kept until
well after they were acknowledged: a server that lost its last second gets them again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from shared import protocol
from shared.errors import JobLost, QueueFull, QueueUnavailable, TransitionFailed
from shared.keys import tag_of
from shared.logs import Log, about
from shared.outage import Outage
from shared.outcomes import Adopted, Append, Finish, Verdict
from shared.protocol import Delta, End, Frame, Head, Item
from shared.transitions import Transitions
from worker.template import Template

log = Log("publisher")

PART_BYTES = 256 * 1024
"""Larger parts of an answer are split: no frame holds up the others for long."""
FRAME_BYTES = 512 * 1024
CALL_BYTES = 4 * 1024 * 1024
OUTBOX_BYTES = 4 * 1024 * 1024
"""An application that is further ahead of the server than this waits."""
KEPT_FRAMES = 2048

C = TypeVar("C")

Stopped = Literal["cancelled", "expired", "fenced", "lost"]


@dataclass(frozen=True)
class Switch:
    """From the next item on, another template."""

    prefix: bytes
    suffix: bytes


class Outbox:
    """The way of one job's answer to its log. `on_stop` is called when the job must not go on."""

    def __init__(
        self, adopted: Adopted, publisher: Publisher, on_stop: Callable[[Stopped], None]
    ) -> None:
        self.adopted = adopted
        self.on_stop = on_stop
        self.fenced = False
        self.marked = False
        """Its writer is going to look at it."""
        self.writer: Writer | None = None
        """Known once there is something to write."""
        self._publisher = publisher
        self._items: deque[Item | Switch] = deque()
        self._waiting_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._tokens: list[Delta] = []
        self._head: Head | None = None
        self._template: Template | None = None
        self._kept: deque[bytes] = deque(maxlen=KEPT_FRAMES)
        """Frames that the server has acknowledged."""
        self._unwritten: list[bytes] = []
        """Frames that it hasn't. Lent out by `take`: replaced, not emptied."""
        self._last = adopted.base
        """Number of the newest frame."""
        self.end: End | None = None
        """Set once nothing more comes."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def advanced(self) -> bool:
        """Whether something of this attempt may have reached a client."""
        return self._last > self.adopted.base

    def put_head(self, head: Head, *, known: bool = False) -> None:
        """Add status and content type; they go with the first part, unless they are known."""
        if not known:
            self._head = head
        if head.content_type.startswith("text/event-stream"):
            self._template = Template()

    def add(self, part: bytes, tokens: Sequence[Delta] = ()) -> bool:
        """Add a part of the answer and what it was made from; True if too much is unwritten."""
        if tokens:
            self._tokens += tokens
        template = self._template
        if template is not None:
            item = template.thin(part)
            if template.fresh is not None:
                self._items.append(Switch(*template.fresh))
                template.fresh = None
            self._items.append(item)
        else:
            for start in range(0, len(part), PART_BYTES):
                self._items.append((part[start : start + PART_BYTES],))
        self._waiting_bytes += len(part)
        if not self.marked:
            self._publisher.mark(self)
        return self._waiting_bytes > OUTBOX_BYTES

    async def room(self) -> None:
        """Wait until what was added is in frames."""
        self._room.clear()
        await self._room.wait()

    async def put(self, part: bytes, tokens: Sequence[Delta] = ()) -> None:
        """Add a part; waits while too much is unwritten."""
        if self.add(part, tokens):
            await self.room()

    def finish(self, end: End) -> None:
        """Add the terminal frame; `ended` is done once it is written or refused."""
        self.end = end
        self._room.set()
        self._publisher.mark(self)

    def discard(self) -> None:
        """Forget what isn't in a frame yet: after a cancel nothing more goes out.

        Not once the end is there: an answer that counts as completed must be whole.
        """
        if self.end is not None and not self.fenced:
            return
        self._head = None
        self._items.clear()
        self._waiting_bytes = 0
        self._room.set()

    def take(self) -> Append | None:
        """Put what waits into a frame of bounded size, and return the unwritten frames."""
        items = self._items
        if len(items) == 1 and not isinstance(item := items[0], Switch):  # As nearly always.
            items.clear()
            self._add_frame([item], None)
            if self._waiting_bytes > OUTBOX_BYTES:
                self._room.set()
            self._waiting_bytes = 0
        elif items or self._head is not None:
            self.seal()
        bodies = self._unwritten
        if not bodies:
            return None
        adopted = self.adopted
        first = self._last - len(bodies) + 1
        return Append(adopted.job.id, adopted.owner, adopted.base, first, bodies)

    def _add_frame(self, items: list[Item], template: tuple[bytes, bytes] | None) -> None:
        frame = Frame(items, self._head, template, None, self._tokens)
        self._unwritten.append(protocol.encode(frame))
        self._tokens = []
        self._last += 1
        self._head = None

    def seal(self) -> None:
        """Turn what waits into a frame of bounded size."""
        items: list[Item] = []
        template = None
        thinned = False
        size = 0
        while self._items and size < FRAME_BYTES:
            item = self._items[0]
            if isinstance(item, Switch):
                if thinned:
                    break
                template = (item.prefix, item.suffix)
            else:
                items.append(item)
                thinned = thinned or isinstance(item, bytes)
                size += len(item) if isinstance(item, bytes) else len(item[0])
            self._items.popleft()
        if items or (self._head is not None and self.end is not None):
            self._add_frame(items, template)
        if not self._items:
            self._waiting_bytes = 0
            self._room.set()

    def finish_call(self) -> Finish | None:
        """Return the terminal write, once everything else is in a frame."""
        if self.end is None or self._items:
            return None
        adopted, end = self.adopted, self.end
        body = protocol.encode(Frame(end=end))
        return Finish(
            adopted.job.id,
            adopted.owner,
            adopted.job.lane,
            self._last + 1,
            body,
            end.outcome,
            end.usage,
        )

    def settle(self, verdict: Verdict) -> None:
        """Take the server's answer to an `Append`."""
        if verdict.word == "ok" and verdict.seq == self._last:
            self._kept += self._unwritten
            self._unwritten = []
            if self._items:
                self._publisher.mark(self)
            return
        if verdict.word == "fenced":
            self._fence()
            return
        self._acknowledge(verdict.seq)
        if verdict.word == "cancelled" or verdict.word == "expired":
            self.on_stop("cancelled" if verdict.word == "cancelled" else "expired")
        if self._items or self._unwritten:
            self._publisher.mark(self)

    def _acknowledge(self, seq: int) -> None:
        """Move frames up to `seq` to the kept ones, or back if the server has lost some."""
        missing = self._last - seq
        if missing > len(self._unwritten) + len(self._kept):
            self._lose(seq)
            return
        written = len(self._unwritten) - missing
        self._kept += self._unwritten[: max(written, 0)]
        lost = [self._kept.pop() for _ in range(-written)]
        self._unwritten = lost[::-1] + self._unwritten[max(written, 0) :]

    def settle_end(self, verdict: Verdict) -> None:
        """Take the server's answer to a `Finish`."""
        if verdict.word == "gap":
            self._acknowledge(verdict.seq)
            self._publisher.mark(self)
            return
        if verdict.word == "fenced":
            self._fence()
        if not self.ended.done():
            self.ended.set_result(None)

    def _lose(self, seq: int) -> None:
        """The server has lost more than is kept here: end the job where its log ends now."""
        log.error("job.unrepairable", **about(self.adopted.job), seq=seq, written=self._last)
        self._items.clear()
        self._unwritten = []
        self._kept.clear()
        self._last = seq
        lost = JobLost()
        self.end = End(outcome="lost", code=lost.code, message=lost.message)
        self._room.set()
        self.on_stop("lost")
        self._publisher.mark(self)

    def give_up(self) -> None:
        """Leave the job to whoever finds its lease lapsed: it can't be written to."""
        self._fence()

    def _fence(self) -> None:
        """Another owns the job now: not a byte more of ours."""
        self.fenced = True
        self.discard()
        self._unwritten = []
        self.on_stop("fenced")
        if not self.ended.done():
            self.ended.set_result(None)


class Publisher:
    """The worker's single writer. `run()` is one of its long tasks.

    Tags may live on different servers, so that one which is away must not hold up the others: each
    has a writer of its own.
    """

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._writers: dict[str, Writer] = {}
        self._begun: asyncio.Queue[Writer] = asyncio.Queue()

    @property
    def calls(self) -> int:
        """Calls so far."""
        return sum(writer.calls for writer in self._writers.values())

    @property
    def frames(self) -> int:
        """Frames written so far."""
        return sum(writer.frames for writer in self._writers.values())

    def mark(self, outbox: Outbox) -> None:
        """Have an outbox looked at in the next write."""
        if outbox.writer is None:
            outbox.writer = self._writer(tag_of(outbox.adopted.job.id))
        outbox.writer.mark(outbox)

    def _writer(self, job_tag: str) -> Writer:
        writer = self._writers.get(job_tag)
        if writer is None:
            writer = self._writers[job_tag] = Writer(self._transitions)
            self._begun.put_nowait(writer)
        return writer

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task((await self._begun.get()).run())


class Writer:
    """Writes to one tag's server, one call at a time."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._outage = Outage(log, "publish.failed", "publish.resumed")
        self._dirty: list[Outbox] = []
        self._wake = asyncio.Event()
        self.calls = 0
        self.frames = 0

    def mark(self, outbox: Outbox) -> None:
        """Have an outbox looked at in the next write."""
        if outbox.marked or outbox.fenced:
            return
        outbox.marked = True
        if not self._dirty:
            self._wake.set()
        self._dirty.append(outbox)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            # One more turn: the other jobs of this engine step are about to put their parts.
            await asyncio.sleep(0)
            self._wake.clear()
            await self._write(*self._take())

    def _take(self) -> tuple[dict[Outbox, Append], dict[Outbox, Finish]]:
        """Return what is to be written, of bounded size; the rest waits for the next call."""
        dirty, self._dirty = self._dirty, []
        appends: dict[Outbox, Append] = {}
        ends: dict[Outbox, Finish] = {}
        size = 0
        for at, outbox in enumerate(dirty):
            if size > CALL_BYTES:
                self._dirty = dirty[at:]
                self._wake.set()
                break
            outbox.marked = False
            if outbox.fenced:
                continue
            if (append := outbox.take()) is not None:
                appends[outbox] = append
                bodies = append.bodies
                size += len(bodies[0]) if len(bodies) == 1 else sum(map(len, bodies))
            if outbox.end is not None and (finish := outbox.finish_call()) is not None:
                ends[outbox] = finish
        return appends, ends

    async def _write(self, appends: dict[Outbox, Append], ends: dict[Outbox, Finish]) -> None:
        """Write, again and again until the server has answered: repeating is harmless."""
        if not appends and not ends:
            return
        delay_s = 0.05
        while True:
            try:
                verdicts, ended = await self._transitions.write(
                    list(appends.values()), list(ends.values())
                )
                break
            except TransitionFailed as error:
                await self._isolate(appends, ends, error)
                return
            except (QueueUnavailable, QueueFull) as error:
                self._outage.note(error, jobs=len(appends | ends))
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, 1.0)
        self._outage.over()
        self.calls += 1
        self.frames += len(ends)
        for (outbox, append), verdict in zip(appends.items(), verdicts, strict=True):
            self.frames += len(append.bodies)
            outbox.settle(verdict)
        for outbox, verdict in zip(ends, ended, strict=True):
            outbox.settle_end(verdict)

    async def _isolate(
        self,
        appends: dict[Outbox, Append],
        ends: dict[Outbox, Finish],
        error: TransitionFailed,
    ) -> None:
        """Find the job whose write can't succeed, so that it doesn't hold up the others."""
        outboxes = list(appends | ends)
        if len(outboxes) > 1:
            for one in outboxes:
                await self._write(_only(appends, one), _only(ends, one))
            return
        log.error("publish.refused", **about(outboxes[0].adopted.job), error=error.message)
        outboxes[0].give_up()


def _only(calls: dict[Outbox, C], outbox: Outbox) -> dict[Outbox, C]:
    return {outbox: calls[outbox]} if outbox in calls else {}
