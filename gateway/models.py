"""Which models there are and who serves them: the registry, read by one task for all requests."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.callers import may_use
from gateway.metrics import Metrics
from gateway.settings import GatewaySettings
from shared.connection import reason
from shared.errors import (
    HeadraceError,
    InvalidRequest,
    NoWorker,
    QueueUnavailable,
    UnknownModel,
)
from shared.keys import tags
from shared.logs import Log
from shared.protocol import KeyRecord, ModelRecord
from shared.registry import Registry, Snapshot
from shared.transitions import Transitions

log = Log("models")

_NO_WORKER_RETRY_S = 5


class Models:
    """The last snapshot of the registry, kept while the queue is away."""

    def __init__(
        self,
        settings: GatewaySettings,
        registry: Registry,
        transitions: Transitions,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._transitions = transitions
        self._metrics = metrics
        self._snapshot: Snapshot | None = None
        self._away: frozenset[str] = frozenset()
        """Tags whose server could not be reached at the last reading."""
        self._deserted: dict[str, float] = {}
        """Pool → since when it has no worker, by the loop's clock."""
        self.on_deserted: Callable[[Mapping[str, float]], None] = lambda _: None
        """Called at each reading with the tags of pools that have no worker, and since when."""
        self.reachable = False
        """Whether the last reading succeeded."""
        self._tried = asyncio.Event()
        """Set once there has been a reading, or none could be made."""

    async def known(self) -> None:
        """Wait for the first reading: a gateway that has just begun doesn't know the models yet."""
        if not self._tried.is_set():
            try:
                async with asyncio.timeout(self._settings.submit_timeout_s):
                    await self._tried.wait()
            except TimeoutError as error:
                raise QueueUnavailable(retry_after_s=2) from error

    async def run(self) -> None:
        """Read the registry until cancelled."""
        warned = False
        said = ""
        while True:
            try:
                snapshot = await self._registry.snapshot()
                if not warned:
                    await self._registry.warn_of_eviction()
                    warned = True
                try:
                    # Before the first request is sent to a shard that is away.
                    await self._read_depths(snapshot)
                finally:
                    self._snapshot = snapshot
                self._note_deserted(snapshot)
                self.reachable = True
                if said:
                    log.info("queue.reached")
                said = ""
            except HeadraceError as error:
                self.reachable = False
                if not said:
                    log.warning("queue.unreachable", error=error.code, reason=reason(error))
                said = error.code
            except msgspec.MsgspecError as error:  # Somebody else's record is no reason to end.
                if not said:
                    log.error("registry.unreadable", error=str(error))
                said = "registry_unreadable"
            self._tried.set()
            await asyncio.sleep(self._settings.registry_refresh_s)

    def _note_deserted(self, snapshot: Snapshot) -> None:
        """See which pools have lost all their workers. One that starts may be any pool's."""
        now = asyncio.get_running_loop().time()
        pools = {record.pool: record.shards for record in snapshot.models.values()}
        if any(worker.state == "starting" for worker in snapshot.workers):
            pools = {}
        for worker in snapshot.workers:
            pools.pop(worker.pool, None)
        self._deserted = {pool: self._deserted.get(pool, now) for pool in pools}
        if pools:
            since = self._deserted
            told = {one: since[pool] for pool in pools for one in tags(pool, pools[pool])}
            self.on_deserted(told)

    async def _read_depths(self, snapshot: Snapshot) -> None:
        """Set the gauges: all lanes of all pools whose models are known."""
        self._metrics.pools.ready_workers = len(snapshot.ready())
        pools = {record.pool: record.shards for record in snapshot.models.values()}
        places = [(pool, one) for pool, shards in pools.items() for one in tags(pool, shards)]
        told = await asyncio.gather(
            *(self._transitions.depths(one) for _, one in places), return_exceptions=True
        )
        away: dict[str, HeadraceError] = {}
        totals: dict[tuple[str, str], int] = {}
        for (pool, one), depths in zip(places, told, strict=True):
            if isinstance(depths, HeadraceError):
                away[one] = depths
            elif isinstance(depths, BaseException):
                raise depths
            else:
                for lane, depth in depths.items():
                    totals[pool, lane] = totals.get((pool, lane), 0) + depth
        self._note_away(away, all_of_them=len(away) == len(places))
        self._metrics.pools.depths = totals

    def _note_away(self, away: dict[str, HeadraceError], *, all_of_them: bool) -> None:
        """Remember which shards can't be reached. Raises where none can."""
        if self._away and not away:
            log.info("shards.reached")
        elif away and not self._away and not all_of_them:
            log.warning("shards.away", shards=len(away), reason=reason(next(iter(away.values()))))
        self._away = frozenset(away)
        if away and all_of_them:
            raise next(iter(away.values()))

    @property
    def ready_workers(self) -> int:
        """Workers that take jobs, as of the last reading."""
        return len(self._snapshot.ready()) if self._snapshot else 0

    @property
    def servable(self) -> bool:
        """Whether requests are taken: by ready workers, or to wait for the first of a pool."""
        if self.ready_workers:
            return True
        waits = self._settings.no_worker_wait_s > 0
        return waits and self._snapshot is not None and bool(self._snapshot.models)

    def resolve(self, name: Any) -> ModelRecord:
        """Return the record of the model that a body names.

        Without a name the only pool's own model is meant. A name that is no text goes there too:
        what is wrong with it the worker says best. A pool without a ready worker is named all the
        same, where requests may wait for one. Raises `UnknownModel`, `NoWorker`.
        """
        snapshot = self._snapshot
        if snapshot is None:
            raise QueueUnavailable(retry_after_s=2)
        if isinstance(name, str) and name:
            record = snapshot.models.get(name)
            if record is None:
                raise UnknownModel(f"The model `{name[:200]}` does not exist.", param="model")
            if not snapshot.served(name) and not self._may_wait(snapshot, record):
                raise no_worker()
            return record
        if not snapshot.models:
            raise no_worker()
        pools = {record.pool for record in snapshot.models.values()}
        if len(pools) > 1:
            raise InvalidRequest("The parameter `model` is missing.", param="model")
        for worker in snapshot.ready():
            if worker.models and (record := snapshot.models.get(worker.models[0])):
                return record
        record = min(snapshot.models.values(), key=_standing)
        if not self._may_wait(snapshot, record):
            raise no_worker()
        return record

    def _may_wait(self, snapshot: Snapshot, record: ModelRecord) -> bool:
        """Tell whether a model's request may be queued though no ready worker serves it.

        Not where the pool has workers that don't: they would take the job and fail it.
        """
        served = any(one.pool == record.pool for one in snapshot.ready())
        return self._settings.no_worker_wait_s > 0 and not served

    def shard(self, record: ModelRecord) -> str:
        """Return the tag of one of the pool's shards, if possible of one that can be reached."""
        all_tags = tags(record.pool, record.shards)
        return random.choice([one for one in all_tags if one not in self._away] or all_tags)

    def lane_limit(self, record: ModelRecord) -> int:
        """Return how many jobs, queued and running, one lane of one shard may hold."""
        workers = self._snapshot.ready() if self._snapshot else []
        seats = sum(one.seats for one in workers if one.pool == record.pool)
        depth = self._settings.max_queue_depth
        return max(1, math.ceil((seats + depth) / record.shards))

    def tenant_limit(self, record: ModelRecord, tenant: str) -> int:
        """Return how many jobs of a tenant may wait in one lane of one shard; 0: any number."""
        limit = self._settings.tenant_queue_limit if tenant else 0
        return math.ceil(limit / record.shards)

    def listing(self, caller: KeyRecord) -> list[dict[str, Any]]:
        """Return OpenAI's list of the models that are served now and that a caller may use."""
        snapshot = self._snapshot
        if snapshot is None:
            raise QueueUnavailable(retry_after_s=2)
        served = sorted(name for name in snapshot.models if snapshot.served(name))
        return [_card(snapshot.models[name]) for name in served if may_use(caller, name)]

    def engines(self) -> str:
        """Return the versions of the engines behind ready workers. Raises `NoWorker`."""
        workers = self._snapshot.ready() if self._snapshot else []
        if not workers:
            raise NoWorker("No worker is ready.", retry_after_s=_NO_WORKER_RETRY_S)
        # "vllm 0.32.0": whoever asks wants what `vllm serve` would say.
        return ", ".join(sorted({one.engine.removeprefix("vllm ") for one in workers}))

    def card(self, name: str, caller: KeyRecord) -> dict[str, Any]:
        """Return OpenAI's description of one of these models."""
        for card in self.listing(caller):
            if card["id"] == name:
                return card
        raise UnknownModel(f"The model `{name[:200]}` does not exist.", param="model")


def no_worker() -> NoWorker:
    """Return the error for a model whose workers are away."""
    return NoWorker(param="model", retry_after_s=_NO_WORKER_RETRY_S)


def _standing(record: ModelRecord) -> tuple[bool, bool, str]:
    """Put a pool's own model first, then other names of it, then adapters."""
    return record.parent is not None, record.name != record.pool, record.name


def _card(record: ModelRecord) -> dict[str, Any]:
    return {
        "id": record.name,
        "object": "model",
        "created": record.created,
        "owned_by": "headrace",
        "root": record.parent or record.name,
        "parent": record.parent,
        "max_model_len": record.max_model_len or None,
    }
