"""Users with no more rights than docs/operations.md gives them, on a server and on a cluster."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pydantic import SecretStr
from redis.exceptions import ResponseError

from shared.admin import dead, jobs, lora
from shared.admin.access import Access
from shared.admin.drain import drain
from shared.admin.settings import AdminSettings
from shared.admin.status import status
from shared.keys import new_job_id, tag
from shared.protocol import Job, encode
from tests.faults.clients import EXACT, Client
from tests.support import sse
from tests.support.cluster import Cluster
from tests.support.processes import Pool
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
USERS = ("gateway", "worker", "admin")


def rules() -> dict[str, list[str]]:
    """Return the lines `ACL SETUSER` of the page, by their user."""
    lines = re.findall(r"^ACL SETUSER (headrace-(\w+) .*)$", OPERATIONS.read_text(), re.M)
    return {user: line.split() for line, user in lines}


@contextmanager
def guarded(kind: str) -> Iterator[tuple[list[ValkeyServer], str]]:
    """Yield servers that know these users alone, and a URL that lacks the login."""
    server: ValkeyServer | Cluster = ValkeyServer() if kind == "server" else Cluster()
    with server:
        servers = [server] if isinstance(server, ValkeyServer) else server.servers
        for one in servers:
            for words in rules().values():
                one.command("ACL", "SETUSER", *words, ">pw")
        yield servers, server.url


def login(url: str, user: str) -> str:
    return url.replace("://", f"://headrace-{user}:pw@")


def denied(servers: list[ValkeyServer]) -> set[tuple[str, str]]:
    """Return what users were denied: their name and the command, key or channel."""
    found = set()
    for server in servers:
        for entry in server.command("ACL", "LOG"):
            fields = dict(zip(entry[::2], entry[1::2], strict=True))
            found.add((fields[b"username"].decode(), fields[b"object"].decode()))
    return found


@pytest.mark.parametrize("kind", ["server", "cluster"])
async def test_the_whole_pool_runs_with_the_documented_rights(kind: str) -> None:
    assert sorted(rules()) == sorted(USERS)
    with guarded(kind) as (servers, url):
        pool = Pool(login(url, "worker"), gateways=0, workers=0, simulated={"tpot_ms": 20})
        async with pool:
            for _ in range(2):
                pool.add_worker(shards=2)
            gateway = pool.add_gateway(login(url, "gateway"))
            await pool.wait_ready()
            keyed = {"Idempotency-Key": "once"}
            long = [Client(gateway.url, f"long {n}", 400) for n in range(8)]
            runs = [asyncio.create_task(client.run()) for client in long]
            short = [
                Client(gateway.url, "short", 5, "whole", headers=keyed if n < 2 else {})
                for n in range(6)
            ]
            for client in short:
                await client.run()
            assert [client.outcome() for client in short] == [EXACT] * 6
            await until(lambda: all(client.words for client in long), "all stream")
            given = AdminSettings(redis_url=SecretStr(login(url, "admin")))
            async with Access(given) as access:
                assert sum(one.running for one in (await status(access)).lanes) == 8
                listed = await jobs.jobs(access, pool=None, lane=None, state=None, limit=99)
                assert len(listed.jobs) == 8
                assert (await jobs.show(access, long[0].job_id)).state == "running"
                assert (await jobs.show(access, short[0].job_id)).state == "done"
                assert (await jobs.cancel(access, long[0].job_id)).outcome == "cancelled_running"
                response, _ = await sse.fetch(f"{gateway.url}/v1/jobs/{long[1].job_id}/cancel", {})
                assert response.status == 200
                await check_dead(access, servers)
                await check_adapters(access)
                pool.workers[0].kill()
                await asyncio.wait(runs, timeout=20)
                outcomes = Counter(client.outcome() for client in long)
                assert outcomes == {EXACT: 6, "cancelled": 2}
                assert (await drain(access, "worker-1", 10)).outcome == "left"
        assert denied(servers) == set()


async def check_adapters(access: Access) -> None:
    """Check the commands on adapters, which the workers carry out."""
    change = await lora.load(access, "simulated", "ours", str(OPERATIONS), 20)
    assert (change.outcome, len(change.workers)) == ("loaded", 2)
    change = await lora.unload(access, "simulated", "ours", 20)
    assert (change.outcome, len(change.workers)) == ("unloaded", 2)


async def check_dead(access: Access, servers: list[ValkeyServer]) -> None:
    """Check the commands on the dead-letter."""
    job_tag = tag("simulated", 0)
    job = Job(
        id=new_job_id(job_tag),
        path="/v1/chat/completions",
        body=b'{"messages": [{"role": "user", "content": "again"}], "max_tokens": 3}',
        model="simulated",
        lane="batch",
    )
    entry = ("j", job.id, "rec", encode(job), "history", "")
    for server in servers:
        with suppress(ResponseError):  # Of a cluster's, one has the slot.
            server.command("XADD", access.keys.dead(job_tag), "*", *entry)
    assert [one.id for one in (await dead.listing(access, pool=None, limit=9)).jobs] == [job.id]
    assert (await dead.show(access, job.id)).path == job.path
    again = await dead.requeue(access, job.id, 60)

    async def done() -> bool:
        return (await jobs.show(access, again.id)).outcome == "completed"

    await until(done, "the job that was submitted again")
    assert (await dead.purge(access, None, pool=None)).purged == 0


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    "words",
    [
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("CONFIG", "GET", "*"),
        ("GET", "other:key"),
        ("SUBSCRIBE", "other"),
        ("SCRIPT", "FLUSH"),
        ("SHUTDOWN",),
    ],
)
def test_no_user_may_do_more(user: str, words: tuple[str, ...], acl_server: ValkeyServer) -> None:
    told = acl_server.command("ACL", "DRYRUN", f"headrace-{user}", *words)
    assert told != b"OK"


@pytest.fixture(scope="module")
def acl_server() -> Iterator[ValkeyServer]:
    with guarded("server") as (servers, _):
        yield servers[0]
