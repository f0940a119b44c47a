"""What browsers need so that a page of another origin may read answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.settings import GatewaySettings
from tests.support import sse
from tests.support.fake_worker import FakeWorker
from tests.support.gateway import RunningGateway, pool
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyServer

PAGE = "https://chat.example.com"
STREAM = {"model": "tiny", "stream": True, "messages": []}
ASKS = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}

Pair = tuple[RunningGateway, FakeWorker]


@pytest.fixture
async def pair(valkey: ValkeyServer) -> AsyncIterator[Pair]:
    origins = ("http://localhost:3000", PAGE)
    async with pool(valkey.url, cors_origins=origins, max_header_bytes=4096) as both:
        yield both


def check_readable(response: sse.Response) -> None:
    """Check that the page may read the answer and its headers."""
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["vary"] == "Origin"
    exposed = response.headers["access-control-expose-headers"].split(", ")
    assert {"x-job-id", "x-request-id", "retry-after", "retry-after-ms", "x-should-retry"} < set(
        exposed
    )
    assert "x-ratelimit-remaining-tokens" in exposed


async def test_a_page_may_read_streams_and_what_is_refused(pair: Pair) -> None:
    gateway, worker = pair
    streaming = asyncio.ensure_future(sse.fetch(gateway.chat, STREAM, headers={"origin": PAGE}))
    await (await worker.take()).stream(b"1")
    response, raw = await streaming
    check_readable(response)
    assert raw.endswith(b"[DONE]\n\n")
    refused = [
        (404, "/v1/nothing", None, {}),
        (404, "/v1/chat/completions", {"model": "unknown"}, {}),
        (405, "/v1/chat/completions", None, {}),
        (400, "/v1/chat/completions", b"[]", {}),
        (415, "/v1/chat/completions", b"x", {"content-type": "text/plain"}),
        (413, "/v1/chat/completions", None, {"content-length": "99999999999"}),
        (431, "/v1/chat/completions", STREAM, {"x-long": "x" * 5000}),
    ]
    for status, path, body, headers in refused:
        method = "GET" if status == 405 else "POST"
        response, _ = await sse.fetch(
            gateway.url + path, body, method=method, headers={"origin": PAGE, **headers}
        )
        assert response.status == status
        check_readable(response)


async def test_a_page_may_read_that_nobody_is_there(pair: Pair) -> None:
    gateway, _ = pair
    gateway.gateway.submitter.draining = True
    response, _ = await sse.fetch(gateway.chat, STREAM, headers={"origin": PAGE})
    assert response.status == 503
    check_readable(response)


async def test_a_preflight_is_answered_without_a_key_and_without_the_queue(
    own_valkey: ValkeyServer,
) -> None:
    async with (
        TcpProxy.to(own_valkey.url) as proxy,
        pool(own_valkey.url, gateway_url=proxy.url, cors_origins=(PAGE,)) as (gateway, _),
    ):
        proxy.swallow()
        for path in ("/v1/chat/completions", "/v1/models", "/v1/nothing"):
            async with asyncio.timeout(1):
                response, raw = await sse.fetch(gateway.url + path, method="OPTIONS", headers=ASKS)
            assert (response.status, raw) == (204, b"")
            check_readable(response)
            allowed = response.headers["access-control-allow-headers"]
            assert allowed == ASKS["access-control-request-headers"]
            allowed = response.headers["access-control-allow-methods"]
            assert allowed == "GET, HEAD, POST, DELETE, OPTIONS"
        proxy.heal()


async def test_other_pages_are_told_nothing(pair: Pair) -> None:
    gateway, _ = pair
    for origin in ("https://evil.example.com", "null", PAGE + ".evil.com", PAGE.upper()):
        for method, headers in (("GET", {}), ("OPTIONS", ASKS)):
            response, _ = await sse.fetch(
                f"{gateway.url}/v1/models", method=method, headers={**headers, "origin": origin}
            )
            assert "access-control-allow-origin" not in response.headers
            assert response.headers["vary"] == "Origin"


async def test_all_pages_by_setting_and_none_by_default(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, cors_origins=("*",)) as (gateway, _):
        response, _ = await sse.fetch(f"{gateway.url}/v1/models", headers={"origin": PAGE})
        assert response.headers["access-control-allow-origin"] == "*"
        assert "vary" not in response.headers
    async with pool(valkey.url) as (gateway, _):
        response, _ = await sse.fetch(f"{gateway.url}/v1/models", headers=ASKS)
        assert [name for name in response.headers if name.startswith("access-control")] == []


def test_origins_are_read_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CORS_ORIGINS", f"{PAGE}, app://obsidian.md,")
    assert GatewaySettings().cors_origins == (PAGE, "app://obsidian.md")
    for wrong in ("chat.example.com", f"{PAGE}/", f"{PAGE}/chat"):
        monkeypatch.setenv("HEADRACE_CORS_ORIGINS", wrong)
        with pytest.raises(ValueError, match="no path"):
            GatewaySettings()
