"""A cancel that waits until it has taken effect, and says what it met."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from shared.errors import UnknownJob
from shared.keys import is_job_id
from shared.outcomes import CancelOutcome
from shared.protocol import Usage
from shared.transitions import Transitions

_FIRST_POLL_S = 0.002
_MAX_POLL_S = 0.25

Outcome = Literal["cancelled_queued", "cancelled_running", "already_finished"]


@dataclass(frozen=True)
class Acknowledged:
    """What a cancel has done, and how the job has ended."""

    outcome: Outcome
    ended: str
    usage: Usage | None = None
    """Not of a job that never ran, nor of one that was ended over its worker's head."""


async def cancel_and_wait(
    transitions: Transitions, job_id: str, *, force_after_s: float, tenant: str | None = None
) -> Acknowledged:
    """End a job and tell what it was doing. Safe to repeat. Raises `UnknownJob`.

    `tenant`: whose job it must be, if that matters.
    A running job that its worker doesn't end within `force_after_s` is ended over its head.
    """
    lane = await transitions.lane_of(job_id, tenant=tenant) if is_job_id(job_id) else None
    if lane is None:
        raise UnknownJob
    first = await transitions.cancel(job_id, lane)
    if first.word == "unknown":
        raise UnknownJob
    if first.word == "queued":
        return Acknowledged("cancelled_queued", "cancelled")
    if first.word == "finished":
        return Acknowledged("already_finished", first.outcome, first.usage)
    last = await _wait_end(transitions, job_id, lane, force_after_s)
    if last.word == "finished" and last.outcome != "cancelled":
        return Acknowledged("already_finished", last.outcome, last.usage)
    return Acknowledged("cancelled_running", "cancelled", last.usage)


async def _wait_end(
    transitions: Transitions, job_id: str, lane: str, force_after_s: float
) -> CancelOutcome:
    """Repeat the cancel, which nudges the worker, until the job has ended; then end it here."""
    delay_s = _FIRST_POLL_S
    try:
        async with asyncio.timeout(force_after_s):
            while True:
                await asyncio.sleep(delay_s)
                outcome = await transitions.cancel(job_id, lane)
                if outcome.word != "running":
                    return outcome
                delay_s = min(2 * delay_s, _MAX_POLL_S)
    except TimeoutError:
        return await transitions.cancel(job_id, lane, force=True)
