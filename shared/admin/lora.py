"""`lora …`: adapters on all workers of a model's pool, at run time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from shared.adapters import MOST_ADAPTERS
from shared.admin.access import Access, Refused
from shared.admin.documents import Adapter, AdapterChange, Adapters, AdapterWorker
from shared.admin.drain import nudge
from shared.errors import QueueUnavailable
from shared.protocol import AdapterRecord, WorkerRecord
from shared.registry import Snapshot

_LOOK_S = 0.2


async def load(access: Access, model: str, name: str, source: str, wait_s: float) -> AdapterChange:
    """Have an adapter wanted, and wait for every ready worker's word. Raises `Refused`."""
    snapshot = await access.registry.snapshot()
    pool = _pool(snapshot, model)
    wanted = await access.adapters.wanted(pool)
    _check_name(snapshot, pool, name, wanted=name in wanted)
    for other in {one.pool for one in snapshot.models.values()} - {pool}:
        if name in await access.adapters.wanted(other):
            raise Refused(f"pool `{other}` has an adapter `{name}`", "name_taken")
    if name in wanted and wanted[name].source != source:
        raise Refused(
            f"`{name}` is wanted from {wanted[name].source} already: unload it first", "name_taken"
        )
    if name not in wanted and len(wanted) >= MOST_ADAPTERS:
        raise Refused(f"pool `{pool}` has {MOST_ADAPTERS} adapters already", "too_many_adapters")
    asked_ms = int(await access.now() * 1000)
    wish = AdapterRecord(name=name, source=source, asked_ms=asked_ms)
    await access.adapters.want(pool, wish)
    return await _awaited(access, pool, name, wish, wait_s)


async def unload(access: Access, model: str, name: str, wait_s: float) -> AdapterChange:
    """Have it wanted no more, and wait until no worker has it. Raises `Refused`."""
    snapshot = await access.registry.snapshot()
    pool = _pool(snapshot, model)
    if name not in await access.adapters.wanted(pool):
        raise Refused(f"pool `{pool}` has no adapter `{name}`", "adapter_not_found")
    await access.adapters.unwant(pool, name)
    change = await _awaited(access, pool, name, None, wait_s)
    snapshot = await access.registry.snapshot()
    known = snapshot.models.get(name)
    held = any(name in one.models for one in snapshot.workers)
    if known is not None and known.pool == pool and not held:
        # Of workers that died with it.
        await access.registry.forget_models([name])
    return change


async def listing(access: Access, model: str) -> Adapters:
    """Tell what is wanted of a model's pool, and how far its workers are. Raises `Refused`."""
    snapshot = await access.registry.snapshot()
    pool = _pool(snapshot, model)
    wanted = (await access.adapters.wanted(pool)).values()
    ready = _ready(snapshot, pool)
    return Adapters(
        pool=pool,
        adapters=[
            Adapter(
                name=wish.name,
                source=wish.source,
                asked=wish.asked_ms / 1000,
                workers=[_told(one, wish.name, wish) for one in ready],
            )
            for wish in wanted
        ],
    )


def _pool(snapshot: Snapshot, model: str) -> str:
    record = snapshot.models.get(model)
    if record is None:
        raise Refused(f"no model `{model}`", "model_not_found")
    if record.parent is not None:
        raise Refused(f"`{model}` is an adapter itself, of `{record.parent}`", "not_a_model")
    return record.pool


def _check_name(snapshot: Snapshot, pool: str, name: str, *, wanted: bool) -> None:
    """Refuse a name that stands for something else."""
    record = snapshot.models.get(name)
    if name in {one.pool for one in snapshot.models.values()}:
        raise Refused(f"`{name}` is a pool's name", "name_taken")
    if record is None:
        return
    # A name that was unloaded may stay a while: what only workers' records say, doesn't.
    of_start = not wanted and any(
        name in one.models and name not in one.adapters for one in snapshot.workers
    )
    if record.parent is None or record.pool != pool or of_start:
        raise Refused(f"`{name}` is served already, by pool `{record.pool}`", "name_taken")


def _ready(snapshot: Snapshot, pool: str) -> list[WorkerRecord]:
    """Return the pool's workers that take jobs; one that starts loads before it does."""
    return [one for one in snapshot.ready() if one.pool == pool]


async def _awaited(
    access: Access, pool: str, name: str, wish: AdapterRecord | None, wait_s: float
) -> AdapterChange:
    """Nudge the pool's workers, and wait until each has said what it made of the wish."""
    begun = time.monotonic()
    nudged: set[str] = set()
    while True:
        ready = _ready(await access.registry.snapshot(), pool)
        await _nudge(access, [one for one in ready if one.id not in nudged])
        nudged |= {one.id for one in ready}
        told = [_told(one, name, wish) for one in ready]
        waited_s = time.monotonic() - begun
        if waited_s >= wait_s or all(one.state != "waiting" for one in told):
            return AdapterChange(
                pool=pool,
                name=name,
                source=None if wish is None else wish.source,
                outcome=_outcome(told, "unloaded" if wish is None else "loaded"),
                workers=told,
                waited_s=waited_s,
            )
        await asyncio.sleep(min(_LOOK_S, wait_s))


async def _nudge(access: Access, workers: Sequence[WorkerRecord]) -> None:
    """Have them look at once; one that doesn't hear it looks at its next beat."""
    for one in workers:
        try:
            await nudge(access, one, "adapters")
        except QueueUnavailable:
            continue


def _told(worker: WorkerRecord, name: str, wish: AdapterRecord | None) -> AdapterWorker:
    """Return what a worker says of a wish; None: that it has the adapter no more."""
    asked_ms, failure = worker.adapters.get(name, (-1, ""))
    if wish is None:
        state = "waiting" if name in worker.models else "unloaded"
        return AdapterWorker(worker=worker.id, state=state, reason="")
    if asked_ms != wish.asked_ms:
        return AdapterWorker(worker=worker.id, state="waiting", reason="")
    state = "failed" if failure else "loaded"
    return AdapterWorker(worker=worker.id, state=state, reason=failure)


def _outcome(told: Sequence[AdapterWorker], done: str) -> str:
    states = {one.state for one in told}
    if not states:
        return "no_worker"
    if "failed" in states:
        return "failed"
    return "timed_out" if "waiting" in states else done
