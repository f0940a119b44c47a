"""Jobs by their id, from any gateway."""

from __future__ import annotations

from typing import Any

from gateway.settings import GatewaySettings
from shared.cancelling import cancel_and_wait
from shared.connection import Clients
from shared.errors import UnknownJob
from shared.keys import Keys, is_job_id
from shared.protocol import Usage
from shared.status import read_status
from shared.transitions import Transitions


class Jobs:
    """What clients may do with a job of their tenant whose id they know."""

    def __init__(
        self, settings: GatewaySettings, clients: Clients, keys: Keys, transitions: Transitions
    ) -> None:
        self._force_after_s = settings.force_cancel_s
        self._clients = clients
        self._keys = keys
        self._transitions = transitions

    async def status(self, job_id: str, tenant: str) -> dict[str, Any]:
        """Return what is known of a job, never what was asked or answered. Raises `UnknownJob`."""
        found = await read_status(self._clients, self._keys, job_id) if is_job_id(job_id) else None
        if found is None or found.tenant != tenant:
            raise UnknownJob
        return {
            "id": job_id,
            "object": "job",
            "state": found.state,
            "outcome": found.outcome,
            "model": found.model,
            "lane": found.lane,
            "stream": found.stream,
            "attempts": found.attempts,
            "strikes": found.strikes,
            "position": found.position,
            "submitted_at": found.submitted_at,
            "started_at": found.started_at,
            "finished_at": found.finished_at,
            "deadline": found.deadline,
            "waited_s": found.waited_s,
            "ran_s": found.ran_s,
            "usage": _usage(found.usage),
        }

    async def cancel(self, job_id: str, tenant: str) -> dict[str, Any]:
        """End a job and tell what it was doing. Safe to repeat. Raises `UnknownJob`."""
        done = await cancel_and_wait(
            self._transitions, job_id, force_after_s=self._force_after_s, tenant=tenant
        )
        return {
            "id": job_id,
            "object": "job",
            "outcome": done.outcome,
            "ended": done.ended,
            "usage": _usage(done.usage),
        }


def _usage(counted: Usage | None) -> dict[str, int] | None:
    if counted is None:
        return None
    prompt, completion = counted.prompt_tokens, counted.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
