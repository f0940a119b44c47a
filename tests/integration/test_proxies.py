"""What clients see through other people's HTTP: a real nginx, curl, HTTP/1.0.

nginx runs with its defaults, as somebody has it who has not read our documentation, and with
`compose/nginx.conf`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Literal

import pytest
import pytest_asyncio

from tests.faults.aftermath import Inspector, JobState
from tests.support import nginx
from tests.support.nginx import Nginx
from tests.support.processes import Pool
from tests.support.sse import Event, connect, fetch, open_response, request_bytes
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not nginx.BINARY.exists(), reason="no nginx: apt-get install nginx-light"),
]

TOKEN_S = 0.05
TOKENS = 20
CHAT = "/v1/chat/completions"
LIMIT = 4096
"""Longest body that the gateway takes; nginx's own limits are far above."""

Config = Literal["defaults", "compose"]


class Site:
    """A pool with nginx in front of its gateway."""

    def __init__(self, front: Nginx, inspector: Inspector, config: Config) -> None:
        self.config = config
        self.url = front.url
        self.chat = front.url + CHAT
        self._inspector = inspector

    async def jobs(self) -> dict[str, JobState]:
        return await self._inspector.jobs(await self._inspector.job_ids())

    async def new_job(self, before: dict[str, JobState], state: str) -> str:
        """Wait for a new job to be in a state and return its id."""

        async def there() -> str:
            jobs = await self.jobs()
            (new,) = jobs.keys() - before.keys() or [""]
            assert new, "no new job"
            assert jobs[new].fields["state"] == state
            return new

        return await until(there, f"a new job that is {state}")

    async def ended(self, job_id: str) -> JobState:
        """Wait, a second at most, for a job's end."""

        async def over() -> JobState:
            job = (await self.jobs())[job_id]
            assert job.outcome, job.fields
            return job

        return await until(over, "the job's end", timeout=1, every=0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[tuple[Pool, Inspector]]:
    gateway = {"max_body_bytes": LIMIT, "first_byte_grace_s": 0.3, "keepalive_s": 0.3}
    paces = {"ttft_ms": 100, "tpot_ms": TOKEN_S * 1000, "seats": 8}
    with ValkeyServer() as server:
        inspector = Inspector(server.url)
        async with Pool(server.url, gateway=gateway, simulated=paces) as started:
            yield started, inspector
        await inspector.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["defaults", "compose"])
async def site(
    pool: tuple[Pool, Inspector],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Site]:
    directory = tmp_path_factory.mktemp("nginx")
    config = nginx.DEFAULTS if request.param == "defaults" else nginx.compose_config()
    front = Nginx(config, pool[0].url, directory)
    front.start()
    try:
        await front.wait_ready()
        yield Site(front, pool[1], request.param)
    finally:
        await front.close()


def ask(text: str = "hello", *, stream: bool = True, tokens: int = TOKENS) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "stream": stream, "max_tokens": tokens}


def check_pace(times: Sequence[float]) -> None:
    """Check that tokens came as they were made, not in lumps; a busy machine may join a few."""
    gaps = [after - before for before, after in pairwise(times)]
    assert TOKEN_S / 2 < median(gaps) < TOKEN_S * 2, gaps
    assert max(gaps) < 8 * TOKEN_S, gaps
    assert times[-1] - times[0] > 0.7 * TOKEN_S * len(gaps), gaps


def content_times(events: Sequence[Event]) -> list[float]:
    return [event.at for event in events if event.data and '"content":"' in event.data]


# --- nginx ---


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_tokens_come_one_by_one(site: Site, version: Literal["1.1", "1.0"]) -> None:
    begun = time.monotonic()
    # A browser's client says that it takes compressed answers.
    accepted = {"accept-encoding": "gzip, deflate, br"}
    async with open_response(site.chat, ask(), version=version, headers=accepted) as response:
        assert response.status == 200
        assert "content-encoding" not in response.headers
        events = await response.all_events()
    assert events[-1].done
    assert response.clean
    times = content_times(events)[-TOKENS:]
    assert len(times) == TOKENS
    assert times[0] - begun < 1
    check_pace(times)


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_stops_the_engine(site: Site, stream: bool, reset: bool) -> None:
    before = await site.jobs()
    wire = await connect(site.url)
    await wire.send(request_bytes(site.chat, ask(stream=stream, tokens=2000)))
    job_id = await site.new_job(before, "running")
    await asyncio.sleep(0.4)
    wire.close(reset=reset)
    job = await site.ended(job_id)
    assert job.outcome == "cancelled"
    assert job.usage is not None
    assert 1 <= job.usage.completion_tokens < 60


async def test_a_client_that_leaves_while_it_waits_takes_its_job_along(site: Site) -> None:
    seated = [asyncio.ensure_future(fetch(site.chat, ask(tokens=60))) for _ in range(8)]
    await asyncio.sleep(0.5)
    before = await site.jobs()
    wire = await connect(site.url)
    await wire.send(request_bytes(site.chat, ask()))
    job_id = await site.new_job(before, "queued")
    wire.close()
    job = await site.ended(job_id)
    assert (job.outcome, job.attempts) == ("cancelled", 0)
    assert {response.status for response, _ in await asyncio.gather(*seated)} == {200}


async def test_comments_bridge_a_silence(site: Site) -> None:
    begun = time.monotonic()
    async with open_response(site.chat, ask("[[fault:slow:ttft_ms=2500]]")) as response:
        assert response.status == 200
        assert time.monotonic() - begun < 1
        events = await response.all_events()
    comments = [event for event in events if event.comment is not None]
    assert {event.comment for event in comments} == {"keep-alive"}
    assert len(comments) >= 3
    assert comments[-1].at - comments[0].at > 1
    assert events[-1].done


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_refusals_come_as_they_are(site: Site, stream: bool) -> None:
    async def refused(body: object, url: str = site.chat, **options: Any) -> tuple[int, str]:
        response, raw = await fetch(url, body, **options)
        error = json.loads(raw)["error"]
        assert response.headers["content-type"] == "application/json"
        assert set(error) == {"message", "type", "param", "code"}
        return response.status, error["code"]

    asked = ask(stream=stream)
    assert await refused({**asked, "model": "nope"}) == (404, "model_not_found")
    assert await refused(b"{") == (400, "invalid_json")
    assert await refused(asked, site.url + "/nowhere") == (404, "unknown_url")
    assert await refused(None, method="GET") == (405, "method_not_allowed")
    assert (await refused({**asked, "max_tokens": 0}))[0] == 400


@pytest.mark.parametrize("size", [LIMIT + 1, 900_000])
async def test_a_body_that_is_too_large(site: Site, size: int) -> None:
    """nginx may still be sending it when the answer is there."""
    for _ in range(5):
        response, raw = await fetch(site.chat, {**ask(), "pad": "x" * size})
        assert response.status == 413
        assert json.loads(raw)["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("fault", ["raise@5", "abort@5"])
async def test_a_failure_in_mid_stream_is_seen(site: Site, fault: str) -> None:
    response, raw = await fetch(site.chat, ask(f"[[fault:{fault}]]"))
    *_, last = raw.split(b"\n\n")[:-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_error"
    assert b"[DONE]" not in raw
    # HTTP/1.0, which nginx speaks by default, has no way to say that an answer isn't whole.
    assert response.ending == ("complete" if site.config == "defaults" else "cut")


async def test_fifty_streams_at_once_and_again(site: Site) -> None:
    for _ in range(2):
        answers = await asyncio.gather(*(fetch(site.chat, ask(tokens=3)) for _ in range(50)))
        assert {response.status for response, _ in answers} == {200}
        assert all(raw.endswith(b"data: [DONE]\n\n") for _, raw in answers)


# --- curl ---


async def curl(url: str, body: object, *options: str) -> tuple[int, list[tuple[float, bytes]]]:
    """Return curl's exit code and the lines that it printed, each with its time."""
    command = ["curl", "-sN", *options, url, "-H", "content-type: application/json"]
    process = await asyncio.create_subprocess_exec(
        *command, "-d", json.dumps(body), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    lines = [(time.monotonic(), line) async for line in process.stdout]
    return await process.wait(), lines


@pytest.mark.parametrize("options", [[], ["--http1.0"], ["--compressed"]], ids=str)
@pytest.mark.parametrize("through", ["nginx", "gateway"])
async def test_curl_prints_tokens_as_they_come(
    site: Site, pool: tuple[Pool, Inspector], through: str, options: list[str]
) -> None:
    url = site.chat if through == "nginx" else pool[0].url + CHAT
    code, lines = await curl(url, ask(), *options)
    assert code == 0
    assert lines[-2][1] == b"data: [DONE]\n"
    times = [at for at, line in lines if b'"content":"' in line][-TOKENS:]
    assert len(times) == TOKENS
    check_pace(times)


async def test_curl_says_that_a_stream_is_broken(site: Site) -> None:
    code, lines = await curl(site.chat, ask("[[fault:raise@5]]"))
    assert b'"engine_error"' in lines[-2][1]
    assert code == (0 if site.config == "defaults" else 18)  # CURLE_PARTIAL_FILE


async def test_curl_that_is_stopped_stops_the_engine(site: Site) -> None:
    before = await site.jobs()
    process = await asyncio.create_subprocess_exec(
        "curl",
        "-sN",
        site.chat,
        "-H",
        "content-type: application/json",
        "-d",
        json.dumps(ask(tokens=2000)),
        stdout=subprocess.PIPE,
    )
    job_id = await site.new_job(before, "running")
    await asyncio.sleep(0.3)
    process.terminate()
    await process.communicate()
    assert (await site.ended(job_id)).outcome == "cancelled"
