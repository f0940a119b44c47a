"""Everything that is refused: OpenAI's body, the right status, at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from gateway.endpoints import ENDPOINTS
from shared.registry import Snapshot
from tests.support import sse
from tests.support.fake_worker import FakeWorker
from tests.support.gateway import RunningGateway, pool
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until
from tests.unit.test_gateway_body import BAD
from tests.unit.test_gateway_form import upload

WHOLE = {"model": "tiny", "messages": []}
UPLOAD = upload({"model": "tiny"})

Pair = tuple[RunningGateway, FakeWorker]


@pytest.fixture
async def pair(valkey: ValkeyServer) -> AsyncIterator[Pair]:
    async with pool(valkey.url, max_body_bytes=1 << 20) as both:
        yield both


def check_error(response: sse.Response, raw: bytes, status: int, code: str) -> dict[str, object]:
    """Check an error's whole form and return it."""
    assert response.status == status, raw
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = json.loads(raw)
    assert list(body) == ["error"]
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]
    assert not any(word in error["message"] for word in ("Traceback", "<class", "0x", "b'"))
    if status == 503:
        assert 1 <= int(response.headers["retry-after"]) <= 60
    assert isinstance(error, dict)
    return error


async def test_costly_requests_are_refused_before_a_worker_is_asked(pair: Pair) -> None:
    gateway, worker = pair
    for endpoint in ENDPOINTS:
        if endpoint.takes_form:
            continue
        fields = {**WHOLE, "stream": True, "n": 10**6}
        response, raw = await sse.fetch(gateway.url + endpoint.path, fields)
        if endpoint.path.startswith("/v1/messages"):
            assert response.status == 400
            assert json.loads(raw)["error"]["type"] == "invalid_request_error"
        else:
            error = check_error(response, raw, 400, "above_limit")
            assert (error["type"], error["param"]) == ("invalid_request_error", "n")
    assert await worker.job_ids() == []


async def test_bad_bodies(pair: Pair) -> None:
    gateway, worker = pair
    for name, content in BAD.items():
        response, raw = await sse.fetch(gateway.chat, content)
        assert response.status == 400, name
        check_error(response, raw, 400, json.loads(raw)["error"]["code"])
    assert await worker.job_ids() == []


async def test_unknown_things(pair: Pair) -> None:
    gateway, _ = pair
    response, raw = await sse.fetch(gateway.chat, {**WHOLE, "model": "caf\u00e9"})
    error = check_error(response, raw, 404, "model_not_found")
    assert error["param"] == "model"
    assert raw.isascii()
    response, raw = await sse.fetch(f"{gateway.url}/v1/chat/nope", WHOLE)
    check_error(response, raw, 404, "unknown_url")
    response, raw = await sse.fetch(gateway.chat)
    check_error(response, raw, 405, "method_not_allowed")
    assert response.headers["allow"] == "OPTIONS, POST"
    response, raw = await sse.fetch(f"{gateway.url}/v1/models", WHOLE)
    check_error(response, raw, 405, "method_not_allowed")
    response, raw = await sse.fetch(f"{gateway.url}/v1/models/nope")
    check_error(response, raw, 404, "model_not_found")


async def test_content_types(pair: Pair) -> None:
    gateway, worker = pair
    for wrong in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        response, raw = await sse.fetch(gateway.chat, WHOLE, headers={"content-type": wrong})
        check_error(response, raw, 415, "unsupported_media_type")
    for right in ("application/json; charset=utf-8", "application/vnd.api+json", None):
        request = sse.request_bytes(gateway.chat, WHOLE)
        line = b"" if right is None else f"content-type: {right}\r\n".encode()
        request = request.replace(b"content-type: application/json\r\n", line)
        wire = await sse.connect(gateway.url)
        await wire.send(request)
        await (await worker.take()).whole(b"{}")
        assert (await sse.read_head(wire)).status == 200
        wire.close()


async def test_stored_state_is_refused(pair: Pair) -> None:
    gateway, _ = pair
    url = f"{gateway.url}/v1/responses"
    for name in ("background", "previous_response_id", "conversation"):
        value = True if name == "background" else "id_1"
        response, raw = await sse.fetch(url, {"model": "tiny", "input": "x", name: value})
        error = check_error(response, raw, 400, "invalid_request")
        assert error["param"] == name


@pytest.mark.parametrize(
    ("method", "tail"),
    [("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")],
)
async def test_stored_responses_are_known_not_to_be_kept(
    pair: Pair, method: str, tail: str
) -> None:
    gateway, worker = pair
    url = f"{gateway.url}/v1/responses/resp_1{tail}"
    response, raw = await sse.fetch(url, method=method)
    error = check_error(response, raw, 404, "not_stored")
    assert "not stored" in str(error["message"])
    assert await worker.job_ids() == []


async def test_stored_state_matters_to_responses_alone(pair: Pair) -> None:
    gateway, worker = pair
    for name in ("background", "previous_response_id", "conversation"):
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, {**WHOLE, name: True}))
        await (await worker.take()).whole(b"{}")
        assert (await answering)[0].status == 200


async def test_body_that_says_it_is_too_large(pair: Pair) -> None:
    gateway, _ = pair
    wire = await sse.connect(gateway.url)
    await wire.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n"
        b"expect: 100-continue\r\n\r\n"
    )
    response = await sse.read_head(wire)
    check_error(response, await response.body(), 413, "body_too_large")
    assert response.headers["connection"] == "close"
    wire.close()


async def test_body_that_grows_too_large_is_refused_while_it_is_read(pair: Pair) -> None:
    gateway, worker = pair
    wire = await sse.connect(gateway.url)
    await wire.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    for _ in range(17):
        await wire.send(chunk)
    async with asyncio.timeout(1):  # Not sent to its end: the answer is there already.
        response = await sse.read_head(wire)
    for _ in range(50):  # What the client still sends doesn't reset the connection under it.
        await wire.send(chunk)
    await wire.send(b"0\r\n\r\n")
    check_error(response, await response.body(), 413, "body_too_large")
    assert response.ending == "complete"
    assert await worker.job_ids() == []
    wire.close()


async def test_large_body_sent_at_once_still_sees_its_answer(pair: Pair) -> None:
    gateway, _ = pair
    response, raw = await sse.fetch(gateway.chat, b"x" * (20 << 20))
    check_error(response, raw, 413, "body_too_large")


async def test_body_that_does_not_come(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, body_timeout_s=0.2) as (gateway, _):
        wire = await sse.connect(gateway.url)
        await wire.send(sse.request_bytes(gateway.chat, WHOLE)[:-3])
        response = await sse.read_head(wire)
        check_error(response, await response.body(), 400, "invalid_request")
        wire.close()


async def test_full_queue(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, seats=2, max_queue_depth=3) as (gateway, worker):
        tasks = [asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE)) for _ in range(5)]

        async def full() -> bool:
            return await worker.depth() == 5

        await until(full, "seats and queue are full")
        response, raw = await sse.fetch(gateway.chat, WHOLE)
        check_error(response, raw, 503, "queue_full")
        batch = asyncio.ensure_future(sse.fetch(gateway.chat, {**WHOLE, "service_tier": "flex"}))

        async def batched() -> bool:
            return (await worker.transitions.depths(worker.tag))["batch"] == 1

        await until(batched, "the other lane has room")
        for _ in range(6):
            await (await worker.take()).whole(b"{}")
        await asyncio.gather(*tasks, batch)


async def test_a_gateway_that_has_just_begun_knows_its_models_at_once(
    pair: Pair, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first reading of the registry it waits for that; it doesn't refuse."""
    first, worker = pair
    young = RunningGateway(valkey.url, workers=0, key_prefix=first.settings.key_prefix)
    read, let = young.gateway.models._registry.snapshot, asyncio.Event()

    async def slowly() -> Snapshot:
        await let.wait()
        return await read()

    monkeypatch.setattr(young.gateway.models._registry, "snapshot", slowly)
    async with young:
        answering = asyncio.ensure_future(sse.fetch(young.chat, WHOLE))
        listing = asyncio.ensure_future(sse.fetch(f"{young.url}/v1/models"))
        await asyncio.wait({answering, listing}, timeout=0.1)
        assert not answering.done()
        assert not listing.done()
        let.set()
        await (await worker.take()).whole(b"{}")
        assert (await answering)[0].status == 200
        assert b'"tiny"' in (await listing)[1]


async def test_too_many_streams(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, max_streams=2) as (gateway, worker):
        tasks = [asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE)) for _ in range(2)]
        await until(lambda: gateway.gateway.submitter.open_streams == 2, "two are open")
        response, raw = await sse.fetch(gateway.chat, WHOLE)
        check_error(response, raw, 503, "overloaded")
        for _ in range(2):
            await (await worker.take()).whole(b"{}")
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("how", ["refused", "silent", "frozen"])
async def test_queue_away_is_said_within_two_seconds(own_valkey: ValkeyServer, how: str) -> None:
    loop = asyncio.get_running_loop()
    async with (
        TcpProxy.to(own_valkey.url) as proxy,
        pool(own_valkey.url, gateway_url=proxy.url) as (gateway, worker),
    ):
        if how == "refused":
            proxy.refuse()
            proxy.cut()
        elif how == "silent":
            proxy.swallow()
        else:
            own_valkey.pause()
        for _ in range(2):
            start = loop.time()
            response, raw = await sse.fetch(gateway.chat, WHOLE)
            assert loop.time() - start < 2
            check_error(response, raw, 503, "queue_unavailable")
        live, _ = await sse.fetch(f"{gateway.url}/healthz")
        assert live.status == 200
        ready, _ = await sse.fetch(f"{gateway.url}/readyz")
        assert ready.status == 503
        listed, _ = await sse.fetch(f"{gateway.url}/v1/models")
        assert listed.status == 200
        own_valkey.resume()
        proxy.heal()
        await until(lambda: gateway.gateway.models.reachable, "it recovers by itself", timeout=8)
        await gateway.wait_ready()
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
        await _answer_live(worker)
        assert (await answering)[0].status == 200
        await until(lambda: gateway.gateway.canceller.pending == 0, "nothing is left", timeout=8)


async def _answer_live(worker: FakeWorker) -> None:
    while True:
        job = await worker.take()
        if not (await job.state()).get("cancel"):
            await job.whole(b"{}")
            return


async def test_queue_away_at_start_is_waited_for(own_valkey: ValkeyServer) -> None:
    own_valkey.stop()
    async with RunningGateway(own_valkey.url, workers=0) as gateway:
        live, _ = await sse.fetch(f"{gateway.url}/healthz")
        assert live.status == 200
        ready, raw = await sse.fetch(f"{gateway.url}/readyz")
        assert ready.status == 503
        assert json.loads(raw)["redis"] is False
        response, raw = await sse.fetch(gateway.chat, WHOLE)
        check_error(response, raw, 503, "queue_unavailable")
        own_valkey.start()
        async with FakeWorker(own_valkey.url) as worker:
            await gateway.wait_ready(1)
            answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
            await (await worker.take()).whole(b"{}")
            assert (await answering)[0].status == 200


async def test_full_memory_refuses_new_work_and_lets_cancels_through(
    own_valkey: ValkeyServer,
) -> None:
    async with pool(own_valkey.url) as (gateway, worker):
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
        job = await worker.take()
        own_valkey.command("CONFIG", "SET", "maxmemory", "1")
        response, raw = await sse.fetch(gateway.chat, WHOLE)
        check_error(response, raw, 503, "queue_full")
        _, raw = await sse.fetch(f"{gateway.url}/v1/jobs/{'0' * 32}/cancel", b"", method="POST")
        assert b"job_not_found" in raw
        await job.whole(b"{}")
        assert (await answering)[0].status == 200


async def test_every_endpoint_of_the_table_is_relayed(pair: Pair) -> None:
    gateway, worker = pair
    for endpoint in ENDPOINTS:
        content, sent = (b"{}", "application/json") if not endpoint.takes_form else UPLOAD
        headers = {"content-type": sent}
        url = gateway.url + endpoint.path
        answering = asyncio.ensure_future(sse.fetch(url, content, headers=headers))
        job = await worker.take()
        assert (job.job.path, job.job.body, job.job.content_type) == (endpoint.path, content, sent)
        assert job.job.model == "tiny"
        await job.whole(b'{"ok": true}')
        assert (await answering)[1] == b'{"ok": true}'


async def test_uploads_are_streamed_refused_and_sent_to_their_model(pair: Pair) -> None:
    gateway, worker = pair
    url = f"{gateway.url}/v1/audio/transcriptions"
    content, sent = upload({"model": "tiny", "stream": "true"})
    answering = asyncio.ensure_future(sse.fetch(url, content, headers={"content-type": sent}))
    job = await worker.take()
    assert job.job.stream
    await job.whole(b"{}")
    assert (await answering)[0].status == 200
    content, sent = upload({"model": "other"})
    response, raw = await sse.fetch(url, content, headers={"content-type": sent})
    check_error(response, raw, 404, "model_not_found")
    response, raw = await sse.fetch(url, WHOLE)
    check_error(response, raw, 415, "unsupported_media_type")
    response, raw = await sse.fetch(
        url, content, headers={"content-type": "multipart/form-data; boundary=other"}
    )
    check_error(response, raw, 400, "invalid_request")


async def test_what_needs_no_job_is_answered_without_one(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, no_worker_wait_s=0) as (gateway, worker):
        await _without_a_job(gateway, worker)


async def _without_a_job(gateway: RunningGateway, worker: FakeWorker) -> None:
    response, raw = await sse.fetch(f"{gateway.url}/version")
    assert (response.status, json.loads(raw)) == (200, {"version": "0.32.0"})
    response, raw = await sse.fetch(f"{gateway.url}/health")
    assert (response.status, raw) == (200, b"")
    await worker.announce("draining")
    await until(lambda: gateway.gateway.models.ready_workers == 0, "it is noticed")
    response, raw = await sse.fetch(f"{gateway.url}/version")
    check_error(response, raw, 503, "no_worker")
    response, raw = await sse.fetch(f"{gateway.url}/health")
    assert (response.status, raw) == (503, b"")
    assert await worker.job_ids() == []


async def test_model_may_be_left_out_where_there_is_one_pool(pair: Pair) -> None:
    gateway, worker = pair
    for model in ({}, {"model": None}, {"model": ""}, {"model": 7}):
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, {"messages": [], **model}))
        job = await worker.take()
        assert job.job.model == "tiny"
        await job.whole(b"{}")
        await answering


async def test_model_must_be_named_where_there_are_two_pools(
    pair: Pair, valkey: ValkeyServer
) -> None:
    gateway, worker = pair
    prefix = gateway.settings.key_prefix
    async with FakeWorker(valkey.url, key_prefix=prefix, pool="other", models=["lora"]) as other:
        await gateway.wait_ready(2)
        response, raw = await sse.fetch(gateway.chat, {"messages": []})
        error = check_error(response, raw, 400, "invalid_request")
        assert error["param"] == "model"
        for model, its in (("tiny", worker), ("other", other), ("lora", other)):
            answering = asyncio.ensure_future(sse.fetch(gateway.chat, {"model": model}))
            await (await its.take()).whole(b"{}")
            assert (await answering)[0].status == 200
        _, raw = await sse.fetch(f"{gateway.url}/v1/models")
        cards = {card["id"]: card for card in json.loads(raw)["data"]}
        assert set(cards) == {"tiny", "other", "lora"}
        assert cards["lora"]["parent"] == "other"
        assert cards["tiny"]["max_model_len"] == 2048
        _, raw = await sse.fetch(f"{gateway.url}/v1/models/lora")
        assert json.loads(raw) == cards["lora"]


async def test_request_id_is_echoed_where_it_is_sane(pair: Pair) -> None:
    gateway, _ = pair
    url = f"{gateway.url}/v1/models"
    response, _ = await sse.fetch(url, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    for insane in ("x" * 129, "with space", "caf\u00e9", ""):
        response, _ = await sse.fetch(url, headers={"X-Request-Id": insane})
        assert response.headers["x-request-id"].startswith("req-")


async def test_request_id_is_on_every_answer_and_in_the_job(pair: Pair) -> None:
    gateway, worker = pair
    mine = {"X-Request-Id": "mine-2"}
    for path in ("/healthz", "/readyz", "/metrics", "/v1/nothing", "/v1/chat/completions"):
        response, _ = await sse.fetch(gateway.url + path, headers=mine)
        assert response.headers["x-request-id"] == "mine-2"
    too_large = {**mine, "x-long": "x" * 70_000}
    response, _ = await sse.fetch(f"{gateway.url}/healthz", headers=too_large)
    assert (response.status, response.headers["x-request-id"]) == (431, "mine-2")
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "v=1"}
    answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE, headers=mine | trace))
    job = await worker.take()
    assert (job.job.request_id, job.job.model) == ("mine-2", "tiny")
    assert {"traceparent": job.job.traceparent, "tracestate": job.job.tracestate} == trace
    await job.whole(b"{}")
    assert (await answering)[0].headers["x-request-id"] == "mine-2"


async def test_what_nobody_foresaw_is_one_line_that_says_whose_it_was(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gateway, _ = pair

    def listing() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(gateway.gateway.models, "listing", listing)
    url = f"{gateway.url}/v1/models"
    response, raw = await sse.fetch(url, headers={"X-Request-Id": "broke-1"})
    check_error(response, raw, 500, "internal_error")
    (record,) = [one for one in caplog.records if one.exc_info]
    assert record.getMessage() == "request.broke"
    assert record.__dict__["fields"]["request"] == "broke-1"
