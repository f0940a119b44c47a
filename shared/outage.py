"""Tells of something that is away once, and once when it is back, however often it was tried."""

from __future__ import annotations

import time
from typing import Any

from shared.connection import reason
from shared.logs import Log


class Outage:
    """One thing's absence. `fields` say whose."""

    def __init__(self, log: Log, lost: str, back: str, **fields: Any) -> None:
        self._log = log
        self._lost = lost
        self._back = back
        self._fields = fields
        self._since: float | None = None

    def note(self, error: BaseException, **fields: Any) -> None:
        """It is away: a warning the first time, with why."""
        say = self._log.debug if self._since is not None else self._log.warning
        self._since = self._since or time.monotonic()
        say(self._lost, reason=reason(error), **self._fields, **fields)

    def over(self) -> None:
        """It is there; a line if it was away."""
        if self._since is not None:
            after_s = round(time.monotonic() - self._since, 2)
            self._since = None
            self._log.info(self._back, after_s=after_s, **self._fields)
