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
from typing import Literal

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
        self._unwritten: deque[bytes] = deque()
        """Frames that it hasn't."""
        self._last = adopted.base
        """Number of the newest frame."""
        self._end: End | None = None
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

    async def put(self, part: bytes, tokens: Sequence[Delta] = ()) -> None:
        """Add a part of the answer and what it was made from; waits while too much is unwritten."""
        self._tokens += tokens
        if self._template is not None:
            item = self._template.thin(part)
            if self._template.fresh is not None:
                self._items.append(Switch(*self._template.fresh))
                self._template.fresh = None
            self._items.append(item)
        else:
            for start in range(0, len(part), PART_BYTES):
                self._items.append((part[start : start + PART_BYTES],))
        self._waiting_bytes += len(part)
        self._publisher.mark(self)
        if self._waiting_bytes > OUTBOX_BYTES:
            self._room.clear()
            await self._room.wait()

    def finish(self, end: End) -> None:
        """Add the terminal frame; `ended` is done once it is written or refused."""
        self._end = end
        self._room.set()
        self._publisher.mark(self)

    def discard(self) -> None:
        """Forget what isn't in a frame yet: after a cancel nothing more goes out.

        Not once the end is there: an answer that counts as completed must be whole.
        """
        if self._end is not None and not self.fenced:
            return
        self._head = None
        self._items.clear()
        self._waiting_bytes = 0
        self._room.set()

    def seal(self) -> int:
        """Turn what waits into a frame of bounded size; return the bytes of all unwritten ones."""
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
        if items or (self._head is not None and self._end is not None):
            frame = Frame(items, self._head, template, None, self._tokens)
            self._unwritten.append(protocol.encode(frame))
            self._tokens = []
            self._last += 1
            self._head = None
        if not self._items:
            self._waiting_bytes = 0
            self._room.set()
        return sum(map(len, self._unwritten))

    def append(self) -> Append | None:
        """Return the unwritten frames."""
        if not self._unwritten:
            return None
        adopted, bodies = self.adopted, list(self._unwritten)
        first = self._last - len(bodies) + 1
        return Append(adopted.job.id, adopted.owner, adopted.base, first, bodies)

    def finish_call(self) -> Finish | None:
        """Return the terminal write, once everything else is in a frame."""
        if self._end is None or self._items:
            return None
        adopted, end = self.adopted, self._end
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
        while len(self._unwritten) > missing:
            self._kept.append(self._unwritten.popleft())
        while len(self._unwritten) < missing:
            self._unwritten.appendleft(self._kept.pop())

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
        self._unwritten.clear()
        self._kept.clear()
        self._last = seq
        lost = JobLost()
        self._end = End(outcome="lost", code=lost.code, message=lost.message)
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
        self._unwritten.clear()
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
        if outbox.fenced:
            return
        job_tag = tag_of(outbox.adopted.job.id)
        writer = self._writers.get(job_tag)
        if writer is None:
            writer = self._writers[job_tag] = Writer(self._transitions)
            self._begun.put_nowait(writer)
        writer.mark(outbox)

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
        self._dirty: dict[Outbox, None] = {}
        self._wake = asyncio.Event()
        self.calls = 0
        self.frames = 0

    def mark(self, outbox: Outbox) -> None:
        """Have an outbox looked at in the next write."""
        self._dirty[outbox] = None
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            # One more turn: the other jobs of this engine step are about to put their parts.
            await asyncio.sleep(0)
            self._wake.clear()
            batch: list[Outbox] = []
            size = 0
            for outbox in list(self._dirty):
                if size > CALL_BYTES:
                    self._wake.set()
                    break
                del self._dirty[outbox]
                if not outbox.fenced:
                    size += outbox.seal()
                    batch.append(outbox)
            await self._write(batch)

    async def _write(self, outboxes: list[Outbox]) -> None:
        """Write, again and again until the server has answered: repeating is harmless."""
        pairs = [(o, a) for o in outboxes if (a := o.append()) is not None]
        ends = [(o, f) for o in outboxes if (f := o.finish_call()) is not None]
        if not pairs and not ends:
            return
        delay_s = 0.05
        while True:
            try:
                verdicts, ended = await self._transitions.write(
                    [append for _, append in pairs], [finish for _, finish in ends]
                )
                break
            except TransitionFailed as error:
                await self._isolate(outboxes, error)
                return
            except (QueueUnavailable, QueueFull) as error:
                self._outage.note(error, jobs=len(outboxes))
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, 1.0)
        self._outage.over()
        self.calls += 1
        self.frames += sum(len(append.bodies) for _, append in pairs) + len(ends)
        for (outbox, _), verdict in zip(pairs, verdicts, strict=True):
            outbox.settle(verdict)
        for (outbox, _), verdict in zip(ends, ended, strict=True):
            outbox.settle_end(verdict)

    async def _isolate(self, outboxes: list[Outbox], error: TransitionFailed) -> None:
        """Find the job whose write can't succeed, so that it doesn't hold up the others."""
        if len(outboxes) > 1:
            for outbox in outboxes:
                await self._write([outbox])
            return
        log.error("publish.refused", **about(outboxes[0].adopted.job), error=error.message)
        outboxes[0].give_up()
