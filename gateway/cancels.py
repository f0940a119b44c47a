"""Cancels that must happen: whatever becomes of the request, the client or the link meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from shared.errors import HeadraceError
from shared.logs import Log
from shared.transitions import Reason, Transitions

log = Log("cancels")

RUNNERS = 32
"""Cancels on their way at once, each on a connection."""
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_GOES_ON = ("read", "waiting", "kept")


@dataclass(frozen=True)
class Cancel:
    """A job that is to end."""

    job_id: str
    lane: str
    reason: Reason = "cancelled"
    early: bool = False
    """It isn't known whether the job was submitted."""
    reader: str = ""
    """Set where only this reader has gone: what becomes of the job is a matter of its policy."""
    request: str = ""
    """The request's id, for log lines."""
    on_over: Callable[[], None] | None = None
    """Called when the job has ended or is about to; not where it goes on for others."""
    force: bool = False
    backoff_s: float = 0.0


class Canceller:
    """Carries out cancels outside the requests that ask for them, and repeats those that fail.

    `run()` is one of the process's long tasks. A running job that its worker doesn't end within
    `force_after_s` is ended over the worker's head.
    """

    def __init__(
        self, transitions: Transitions, *, force_after_s: float, limit: int = 200_000
    ) -> None:
        self._transitions = transitions
        self._force_after_s = force_after_s
        self._limit = limit
        self._queue: asyncio.Queue[Cancel] = asyncio.Queue()
        self._retrying = 0

    @property
    def pending(self) -> int:
        """Cancels that the queue has not taken yet."""
        return self._queue.qsize() + self._retrying

    def request(
        self,
        job_id: str,
        lane: str,
        reason: Reason = "cancelled",
        *,
        early: bool = False,
        request: str = "",
        on_over: Callable[[], None] | None = None,
    ) -> None:
        """See to it that a job ends. Returns at once."""
        self._add(Cancel(job_id, lane, reason, early, request=request, on_over=on_over))

    def leave(
        self,
        job_id: str,
        lane: str,
        reader: str,
        *,
        request: str = "",
        on_over: Callable[[], None] | None = None,
    ) -> None:
        """See to it that a job without this reader goes by its policy. Returns at once."""
        self._add(Cancel(job_id, lane, reader=reader, request=request, on_over=on_over))

    def _add(self, cancel: Cancel) -> None:
        if self.pending >= self._limit:
            log.error("cancel.dropped", **_about(cancel), pending=self.pending)
            return
        self._queue.put_nowait(cancel)

    async def run(self) -> None:
        """Carry out cancels until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(RUNNERS):
                group.create_task(self._run())

    async def _run(self) -> None:
        while True:
            cancel = await self._queue.get()
            self._retrying += 1
            try:
                await self._carry_out(cancel)
            finally:
                self._retrying -= 1

    async def _carry_out(self, cancel: Cancel) -> None:
        try:
            word = await self._apply(cancel)
        except HeadraceError as error:
            delay_s = min(max(2 * cancel.backoff_s, _FIRST_BACKOFF_S), _MAX_BACKOFF_S)
            if delay_s < _MAX_BACKOFF_S:
                log.debug("cancel.failed", **_about(cancel), error=error.code)
            else:
                log.warning("cancel.failed", **_about(cancel), error=error.code)
            self._retrying += 1
            asyncio.get_running_loop().call_later(
                delay_s, self._again, replace(cancel, backoff_s=delay_s)
            )
            return
        except msgspec.MsgspecError:
            log.error("cancel.unreadable", exc=True, **_about(cancel))
            return
        log.debug("job.cancelled", **_about(cancel), reason=cancel.reason, found=word)
        if cancel.on_over is not None and word not in _GOES_ON:
            cancel.on_over()
        if word == "running":
            forced = replace(cancel, reader="", on_over=None, force=True, backoff_s=0.0)
            loop = asyncio.get_running_loop()
            loop.call_later(self._force_after_s, self._queue.put_nowait, forced)

    async def _apply(self, cancel: Cancel) -> str:
        """Return what was met."""
        if not cancel.reader:
            outcome = await self._transitions.cancel(
                cancel.job_id, cancel.lane, cancel.reason, force=cancel.force, early=cancel.early
            )
            return outcome.word
        left = await self._transitions.leave(cancel.job_id, cancel.lane, [cancel.reader])
        if left.word == "waiting":  # Should this process end before, a worker looks.
            again = replace(cancel, backoff_s=0.0)
            loop = asyncio.get_running_loop()
            loop.call_later(left.wait_s, self._queue.put_nowait, again)
        return left.word

    def _again(self, cancel: Cancel) -> None:
        self._retrying -= 1
        self._queue.put_nowait(cancel)

    async def drain(self, timeout_s: float) -> None:
        """Wait until the queue has taken every cancel, within limits."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.pending:  # noqa: ASYNC110 (once, at the end of the process)
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.error("cancels.left", pending=self.pending)


def _about(cancel: Cancel) -> dict[str, Any]:
    fields = {"job": cancel.job_id, "request": cancel.request}
    return {name: value for name, value in fields.items() if value}
