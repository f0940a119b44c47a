"""`drain`: ask a worker to leave, as SIGTERM does, from anywhere."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import Any

from redis.asyncio import Redis

from shared.admin.access import Access, Refused
from shared.admin.documents import Drained
from shared.errors import QueueUnavailable
from shared.keys import tags
from shared.protocol import WorkerRecord

_LOOK_S = 0.2
_REPEAT_S = 2.0
"""How often it is asked again: a worker that loads hears nothing yet, and a message may be lost."""


async def drain(access: Access, worker_id: str, wait_s: float) -> Drained:
    """Ask a worker to drain, and wait until it has left. Raises `Refused`."""
    record = first = await _find(access, worker_id)
    if first is None:
        raise Refused(f"no worker `{worker_id}`", "worker_not_found")
    begun = time.monotonic()
    asked_at, heard = begun, await nudge(access, first)
    while (record := await _find(access, worker_id)) is not None:
        now = time.monotonic()
        if record.started_ms != first.started_ms:
            break  # Its supervisor has started another under the same name.
        if now - begun >= wait_s:
            outcome = "draining" if heard or record.state == "draining" else "unheard"
            return Drained(
                worker=worker_id, outcome=outcome, running=record.running, waited_s=now - begun
            )
        if now - asked_at >= _REPEAT_S and record.state != "draining":
            asked_at, heard = now, await nudge(access, record) or heard
        await asyncio.sleep(min(_LOOK_S, wait_s))
    waited_s = time.monotonic() - begun
    return Drained(worker=worker_id, outcome="left", running=0, waited_s=waited_s)


async def _find(access: Access, worker_id: str) -> WorkerRecord | None:
    workers = (await access.registry.snapshot()).workers
    return next((one for one in workers if one.id == worker_id), None)


async def nudge(access: Access, record: WorkerRecord, word: str = "drain") -> bool:
    """Send a word on the worker's channel of each tag; whether anybody listened."""
    heard = 0
    command = "SPUBLISH" if access.clients.sharded else "PUBLISH"
    for one in tags(record.pool, record.shards):
        channel = access.keys.control(one, record.id)
        publish = partial(_publish, command=command, channel=channel, word=word)
        with suppress(QueueUnavailable):  # The worker listens on all, and one is enough.
            heard += await access.at(one, publish)
    return heard > 0


async def _publish(redis: Redis, command: str, channel: str, word: str) -> int:
    heard: Any = await redis.execute_command(command, channel, word)  # type: ignore[no-untyped-call]
    return int(heard)
