"""Jobs by their id, from any gateway."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.settings import GatewaySettings
from shared.errors import UnknownJob
from shared.keys import is_job_id
from shared.protocol import Usage
from shared.transitions import CancelOutcome, Transitions

_FIRST_POLL_S = 0.002
_MAX_POLL_S = 0.25


class Jobs:
    """What clients may do with a job whose id they know."""

    def __init__(self, settings: GatewaySettings, transitions: Transitions) -> None:
        self._force_after_s = settings.force_cancel_s
        self._transitions = transitions

    async def cancel(self, job_id: str) -> dict[str, Any]:
        """End a job and tell what it was doing. Safe to repeat. Raises `UnknownJob`."""
        lane = await self._transitions.lane_of(job_id) if is_job_id(job_id) else None
        if lane is None:
            raise UnknownJob
        first = await self._transitions.cancel(job_id, lane)
        if first.word == "unknown":
            raise UnknownJob
        if first.word == "queued":
            return _answer(job_id, "cancelled_queued", "cancelled", None)
        if first.word == "finished":
            return _answer(job_id, "already_finished", first.outcome, first.usage)
        last = await self._wait_end(job_id, lane)
        if last.word == "finished" and last.outcome != "cancelled":
            return _answer(job_id, "already_finished", last.outcome, last.usage)
        return _answer(job_id, "cancelled_running", "cancelled", last.usage)

    async def _wait_end(self, job_id: str, lane: str) -> CancelOutcome:
        """Repeat the cancel, which nudges the worker, until the job has ended; then end it here."""
        delay_s = _FIRST_POLL_S
        try:
            async with asyncio.timeout(self._force_after_s):
                while True:
                    await asyncio.sleep(delay_s)
                    outcome = await self._transitions.cancel(job_id, lane)
                    if outcome.word != "running":
                        return outcome
                    delay_s = min(2 * delay_s, _MAX_POLL_S)
        except TimeoutError:
            return await self._transitions.cancel(job_id, lane, force=True)


def _answer(job_id: str, outcome: str, ended: str, usage: Usage | None) -> dict[str, Any]:
    counted = None
    if usage is not None:
        counted = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
    return {"id": job_id, "object": "job", "outcome": outcome, "ended": ended, "usage": counted}
