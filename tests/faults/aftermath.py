"""What must hold once all is over: nothing left behind, and every job ended once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from shared import protocol
from shared.connection import Fixed
from shared.keys import GROUP, Keys
from shared.protocol import Usage, WorkerRecord
from shared.registry import Registry
from tests.support.client import client_of
from tests.support.waiting import until

KEYS = Keys()
IDLE_S = 8.0
"""A lease, the beats until it is seen to have lapsed, and a gateway's patience with a worker."""


@dataclass
class JobState:
    """A job as the queue knows it."""

    fields: dict[str, str]
    usage: Usage | None = None
    ends: list[int] = field(default_factory=list)
    """Places of terminal frames in its log."""
    frames: int = 0

    @property
    def outcome(self) -> str:
        return self.fields.get("outcome", "")

    @property
    def attempts(self) -> int:
        return int(self.fields["attempts"])

    @property
    def worker(self) -> str:
        return self.fields.get("worker", "")


class Inspector:
    """Looks into the queue, past gateways and workers."""

    def __init__(self, url: str) -> None:
        self.redis = client_of(url)

    async def close(self) -> None:
        await self.redis.aclose()

    async def keys(self, pattern: str = "*") -> list[str]:
        return [key.decode() async for key in self.redis.scan_iter(pattern, count=1000)]

    async def without_ttl(self) -> list[str]:
        """Return the keys that would stay for ever."""
        names = await self.keys()
        pipeline = self.redis.pipeline(transaction=False)
        for name in names:
            pipeline.pttl(name)
        return [n for n, ttl in zip(names, await pipeline.execute(), strict=True) if ttl == -1]

    async def lanes(self) -> dict[str, tuple[int, int]]:
        """Return lane stream → entries, and pending ones among them."""
        found = {}
        for name in await self.keys("*:lane:*"):
            if await self.redis.type(name) != b"stream":
                continue
            pending = await self.redis.xpending(name, GROUP)
            found[name] = (await self.redis.xlen(name), pending["pending"])
        return found

    async def workers(self) -> dict[str, WorkerRecord]:
        """Return the registered workers."""
        snapshot = await Registry(Fixed(self.redis), KEYS).snapshot()
        return {one.id: one for one in snapshot.workers}

    async def job_ids(self) -> list[str]:
        return [name.rpartition(":")[2] for name in await self.keys("*:job:*")]

    async def jobs(self, ids: Collection[str]) -> dict[str, JobState]:
        """Return the states of jobs, without those that are not known."""
        pipeline = self.redis.pipeline(transaction=False)
        for job_id in ids:
            pipeline.hgetall(KEYS.job(job_id))
            pipeline.xrange(KEYS.log(job_id))
        replies = await pipeline.execute()
        found = {}
        for at, job_id in enumerate(ids):
            raw, entries = replies[2 * at], replies[2 * at + 1]
            if raw:
                found[job_id] = _job_state(raw, entries)
        return found

    async def running_on(self) -> dict[str, int]:
        """Return worker → jobs that it runs."""
        pipeline = self.redis.pipeline(transaction=False)
        for name in await self.keys("*:job:*"):
            pipeline.hmget(name, "state", "worker")
        counts: dict[str, int] = {}
        for state, worker in await pipeline.execute():
            if state == b"running":
                counts[worker.decode()] = counts.get(worker.decode(), 0) + 1
        return counts

    async def wait_idle(self, workers: Collection[str], timeout: float = IDLE_S) -> None:
        """Wait until lanes are empty and these workers, and no others, are there with nothing."""

        async def idle() -> bool:
            lanes = await self.lanes()
            assert all(counts == (0, 0) for counts in lanes.values()), lanes
            records = await self.workers()
            assert sorted(records) == sorted(workers), f"workers {sorted(records)}"
            busy = [r for r in records.values() if r.running or r.waiting or r.kv_usage]
            assert not busy, f"busy: {busy}"
            return True

        await until(idle, "empty lanes and idle engines", timeout=timeout, every=0.1)

    async def check_ended_once(self, jobs: dict[str, JobState]) -> None:
        """Check that each job is done, with one terminal frame, at its log's end."""
        wrong = {
            job_id: (job.fields.get("state"), job.ends, job.frames)
            for job_id, job in jobs.items()
            if job.fields.get("state") != "done" or job.ends != [job.frames]
        }
        assert not wrong, f"job: (state, terminal frames, frames) {wrong}"


def _job_state(
    raw: dict[bytes, bytes], entries: list[tuple[bytes, dict[bytes, bytes]]]
) -> JobState:
    usage = protocol.decode_usage(raw[b"usage"]) if raw.get(b"usage") else None
    skipped = (b"rec", b"usage")
    job = JobState({k.decode(): v.decode() for k, v in raw.items() if k not in skipped}, usage)
    job.frames = len(entries)
    for place, (_, fields) in enumerate(entries, 1):
        if protocol.decode_frame(protocol.open_message(fields[b"f"]).body).end is not None:
            job.ends.append(place)
    return job
