"""`jobs`, `show` and `cancel`: jobs in their lanes, one by one, and their end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from redis.asyncio import Redis

from shared import protocol
from shared.admin import dead
from shared.admin.access import Access, Peeked, Refused, attempts
from shared.admin.documents import Cancelled, Error, Job, JobRow, Jobs, Times
from shared.admin.lanes import PAGE, Place, Stream, claimed, streams, waiting
from shared.cancelling import cancel_and_wait
from shared.errors import UnknownJob
from shared.keys import LANES, is_job_id, tag_of
from shared.status import read_status


def unknown(job_id: str) -> Refused:
    """Return what is raised where there is no such job."""
    return Refused(f"no job `{job_id}`: it never was, or is forgotten", "job_not_found")


async def jobs(
    access: Access, *, pool: str | None, lane: str | None, state: str | None, limit: int
) -> Jobs:
    """List jobs: those that workers hold, oldest first, then those that wait, in order."""
    pools = await access.pools(pool)
    found = await streams(access, pools, [lane] if lane else LANES)
    now = await access.now()
    rows: list[JobRow] = []
    async with aclosing(_places(access, found, state, limit)) as places:
        page: list[Place] = []
        async for place in places:
            page.append(place)
            if len(page) == PAGE:
                rows += await _rows(access, page, now)
                page = []
        rows += await _rows(access, page, now)
    total = sum(
        (state != "queued") * one.claimed + (state != "running") * one.queued for one in found
    )
    return Jobs(jobs=rows, total=total)


async def _places(
    access: Access, found: list[Stream], state: str | None, limit: int
) -> AsyncGenerator[Place, None]:
    kinds = {"running": [claimed], "queued": [waiting]}.get(state or "", [claimed, waiting])
    for places_of in kinds:
        for stream in found:
            if limit <= 0:
                return
            async with aclosing(places_of(access, stream, limit)) as places:
                async for place in places:
                    limit -= 1
                    yield place


async def _rows(access: Access, page: list[Place], now: float) -> list[JobRow]:
    peeked = await access.peek([place.job_id for place in page])
    return [_row(place, peeked.get(place.job_id), now) for place in page]


def _row(place: Place, peeked: Peeked | None, now: float) -> JobRow:
    fields = peeked.fields if peeked else {}
    state = fields.get("state", "gone")
    if state == "queued" and place.worker is not None:
        state = "claimed"
    job = peeked.job if peeked else None
    submitted = peeked.time("submitted") if peeked else None
    return JobRow(
        id=place.job_id,
        state=state,
        pool=place.stream.pool,
        lane=place.stream.lane,
        model=fields.get("model"),
        tenant=job.tenant or None if job else None,
        age_s=None if submitted is None else max(now - submitted, 0.0),
        worker=place.worker,
        attempts=int(fields.get("attempts", 0)),
        position=place.position,
    )


async def show(access: Access, job_id: str) -> Job:
    """Tell all about a job but what was asked and answered."""
    peeked = (await access.peek([job_id])).get(job_id) if is_job_id(job_id) else None
    if peeked is None:
        if await dead.holds(access, job_id):
            raise Refused(f"job `{job_id}` is in the dead-letter: see dead show", "job_dead")
        raise unknown(job_id)
    fields, job = peeked.fields, peeked.job
    frames, error, ttl_ms = await _log(access, job_id, ended=fields["state"] == "done")
    pool = await access.pool_of(tag_of(job_id))
    status = await read_status(access.clients, access.keys, job_id)
    return Job(
        id=job_id,
        state=fields["state"],
        outcome=fields.get("outcome"),
        error=error,
        pool=pool,
        lane=fields["lane"],
        position=status.position if status else None,
        worker=fields.get("worker"),
        cancel=fields.get("cancel") if fields["state"] != "done" else None,
        attempts=peeked.number("attempts"),
        strikes=peeked.number("strikes"),
        history=attempts(fields.get("history", "")),
        times=_times(peeked, await access.now(), ttl_ms),
        usage=peeked.usage,
        frames=frames,
        readers=fields.get("readers", "").split(),
        model=fields.get("model"),
        stream={"1": True, "0": False}.get(fields.get("stream", "")),
        tenant=job.tenant or None if job else None,
        path=job.path if job else None,
        sequences=job.sequences if job else None,
        body_bytes=peeked.number("body_bytes") if job else None,
        request_id=job.request_id or None if job else None,
        gateway=job.gateway or None if job else None,
    )


async def _log(access: Access, job_id: str, *, ended: bool) -> tuple[int, Error | None, int]:
    """Return the length of a job's log, the error in its terminal frame and the job's TTL."""

    async def read(redis: Redis) -> Any:
        pipeline = redis.pipeline(transaction=False)
        pipeline.xlen(access.keys.log(job_id))
        pipeline.pttl(access.keys.job(job_id))
        # What is last while it runs may hold a part of the answer.
        last = await redis.xrevrange(access.keys.log(job_id), count=1) if ended else None
        return *await pipeline.execute(), last

    frames, ttl_ms, last = await access.at(tag_of(job_id), read)
    if not last:
        return frames, None, ttl_ms
    end = protocol.decode_frame(protocol.open_message(last[0][1][b"f"]).body).end
    error = Error(code=end.code, message=end.message) if end and end.code else None
    return frames, error, ttl_ms


def _times(peeked: Peeked, now: float, ttl_ms: int) -> Times:
    submitted, started = peeked.time("submitted"), peeked.time("started")
    finished, state = peeked.time("finished"), peeked.fields["state"]
    began = started if state != "queued" else None
    waited = ran = None
    if submitted is not None:
        waited = max((began or finished or now) - submitted, 0.0)
    if began is not None:
        ran = max((finished or now) - began, 0.0)
    return Times(
        submitted=submitted,
        started=started,
        finished=finished,
        deadline=peeked.time("deadline"),
        waited_s=waited,
        ran_s=ran,
        kept_s=ttl_ms / 1000 if ttl_ms >= 0 else None,
    )


async def cancel(access: Access, job_id: str) -> Cancelled:
    """End a job in any state, and say what it was doing."""
    try:
        done = await cancel_and_wait(
            access.transitions, job_id, force_after_s=access.settings.force_cancel_s
        )
    except UnknownJob:
        raise unknown(job_id) from None
    return Cancelled(id=job_id, outcome=done.outcome, ended=done.ended, usage=done.usage)
