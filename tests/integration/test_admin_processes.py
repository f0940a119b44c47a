"""`headrace-admin` as a process of its own, among real workers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from shared.connection import connect
from shared.keys import Keys, new_job_id, tag
from shared.protocol import Job, WorkerRecord
from shared.registry import Registry
from shared.settings import RedisSettings
from shared.transitions import Transitions
from tests.support.processes import WorkerProcess
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
POOL = "simulated"
SLOW = {"ttft_ms": 1, "tpot_ms": 20}


class Queue:
    """A queue, and programs that use it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.redis = connect(RedisSettings(redis_url=SecretStr(url)), name="test")
        self.transitions = Transitions(self.redis, Keys(), result_ttl_s=100)
        self.registry = Registry(self.redis, Keys())

    async def registered(self) -> bool:
        """Tell whether any worker has announced itself."""
        return bool((await self.registry.snapshot()).workers)

    async def admin(self, line: str, **environment: str) -> tuple[int, str, str]:
        """Run the program to its end: exit code, standard output, standard error."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "shared.admin",
            *line.split(),
            cwd=ROOT,
            env={**os.environ, "HEADRACE_REDIS_URL": self.url, **environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    async def submit(self, tokens: int) -> str:
        """Submit a job with an answer of so many tokens."""
        body = {"model": POOL, "stream": True, "max_tokens": tokens, "ignore_eos": True}
        body["messages"] = [{"role": "user", "content": "hello"}]
        job = Job(
            id=new_job_id(tag(POOL, 0)),
            path="/v1/chat/completions",
            body=json.dumps(body).encode(),
            model=POOL,
            lane="interactive",
            stream=True,
            max_tokens_given=True,
        )
        await self.transitions.submit(job, limit=100, timeout_s=60)
        return job.id

    async def field(self, job_id: str, name: str) -> str:
        found: Any = await self.redis.hget(Keys().job(job_id), name)
        return found.decode() if found else ""

    async def streaming(self, job_id: str) -> None:
        """Wait until a job has put out a few frames."""

        async def begun() -> bool:
            return bool(await self.redis.xlen(Keys().log(job_id)) > 3)

        await until(begun, "frames", timeout=10)

    async def close(self) -> None:
        await self.redis.aclose()


@pytest.fixture
async def queue(own_valkey: ValkeyServer) -> Any:
    queue = Queue(own_valkey.url)
    yield queue
    await queue.close()


def make_worker(queue: Queue, folder: Path, name: str = "w1", **settings: Any) -> WorkerProcess:
    simulated = SLOW | settings.pop("simulated", {})
    worker = WorkerProcess(queue.url, name, folder / f"{name}.log", simulated=simulated, **settings)
    worker.start()
    return worker


async def test_a_worker_drains_and_leaves(queue: Queue, tmp_path: Path) -> None:
    worker = make_worker(queue, tmp_path)
    try:
        await worker.wait_log("worker.ready")
        job_id = await queue.submit(tokens=60)
        await queue.streaming(job_id)
        code, out, err = await queue.admin("--json drain w1 --wait 40")
        answer = json.loads(out)
        assert (code, answer["outcome"], err) == (0, "left", ""), worker.log
        # What ran was finished: a second request would have cut it short.
        assert await queue.field(job_id, "outcome") == "completed"
        assert await worker.wait() == 0
        assert worker.log.count("worker.draining") == 1
    finally:
        await worker.close()
    code, out, err = await queue.admin("drain w1")
    assert (code, out, err) == (1, "", "headrace-admin: no worker `w1`\n")


async def test_the_wait_for_a_worker_is_bounded(queue: Queue, tmp_path: Path) -> None:
    worker = make_worker(queue, tmp_path)
    try:
        await worker.wait_log("worker.ready")
        job_id = await queue.submit(tokens=2500)
        await queue.streaming(job_id)
        code, out, _ = await queue.admin("drain w1 --wait 0")
        assert code == 0
        assert out.startswith("w1  draining after 0.")
        code, out, _ = await queue.admin("--json drain w1 --wait 0.5")
        answer = json.loads(out)
        assert answer.pop("waited_s") >= 0.5
        assert code == 1
        assert answer == {"worker": "w1", "outcome": "draining", "running": 1}
        code, out, _ = await queue.admin("status")
        assert "draining" in out
        code, out, _ = await queue.admin(f"--json cancel {job_id}")
        assert json.loads(out)["outcome"] == "cancelled_running"
        assert json.loads(out)["usage"]["completion_tokens"] > 3
        assert await worker.wait() == 0
    finally:
        await worker.close()


async def test_a_worker_that_loads_is_drained_once_it_hears(queue: Queue, tmp_path: Path) -> None:
    worker = make_worker(queue, tmp_path, simulated={"load_s": 8}, pool=POOL)
    try:
        await until(queue.registered, "the worker's record", timeout=10)
        code, out, _ = await queue.admin("--json drain w1 --wait 0")
        assert (code, json.loads(out)["outcome"]) == (1, "unheard")
        code, out, _ = await queue.admin("--json drain w1 --wait 60")
        assert (code, json.loads(out)["outcome"]) == (0, "left"), worker.log
        assert await worker.wait() == 0
    finally:
        await worker.close()


async def test_a_successor_of_the_same_name_is_left_alone(queue: Queue) -> None:
    def record(started_ms: int) -> WorkerRecord:
        return WorkerRecord(
            id="w1", pool=POOL, models=[POOL], state="ready", seats=1, started_ms=started_ms
        )

    now_ms = int(time.time() * 1000)
    await queue.registry.announce(record(now_ms), [], lease_s=60)
    pubsub = queue.redis.pubsub()
    await pubsub.subscribe(Keys().control(tag(POOL, 0), "w1"))
    draining = asyncio.create_task(queue.admin("--json drain w1 --wait 40"))

    async def asked() -> bool:
        message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=0.1)
        return message is not None and message["data"] == b"drain"

    await until(asked, "the message", timeout=30)
    await queue.registry.announce(record(now_ms + 1), [], lease_s=60)
    code, out, _ = await draining
    assert (code, json.loads(out)["outcome"]) == (0, "left")
    await pubsub.aclose()  # type: ignore[no-untyped-call]


async def test_a_frozen_server_is_exit_3(queue: Queue, own_valkey: ValkeyServer) -> None:
    own_valkey.pause()
    try:
        begun = time.monotonic()
        code, out, err = await queue.admin("status", HEADRACE_REDIS_TIMEOUT_S="0.3")
        assert (code, out) == (3, "")
        assert err.startswith("headrace-admin: the queue at 127.0.0.1:")
        assert err.count("\n") == 1
        assert time.monotonic() - begun < 10
    finally:
        own_valkey.resume()


async def test_a_reader_that_has_had_enough_is_no_error(queue: Queue) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "shared.admin",
        "status",
        cwd=ROOT,
        env={**os.environ, "HEADRACE_REDIS_URL": queue.url},
        stdout=writing,
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(writing)
    _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
