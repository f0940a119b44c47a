"""Jobs by their id, from any gateway."""

from __future__ import annotations

from typing import Any

from gateway.settings import GatewaySettings
from shared.cancelling import cancel_and_wait
from shared.transitions import Transitions


class Jobs:
    """What clients may do with a job whose id they know."""

    def __init__(self, settings: GatewaySettings, transitions: Transitions) -> None:
        self._force_after_s = settings.force_cancel_s
        self._transitions = transitions

    async def cancel(self, job_id: str) -> dict[str, Any]:
        """End a job and tell what it was doing. Safe to repeat. Raises `UnknownJob`."""
        done = await cancel_and_wait(self._transitions, job_id, force_after_s=self._force_after_s)
        usage = None
        if done.usage is not None:
            prompt, completion = done.usage.prompt_tokens, done.usage.completion_tokens
            usage = {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            }
        return {
            "id": job_id,
            "object": "job",
            "outcome": done.outcome,
            "ended": done.ended,
            "usage": usage,
        }
