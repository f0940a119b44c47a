"""Each command of `headrace-admin` on a real server, with jobs in every state, as text and JSON."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from pydantic import SecretStr

from shared.admin.__main__ import main
from shared.connection import connect
from shared.keys import Keys, new_job_id, tag
from shared.outcomes import Adopted, Finish, Submitted
from shared.protocol import (
    End,
    Frame,
    Job,
    ModelRecord,
    Usage,
    WorkerRecord,
    decode_job,
    encode,
)
from shared.registry import Registry
from shared.settings import RedisSettings
from shared.transitions import Transitions
from tests.support.appends import append_of
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

POOL = "tiny"
TAG = tag(POOL, 0)
SECRET = "the quick brown prompt"
BODY = json.dumps({"model": POOL, "messages": [{"role": "user", "content": SECRET}]}).encode()
ANSWER = "the answer of the model"


@dataclass
class Answer:
    """What a call gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Queue:
    """A queue with a registered worker, jobs in chosen states, and the program under test."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.redis = connect(RedisSettings(redis_url=SecretStr(url)), name="test")
        self.keys = Keys()
        self.transitions = Transitions(self.redis, self.keys, result_ttl_s=100)
        self.registry = Registry(self.redis, self.keys)
        self._capsys = capsys

    async def call(self, line: str) -> Answer:
        """Run a command line."""
        self._capsys.readouterr()
        code = await asyncio.to_thread(main, line.split())
        written = self._capsys.readouterr()
        for secret in (SECRET, ANSWER):
            assert secret not in written.out + written.err
        return Answer(code, written.out, written.err)

    async def json(self, line: str) -> Any:
        """Run a command that succeeds, and return its document."""
        answer = await self.call(f"--json {line}")
        assert (answer.code, answer.err) == (0, "")
        return answer.json

    async def text(self, line: str) -> str:
        """Run a command that succeeds, and return what people see."""
        answer = await self.call(line)
        assert (answer.code, answer.err) == (0, "")
        return answer.out

    async def refused(self, line: str) -> str:
        """Run a command that is refused, and return its error's code."""
        answer = await self.call(line)
        assert (answer.code, answer.out) == (1, "")
        assert answer.err.startswith("headrace-admin: ")
        assert answer.err.count("\n") == 1
        code: str = (await self.call(f"--json {line}")).json["error"]["code"]
        return code

    async def announce(self, worker: str = "w1", state: str = "ready", **changes: Any) -> None:
        record = WorkerRecord(
            id=worker,
            pool=POOL,
            models=[POOL],
            state=state,
            seats=8,
            reserve=2,
            running=3,
            waiting=1,
            kv_usage=0.256,
            engine="simulated",
            version="0.1.0",
            started_ms=int(time.time() * 1000) - 65_000,
        )
        models = [ModelRecord(name=POOL, pool=POOL, max_model_len=2048, **changes)]
        await self.registry.announce(record, models, lease_s=60)

    async def submit(self, lane: str = "interactive", **changes: Any) -> Job:
        fields: dict[str, Any] = {
            "id": new_job_id(TAG),
            "path": "/v1/chat/completions",
            "body": BODY,
            "model": POOL,
            "lane": lane,
            "tenant": "acme",
            "request_id": "r-1",
            "gateway": "g-1",
        }
        job = Job(**(fields | changes))
        submitted = await self.transitions.submit(job, limit=10_000, timeout_s=60, reader="g-1")
        assert submitted == Submitted("queued")
        return job

    async def adopt(self, worker: str = "w1", lane: str = "interactive") -> Adopted:
        """Claim the next job of a lane and own it."""
        (claimed,) = await self.transitions.claim(TAG, {lane: 1}, worker)
        adopted = await self.transitions.adopt(claimed, f"owner-{worker}", worker)
        assert isinstance(adopted, Adopted)
        return adopted

    async def running(self, worker: str = "w1") -> Adopted:
        await self.submit()
        return await self.adopt(worker)

    async def publish(self, adopted: Adopted) -> None:
        body = encode(Frame([ANSWER.encode()]))
        append = append_of(adopted.job.id, adopted.owner, adopted.base, adopted.base + 1, [body])
        await self.transitions.write([append], [])

    async def finish(self, adopted: Adopted, seq: int = 1, **end: Any) -> None:
        fields: dict[str, Any] = {"outcome": "completed", "usage": Usage(11, 5, 4)}
        record = End(**(fields | end))
        body = encode(Frame(end=record))
        job = adopted.job
        finish = Finish(job.id, adopted.owner, job.lane, seq, body, record.outcome, record.usage)
        await self.transitions.write([], [finish])

    async def dead(self, **changes: Any) -> Job:
        """Return a job that has cost three workers."""
        job = await self.submit(**changes)
        lane = job.lane
        (claimed,) = await self.transitions.claim(TAG, {lane: 1}, "w1")
        assert isinstance(await self.transitions.adopt(claimed, "o1", "w1"), Adopted)
        for worker in ("w2", "w3", "w4"):
            await asyncio.sleep(0.01)
            verdict = await self.transitions.adopt(claimed, "o", worker, idle_s=0.005)
            assert verdict == "poisoned" if worker == "w4" else isinstance(verdict, Adopted)
        return job


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@pytest.fixture
async def queue(
    server: ValkeyServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> AsyncIterator[Queue]:
    server.command("FLUSHALL")
    monkeypatch.setenv("HEADRACE_REDIS_URL", server.url)
    monkeypatch.setenv("HEADRACE_FORCE_CANCEL_S", "0.2")
    queue = Queue(server.url, capsys)
    await queue.transitions.create_lanes([TAG])
    await queue.announce()
    yield queue
    for name in await queue.redis.keys("*"):
        assert await queue.redis.pttl(name) > 0, name
    await queue.redis.aclose()


def column(text: str, heading: str) -> list[str]:
    """Return a column of a table, by the place of its heading."""
    first, *rows = [line for line in text.splitlines() if line]
    index = re.split(r"\s{2,}", first).index(heading)
    return [re.split(r"\s{2,}", row.strip())[index] for row in rows]


# status


async def test_status_counts_lanes_workers_models_and_the_dead(queue: Queue) -> None:
    await queue.dead()
    await queue.running()
    await queue.submit()
    await queue.submit()
    await queue.submit(lane="batch")
    status = await queue.json("status")
    interactive, batch = status["lanes"]
    assert interactive.pop("oldest_s") >= 0
    assert interactive == {"pool": POOL, "lane": "interactive", "queued": 2, "running": 1}
    assert (batch["queued"], batch["running"]) == (1, 0)
    (worker,) = status["workers"]
    assert 64 < worker.pop("age_s") < 70
    assert worker == {
        "id": "w1",
        "pool": POOL,
        "state": "ready",
        "seats": 8,
        "reserve": 2,
        "running": 3,
        "waiting": 1,
        "kv_usage": 0.256,
        "version": "0.1.0",
        "engine": "simulated",
        "models": [POOL],
    }
    (model,) = status["models"]
    assert (model["name"], model["workers"], model["max_model_len"]) == (POOL, 1, 2048)
    assert status["dead"] == [{"pool": POOL, "jobs": 1}]
    (server_told,) = status["servers"]
    assert server_told["reached"]
    assert server_told["name"] == "valkey"
    assert server_told["version"][0].isdigit()
    assert server_told["used_memory"] > 0
    assert server_told["maxmemory_policy"] == "noeviction"
    assert status["warnings"] == []


async def test_status_as_text(queue: Queue) -> None:
    await queue.submit()
    shown = await queue.text("status")
    assert re.match(
        r"127.0.0.1:\d+: valkey [\d.]+, memory [\d.]+ MiB, no limit, maxmemory-policy noev", shown
    )
    assert re.search(r"^tiny +interactive +1 +0 +0\.\ds$", shown, re.MULTILINE)
    assert re.search(r"^w1 +tiny +ready +8 +3 +1 +26% +0\.1\.0 simulated +1m", shown, re.MULTILINE)
    assert "warning" not in shown


async def test_a_job_that_was_handed_back_keeps_its_age(queue: Queue) -> None:
    adopted = await queue.running()
    assert await queue.transitions.hand_back(adopted)
    await queue.redis.hincrby(queue.keys.job(adopted.job.id), "submitted", -50_000)
    (interactive, _) = (await queue.json("status"))["lanes"]
    assert 50 <= interactive["oldest_s"] < 55
    assert interactive["queued"] == 1


async def test_status_adds_up_the_shards_of_a_pool(queue: Queue) -> None:
    await queue.announce(shards=3)
    await queue.submit()
    await queue.submit(id=new_job_id(tag(POOL, 2)))
    (interactive, _) = (await queue.json("status"))["lanes"]
    assert interactive["queued"] == 2


async def test_status_warns_of_jobs_without_workers(queue: Queue) -> None:
    await queue.announce(state="draining")
    await queue.submit()
    (warning,) = (await queue.json("status"))["warnings"]
    assert warning == "jobs wait in pool tiny, and no worker is ready there"
    assert f"warning: {warning}\n" in await queue.text("status")


async def test_status_warns_of_eviction_and_of_a_full_server(
    own_valkey: ValkeyServer, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", own_valkey.url)
    used = int(re.findall(rb"used_memory:(\d+)", own_valkey.command("INFO", "memory"))[0])
    own_valkey.command("CONFIG", "SET", "maxmemory", used + 100_000)
    own_valkey.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    eviction, full = (await queue.json("status"))["warnings"]
    assert eviction.startswith("maxmemory-policy is allkeys-lru: ")
    assert full == "more than 90% of the server's memory is in use"


# jobs


async def test_jobs_are_listed_in_order(queue: Queue) -> None:
    running = await queue.running()
    batch = await queue.submit(lane="batch", tenant="")
    second, third = await queue.submit(), await queue.submit()
    returned = await queue.submit()
    # Handed back: before all that wait in its lane.
    for _ in range(2):
        await queue.adopt("w2")
    last = await queue.adopt("w2")
    assert last.job.id == returned.id
    assert await queue.transitions.hand_back(last)
    first = await queue.submit()

    listed = await queue.json("jobs")
    assert listed["total"] == 6
    rows = {row["id"]: row for row in listed["jobs"]}
    assert list(rows) == [running.job.id, second.id, third.id, returned.id, first.id, batch.id]
    assert [row["state"] for row in rows.values()] == ["running"] * 3 + ["queued"] * 3
    assert [row["position"] for row in rows.values()] == [None, None, None, 1, 2, 1]
    assert [row["worker"] for row in rows.values()] == ["w1", "w2", "w2", None, None, None]
    assert rows[batch.id]["tenant"] is None
    row = rows[running.job.id]
    assert row.pop("age_s") >= 0
    assert row == {
        "id": running.job.id,
        "state": "running",
        "pool": POOL,
        "lane": "interactive",
        "model": POOL,
        "tenant": "acme",
        "worker": "w1",
        "attempts": 1,
        "position": None,
    }


async def test_jobs_as_text(queue: Queue) -> None:
    running = await queue.running()
    waiting = await queue.submit()
    shown = await queue.text("jobs")
    assert column(shown, "ID") == [running.job.id, waiting.id]
    assert column(shown, "STATE") == ["running", "queued"]
    assert column(shown, "TENANT") == ["acme", "acme"]
    assert column(shown, "POSITION") == ["-", "1"]
    assert await queue.text("jobs --lane batch") == "none\n"


async def test_jobs_can_be_chosen(queue: Queue) -> None:
    running = await queue.running()
    batch = await queue.submit(lane="batch")
    waiting = await queue.submit()

    async def ids(options: str) -> list[str]:
        listed = await queue.json(f"jobs {options}")
        assert listed["total"] == len(listed["jobs"])
        return [row["id"] for row in listed["jobs"]]

    assert await ids("--state running") == [running.job.id]
    assert await ids("--state queued") == [waiting.id, batch.id]
    assert await ids("--lane batch") == [batch.id]
    assert await ids("--lane interactive --state queued") == [waiting.id]
    assert await ids(f"--pool {POOL}") == [running.job.id, waiting.id, batch.id]
    assert await queue.refused("jobs --pool other") == "pool_not_found"


async def test_a_long_lane_is_read_up_to_the_limit(queue: Queue) -> None:
    submitted = [(await queue.submit()).id for _ in range(260)]
    for _ in range(3):
        await queue.adopt()
    listed = await queue.json("jobs --state queued --limit 230")
    assert [row["id"] for row in listed["jobs"]] == submitted[3:233]
    assert [row["position"] for row in listed["jobs"]] == list(range(1, 231))
    assert listed["total"] == 257
    assert len((await queue.json("jobs"))["jobs"]) == 50
    shown = await queue.text("jobs --limit 4")
    assert shown.endswith("\n4 of 260; more with --limit\n")
    assert (await queue.json(f"show {submitted[-1]}"))["position"] == 257


async def test_many_running_jobs_are_read_page_by_page(queue: Queue) -> None:
    submitted = [(await queue.submit()).id for _ in range(120)]
    await queue.transitions.claim(TAG, {"interactive": 120}, "w1")
    listed = await queue.json("jobs --limit 110")
    assert [row["id"] for row in listed["jobs"]] == submitted[:110]
    assert {row["state"] for row in listed["jobs"]} == {"claimed"}


async def test_a_job_whose_record_is_gone_or_unreadable_is_listed(queue: Queue) -> None:
    gone, odd, torn = [await queue.submit() for _ in range(3)]
    await queue.redis.delete(queue.keys.job(gone.id))
    await queue.redis.hset(queue.keys.job(odd.id), "rec", SECRET)
    await queue.redis.hset(queue.keys.job(torn.id), "rec", b"\xa4body\xc6")
    rows = (await queue.json("jobs"))["jobs"]
    assert [(row["state"], row["tenant"]) for row in rows] == [
        ("gone", None),
        ("queued", None),
        ("queued", None),
    ]
    assert await queue.text("jobs")
    assert (await queue.json(f"show {odd.id}"))["tenant"] is None


@pytest.mark.parametrize("length", [0, 1, 255, 256, 65_535, 65_536, 3_000_000])
async def test_bodies_of_any_length_stay_on_the_server(queue: Queue, length: int) -> None:
    job = await queue.submit(body=b"x" * length)
    shown = await queue.json(f"show {job.id}")
    assert (shown["body_bytes"], shown["model"], shown["tenant"]) == (length, POOL, "acme")


async def test_without_lanes_there_are_no_jobs(queue: Queue) -> None:
    await queue.redis.delete(*[key async for key in queue.redis.scan_iter("*:lane:*")])
    assert await queue.json("jobs") == {"jobs": [], "total": 0}
    await queue.submit()
    # The lane without its group, as after a loss of data.
    assert (await queue.json("jobs"))["jobs"][0]["position"] == 1


# show


async def test_show_a_queued_job(queue: Queue) -> None:
    await queue.submit()
    job = await queue.submit(stream=True, sequences=2)
    shown = await queue.json(f"show {job.id}")
    times = shown.pop("times")
    assert times["started"] is None
    assert times["ran_s"] is None
    assert times["deadline"] - times["submitted"] == pytest.approx(60)
    assert 0 <= times["waited_s"] < 5
    assert 150 < times["kept_s"] <= 160
    assert shown == {
        "id": job.id,
        "state": "queued",
        "outcome": None,
        "error": None,
        "pool": POOL,
        "lane": "interactive",
        "position": 2,
        "worker": None,
        "cancel": None,
        "attempts": 0,
        "strikes": 0,
        "history": [],
        "usage": None,
        "frames": 0,
        "readers": ["g-1"],
        "model": POOL,
        "stream": True,
        "tenant": "acme",
        "path": "/v1/chat/completions",
        "sequences": 2,
        "body_bytes": len(BODY),
        "request_id": "r-1",
        "gateway": "g-1",
    }


async def test_show_a_running_job(queue: Queue) -> None:
    adopted = await queue.running()
    await queue.publish(adopted)
    await queue.transitions.cancel(adopted.job.id, "interactive")
    shown = await queue.json(f"show {adopted.job.id}")
    assert (shown["state"], shown["worker"], shown["attempts"]) == ("running", "w1", 1)
    assert (shown["frames"], shown["position"], shown["cancel"]) == (1, None, "cancelled")
    (attempt,) = shown["history"]
    assert attempt == {"worker": "w1", "at": shown["times"]["started"]}
    assert shown["times"]["ran_s"] >= 0
    text = await queue.text(f"show {adopted.job.id}")
    assert re.search(r"^state +running$", text, re.MULTILINE)
    assert re.search(r"^started +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z$", text, re.MULTILINE)
    assert "\nHistory\n" in text
    assert "owner-w1" not in text


async def test_show_a_job_that_is_claimed_but_not_begun(queue: Queue) -> None:
    job = await queue.submit()
    await queue.transitions.claim(TAG, {"interactive": 1}, "w1")
    shown = await queue.json(f"show {job.id}")
    assert (shown["state"], shown["position"]) == ("queued", None)


async def test_show_a_job_that_was_handed_back(queue: Queue) -> None:
    await queue.submit()
    adopted = await queue.adopt()
    await queue.submit()
    assert await queue.transitions.hand_back(adopted, blame=True)
    shown = await queue.json(f"show {adopted.job.id}")
    assert (shown["state"], shown["position"], shown["strikes"]) == ("queued", 1, 1)
    assert len(shown["history"]) == 1


async def test_show_a_completed_job(queue: Queue) -> None:
    adopted = await queue.running()
    await queue.publish(adopted)
    await queue.finish(adopted, 2)
    shown = await queue.json(f"show {adopted.job.id}")
    assert (shown["state"], shown["outcome"], shown["error"]) == ("done", "completed", None)
    assert shown["usage"] == {"prompt_tokens": 11, "completion_tokens": 5, "cached_tokens": 4}
    assert (shown["frames"], shown["model"], shown["body_bytes"]) == (2, POOL, None)
    assert shown["stream"] is False
    assert shown["times"]["finished"] >= shown["times"]["started"]
    text = await queue.text(f"show {adopted.job.id}")
    assert re.search(r"^usage +prompt 11 \(4 cached\), completion 5$", text, re.MULTILINE)
    assert not re.search("^tenant", text, re.MULTILINE)


async def test_show_a_failed_and_an_expired_job(queue: Queue) -> None:
    adopted = await queue.running()
    await queue.finish(adopted, outcome="failed", code="engine_error", message="It failed.")
    shown = await queue.json(f"show {adopted.job.id}")
    assert shown["error"] == {"code": "engine_error", "message": "It failed."}
    assert "engine_error: It failed." in await queue.text(f"show {adopted.job.id}")
    job = await queue.submit()
    await queue.transitions.cancel(job.id, job.lane, "expired")
    shown = await queue.json(f"show {job.id}")
    assert (shown["outcome"], shown["error"]["code"]) == ("expired", "request_timeout")
    assert shown["times"]["ran_s"] is None


@pytest.mark.parametrize("job_id", ["0" * 32, "nonsense", "Z" * 32])
@pytest.mark.parametrize("command", ["show", "cancel", "dead show", "dead requeue", "dead purge"])
async def test_an_unknown_job_is_refused(queue: Queue, command: str, job_id: str) -> None:
    assert await queue.refused(f"{command} {job_id}") == "job_not_found"


# cancel


async def test_cancel_a_queued_job(queue: Queue) -> None:
    job = await queue.submit()
    answer = {"id": job.id, "outcome": "cancelled_queued", "ended": "cancelled", "usage": None}
    assert await queue.json(f"cancel {job.id}") == answer
    answer["outcome"] = "already_finished"
    assert await queue.json(f"cancel {job.id}") == answer
    assert await queue.text(f"cancel {job.id}") == f"{job.id}  already_finished, cancelled\n"
    assert (await queue.json("jobs"))["total"] == 0


async def _obey(queue: Queue, adopted: Adopted, **end: Any) -> None:
    """End a job once its cancel is seen, as its worker does."""
    key = queue.keys.job(adopted.job.id)
    await until(lambda: queue.redis.hget(key, "cancel"), "cancel", every=0.005)
    await queue.finish(adopted, **end)


async def test_cancel_a_running_job_waits_for_its_end_and_usage(queue: Queue) -> None:
    adopted = await queue.running()
    async with asyncio.TaskGroup() as group:
        group.create_task(_obey(queue, adopted, outcome="cancelled", code="cancelled"))
        answer = await queue.json(f"cancel {adopted.job.id}")
    assert answer["outcome"] == "cancelled_running"
    assert answer["usage"] == {"prompt_tokens": 11, "completion_tokens": 5, "cached_tokens": 4}


async def test_cancel_a_job_that_finishes_meanwhile(queue: Queue) -> None:
    adopted = await queue.running()
    async with asyncio.TaskGroup() as group:
        group.create_task(_obey(queue, adopted))
        answer = await queue.json(f"cancel {adopted.job.id}")
    assert (answer["outcome"], answer["ended"]) == ("already_finished", "completed")
    assert answer["usage"]["completion_tokens"] == 5


async def test_cancel_ends_a_job_over_a_deaf_workers_head(queue: Queue) -> None:
    adopted = await queue.running()
    shown = await queue.text(f"cancel {adopted.job.id}")
    assert shown == f"{adopted.job.id}  cancelled_running\n"
    assert (await queue.json(f"show {adopted.job.id}"))["outcome"] == "cancelled"


# dead


async def test_the_dead_letter_is_listed(queue: Queue) -> None:
    jobs = [await queue.dead(lane="batch") for _ in range(12)]
    listed = await queue.json("dead list")
    assert listed["total"] == 12
    assert [row["id"] for row in listed["jobs"]] == [job.id for job in jobs]
    row = listed["jobs"][0]
    assert [attempt["worker"] for attempt in row["history"]] == ["w1", "w2", "w3"]
    assert (row["model"], row["lane"], row["tenant"]) == (POOL, "batch", "acme")
    assert (row["pool"], row["body_bytes"]) == (POOL, len(BODY))
    assert 0 <= row["age_s"] < 30
    shown = await queue.text(f"dead list --pool {POOL} --limit 11")
    assert shown.endswith("\n11 of 12; more with --limit\n")
    assert "w1, w2, w3" in shown
    assert await queue.refused("dead list --pool other") == "pool_not_found"


async def test_a_dead_job_is_shown(queue: Queue) -> None:
    job = await queue.dead(stream=True)
    shown = await queue.json(f"dead show {job.id}")
    assert (shown["id"], shown["path"], shown["stream"]) == (job.id, job.path, True)
    assert [attempt["worker"] for attempt in shown["history"]] == ["w1", "w2", "w3"]
    text = await queue.text(f"dead show {job.id}")
    assert re.search(r"^died +\d{4}-", text, re.MULTILINE)
    assert re.search(r"^stream +yes$", text, re.MULTILINE)
    assert (await queue.json(f"show {job.id}"))["error"]["code"] == "poisoned"
    await queue.redis.delete(queue.keys.job(job.id))
    assert await queue.refused(f"show {job.id}") == "job_dead"


async def test_a_dead_job_is_requeued_under_a_new_id(queue: Queue) -> None:
    other = await queue.dead()
    job = await queue.dead(lane="batch", stream=True)
    requeued = await queue.json(f"dead requeue {job.id} --timeout 30")
    new_id = requeued["id"]
    assert new_id != job.id
    assert requeued == {"id": new_id, "was": job.id, "pool": POOL, "lane": "batch"}
    tenant = await queue.redis.hget(queue.keys.job(new_id), "tenant")
    assert tenant == job.tenant.encode() != b""
    assert [row["id"] for row in (await queue.json("dead list"))["jobs"]] == [other.id]
    shown = await queue.json(f"show {new_id}")
    assert (shown["state"], shown["strikes"], shown["attempts"]) == ("queued", 0, 0)
    assert shown["history"] == []
    assert (shown["model"], shown["stream"], shown["readers"]) == (POOL, True, [])
    assert shown["times"]["deadline"] - shown["times"]["submitted"] == pytest.approx(30)
    adopted = await queue.adopt("w9", "batch")
    assert adopted.job.id == new_id
    assert adopted.strikes == 0
    # All but the id is as it was, the body too.
    assert encode(adopted.job).replace(new_id.encode(), job.id.encode()) == encode(job)
    assert await queue.refused(f"dead requeue {job.id}") == "job_not_found"


async def test_a_requeued_job_keeps_what_only_a_newer_version_knows(queue: Queue) -> None:
    job = await queue.dead()
    key = queue.keys.dead(TAG)
    found: Any = await queue.redis.xrange(key)
    ((entry, fields),) = found
    known = msgspec.msgpack.decode(fields[b"rec"])
    record = msgspec.msgpack.encode(known | {"future": 7})
    await queue.redis.xdel(key, entry)
    await queue.redis.xadd(key, {b"j": job.id, b"rec": record, b"history": b""})
    shown = await queue.text(f"dead requeue {job.id}")
    new_id = shown.split()[-1]
    assert shown == f"{job.id}  requeued as {new_id}\n"
    kept: Any = await queue.redis.hget(queue.keys.job(new_id), "rec")
    assert msgspec.msgpack.decode(kept) == known | {"future": 7, "id": new_id}
    assert decode_job(kept).id == new_id


async def test_a_dead_record_that_cannot_be_read_stays(queue: Queue) -> None:
    job_id = new_job_id(TAG)
    key = queue.keys.dead(TAG)
    await queue.redis.xadd(key, {"j": job_id, "rec": SECRET, "history": ""})
    await queue.redis.pexpire(key, 60_000)
    assert await queue.refused(f"dead requeue {job_id}") == "unreadable"
    (row,) = (await queue.json("dead list"))["jobs"]
    assert (row["id"], row["model"]) == (job_id, None)


async def test_a_full_server_takes_no_requeued_job(
    queue: Queue, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await queue.dead()
    server.command("CONFIG", "SET", "maxmemory", 1)
    try:
        assert await queue.refused(f"dead requeue {job.id}") == "queue_full"
        assert (await queue.json("dead list"))["total"] == 1
    finally:
        server.command("CONFIG", "SET", "maxmemory", 0)


async def test_one_dead_job_is_purged(queue: Queue) -> None:
    first, second = await queue.dead(), await queue.dead()
    assert await queue.json(f"dead purge {first.id}") == {"purged": 1}
    assert [row["id"] for row in (await queue.json("dead list"))["jobs"]] == [second.id]


async def test_all_dead_jobs_are_purged(queue: Queue) -> None:
    for _ in range(3):
        await queue.dead()
    assert await queue.refused("dead purge --pool other") == "pool_not_found"
    assert await queue.text(f"dead purge --pool {POOL}") == "3 purged\n"
    await queue.dead()
    assert await queue.json("dead purge --all") == {"purged": 1}
    assert await queue.text("dead list") == "none\n"
