"""How busy vLLM is, as its statistics of the last step say."""

from __future__ import annotations

from typing import Any

from worker.engine.interface import Load


class Gauge:
    """Holds the last step's numbers of each engine core (several with data parallelism)."""

    def __init__(self) -> None:
        self.steps = 0
        self._cores: dict[int, Load] = {}

    def record(self, core: int, stats: Any | None) -> None:
        """Take the statistics of one step; a step without them is still a step."""
        self.steps += 1
        if stats is not None:
            # Requests that wait for a grammar or a remote cache are counted apart.
            skipped = getattr(stats, "num_skipped_waiting_reqs", 0)
            self._cores[core] = Load(
                running=stats.num_running_reqs,
                waiting=stats.num_waiting_reqs + skipped,
                kv_usage=stats.kv_cache_usage,
            )

    def load(self) -> Load:
        """Return the sum over the cores; of the caches, the fullest decides."""
        cores = self._cores.values()
        return Load(
            running=sum(core.running for core in cores),
            waiting=sum(core.waiting for core in cores),
            kv_usage=max((core.kv_usage for core in cores), default=0.0),
        )
