"""Settings of `headrace-admin`, read from `HEADRACE_*` variables."""

from __future__ import annotations

from shared.settings import RedisSettings, Seconds


class AdminSettings(RedisSettings):
    """How to reach the queue, and what the gateways do too."""

    force_cancel_s: Seconds = 5
    """How long a worker has to end a cancelled job before it is ended over its head."""
