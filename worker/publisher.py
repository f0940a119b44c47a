"""Writes what all running jobs produced in one turn of the loop, in one call.

A job's frames wait in its `Outbox`. One write is under way at a time; what comes meanwhile goes
with the next, so that a busy worker makes larger calls, not more of them.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from shared.errors import QueueFull, QueueUnavailable, TransitionFailed
from shared.keys import tag_of
from shared.logs import Log, about
from shared.outage import Outage
from shared.outcomes import Append, Finish
from shared.transitions import Transitions
from worker.outbox import Outbox

log = Log("publisher")

CALL_BYTES = 4 * 1024 * 1024

C = TypeVar("C")


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
                messages = append.messages
                size += len(messages[0]) if len(messages) == 1 else sum(map(len, messages))
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
            self.frames += len(append.messages)
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
