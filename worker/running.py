"""The jobs that this worker runs now."""

from __future__ import annotations

import asyncio

from worker.run import Run

SUSPECTS = 8
"""Most jobs of one strike that begin together: each waits for no more than a few first tokens."""


class Running:
    """Runs by job id, with a signal for each change."""

    def __init__(self) -> None:
        self.jobs: dict[str, Run] = {}
        self.sequences = 0
        """Sequences that they take in the engine."""
        self._seated: set[Run] = set()
        self._changed = asyncio.Event()

    def takes_suspect(self, strikes: int = 1) -> bool:
        """Tell whether a job that may be what killed its worker can run beside what runs now.

        After its first strike it can, beside a few others of one strike: it was one of many that
        ran there. With more it runs as the only suspect, so that no neighbour is condemned with it.
        """
        others = [run.adopted.strikes for run in self._seated if run.suspect]
        return not others or (len(others) < SUSPECTS and max(strikes, *others) == 1)

    @property
    def suspect(self) -> bool:
        """Whether one of them may be what killed another worker."""
        return any(run.suspect for run in self._seated)

    def sequences_of(self, lane: str) -> int:
        """Return the sequences of one lane's jobs."""
        jobs = (run.adopted.job for run in self._seated)
        return sum(max(job.sequences, 1) for job in jobs if job.lane == lane)

    def add(self, run: Run) -> None:
        self._seated.add(run)
        self.jobs[run.adopted.job.id] = run
        self.sequences += max(run.adopted.job.sequences, 1)
        self._changed.set()

    def free(self, run: Run) -> None:
        """Give back a run's seats: the engine is done with it, its last frames may not be."""
        if run in self._seated:
            self._seated.discard(run)
            self.sequences -= max(run.adopted.job.sequences, 1)
            run.over.set()
            self._changed.set()

    def remove(self, run: Run) -> None:
        """Remove a run, unless another attempt at its job has taken its place."""
        self.free(run)
        if self.jobs.get(run.adopted.job.id) is run:
            del self.jobs[run.adopted.job.id]
        self._changed.set()

    async def changed(self, timeout_s: float) -> None:
        """Wait for a job's beginning or end."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def drained(self) -> None:
        """Wait until nothing runs."""
        while self.jobs:
            await self.changed(timeout_s=1.0)
