"""Hears nudges: a gateway that cancels a running job tells its worker at once.

The cancel itself stands in the job's key. A nudge that is lost is found there by the next write or
beat. `drain` comes from an operator, who repeats it until the worker has left.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.logs import Log, about
from worker.running import Running

log = Log("cancellation")


class Nudges:
    """The sink of the worker's control channel."""

    def __init__(
        self,
        running: Running,
        missed: Callable[[], None],
        drain: Callable[[], None] = lambda: None,
        adapters: Callable[[], None] = lambda: None,
    ) -> None:
        self._running = running
        self._missed = missed
        self._drain = drain
        """Begins the drain; may be called again."""
        self._adapters = adapters
        """Has the wanted adapters looked at."""

    def on_message(self, message: bytes) -> None:
        """Take `cancel <job> <owner> <reason>`, `drain` or `adapters`."""
        if message == b"drain":
            log.info("worker.drain_asked")
            self._drain()
            return
        if message == b"adapters":
            self._adapters()
            return
        try:
            verb, job_id, owner, reason = message.decode().split(" ")
        except ValueError:
            return
        run = self._running.jobs.get(job_id)
        if verb == "cancel" and run is not None and run.adopted.owner == owner:
            log.info("job.cancelled", **about(run.adopted.job), reason=reason)
            run.stop(reason)

    def on_subscribed(self) -> None:
        """Nudges may have been lost: have a beat look."""
        self._missed()
