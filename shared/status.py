"""What a client may know of its job: everything but what was asked and answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from shared import protocol
from shared.border import translated
from shared.connection import Clients
from shared.keys import LANES, Keys, tag_of
from shared.protocol import Usage
from shared.scripts import Script

COUNTED = 10_000
"""Highest place in a lane that is told."""

_FIELDS = (
    "state outcome lane model stream attempts strikes submitted started finished deadline usage "
    "tenant"
).split()
_status = Script("status")


@dataclass(frozen=True)
class Status:
    """A job. Times are Unix time by the server's clock, durations seconds."""

    state: str
    outcome: str | None
    lane: str
    model: str | None
    stream: bool
    attempts: int
    strikes: int
    position: int | None
    """Of a job that waits, about: 1 is the next of its lane."""
    submitted_at: float
    started_at: float | None
    """By its last worker."""
    finished_at: float | None
    deadline: float
    waited_s: float
    """Until the last start, or until now."""
    ran_s: float | None
    usage: Usage | None
    tenant: str


async def read_status(clients: Clients, keys: Keys, job_id: str) -> Status | None:
    """Return what is known of a job, None if there is no such job. Raises `QueueUnavailable`."""
    job_tag = tag_of(job_id)

    async def read(redis: Redis) -> Any:
        # First its lane: a script must name its keys.
        lane: Any = await redis.hget(keys.job(job_id), "lane")
        name = lane.decode() if lane else LANES[0]
        names = [keys.job(job_id), keys.lane(job_tag, name), keys.returned(job_tag, name)]
        return await _status(redis, names, [*_FIELDS, COUNTED])

    async with translated():
        reply = await clients.run(job_tag, read)
    if not reply:
        return None
    values, now_ms, place = reply
    fields = {
        name: value.decode() if name != "usage" else value
        for name, value in zip(_FIELDS, values, strict=True)
        if value
    }

    def time(name: str) -> float | None:
        return int(fields[name]) / 1000 if name in fields else None

    submitted, started, finished = time("submitted") or 0, time("started"), time("finished")
    began = started if fields["state"] != "queued" else None
    until = finished or now_ms / 1000
    return Status(
        state=fields["state"],
        outcome=fields.get("outcome"),
        lane=fields["lane"],
        model=fields.get("model"),
        stream=fields.get("stream") == "1",
        attempts=int(fields["attempts"]),
        strikes=int(fields["strikes"]),
        position=place if place > 0 else None,
        submitted_at=submitted,
        started_at=started,
        finished_at=finished,
        deadline=time("deadline") or 0,
        waited_s=round(max((began or until) - submitted, 0), 3),
        ran_s=None if began is None else round(max(until - began, 0), 3),
        usage=protocol.decode_usage(fields["usage"]) if "usage" in fields else None,
        tenant=fields.get("tenant", ""),
    )
