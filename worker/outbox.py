"""One job's answer on its way to the log: parts become frames, and frames are kept.

They are kept until well after they were acknowledged: a server that lost its last second gets them
again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shared.errors import JobLost
from shared.logs import Log, about
from shared.outcomes import Adopted, Append, Finish, Verdict
from shared.protocol import Delta, End, Frame, Head, Item, encode, seal_message, stamp
from worker.template import Template

if TYPE_CHECKING:
    from worker.publisher import Publisher, Writer

log = Log("publisher")

PART_BYTES = 256 * 1024
"""Larger parts of an answer are split: no frame holds up the others for long."""
FRAME_BYTES = 512 * 1024
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
        self._stamp = stamp(adopted.owner, adopted.base)
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
        messages = self._unwritten
        if not messages:
            return None
        adopted = self.adopted
        first = self._last - len(messages) + 1
        return Append(adopted.job.id, adopted.owner, first, messages)

    def _add_frame(self, items: list[Item], template: tuple[bytes, bytes] | None) -> None:
        frame = Frame(items, self._head, template, None, self._tokens)
        self._last += 1
        self._unwritten.append(seal_message(self._last, self._stamp, encode(frame)))
        self._tokens = []
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
        body = encode(Frame(end=end))
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
