"""One attempt at one job, with an application written by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.datastructures import UploadFile
from starlette.requests import Request

from shared.protocol import End, Frame, Head, Usage
from tests.unit.engines import Answer, ScriptedEngine, complete, gone, part, start
from tests.unit.test_gateway_form import upload
from tests.unit.test_publisher import Server, event, make_adopted, running
from worker import run as run_module
from worker.engine.interface import CURRENT, Call, Message, Receive, Send
from worker.outbox import PART_BYTES
from worker.publisher import Publisher
from worker.run import Run


class Bench:
    """Runs one job and shows what became of it."""

    def __init__(self, server: Server, publisher: Publisher) -> None:
        self.server = server
        self.publisher = publisher
        self.engine = ScriptedEngine()
        self.begun = asyncio.Event()

    def make(self, answer: Answer, left_s: float = 60, **changes: Any) -> Run:
        async def begin(call: Call, body: bytes, receive: Receive, send: Send) -> None:
            self.begun.set()
            await answer(call, body, receive, send)

        self.engine.answer = begin
        adopted = replace(make_adopted(**changes), left_s=left_s)
        return Run(adopted, self.engine, self.publisher)

    async def settle(self, run: Run) -> End | None:
        """Execute a run and write its end, as the worker does."""
        async with asyncio.timeout(5):
            end = await run.execute()
            if end is not None:
                run.outbox.finish(end)
                await run.outbox.ended
        return end

    def frames(self, run: Run) -> list[Frame]:
        return self.server.frames(run.adopted.job.id)

    def answer(self, run: Run) -> bytes:
        return self.server.answer(run.adopted.job.id)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    server = Server()
    publisher = Publisher(server)
    async with running(publisher):
        yield Bench(server, publisher)


# The request


async def test_the_application_gets_the_job_as_a_request(bench: Bench) -> None:
    run = bench.make(complete, path="/v1/embeddings", body=b'{"a":"\xc3\xa9"}', request_id="mine")
    end = await bench.settle(run)
    assert end == End(outcome="completed", usage=Usage(3, 2))
    assert bench.answer(run) == b'{"a":"\xc3\xa9"}'
    assert bench.frames(run)[0].head == Head(200, "application/json")
    (scope,) = bench.engine.scopes
    headers = dict(scope["headers"])
    assert (scope["type"], scope["method"], scope["path"]) == ("http", "POST", "/v1/embeddings")
    assert scope["asgi"]["spec_version"] == "2.3"
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == b"10"
    # Never the client's own: engines abort by id.
    assert headers[b"x-request-id"] == run.adopted.job.id.encode()
    assert b"traceparent" not in headers


async def test_the_application_gets_the_trace_that_the_request_belongs_to(bench: Bench) -> None:
    await bench.settle(bench.make(complete, traceparent="00-1-2-01", tracestate="a=1"))
    headers = dict(bench.engine.scopes[0]["headers"])
    assert headers[b"traceparent"] == b"00-1-2-01"
    assert headers[b"tracestate"] == b"a=1"


async def test_an_upload_is_a_form_to_the_application(bench: Bench) -> None:
    content, sent = upload({"language": "en"}, b"RIFF\xff")
    run = bench.make(complete, path="/v1/audio/transcriptions", body=content, content_type=sent)
    await bench.settle(run)
    (scope,) = bench.engine.scopes

    async def receive() -> Message:
        return {"type": "http.request", "body": content, "more_body": False}

    async with Request(scope, receive).form() as form:
        assert form["language"] == "en"
        file = form["file"]
        assert isinstance(file, UploadFile)
        assert await file.read() == b"RIFF\xff"


async def test_the_call_reaches_every_task_of_the_application(bench: Bench) -> None:
    seen: list[Call] = []

    async def answer(call: Call, body: bytes, receive: Receive, send: Send) -> None:
        async def inner() -> None:
            seen.append(CURRENT.get())

        await asyncio.create_task(inner())
        await complete(call, body, receive, send)

    run = bench.make(answer, max_tokens_given=True, max_tokens=7)
    await bench.settle(run)
    assert seen == [run.call]
    assert run.call.job_id == run.adopted.job.id
    assert run.call.max_tokens_given
    assert run.call.max_tokens == 7


async def test_a_stream_goes_out_as_it_comes(bench: Bench) -> None:
    step = asyncio.Event()

    async def answer(call: Call, body: bytes, receive: Receive, send: Send) -> None:
        await start(send, "text/event-stream")
        for n in range(6):
            await part(send, event(str(n)))
            await step.wait()
            step.clear()
        await part(send, b"", more=False)

    run = bench.make(answer)
    settling = asyncio.create_task(bench.settle(run))
    for n in range(6):
        while bench.answer(run) != b"".join(event(str(i)) for i in range(n + 1)):
            bench.server.called.clear()
            await asyncio.wait_for(bench.server.called.wait(), 5)
            await asyncio.sleep(0)
        step.set()
    assert (await settling) == End(outcome="completed", usage=Usage())
    assert [f.head for f in bench.frames(run) if f.head] == [Head(200, "text/event-stream")]


async def test_an_error_of_the_application_is_its_answer(bench: Bench) -> None:
    async def refuse(call: Call, body: bytes, receive: Receive, send: Send) -> None:
        await start(send, status=400)
        await part(send, b'{"error":{}}', more=False)

    run = bench.make(refuse)
    end = await bench.settle(run)
    assert end is not None
    assert end.outcome == "completed"
    assert bench.frames(run)[0].head == Head(400, "application/json")


async def test_a_body_in_many_parts_of_any_type(bench: Bench) -> None:
    async def answer(call: Call, body: bytes, receive: Receive, send: Send) -> None:
        await start(send)
        await part(send, b"")
        await part(send, bytearray(b"ab"))  # type: ignore[arg-type]
        await part(send, memoryview(b"cd"))  # type: ignore[arg-type]
        await send({"type": "http.response.body"})

    run = bench.make(answer)
    assert (await bench.settle(run)) == End(outcome="completed", usage=Usage())
    assert bench.answer(run) == b"abcd"


# Failures


async def _raise(call: Call, body: bytes, receive: Receive, send: Send) -> None:
    raise ZeroDivisionError


async def _stop_short(call: Call, body: bytes, receive: Receive, send: Send) -> None:
    await start(send)
    await part(send, b'{"half":')


async def _say_nothing(call: Call, body: bytes, receive: Receive, send: Send) -> None:
    pass


async def _only_start(call: Call, body: bytes, receive: Receive, send: Send) -> None:
    await start(send)


async def _cancel_itself(call: Call, body: bytes, receive: Receive, send: Send) -> None:
    raise asyncio.CancelledError


async def _raise_late(call: Call, body: bytes, receive: Receive, send: Send) -> None:
    await _stop_short(call, body, receive, send)
    raise ZeroDivisionError


async def _look_complete(call: Call, body: bytes, receive: Receive, send: Send) -> None:
    call.fault = "aborted"
    await complete(call, body, receive, send)


async def _turn_out_false(call: Call, body: bytes, receive: Receive, send: Send) -> None:
    await complete(call, body, receive, send)
    call.fault = "aborted"


@pytest.mark.parametrize(
    "answer",
    [
        _raise,
        _stop_short,
        _say_nothing,
        _only_start,
        _cancel_itself,
        _raise_late,
        _look_complete,
        _turn_out_false,
    ],
)
async def test_what_is_no_whole_genuine_answer_fails(bench: Bench, answer: Answer) -> None:
    run = bench.make(answer)
    end = await bench.settle(run)
    assert end is not None
    assert (end.outcome, end.code) == ("failed", "engine_error")
    if answer not in (_stop_short, _raise_late, _turn_out_false):
        # Nothing has left yet: the failure can be a status, so no head may go before it.
        assert bench.frames(run) == []


async def test_a_failure_after_the_whole_answer_is_too_late(bench: Bench) -> None:
    async def answer(call: Call, body: bytes, receive: Receive, send: Send) -> None:
        await complete(call, body, receive, send)
        raise ZeroDivisionError

    run = bench.make(answer)
    end = await bench.settle(run)
    assert end is not None
    assert end.outcome == "completed"
    assert bench.answer(run) == run.adopted.job.body


async def test_a_fault_in_mid_stream_keeps_what_was_said_and_adds_nothing(bench: Bench) -> None:
    run: Run

    async def answer(call: Call, body: bytes, receive: Receive, send: Send) -> None:
        await start(send, "text/event-stream")
        await part(send, event("said"))
        while not bench.answer(run):  # noqa: ASYNC110
            await asyncio.sleep(0)
        call.usage.completion_tokens = 1
        call.fault = "engine died"
        await part(send, event("abort"))
        await part(send, b"data: [DONE]\n\n", more=False)

    run = bench.make(answer)
    end = await bench.settle(run)
    assert bench.answer(run) == event("said")
    assert end is not None
    assert (end.outcome, end.code, end.usage) == ("failed", "engine_error", Usage(0, 1))


# Stops


async def _until_gone(call: Call, body: bytes, receive: Receive, send: Send) -> None:
    """As vLLM's application: a request that was given up is still answered."""
    call.usage.prompt_tokens, call.usage.completion_tokens = 5, 1
    await gone(receive)
    await start(send)
    await part(send, b'{"finish_reason":"abort"}', more=False)


@pytest.mark.parametrize(
    ("reason", "outcome", "code"),
    [
        ("cancelled", "cancelled", "cancelled"),
        ("expired", "expired", "request_timeout"),
        ("drained", "failed", "worker_lost"),
        ("of tomorrow", "cancelled", "cancelled"),
    ],
)
async def test_a_stop_is_a_disconnect_and_its_answer_is_thrown_away(
    bench: Bench, reason: str, outcome: str, code: str
) -> None:
    run = bench.make(_until_gone)
    settling = asyncio.create_task(bench.settle(run))
    await bench.begun.wait()
    run.stop(reason)
    end = await settling
    assert end is not None
    assert (end.outcome, end.code, end.usage) == (outcome, code, Usage(5, 1))
    assert bench.frames(run) == []
    # Not to end it, which the disconnect has done, but to settle its usage.
    assert set(bench.engine.aborted) == {run.adopted.job.id}


async def test_the_first_reason_counts(bench: Bench) -> None:
    run = bench.make(_until_gone)
    settling = asyncio.create_task(bench.settle(run))
    await bench.begun.wait()
    run.stop("expired")
    run.stop("cancelled")
    end = await settling
    assert end is not None
    assert end.outcome == "expired"


async def test_a_job_that_is_anothers_gets_no_end(bench: Bench) -> None:
    run = bench.make(_until_gone)
    settling = asyncio.create_task(bench.settle(run))
    await bench.begun.wait()
    run.stop("cancelled")
    run.stop("fenced")
    assert await settling is None
    assert bench.server.ended == {}


async def test_a_job_is_stopped_at_its_deadline(bench: Bench) -> None:
    run = bench.make(_until_gone, left_s=0.02)
    end = await bench.settle(run)
    assert end is not None
    assert (end.outcome, end.code) == ("expired", "request_timeout")


async def test_a_stop_before_the_start(bench: Bench) -> None:
    run = bench.make(_until_gone)
    run.stop("cancelled")
    end = await bench.settle(run)
    assert end is not None
    assert end.outcome == "cancelled"


async def test_a_failed_engine_ends_its_runs(bench: Bench) -> None:
    run = bench.make(_until_gone)
    settling = asyncio.create_task(bench.settle(run))
    await bench.begun.wait()
    run.fail("died")
    end = await settling
    assert end is not None
    assert (end.outcome, end.code) == ("failed", "engine_error")
    assert run.call.fault == "died"
    assert bench.frames(run) == []


async def test_a_deaf_application_is_aborted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "DISCONNECT_S", 0.02)
    aborted = asyncio.Event()

    async def deaf(call: Call, body: bytes, receive: Receive, send: Send) -> None:
        await aborted.wait()

    async def abort(job_id: str) -> None:
        bench.engine.aborted.append(job_id)
        aborted.set()

    monkeypatch.setattr(bench.engine, "abort", abort)
    run = bench.make(deaf)
    settling = asyncio.create_task(bench.settle(run))
    await bench.begun.wait()
    run.stop("cancelled")
    end = await settling
    assert end is not None
    assert end.outcome == "cancelled"
    assert set(bench.engine.aborted) == {run.adopted.job.id}


@pytest.mark.parametrize("stubborn", [False, True])
async def test_an_application_deaf_to_everything_is_cancelled_and_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    monkeypatch.setattr(run_module, "DISCONNECT_S", 0.02)
    cancelled: list[bool] = []
    leave = asyncio.Event()

    async def deaf(call: Call, body: bytes, receive: Receive, send: Send) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            if not stubborn:
                raise
            await leave.wait()

    run = bench.make(deaf)
    settling = asyncio.create_task(bench.settle(run))
    await bench.begun.wait()
    run.stop("cancelled")
    end = await settling
    assert end is not None
    assert end.outcome == "cancelled"
    assert cancelled
    leave.set()


async def test_a_drain_does_not_cut_an_answer_that_is_whole(bench: Bench) -> None:
    """The application is done talking but not with itself, and the queue is slow."""
    body = bytes(3 * PART_BYTES) + b"end"
    whole = asyncio.Event()

    async def answer(call: Call, given: bytes, receive: Receive, send: Send) -> None:
        await start(send)
        await part(send, body, more=False)
        whole.set()
        await gone(receive)

    bench.server.gate.clear()
    run = bench.make(answer)
    settling = asyncio.create_task(bench.settle(run))
    await whole.wait()
    run.stop("drained")
    bench.server.gate.set()
    end = await settling
    assert end is not None
    assert end.outcome == "completed"
    assert bench.answer(run) == body


@pytest.mark.parametrize(
    "last",
    [
        b"data: [DONE]\n\n",
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed"}\n\n',
    ],
)
async def test_a_client_that_leaves_with_the_last_event_has_cancelled_nothing(
    bench: Bench, last: bytes
) -> None:
    said = asyncio.Event()

    async def answer(call: Call, given: bytes, receive: Receive, send: Send) -> None:
        await start(send, "text/event-stream")
        await part(send, event("1"))
        await part(send, last)
        said.set()
        await gone(receive)
        await part(send, b"", more=False)

    run = bench.make(answer)
    settling = asyncio.create_task(bench.settle(run))
    await said.wait()
    run.stop("cancelled")
    end = await settling
    assert end is not None
    assert end.outcome == "completed"
    assert bench.answer(run) == event("1") + last


async def test_a_stop_after_the_end_was_said_is_too_late(bench: Bench) -> None:
    body = bytes(3 * PART_BYTES) + b"end"
    bench.server.gate.clear()
    run = bench.make(complete, body=body)
    settling = asyncio.create_task(bench.settle(run))
    await bench.server.called.wait()
    run.stop("cancelled")
    run.fail("died")
    bench.server.gate.set()
    end = await settling
    assert end is not None
    assert end.outcome == "completed"
    assert bench.answer(run) == body


async def test_a_cancelled_run_leaves_no_task(bench: Bench) -> None:
    run = bench.make(_until_gone)
    before = asyncio.all_tasks()
    executing = asyncio.create_task(run.execute())
    await bench.begun.wait()
    executing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await executing
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_cancel_seen_by_a_write_stops_the_run(bench: Bench) -> None:
    async def answer(call: Call, body: bytes, receive: Receive, send: Send) -> None:
        await start(send, "text/event-stream")
        await part(send, event("one"))
        await gone(receive)

    run = bench.make(answer)
    bench.server.words[run.adopted.job.id] = "cancelled"
    end = await bench.settle(run)
    assert end is not None
    assert end.outcome == "cancelled"
    assert bench.answer(run) == event("one")


async def test_a_client_that_does_not_read_holds_the_application(bench: Bench) -> None:
    sent = 0

    async def answer(call: Call, body: bytes, receive: Receive, send: Send) -> None:
        nonlocal sent
        await start(send)
        for _ in range(64):
            await part(send, bytes(PART_BYTES))
            sent += 1
        await part(send, b"", more=False)

    bench.server.gate.clear()
    run = bench.make(answer)
    settling = asyncio.create_task(bench.settle(run))
    await bench.server.called.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    held = sent
    bench.server.gate.set()
    assert (await settling) == End(outcome="completed", usage=Usage())
    assert held < 32
    assert len(bench.answer(run)) == 64 * PART_BYTES
