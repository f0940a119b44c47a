"""Every branch of every transition, on fakeredis and on a real server alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import fakeredis
import pytest
from redis.asyncio import Redis

from shared.connection import connect
from shared.keys import GROUP, LANES, Keys, new_job_id
from shared.outcomes import Adopted, Claimed, Finish, Submitted, Verdict
from shared.protocol import (
    NOBODY,
    End,
    Envelope,
    Frame,
    Job,
    Usage,
    decode_frame,
    encode,
    open_message,
)
from shared.settings import RedisSettings
from shared.transitions import Transitions
from tests.support.appends import append_of
from tests.support.valkey import ValkeyServer
from tests.wire.records import TAG, make_job

BOTH = {"interactive": 4, "batch": 4}
BODY = encode(Frame([b"part"]))
END = encode(Frame(end=End(outcome="completed")))


class Pool:
    """A queue with the steps that most tests begin with."""

    def __init__(self, redis: Redis, *, shebang: bool) -> None:
        self.redis = redis
        self.keys = Keys("test")
        self.transitions = Transitions(redis, self.keys, result_ttl_s=100, shebang=shebang)

    async def submit(self, job: Job | None = None, **changes: Any) -> Job:
        job = job or make_job(**changes)
        submitted = await self.transitions.submit(job, limit=1000, timeout_s=60)
        assert submitted == Submitted("queued")
        return job

    async def claim(self, worker: str = "w1", **limits: int) -> list[Claimed]:
        return await self.transitions.claim(TAG, limits or BOTH, worker)

    async def adopt(self, owner: str = "o1", worker: str = "w1", **changes: Any) -> Adopted:
        """Submit a job, claim it and own it."""
        await self.submit(**changes)
        (claimed,) = await self.claim(worker)
        adopted = await self.transitions.adopt(claimed, owner, worker)
        assert isinstance(adopted, Adopted)
        return adopted

    async def publish(self, adopted: Adopted, first: int, *bodies: bytes) -> Verdict:
        append = append_of(adopted.job.id, adopted.owner, adopted.base, first, bodies)
        (verdict,), _ = await self.transitions.write([append], [])
        return verdict

    async def finish(self, adopted: Adopted, seq: int, **fields: Any) -> Verdict:
        _, (verdict,) = await self.transitions.write([], [_finish(adopted, seq, **fields)])
        return verdict

    async def fields(self, job: Job) -> dict[str, bytes]:
        raw: Any = self.redis.hgetall(self.keys.job(job.id))
        return {key.decode(): value for key, value in (await raw).items()}

    async def state(self, job: Job) -> str:
        return (await self.fields(job))["state"].decode()

    async def log(self, job: Job) -> list[bytes]:
        page = await self.transitions.read_log(job.id, 0)
        assert [e.seq for e in page.envelopes] == list(range(1, len(page.envelopes) + 1))
        return [envelope.body for envelope in page.envelopes]

    async def depth(self, lane: str = "interactive") -> int:
        return (await self.transitions.depths(TAG))[lane]

    async def claimed(self) -> int:
        """Return how many entries some worker holds."""
        held = 0
        for lane in LANES:
            for stream in (self.keys.lane(TAG, lane), self.keys.returned(TAG, lane)):
                held += (await self.redis.xpending(stream, GROUP))["pending"]
        return held

    async def immortal(self) -> list[str]:
        """Return the keys that would stay for ever."""
        found: Any = await self.redis.keys("*")
        names = [name.decode() for name in found]
        return [name for name in names if await self.redis.pttl(name) < 0]

    async def listen(self, channel: str) -> Any:
        pubsub = self.redis.pubsub()
        await pubsub.subscribe(channel)
        await pubsub.get_message(timeout=5)
        return pubsub


def _finish(adopted: Adopted, seq: int, **fields: Any) -> Finish:
    fields = {"body": END, "outcome": "completed", "owner": adopted.owner} | fields
    return Finish(job_id=adopted.job.id, lane=adopted.job.lane, seq=seq, **fields)


async def _messages(pubsub: Any, count: int) -> list[bytes]:
    messages: list[bytes] = []
    while len(messages) < count:
        message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=5)
        assert message is not None, f"only {len(messages)} messages"
        messages.append(message["data"])
    assert await pubsub.get_message(ignore_subscribe_messages=True, timeout=0.01) is None
    await pubsub.aclose()
    return messages


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@pytest.fixture(params=["fake", "real"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    kind: Literal["fake", "real"] = request.param
    if kind == "fake":
        redis = fakeredis.FakeAsyncRedis(protocol=2)
    else:
        server: ValkeyServer = request.getfixturevalue("server")
        server.command("FLUSHALL")
        redis = connect(RedisSettings(redis_url=server.url), name="test")
    pool = Pool(redis, shebang=kind == "real")
    await pool.transitions.create_lanes([TAG])
    yield pool
    assert await pool.immortal() == []
    await redis.aclose()


# submit


async def test_submit_stores_the_job_and_its_entry(pool: Pool) -> None:
    job = await pool.submit(lane="batch", tenant="t")
    fields = await pool.fields(job)
    assert fields["state"] == b"queued"
    assert fields["lane"] == b"batch"
    assert int(fields["deadline"]) - int(fields["submitted"]) == 60_000
    assert 150_000 < await pool.redis.pttl(pool.keys.job(job.id)) <= 160_000
    assert await pool.depth("batch") == 1
    assert await pool.depth("interactive") == 0
    assert await pool.transitions.lane_of(job.id) == "batch"


async def test_submit_twice_is_one_job(pool: Pool) -> None:
    job = await pool.submit()
    again = await pool.transitions.submit(job, limit=100, timeout_s=60)
    assert again == Submitted("known")
    assert await pool.depth() == 1


async def test_submit_of_a_job_that_runs_or_has_ended_is_known(pool: Pool) -> None:
    adopted = await pool.adopt()
    assert (await pool.transitions.submit(adopted.job, limit=9, timeout_s=60)).verdict == "known"
    assert await pool.state(adopted.job) == "running"
    await pool.finish(adopted, 1)
    assert (await pool.transitions.submit(adopted.job, limit=9, timeout_s=60)).verdict == "known"
    assert await pool.depth() == 0


async def test_submit_is_refused_at_the_lanes_limit(pool: Pool) -> None:
    await pool.submit()
    await pool.submit()
    refused = make_job()
    submitted = await pool.transitions.submit(refused, limit=2, timeout_s=60)
    assert (submitted.verdict, submitted.entries) == ("full", 2)
    assert await pool.fields(refused) == {}
    other = make_job(lane="batch")
    assert (await pool.transitions.submit(other, limit=2, timeout_s=60)).verdict == "queued"


async def test_running_jobs_count_towards_the_limit(pool: Pool) -> None:
    await pool.adopt()
    await asyncio.sleep(0.05)
    submitted = await pool.transitions.submit(make_job(), limit=1, timeout_s=60)
    assert (submitted.verdict, submitted.entries) == ("full", 1)
    assert 0.05 <= submitted.oldest_s < 30


async def test_submit_after_an_early_cancel_stores_nothing(pool: Pool) -> None:
    job = make_job()
    outcome = await pool.transitions.cancel(job.id, job.lane, early=True)
    assert outcome.word == "unknown"
    assert 0 < await pool.redis.pttl(pool.keys.cancel(job.id)) <= 60_000
    submitted = await pool.transitions.submit(job, limit=100, timeout_s=60)
    assert submitted == Submitted("cancelled")
    assert await pool.depth() == 0
    assert await pool.fields(job) == {}


async def test_a_late_cancel_of_an_unknown_job_leaves_nothing(pool: Pool) -> None:
    job = make_job()
    assert (await pool.transitions.cancel(job.id, job.lane)).word == "unknown"
    await pool.submit(job)


# claim


async def test_claim_takes_the_urgent_lane_first(pool: Pool) -> None:
    batch = [await pool.submit(lane="batch") for _ in range(3)]
    chats = [await pool.submit() for _ in range(2)]
    claimed = await pool.claim()
    assert [one.job_id for one in claimed] == [job.id for job in chats + batch[:2]]
    assert [one.lane for one in claimed] == ["interactive"] * 2 + ["batch"] * 2


async def test_a_lanes_limit_counts_what_was_claimed_before_it(pool: Pool) -> None:
    for lane in ("batch", "batch", "interactive", "interactive"):
        await pool.submit(lane=lane)
    claimed = await pool.claim(interactive=3, batch=2)
    assert [one.lane for one in claimed] == ["interactive"] * 2
    assert [one.lane for one in await pool.claim(batch=1)] == ["batch"]


async def test_claim_keeps_the_order_of_submission(pool: Pool) -> None:
    jobs = [await pool.submit() for _ in range(9)]
    claimed = await pool.claim(interactive=5) + await pool.claim(interactive=5)
    assert [one.job_id for one in claimed] == [job.id for job in jobs]


async def test_two_workers_never_get_the_same_entry(pool: Pool) -> None:
    jobs = [await pool.submit() for _ in range(6)]
    mine = await pool.claim("w1", interactive=3)
    theirs = await pool.claim("w2", interactive=9)
    assert [one.job_id for one in mine + theirs] == [job.id for job in jobs]
    assert await pool.claim("w3") == []


async def test_claim_from_empty_lanes(pool: Pool) -> None:
    assert await pool.claim() == []


async def test_creating_lanes_again_changes_nothing(pool: Pool) -> None:
    adopted = await pool.adopt()
    waiting = await pool.submit()
    await pool.transitions.create_lanes([TAG])
    assert [one.job_id for one in await pool.claim()] == [waiting.id]
    assert len(await pool.transitions.pending(TAG, worker="w1")) == 2
    assert await pool.publish(adopted, 1, BODY) == Verdict("ok", 1)


async def test_waiting_for_something_to_claim(pool: Pool) -> None:
    wait_claim, chats = pool.transitions.wait_claim, {"interactive": 1, "batch": 0}
    assert await wait_claim(pool.redis, TAG, BOTH, "w1", 0.01) == []
    await pool.submit(lane="batch")
    assert await wait_claim(pool.redis, TAG, chats, "w1", 0.01) == []
    async with asyncio.timeout(5):
        assert len(await wait_claim(pool.redis, TAG, BOTH, "w1", 60)) == 1
    await pool.submit(lane="batch")
    assert len(await pool.claim()) == 1


async def test_waiting_for_what_was_handed_back(pool: Pool) -> None:
    adopted = await pool.adopt()
    await pool.transitions.hand_back(adopted)
    wait_claim = pool.transitions.wait_claim
    assert await pool.transitions.claim(TAG, BOTH, "w1", returned=False) == []
    assert await wait_claim(pool.redis, TAG, BOTH, "w1", 0.01, returned=False) == []
    (claimed,) = await wait_claim(pool.redis, TAG, BOTH, "w1", 5)
    assert (claimed.job_id, claimed.returned) == (adopted.job.id, True)


async def test_who_leaves_something_wakes_the_next(pool: Pool) -> None:
    for _ in range(3):
        await pool.submit()
    wait_claim, one = pool.transitions.wait_claim, {"interactive": 1}
    for _ in range(3):
        async with asyncio.timeout(5):
            assert len(await wait_claim(pool.redis, TAG, one, "w1", 60)) == 1
    # One may be woken for nothing: that it was the last is seen by who looks for more.
    assert await wait_claim(pool.redis, TAG, one, "w1", 0.01) == []
    bell = pool.keys.bell(TAG, "interactive", returned=False)
    assert not await pool.redis.exists(bell)


# Fairness between the tenants of a lane


async def _order(pool: Pool, count: int) -> list[str]:
    """Claim one by one and return whose jobs they are."""
    tenants = []
    for _ in range(count):
        (claimed,) = await pool.claim(interactive=1)
        tenant: Any = await pool.redis.hget(pool.keys.job(claimed.job_id), "tenant")
        tenants.append(tenant.decode())
    return tenants


async def _tenants_keys(pool: Pool) -> list[bytes]:
    found: Any = await pool.redis.keys("*:tenant*")
    return [*found, *await pool.redis.keys("*:waiting")]


async def test_tenants_take_turns_and_each_keeps_its_own_order(pool: Pool) -> None:
    large = [await pool.submit(tenant="large") for _ in range(6)]
    assert await _order(pool, 2) == ["large", "large"]
    small = [await pool.submit(tenant="small") for _ in range(3)]
    claimed = await pool.claim(interactive=7)
    ids = [one.job_id for one in claimed]
    assert [one for one in ids if one in {job.id for job in large}] == [j.id for j in large[2:]]
    assert [one for one in ids if one in {job.id for job in small}] == [job.id for job in small]
    assert small[0].id in ids[:2]
    assert small[2].id in ids[:6]
    assert await pool.claim() == []
    assert await _tenants_keys(pool) == []


async def test_weights_divide_the_turns(pool: Pool) -> None:
    for _ in range(40):
        await pool.submit(tenant="one")
        await pool.submit(tenant="three", weight=3.0)
    for _ in range(5):
        order = await _order(pool, 8)
        assert (order.count("one"), order.count("three")) == (2, 6)


async def test_a_tenant_gains_nothing_by_having_no_second_job_in_the_lane(pool: Pool) -> None:
    for _ in range(6):
        await pool.submit(tenant="many")
    order: list[str] = []
    for _ in range(10):
        if not order or order[-1] == "single":
            await pool.submit(tenant="single")
        order += await _order(pool, 1)
    assert 4 <= order.count("single") <= 6


async def test_a_tenant_gains_nothing_by_having_been_away(pool: Pool) -> None:
    for _ in range(30):
        await pool.submit(tenant="there")
    await _order(pool, 10)
    for _ in range(10):
        await pool.submit(tenant="back")
    order = await _order(pool, 10)
    assert order.count("back") == 5


async def test_cancelled_jobs_take_no_turn(pool: Pool) -> None:
    jobs = [await pool.submit(tenant="a") for _ in range(4)]
    other = await pool.submit(tenant="b")
    for job in jobs[:3]:
        await pool.transitions.cancel(job.id, job.lane)
    assert await pool.redis.zcard(pool.keys.tenant(TAG, "interactive", "a")) == 1
    assert {one.job_id for one in await pool.claim()} == {jobs[3].id, other.id}
    assert await pool.claim() == []
    assert await _tenants_keys(pool) == []


async def test_entries_that_are_gone_are_passed_over(pool: Pool) -> None:
    await pool.submit(tenant="a")
    lane = pool.keys.lane(TAG, "interactive")
    found: Any = await pool.redis.xrange(lane)
    ((entry, _),) = found
    await pool.redis.xdel(lane, entry)
    job = await pool.submit(tenant="a")
    assert [one.job_id for one in await pool.claim()] == [job.id]
    assert await pool.claimed() == 1


async def test_entries_that_no_tenant_has_are_found(pool: Pool) -> None:
    """Those of another version's gateway, and all of a group that was lost."""
    jobs = [await pool.submit(tenant="a") for _ in range(120)]
    await pool.claim(interactive=3)
    await pool.redis.delete(*await _tenants_keys(pool))
    found = await pool.claim("w2", interactive=200)
    while len(found) < 117:
        more = await pool.transitions.wait_claim(pool.redis, TAG, {"interactive": 200}, "w2", 0.01)
        assert more
        found += more
    assert [one.job_id for one in found] == [job.id for job in jobs[3:]]
    assert await pool.claim() == []
    assert len(await pool.transitions.pending(TAG, worker="w1")) == 3


async def test_batch_that_waits_too_long_has_its_turn(pool: Pool) -> None:
    batch = [await pool.submit(lane="batch", tenant=t) for t in "aab"]
    chats = [await pool.submit() for _ in range(6)]
    claim = pool.transitions.claim
    one = {"interactive": 1, "batch": 1}
    (claimed,) = await claim(TAG, one, "w1", batch_turn=1, batch_max_wait_s=60)
    assert claimed.job_id == chats[0].id
    await asyncio.sleep(0.03)
    (claimed,) = await claim(TAG, one, "w1", batch_turn=0, batch_max_wait_s=0.02)
    assert claimed.job_id == chats[1].id
    (claimed,) = await claim(TAG, one, "w1", batch_turn=1, batch_max_wait_s=0.02)
    assert claimed.job_id == batch[0].id
    claimed_both = await claim(TAG, BOTH, "w1", batch_turn=2, batch_max_wait_s=0.02)
    assert [c.lane for c in claimed_both] == ["batch"] * 2 + ["interactive"] * 2
    limits = {"interactive": 1}
    (claimed,) = await claim(TAG, limits, "w1", batch_turn=1, batch_max_wait_s=0.02)
    assert claimed.job_id == chats[4].id


async def test_the_oldest_batch_has_its_turn_whoever_else_is_there(pool: Pool) -> None:
    """Also a tenant's that has had much, among many that are new, or that have cancelled all."""
    claim = pool.transitions.claim
    for _ in range(20):
        await pool.submit(lane="batch", tenant="old", weight=0.1)
    await claim(TAG, {"batch": 10}, "w1")
    gone = [await pool.submit(lane="batch", tenant=f"gone{n}") for n in range(12)]
    for job in gone:
        await pool.transitions.cancel(job.id, job.lane)
    await asyncio.sleep(0.03)
    for n in range(12):
        await pool.submit(lane="batch", tenant=f"new{n}")
    for _ in range(10):
        (one,) = await claim(TAG, {"batch": 0}, "w1", batch_turn=1, batch_max_wait_s=0.025)
        assert await pool.redis.hget(pool.keys.job(one.job_id), "tenant") == b"old"
    waiting = pool.keys.waiting(TAG, "batch")
    assert await pool.redis.zcard(waiting) == 12
    assert await claim(TAG, {"batch": 0}, "w1", batch_turn=1, batch_max_wait_s=60) == []


async def test_batch_that_was_handed_back_has_its_turn_too(pool: Pool) -> None:
    adopted = await pool.adopt(lane="batch")
    await pool.transitions.hand_back(adopted)
    await pool.submit()
    await asyncio.sleep(0.03)
    one = {"interactive": 1, "batch": 1}
    (claimed,) = await pool.transitions.claim(TAG, one, "w1", batch_turn=1, batch_max_wait_s=0.02)
    assert claimed.job_id == adopted.job.id


async def test_submit_is_refused_at_the_tenants_limit(pool: Pool) -> None:
    for _ in range(2):
        await pool.submit(tenant="a")
    await asyncio.sleep(0.02)
    submit = pool.transitions.submit
    refused = await submit(make_job(tenant="a"), limit=9, timeout_s=60, tenant_limit=2)
    assert (refused.verdict, refused.entries) == ("tenant_full", 2)
    assert 0.02 <= refused.oldest_s < 30
    other = await submit(make_job(tenant="b"), limit=9, timeout_s=60, tenant_limit=2)
    assert other.verdict == "queued"
    await pool.claim(interactive=2)
    again = await submit(make_job(tenant="a"), limit=9, timeout_s=60, tenant_limit=2)
    assert again.verdict == "queued"


# adopt


async def test_adopt_gives_the_job_to_its_owner(pool: Pool) -> None:
    job = await pool.submit(body=bytes(range(256)), sequences=2)
    (claimed,) = await pool.claim()
    adopted = await pool.transitions.adopt(claimed, "o1", "w1")
    assert isinstance(adopted, Adopted)
    assert adopted.job == job
    assert (adopted.owner, adopted.attempts, adopted.base, adopted.strikes) == ("o1", 1, 0, 0)
    assert 59 < adopted.left_s <= 60
    assert 0 <= adopted.waited_s < 5
    assert await pool.state(job) == "running"
    assert await pool.depth() == 1


async def test_adopting_again_fences_the_first_owner(pool: Pool) -> None:
    """The reply to the first adopt was lost: the worker can't know its owner token."""
    first = await pool.adopt(owner="o1")
    assert await pool.publish(first, 1, BODY) == Verdict("ok", 1)
    second = await pool.transitions.adopt(first.claimed, "o2", "w1")
    assert isinstance(second, Adopted)
    assert (second.attempts, second.base) == (2, 1)
    assert await pool.publish(first, 2, BODY) == Verdict("fenced")
    assert await pool.finish(first, 2) == Verdict("fenced")
    assert not await pool.transitions.hand_back(first)
    assert await pool.publish(second, 2, BODY) == Verdict("ok", 2)
    assert len(await pool.log(first.job)) == 2


async def test_a_job_past_its_deadline_never_starts(pool: Pool) -> None:
    job = make_job()
    await pool.transitions.submit(job, limit=9, timeout_s=60)
    await pool.redis.hset(pool.keys.job(job.id), "deadline", 1)
    heard = await pool.listen(pool.keys.channel(job.id))
    (claimed,) = await pool.claim()
    assert await pool.transitions.adopt(claimed, "o1", "w1") == "expired"
    (message,) = await _messages(heard, 1)
    envelope = open_message(message)
    end = decode_frame(envelope.body).end
    assert end is not None
    assert (end.outcome, end.code) == ("expired", "request_timeout")
    assert (envelope.seq, envelope.owner, envelope.base) == (1, NOBODY.encode(), 0)
    assert await pool.log(job) == [envelope.body]
    assert await pool.state(job) == "done"
    assert await pool.depth() == await pool.claimed() == 0


async def test_a_job_cancelled_while_it_ran_ends_when_it_is_adopted_anew(pool: Pool) -> None:
    adopted = await pool.adopt()
    await pool.publish(adopted, 1, BODY)
    await pool.transitions.cancel(adopted.job.id, "interactive")
    assert await pool.transitions.adopt(adopted.claimed, "o2", "w2") == "cancelled"
    bodies = await pool.log(adopted.job)
    end = decode_frame(bodies[-1]).end
    assert len(bodies) == 2
    assert end is not None
    assert (end.outcome, end.code) == ("cancelled", "cancelled")
    assert await pool.depth() == await pool.claimed() == 0


@pytest.mark.parametrize("why", ["ended", "lost", "moved"])
async def test_an_entry_whose_job_is_elsewhere_is_dropped(pool: Pool, why: str) -> None:
    job = await pool.submit()
    (claimed,) = await pool.claim()
    if why == "ended":
        await pool.transitions.cancel(job.id, job.lane)
    elif why == "lost":
        await pool.redis.delete(pool.keys.job(job.id))
    else:
        await pool.redis.hset(pool.keys.job(job.id), "entry", "1-1")
    before = await pool.log(job)
    assert await pool.transitions.adopt(claimed, "o1", "w1") == "gone"
    assert await pool.depth() == await pool.claimed() == 0
    assert await pool.log(job) == before


async def test_an_entry_without_a_job_is_dropped(pool: Pool) -> None:
    """A deleted entry comes back from a worker's history without its fields."""
    await pool.submit()
    (claimed,) = await pool.claim()
    nameless = Claimed(TAG, claimed.lane, claimed.returned, claimed.entry, "")
    assert await pool.transitions.adopt(nameless, "o1", "w1") == "gone"
    assert await pool.depth() == 0


# take over


async def test_a_job_is_not_taken_over_before_its_lease_has_lapsed(pool: Pool) -> None:
    adopted = await pool.adopt()
    assert await pool.transitions.adopt(adopted.claimed, "o2", "w2", idle_s=60) == "held"
    assert await pool.publish(adopted, 1, BODY) == Verdict("ok", 1)
    assert await pool.transitions.pending(TAG, idle_s=60) == []


async def _late(pool: Pool, adopted: Adopted) -> None:
    """Let a job's lease lapse."""
    stream = pool.keys.returned if adopted.claimed.returned else pool.keys.lane
    name = stream(TAG, adopted.job.lane)
    entry, worker = adopted.claimed.entry, "w1"
    await pool.redis.xclaim(name, GROUP, worker, 0, [entry], idle=90_000, justid=True)


async def test_a_lost_workers_job_is_taken_over_by_one(pool: Pool) -> None:
    lost = await pool.adopt()
    await _late(pool, lost)
    (claimed,) = await pool.transitions.pending(TAG, idle_s=60)
    assert claimed == lost.claimed
    taken = await pool.transitions.adopt(claimed, "o2", "w2", idle_s=60)
    assert isinstance(taken, Adopted)
    assert (taken.strikes, taken.attempts, taken.base) == (1, 2, 0)
    assert await pool.transitions.adopt(claimed, "o3", "w3", idle_s=60) == "held"
    assert await pool.publish(lost, 1, BODY) == Verdict("fenced")
    assert await pool.publish(taken, 1, BODY) == Verdict("ok", 1)


async def test_a_job_that_costs_workers_without_progress_is_poisoned(pool: Pool) -> None:
    lost = await pool.adopt()
    await _late(pool, lost)
    second = await pool.transitions.adopt(lost.claimed, "o2", "w2", idle_s=60)
    assert isinstance(second, Adopted)
    await _late(pool, second)
    third = await pool.transitions.adopt(lost.claimed, "o3", "w3", idle_s=60)
    assert isinstance(third, Adopted)
    assert third.strikes == 2
    await _late(pool, third)
    assert await pool.transitions.adopt(lost.claimed, "o4", "w4", idle_s=60) == "poisoned"
    end = decode_frame((await pool.log(lost.job))[-1]).end
    assert end is not None
    assert (end.outcome, end.code) == ("failed", "poisoned")
    assert await pool.depth() == await pool.claimed() == 0
    rows: Any = await pool.redis.xrange(pool.keys.dead(TAG))
    ((_, dead),) = rows
    assert dead[b"j"].decode() == lost.job.id
    assert [line.split()[1] for line in dead[b"history"].splitlines()] == [b"w1", b"w2", b"w3"]
    assert dead[b"rec"] == encode(lost.job)


async def test_progress_clears_the_strikes_of_before(pool: Pool) -> None:
    adopted = await pool.adopt()
    for attempt in range(2, 6):
        await pool.publish(adopted, adopted.base + 1, BODY)
        await _late(pool, adopted)
        taken = await pool.transitions.adopt(adopted.claimed, f"o{attempt}", "w", idle_s=60)
        assert isinstance(taken, Adopted)
        assert (taken.strikes, taken.attempts, taken.base) == (1, attempt, attempt - 1)
        adopted = taken


async def test_a_lost_workers_cancelled_or_expired_job_ends(pool: Pool) -> None:
    for field, value, word in (("cancel", "expired", "expired"), ("deadline", "1", "expired")):
        adopted = await pool.adopt()
        await _late(pool, adopted)
        await pool.redis.hset(pool.keys.job(adopted.job.id), field, value)
        assert await pool.transitions.adopt(adopted.claimed, "o2", "w2", idle_s=60) == word
    assert await pool.depth() == 0


# publish


async def test_publish_writes_log_and_channel_alike(pool: Pool) -> None:
    adopted = await pool.adopt()
    heard = await pool.listen(pool.keys.channel(adopted.job.id))
    bodies = [encode(Frame([b"\x00 \xff\r\n", (b" ",)])), BODY, b""]
    assert await pool.publish(adopted, 1, *bodies) == Verdict("ok", 3)
    page = await pool.transitions.read_log(adopted.job.id, 0)
    assert [open_message(m) for m in await _messages(heard, 3)] == page.envelopes
    assert [e.body for e in page.envelopes] == bodies
    assert {(e.owner, e.base) for e in page.envelopes} == {(b"o1", 0)}


async def test_publish_again_is_harmless(pool: Pool) -> None:
    adopted = await pool.adopt()
    heard = await pool.listen(pool.keys.channel(adopted.job.id))
    for _ in range(2):
        assert await pool.publish(adopted, 1, b"a", b"b") == Verdict("ok", 2)
    assert await pool.publish(adopted, 2, b"b", b"c") == Verdict("ok", 3)
    assert await pool.publish(adopted, 1, b"a") == Verdict("ok", 3)
    assert await pool.log(adopted.job) == [b"a", b"b", b"c"]
    assert len(await _messages(heard, 3)) == 3


async def test_publish_over_a_gap_writes_nothing(pool: Pool) -> None:
    adopted = await pool.adopt()
    assert await pool.publish(adopted, 2, b"b") == Verdict("gap", 0)
    await pool.publish(adopted, 1, b"a")
    assert await pool.publish(adopted, 3, b"c") == Verdict("gap", 1)
    assert await pool.publish(adopted, 2, b"b", b"c") == Verdict("ok", 3)
    assert await pool.log(adopted.job) == [b"a", b"b", b"c"]


async def test_one_publish_serves_many_jobs_each_with_its_verdict(pool: Pool) -> None:
    fine, fenced, gap, cancelled = [await pool.adopt(owner=f"o{n}") for n in range(4)]
    await pool.transitions.cancel(cancelled.job.id, "interactive", "expired")
    appends = [
        append_of(fine.job.id, "o0", 0, 1, [b"a", b"b"]),
        append_of(fenced.job.id, "zombie", 0, 1, [b"x", b"y", b"z"]),
        append_of(gap.job.id, "o2", 0, 5, [b"x"]),
        append_of("0" * 32, "o9", 0, 1, [b"x"]),
        append_of(cancelled.job.id, "o3", 0, 1, [b"c"]),
    ]
    verdicts, _ = await pool.transitions.write(appends, [])
    assert [(v.word, v.seq) for v in verdicts] == [
        ("ok", 2),
        ("fenced", 0),
        ("gap", 0),
        ("fenced", 0),
        ("expired", 1),
    ]
    assert await pool.log(fine.job) == [b"a", b"b"]
    assert await pool.log(fenced.job) == await pool.log(gap.job) == []
    assert await pool.log(cancelled.job) == [b"c"]


async def test_nothing_is_published_after_the_end(pool: Pool) -> None:
    adopted = await pool.adopt()
    await pool.finish(adopted, 1)
    assert await pool.publish(adopted, 1, BODY) == Verdict("fenced")
    assert await pool.publish(adopted, 2, BODY) == Verdict("fenced")
    assert await pool.log(adopted.job) == [END]


# finish


async def test_finish_ends_the_job(pool: Pool) -> None:
    adopted = await pool.adopt()
    await pool.publish(adopted, 1, BODY)
    heard = await pool.listen(pool.keys.channel(adopted.job.id))
    assert await pool.finish(adopted, 2, usage=Usage(3, 2, 1)) == Verdict("ok")
    (message,) = await _messages(heard, 1)
    assert open_message(message) == Envelope(2, b"o1", 0, END)
    assert await pool.log(adopted.job) == [BODY, END]
    fields = await pool.fields(adopted.job)
    assert fields["state"] == b"done"
    assert fields["outcome"] == b"completed"
    assert "rec" not in fields, "the request's text outlives its answer"
    assert await pool.depth() == await pool.claimed() == 0
    assert 90_000 < await pool.redis.pttl(pool.keys.job(adopted.job.id)) <= 100_000
    assert 90_000 < await pool.redis.pttl(pool.keys.log(adopted.job.id)) <= 100_000


async def test_finish_again_is_harmless(pool: Pool) -> None:
    adopted = await pool.adopt()
    heard = await pool.listen(pool.keys.channel(adopted.job.id))
    assert await pool.finish(adopted, 1) == Verdict("ok")
    assert await pool.finish(adopted, 1) == Verdict("ok")
    assert len(await _messages(heard, 1)) == 1
    assert await pool.log(adopted.job) == [END]


@pytest.mark.parametrize("seq", [1, 3])
async def test_finish_beside_the_logs_end_is_refused(pool: Pool, seq: int) -> None:
    adopted = await pool.adopt()
    await pool.publish(adopted, 1, BODY)
    assert await pool.finish(adopted, seq) == Verdict("gap", 1)
    assert await pool.state(adopted.job) == "running"
    assert await pool.log(adopted.job) == [BODY]


async def test_only_the_owner_finishes(pool: Pool) -> None:
    adopted = await pool.adopt()
    assert await pool.finish(adopted, 1, owner="zombie") == Verdict("fenced")
    assert await pool.finish(adopted, 1, owner=NOBODY) == Verdict("fenced")
    assert await pool.state(adopted.job) == "running"


async def test_a_finish_of_a_job_that_is_lost_is_fenced(pool: Pool) -> None:
    adopted = await pool.adopt()
    await pool.redis.delete(pool.keys.job(adopted.job.id))
    assert await pool.finish(adopted, 1) == Verdict("fenced")


async def test_frames_and_end_in_one_call(pool: Pool) -> None:
    one, two = await pool.adopt(owner="o1"), await pool.adopt(owner="o2")
    appends = [append_of(o.job.id, o.owner, 0, 1, [b"a", b"b"]) for o in (one, two)]
    verdicts, ended = await pool.transitions.write(appends, [_finish(one, 3), _finish(two, 4)])
    assert verdicts == [Verdict("ok", 2)] * 2
    assert ended == [Verdict("ok"), Verdict("gap", 2)]
    assert await pool.log(one.job) == [b"a", b"b", END]
    assert await pool.transitions.write([], []) == ([], [])


# cancel


@pytest.mark.parametrize("reason", ["cancelled", "expired"])
@pytest.mark.parametrize("force", [False, True])
async def test_cancel_of_a_queued_job_ends_it(
    pool: Pool, reason: Literal["cancelled", "expired"], force: bool
) -> None:
    job = await pool.submit(lane="batch")
    other = await pool.submit(lane="batch")
    heard = await pool.listen(pool.keys.channel(job.id))
    outcome = await pool.transitions.cancel(job.id, "batch", reason, force=force, early=True)
    assert outcome.word == "queued"
    (message,) = await _messages(heard, 1)
    end = decode_frame(open_message(message).body).end
    assert end is not None
    assert end.outcome == reason
    assert await pool.depth("batch") == 1
    assert [one.job_id for one in await pool.claim()] == [other.id]
    again = await pool.transitions.cancel(job.id, "batch", force=force, early=True)
    assert (again.word, again.outcome, again.usage) == ("finished", reason, None)
    assert len(await pool.log(job)) == 1
    assert not await pool.redis.exists(pool.keys.cancel(job.id))


async def test_cancel_of_a_claimed_job_ends_it(pool: Pool) -> None:
    job = await pool.submit()
    (claimed,) = await pool.claim()
    assert (await pool.transitions.cancel(job.id, job.lane)).word == "queued"
    assert await pool.depth() == await pool.claimed() == 0
    assert await pool.transitions.adopt(claimed, "o1", "w1") == "gone"
    assert len(await pool.log(job)) == 1


async def test_cancel_of_a_job_that_was_handed_back_ends_it(pool: Pool) -> None:
    adopted = await pool.adopt()
    await pool.transitions.hand_back(adopted)
    assert (await pool.transitions.cancel(adopted.job.id, adopted.job.lane)).word == "queued"
    assert await pool.depth() == 0
    assert await pool.claim() == []


async def test_cancel_of_a_running_job_asks_its_worker(pool: Pool) -> None:
    adopted = await pool.adopt(worker="w-7")
    nudges = await pool.listen(pool.keys.control(TAG, "w-7"))
    for reason in ("cancelled", "expired"):
        outcome = await pool.transitions.cancel(adopted.job.id, adopted.job.lane, reason)
        assert outcome.word == "running"
    first, second = await _messages(nudges, 2)
    assert first.decode() == f"cancel {adopted.job.id} o1 cancelled"
    assert second.decode() == f"cancel {adopted.job.id} o1 expired"
    assert await pool.state(adopted.job) == "running"
    assert await pool.depth() == 1
    # The first reason counts.
    assert await pool.publish(adopted, 1, BODY) == Verdict("cancelled", 1)
    assert await pool.transitions.beat(TAG, "w-7", [adopted]) == ["cancelled"]
    assert await pool.finish(adopted, 2, outcome="cancelled", usage=Usage(9, 1)) == Verdict("ok")
    late = await pool.transitions.cancel(adopted.job.id, adopted.job.lane)
    assert (late.word, late.outcome, late.usage) == ("finished", "cancelled", Usage(9, 1))


async def test_a_forced_cancel_ends_a_running_job_over_its_workers_head(pool: Pool) -> None:
    adopted = await pool.adopt()
    await pool.publish(adopted, 1, BODY)
    outcome = await pool.transitions.cancel(adopted.job.id, adopted.job.lane, force=True)
    assert outcome.word == "forced"
    assert await pool.publish(adopted, 2, BODY) == Verdict("fenced")
    assert await pool.finish(adopted, 2) == Verdict("fenced")
    assert await pool.transitions.beat(TAG, "w1", [adopted]) == ["fenced"]
    assert len(await pool.log(adopted.job)) == 2
    assert await pool.depth() == await pool.claimed() == 0
    again = await pool.transitions.cancel(adopted.job.id, adopted.job.lane, force=True)
    assert (again.word, again.outcome) == ("finished", "cancelled")


async def test_cancel_after_the_end_changes_nothing(pool: Pool) -> None:
    adopted = await pool.adopt()
    await pool.finish(adopted, 1, usage=Usage(1, 2))
    before = await pool.fields(adopted.job)
    for force in (False, True):
        outcome = await pool.transitions.cancel(adopted.job.id, "interactive", force=force)
        assert (outcome.word, outcome.outcome, outcome.usage) == (
            "finished",
            "completed",
            Usage(1, 2),
        )
    assert await pool.fields(adopted.job) == before
    assert await pool.log(adopted.job) == [END]


async def test_an_early_cancel_twice(pool: Pool) -> None:
    job = make_job()
    for _ in range(2):
        assert (await pool.transitions.cancel(job.id, job.lane, early=True)).word == "unknown"
    assert (await pool.transitions.submit(job, limit=9, timeout_s=60)).verdict == "cancelled"


# beat


async def test_a_beat_renews_the_lease(pool: Pool) -> None:
    adopted = await pool.adopt()
    await _late(pool, adopted)
    assert len(await pool.transitions.pending(TAG, idle_s=60)) == 1
    assert await pool.transitions.beat(TAG, "w1", [adopted]) == ["ok"]
    assert await pool.transitions.pending(TAG, idle_s=60) == []
    (held,) = await pool.transitions.pending(TAG, worker="w1")
    assert held == adopted.claimed


async def test_a_zombies_beat_does_not_steal_its_job_back(pool: Pool) -> None:
    zombie = await pool.adopt(owner="o1", worker="w1")
    await _late(pool, zombie)
    taken = await pool.transitions.adopt(zombie.claimed, "o2", "w2", idle_s=60)
    assert isinstance(taken, Adopted)
    assert await pool.transitions.beat(TAG, "w1", [zombie]) == ["fenced"]
    assert await pool.transitions.pending(TAG, worker="w1") == []
    assert await pool.transitions.pending(TAG, worker="w2") == [zombie.claimed]
    assert await pool.transitions.beat(TAG, "w2", [taken]) == ["ok"]


async def test_one_beat_serves_jobs_of_every_stream(pool: Pool) -> None:
    lane = await pool.adopt(owner="o1")
    batch = await pool.adopt(owner="o2", lane="batch")
    back = await pool.adopt(owner="o3", lane="batch")
    await pool.transitions.hand_back(back)
    (claimed,) = await pool.claim()
    returned = await pool.transitions.adopt(claimed, "o4", "w1")
    assert isinstance(returned, Adopted)
    gone = await pool.adopt(owner="o5")
    await pool.finish(gone, 1)
    words = await pool.transitions.beat(TAG, "w1", [lane, gone, batch, returned, back])
    assert words == ["ok", "fenced", "ok", "ok", "fenced"]
    assert await pool.transitions.beat(TAG, "w1", []) == []


# hand back


async def test_what_was_handed_back_comes_before_the_lane_in_order(pool: Pool) -> None:
    first, second = await pool.adopt(owner="o1"), await pool.adopt(owner="o2")
    waiting = await pool.submit()
    assert await pool.transitions.hand_back(first)
    assert await pool.transitions.hand_back(second)
    assert await pool.depth() == 3
    claimed = await pool.claim("w2")
    assert [one.job_id for one in claimed] == [first.job.id, second.job.id, waiting.id]
    assert [one.returned for one in claimed] == [True, True, False]
    again = await pool.transitions.adopt(claimed[0], "o9", "w2")
    assert isinstance(again, Adopted)
    assert (again.attempts, again.strikes, again.base) == (1, 0, 0)
    assert await pool.publish(again, 1, BODY) == Verdict("ok", 1)
    assert await pool.finish(again, 2) == Verdict("ok")
    assert await pool.depth() == 2


async def test_claim_can_leave_out_what_was_handed_back(pool: Pool) -> None:
    adopted = await pool.adopt()
    waiting = await pool.submit()
    await pool.transitions.hand_back(adopted)
    claimed = await pool.transitions.claim(TAG, BOTH, "w1", returned=False)
    assert [one.job_id for one in claimed] == [waiting.id]


async def test_hand_back_twice_and_by_another(pool: Pool) -> None:
    adopted = await pool.adopt()
    assert await pool.transitions.hand_back(adopted)
    assert not await pool.transitions.hand_back(adopted)
    assert await pool.depth() == 1
    assert await pool.publish(adopted, 1, BODY) == Verdict("fenced")


async def test_a_job_can_be_handed_back_again_and_again(pool: Pool) -> None:
    adopted = await pool.adopt()
    for turn in range(4):
        assert await pool.transitions.hand_back(adopted)
        assert await pool.depth() == 1
        assert await pool.claimed() == 0
        (claimed,) = await pool.claim()
        again = await pool.transitions.adopt(claimed, f"t{turn}", "w1")
        assert isinstance(again, Adopted)
        assert (again.attempts, again.strikes) == (1, 0)
        adopted = again


async def test_a_job_handed_back_unbegun_has_no_line_of_it_in_its_history(pool: Pool) -> None:
    adopted = await pool.adopt()
    assert await pool.transitions.hand_back(adopted)
    (claimed,) = await pool.claim()
    again = await pool.transitions.adopt(claimed, "o2", "w2")
    assert isinstance(again, Adopted)
    assert await pool.transitions.hand_back(again, begun=False)
    history: Any = await pool.redis.hget(pool.keys.job(adopted.job.id), "history")
    assert [line.split()[1] for line in history.splitlines()] == [b"w1"]


async def test_a_job_handed_back_with_blame_gets_a_strike(pool: Pool) -> None:
    adopted = await pool.adopt()
    for strikes in (1, 2):
        assert await pool.transitions.hand_back(adopted, blame=True)
        (claimed,) = await pool.claim()
        again = await pool.transitions.adopt(claimed, f"o{strikes}", "w1")
        assert isinstance(again, Adopted)
        assert (again.attempts, again.strikes) == (1 + strikes, strikes)
        adopted = again
    assert await pool.transitions.hand_back(adopted, blame=True)
    (claimed,) = await pool.claim()
    assert await pool.transitions.adopt(claimed, "o3", "w1") == "poisoned"
    assert await pool.depth() == 0


# reading


async def test_the_log_is_read_in_pages(pool: Pool) -> None:
    adopted = await pool.adopt()
    await pool.publish(adopted, 1, *(str(n).encode() for n in range(1, 251)))
    first = await pool.transitions.read_log(adopted.job.id, 0)
    assert (len(first.envelopes), first.more, first.state) == (200, True, "running")
    rest = await pool.transitions.read_log(adopted.job.id, first.envelopes[-1].seq)
    assert (len(rest.envelopes), rest.more) == (50, False)
    assert [e.body for e in first.envelopes + rest.envelopes] == [
        str(n).encode() for n in range(1, 251)
    ]
    assert (await pool.transitions.read_log(adopted.job.id, 250)).envelopes == []


async def test_an_unknown_job_has_neither_log_nor_lane(pool: Pool) -> None:
    job_id = new_job_id(TAG)
    page = await pool.transitions.read_log(job_id, 0)
    assert (page.envelopes, page.state, page.more) == ([], None, False)
    assert await pool.transitions.lane_of(job_id) is None


async def test_pending_finds_claims_whose_reply_was_lost(pool: Pool) -> None:
    job = await pool.submit(lane="batch")
    claimed = await pool.claim("w1")
    await pool.submit()
    await pool.claim("w2")
    assert await pool.transitions.pending(TAG, worker="w1") == claimed
    assert claimed[0].job_id == job.id


async def test_pending_finds_all_of_a_large_workers_claims(pool: Pool) -> None:
    for _ in range(250):
        await pool.submit()
    claimed = await pool.claim("w1", interactive=250)
    assert len(claimed) == 250
    assert await pool.transitions.pending(TAG, worker="w1") == claimed


async def test_lane_length_is_queued_plus_running_through_every_transition(pool: Pool) -> None:
    """What autoscalers see: neither a consumer group's lag nor its pending entries say this."""
    depths = [await pool.depth()]

    async def note() -> None:
        depths.append(await pool.depth())

    job = await pool.submit()
    await note()
    await pool.submit()
    await note()
    first, second = await pool.claim()
    await note()
    adopted = await pool.transitions.adopt(first, "o1", "w1")
    assert isinstance(adopted, Adopted)
    await note()
    await pool.publish(adopted, 1, BODY)
    await note()
    assert await pool.transitions.hand_back(adopted)
    await note()
    (again,) = await pool.claim()
    adopted = await pool.transitions.adopt(again, "o2", "w1")
    assert isinstance(adopted, Adopted)
    await pool.transitions.beat(TAG, "w1", [adopted])
    await note()
    await pool.transitions.cancel(job.id, job.lane)
    await note()
    await pool.finish(adopted, 2)
    await note()
    await pool.transitions.cancel(second.job_id, "interactive")
    await note()
    assert depths == [0, 1, 2, 2, 2, 2, 2, 2, 2, 1, 0]


# scripts


async def test_a_server_that_forgot_its_scripts_is_taught_again(pool: Pool) -> None:
    await pool.redis.script_flush()
    job = await pool.submit()
    await pool.redis.script_flush()
    (claimed,) = await pool.claim()
    await pool.redis.script_flush()
    adopted = await pool.transitions.adopt(claimed, "o1", "w1")
    assert isinstance(adopted, Adopted)
    await pool.redis.script_flush()
    append = append_of(job.id, "o1", 0, 1, [b"a"])
    verdicts, ended = await pool.transitions.write([append], [_finish(adopted, 2)])
    assert (verdicts, ended) == ([Verdict("ok", 1)], [Verdict("ok")])
    assert await pool.log(job) == [b"a", END]
    await pool.redis.script_flush()
    assert (await pool.transitions.cancel(job.id, job.lane)).word == "finished"


@pytest.mark.parametrize("known", ["publish", "finish"])
async def test_one_unknown_script_of_two_in_a_pipeline(pool: Pool, known: str) -> None:
    adopted = await pool.adopt()
    other = await pool.adopt(owner="o9")
    await pool.redis.script_flush()
    if known == "publish":
        await pool.publish(other, 1, BODY)
    else:
        await pool.finish(other, 1)
    append = append_of(adopted.job.id, "o1", 0, 1, [b"a"])
    verdicts, ended = await pool.transitions.write([append], [_finish(adopted, 2)])
    assert (verdicts, ended) == ([Verdict("ok", 1)], [Verdict("ok")])
    assert await pool.log(adopted.job) == [b"a", END]
