"""The same request in the forms that clients and proxies give it: slashes, prefixes, methods."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping

import pytest
from starlette.routing import Route

from gateway.endpoints import ENDPOINTS
from gateway.gateway import JSON_TYPE
from gateway.paths import route_path
from gateway.settings import GatewaySettings
from tests.support import sse
from tests.support.fake_worker import FakeWorker
from tests.support.gateway import RunningGateway, pool
from tests.support.valkey import ValkeyServer
from tests.unit.test_gateway_form import upload

WHOLE = {"model": "tiny", "messages": []}
LENGTH = len(json.dumps(WHOLE))
EXPECTING = {"expect": "100-continue"}

Pair = tuple[RunningGateway, FakeWorker]


@pytest.fixture
async def pair(valkey: ValkeyServer) -> AsyncIterator[Pair]:
    async with pool(valkey.url, root_path="/llm/a") as both:
        yield both


async def asked(
    pair: Pair, path: str, body: object = WHOLE, headers: Mapping[str, str] | None = None
) -> tuple[sse.Response, bytes]:
    """Send a request that a worker answers."""
    gateway, worker = pair
    answering = asyncio.ensure_future(sse.fetch(gateway.url + path, body, headers=headers))
    job = await worker.take()
    await job.whole(job.job.path.encode())
    return await answering


@pytest.mark.parametrize("prefix", ["", "/llm/a"])
@pytest.mark.parametrize("slash", ["", "/"])
async def test_every_route_with_and_without_prefix_and_slash(
    pair: Pair, prefix: str, slash: str
) -> None:
    gateway, _ = pair
    for endpoint in ENDPOINTS:
        body, kind = upload({"model": "tiny"}) if endpoint.takes_form else (WHOLE, JSON_TYPE)
        path = prefix + endpoint.path + slash
        response, raw = await asked(pair, path, body, {"content-type": kind})
        assert (response.status, raw) == (200, endpoint.path.encode())
    for path in ("/healthz", "/readyz", "/metrics", "/v1/models", "/v1/models/tiny"):
        response, raw = await sse.fetch(gateway.url + prefix + path + slash)
        assert response.status == 200, path
    assert b'"id":"tiny"' in (await sse.fetch(f"{gateway.url}{prefix}/v1/models{slash}"))[1]
    url = f"{gateway.url}{prefix}/v1/jobs/{response.headers['x-request-id']}{slash}"
    assert b"job_not_found" in (await sse.fetch(url))[1]


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/", "/"),
        ("/llm", "/llm"),
        ("/llm/", "/"),
        ("/llm/v1/models//", "/v1/models/"),
        ("/llmx/v1", "/llmx/v1"),
        ("/v1/llm/x", "/v1/llm/x"),
    ],
)
def test_what_is_taken_off_a_path(path: str, known: str) -> None:
    assert route_path(path, "/llm") == known


async def test_a_prefix_that_routes_begin_with_is_taken_off_once(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, root_path="/v1") as (gateway, _):
        assert (await sse.fetch(f"{gateway.url}/v1/v1/models"))[0].status == 200
        assert (await sse.fetch(f"{gateway.url}/v1/v1/v1/models"))[0].status == 404


@pytest.mark.parametrize("wrong", ["llm", "/llm/", "/a b", "/"])
def test_a_prefix_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="root_path"):
        GatewaySettings(root_path=wrong)


async def test_head_has_the_headers_alone(pair: Pair) -> None:
    gateway, worker = pair
    answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
    job = await worker.take()
    here = f"/v1/jobs/{job.job.id}"
    paths = ("/healthz", "/readyz", "/metrics", "/v1/models", "/v1/models/tiny", here)
    wire = await sse.connect(gateway.url)
    for path in (*paths, here + "/stream"):  # Which isn't waited for.
        await wire.send(sse.request_bytes(gateway.url + path, method="HEAD"))
        async with asyncio.timeout(2):
            response = await sse.read_head(wire)
        assert response.status == 200
        assert int(response.headers["content-length"]) > 0
        assert not wire.buffered
    wire.close()
    await job.whole(b"{}")
    assert (await answering)[0].status == 200


async def test_each_route_tells_which_methods_it_takes(pair: Pair) -> None:
    gateway, _ = pair
    routes = [one for one in gateway.server.application.routes if isinstance(one, Route)]
    assert len(routes) > 20
    for route in routes:
        url = gateway.url + re.sub(r"\{[^}]*\}", "x", route.path)
        allowed = ", ".join(sorted({*(route.methods or ()), "OPTIONS"}))
        response, raw = await sse.fetch(url, method="OPTIONS")
        assert (response.status, raw, response.headers["allow"]) == (204, b"", allowed)
        response, raw = await sse.fetch(url, b"{}", method="PATCH")
        assert (response.status, response.headers["allow"]) == (405, allowed)
        assert json.loads(raw)["error"]["message"]
    response, _ = await sse.fetch(f"{gateway.url}/v1/nothing", method="OPTIONS")
    assert response.status == 404


async def test_a_body_that_is_held_back_is_asked_for(pair: Pair) -> None:
    gateway, worker = pair
    wire = await sse.connect(gateway.url)
    head = sse.request_bytes(gateway.chat, WHOLE, headers=EXPECTING)[:-LENGTH]
    for _ in range(2):  # The connection is kept.
        await wire.send(head)
        assert await wire.line() == b"HTTP/1.1 100 Continue"
        assert await wire.line() == b""
        await wire.send(json.dumps(WHOLE).encode())
        await (await worker.take()).whole(b"{}")
        response = await sse.read_head(wire)
        assert response.status == 200
        assert "connection" not in response.headers
        await response.body()
    wire.close()


async def test_a_body_that_is_held_back_is_not_asked_for_in_vain(pair: Pair) -> None:
    gateway, _ = pair
    for status, path, headers in (
        (404, "/v1/nothing", {}),
        (405, "/v1/models", {}),
        (413, "/v1/chat/completions", {"content-length": "9999999999"}),
        (415, "/v1/chat/completions", {"content-type": "text/plain"}),
    ):
        wire = await sse.connect(gateway.url)
        url = gateway.url + path
        request = sse.request_bytes(url, WHOLE, headers={**EXPECTING, **headers})
        await wire.send(request[:-LENGTH])
        line = await wire.line()
        assert line is not None
        assert line.startswith(b"HTTP/1.1 %d " % status)
        wire.buffered = line + b"\r\n" + wire.buffered
        response = await sse.read_head(wire)
        assert response.headers["connection"] == "close"
        await response.body()
        assert await wire.some(1) == b""
        wire.close()


async def test_http_1_0_is_sent_no_interim_answer(pair: Pair) -> None:
    gateway, worker = pair
    wire = await sse.connect(gateway.url)
    await wire.send(sse.request_bytes(gateway.chat, WHOLE, version="1.0", headers=EXPECTING))
    await (await worker.take()).whole(b"{}")
    line = await wire.line()
    assert line is not None
    assert b" 200 " in line
    wire.close()


@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("cut", [0, 12, -5])
async def test_a_body_comes_though_an_upgrade_is_offered(
    pair: Pair, capfd: pytest.CaptureFixture[str], framing: str, cut: int
) -> None:
    """Java's client offers one with each request; uvicorn reads nothing behind it."""
    gateway, worker = pair
    wire = await sse.connect(gateway.url)
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAEA"}
    content = json.dumps(WHOLE).encode()
    request = sse.request_bytes(gateway.chat, WHOLE, headers=offer)
    if framing == "chunks":
        request = request.replace(b"content-length: %d" % LENGTH, b"transfer-encoding: chunked")
        content = b"%x\r\n%s\r\n0\r\n\r\n" % (LENGTH, content)
    head = request[:-LENGTH]
    for _ in range(2):  # The connection is kept.
        await wire.send(head + content[:cut])
        await asyncio.sleep(0.01)
        await wire.send(content[cut:])
        job = await worker.take()
        assert json.loads(job.job.body) == WHOLE
        await job.whole(b"{}")
        response = await sse.read_head(wire)
        assert (response.status, await response.body()) == (200, b"{}")
    await wire.send(sse.request_bytes(f"{gateway.url}/healthz", headers=offer))
    assert (await sse.read_head(wire)).status == 200
    wire.close()
    assert "upgrade" not in capfd.readouterr().err


async def test_many_upgrades_in_one_packet(pair: Pair) -> None:
    gateway, _ = pair
    wire = await sse.connect(gateway.url)
    offer = {"connection": "upgrade", "upgrade": "websocket"}
    await wire.send(1200 * sse.request_bytes(f"{gateway.url}/nothing", headers=offer))
    told = b""
    async with asyncio.timeout(30):
        while told.count(b"HTTP/1.1 404 ") < 1200:
            part = await wire.some(1 << 16)
            assert part
            told += part
    wire.close()
