"""The outbox and its single writer: every byte once, in order, one call per turn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from shared.errors import QueueFull, QueueUnavailable
from shared.outcomes import Adopted, Append, Claimed, Finish, Verdict
from shared.protocol import End, Frame, Head, Usage, decode_frame, encode, open_message
from shared.transitions import Transitions
from tests.support.appends import append_of
from tests.wire.records import TAG, make_job
from worker.outbox import OUTBOX_BYTES, PART_BYTES, Outbox
from worker.publisher import Publisher

SSE = Head(200, "text/event-stream; charset=utf-8")
JSON = Head(200, "application/json")
COMPLETED = End(outcome="completed", usage=Usage(1, 2))


def make_adopted(owner: str = "o1", base: int = 0, **changes: object) -> Adopted:
    job = make_job(**changes)
    return Adopted(job, Claimed(TAG, job.lane, False, b"1-0", job.id), owner, 1, base, 60, 0)


class Server(Transitions):
    """The part of the queue that a publisher sees, in memory, with faults."""

    def __init__(self) -> None:
        self.logs: dict[str, list[bytes]] = {}
        self.bases: dict[str, int] = {}
        self.ended: dict[str, Finish] = {}
        self.words: dict[str, str] = {}
        """What to answer instead of `ok`."""
        self.calls: list[tuple[int, int]] = []
        self.failures: list[Exception] = []
        self.lose_reply = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.called = asyncio.Event()

    def last(self, job_id: str) -> int:
        return self.bases.get(job_id, 0) + len(self.logs.setdefault(job_id, []))

    async def write(
        self, appends: Sequence[Append], finishes: Sequence[Finish]
    ) -> tuple[list[Verdict], list[Verdict]]:
        self.calls.append((len(appends), len(finishes)))
        self.called.set()
        await self.gate.wait()
        if self.failures and not self.lose_reply:
            raise self.failures.pop(0)
        verdicts = [self._append(append) for append in appends]
        ended = [self._finish(finish) for finish in finishes]
        if self.failures:
            raise self.failures.pop(0)
        return verdicts, ended

    def _append(self, append: Append) -> Verdict:
        word = self.words.get(append.job_id, "ok")
        if word == "fenced" or append.job_id in self.ended:
            return Verdict("fenced")
        last = self.last(append.job_id)
        if append.first > last + 1:
            return Verdict("gap", last)
        messages = append.messages[last + 1 - append.first :]
        self.logs[append.job_id] += [open_message(message).body for message in messages]
        return Verdict(word, self.last(append.job_id))

    def _finish(self, finish: Finish) -> Verdict:
        if finish.job_id in self.ended:
            return Verdict("ok")
        if self.words.get(finish.job_id) == "fenced":
            return Verdict("fenced")
        if finish.seq != self.last(finish.job_id) + 1:
            return Verdict("gap", self.last(finish.job_id))
        self.ended[finish.job_id] = finish
        return Verdict("ok")

    def lose(self, job_id: str, frames: int) -> None:
        """Forget the newest frames, as a server does that fell back to its last save."""
        del self.logs[job_id][len(self.logs[job_id]) - frames :]

    def frames(self, job_id: str) -> list[Frame]:
        return [decode_frame(body) for body in self.logs.get(job_id, [])]

    def answer(self, job_id: str) -> bytes:
        """Join the answer as a gateway does."""
        parts: list[bytes] = []
        prefix = suffix = b""
        for frame in self.frames(job_id):
            prefix, suffix = frame.template or (prefix, suffix)
            for item in frame.items:
                parts.append(prefix + item + suffix if isinstance(item, bytes) else item[0])
        return b"".join(parts)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def publisher(server: Server) -> AsyncIterator[Publisher]:
    publisher = Publisher(server)
    async with running(publisher):
        yield publisher


@asynccontextmanager
async def running(publisher: Publisher) -> AsyncIterator[None]:
    task = asyncio.create_task(publisher.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Stops:
    """Notes why an outbox wanted its job stopped."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)


def outbox(
    publisher: Publisher, stop: Callable[[str], None] = lambda _: None, **changes: object
) -> Outbox:
    return Outbox(make_adopted(**changes), publisher, stop)  # type: ignore[arg-type]


async def finish(box: Outbox, end: End = COMPLETED) -> None:
    box.finish(end)
    async with asyncio.timeout(5):
        await box.ended


async def settled(server: Server, box: Outbox, frames: int) -> None:
    """Wait until the server has so many frames and nothing is under way."""
    async with asyncio.timeout(5):
        while len(server.logs.get(box.adopted.job.id, [])) < frames:  # noqa: ASYNC110
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)


def event(text: str) -> bytes:
    return b'data: {"id":"chatcmpl-1","object":"chunk","text":"' + text.encode() + b'"}\n\n'


# The way of an answer


async def test_a_whole_answer(server: Server, publisher: Publisher) -> None:
    box = outbox(publisher)
    box.put_head(JSON)
    await box.put(b'{"a":1}')
    await finish(box)
    job_id = box.adopted.job.id
    assert server.frames(job_id) == [Frame([(b'{"a":1}',)], JSON)]
    assert server.ended[job_id].seq == 2
    assert server.ended[job_id].outcome == "completed"
    assert server.ended[job_id].usage == Usage(1, 2)
    assert decode_frame(server.ended[job_id].body) == Frame(end=COMPLETED)


async def test_an_answer_without_a_body_has_its_head(server: Server, publisher: Publisher) -> None:
    box = outbox(publisher)
    box.put_head(Head(204, ""))
    await finish(box)
    assert server.frames(box.adopted.job.id) == [Frame([], Head(204, ""))]


async def test_an_end_alone(server: Server, publisher: Publisher) -> None:
    box = outbox(publisher)
    await finish(box, End(outcome="failed", code="engine_error"))
    assert server.frames(box.adopted.job.id) == []
    assert server.ended[box.adopted.job.id].seq == 1


async def test_a_stream_is_thin_and_comes_back_whole(server: Server, publisher: Publisher) -> None:
    box = outbox(publisher)
    box.put_head(SSE)
    events = [event(f"word {n}") for n in range(20)]
    for one in events:
        await box.put(one)
    await finish(box)
    job_id = box.adopted.job.id
    assert server.answer(job_id) == b"".join(events)
    frames = server.frames(job_id)
    assert [f.head for f in frames if f.head] == [SSE]
    assert sum(f.template is not None for f in frames) == 1


@pytest.mark.parametrize("seed", range(40))
async def test_old_thin_items_never_meet_a_new_template(server: Server, seed: int) -> None:
    """Random streams that change their shape, sealed at random moments, with lost replies."""
    rng = random.Random(seed)
    publisher = Publisher(server)
    box = outbox(publisher)
    box.put_head(SSE)
    events: list[bytes] = []
    server.lose_reply = True
    async with running(publisher):
        for _ in range(rng.randint(1, 6)):
            head, tail = rng.randbytes(rng.choice([10, 60])), rng.randbytes(30)
            for _ in range(rng.randint(1, 12)):
                events.append(head + rng.randbytes(rng.randint(0, 9)) + tail)
                await box.put(events[-1])
                if rng.random() < 0.3:
                    await settled(server, box, 0)
        await finish(box)
    for frame in server.frames(box.adopted.job.id):
        assert frame.items
    assert server.answer(box.adopted.job.id) == b"".join(events)


async def test_only_streams_of_events_are_thinned(server: Server, publisher: Publisher) -> None:
    box = outbox(publisher)
    box.put_head(JSON)
    for n in range(10):
        await box.put(event(f"word {n}"))
    await finish(box)
    frames = server.frames(box.adopted.job.id)
    assert all(isinstance(item, tuple) for frame in frames for item in frame.items)
    assert server.answer(box.adopted.job.id) == b"".join(event(f"word {n}") for n in range(10))


async def test_tokens_go_with_what_they_made(server: Server, publisher: Publisher) -> None:
    box = outbox(publisher)
    box.put_head(SSE)
    await box.put(event("a"), [([1, 2], None, None)])
    await settled(server, box, 1)
    await box.put(event("b"), [([3], "stop", 7)])
    await finish(box)
    tokens = [frame.tokens for frame in server.frames(box.adopted.job.id)]
    assert tokens == [[([1, 2], None, None)], [([3], "stop", 7)]]


async def test_frames_begin_behind_the_base(server: Server, publisher: Publisher) -> None:
    box = outbox(publisher, base=7)
    server.bases[box.adopted.job.id] = 7
    await box.put(b"x")
    await finish(box)
    assert len(server.frames(box.adopted.job.id)) == 1
    assert server.ended[box.adopted.job.id].seq == 9


async def test_large_bodies_are_split_into_bounded_frames(
    server: Server, publisher: Publisher
) -> None:
    body = random.Random(1).randbytes(PART_BYTES * 9 + 17)
    box = outbox(publisher)
    box.put_head(JSON)
    await box.put(body)
    await finish(box)
    job_id = box.adopted.job.id
    assert server.answer(job_id) == body
    assert max(map(len, server.logs[job_id])) < 4 * PART_BYTES
    assert len(server.logs[job_id]) >= 4
    assert [f.head for f in server.frames(job_id) if f.head] == [JSON]


# One call per turn


async def test_what_many_jobs_put_in_one_turn_goes_in_one_call(
    server: Server, publisher: Publisher
) -> None:
    boxes = [outbox(publisher, owner=f"o{n}") for n in range(32)]
    for turn in range(3):
        for box in boxes:
            await box.put(b"x%d" % turn)
        await settled(server, boxes[-1], turn + 1)
    assert server.calls == [(32, 0)] * 3
    for box in boxes:
        box.finish(COMPLETED)
    await asyncio.gather(*(box.ended for box in boxes))
    assert server.calls[3:] == [(0, 32)]
    assert (publisher.calls, publisher.frames) == (4, 32 * 4)


async def test_what_comes_during_a_call_goes_with_the_next(
    server: Server, publisher: Publisher
) -> None:
    box = outbox(publisher)
    server.gate.clear()
    await box.put(b"1")
    await server.called.wait()
    for part in (b"2", b"3", b"4"):
        await box.put(part)
    server.gate.set()
    await settled(server, box, 2)
    assert [f.items for f in server.frames(box.adopted.job.id)] == [
        [(b"1",)],
        [(b"2",), (b"3",), (b"4",)],
    ]
    assert server.calls == [(1, 0)] * 2


async def test_last_frames_and_end_go_together(server: Server, publisher: Publisher) -> None:
    box = outbox(publisher)
    await box.put(b"1")
    await finish(box)
    assert server.calls == [(1, 1)]


# Trouble


@pytest.mark.parametrize("lost", ["request", "reply"])
@pytest.mark.parametrize("error", [QueueUnavailable(), QueueFull()])
async def test_a_failed_call_is_repeated_without_doubling_anything(
    server: Server, publisher: Publisher, lost: str, error: Exception
) -> None:
    server.failures = [error] * 2
    server.lose_reply = lost == "reply"
    box = outbox(publisher)
    await box.put(b"1")
    await server.called.wait()
    await box.put(b"2")
    await finish(box)
    job_id = box.adopted.job.id
    assert server.answer(job_id) == b"12"
    assert len(server.calls) > 2
    assert server.ended[job_id].seq == len(server.logs[job_id]) + 1


async def test_what_the_server_lost_is_sent_again(server: Server, publisher: Publisher) -> None:
    box = outbox(publisher)
    job_id = box.adopted.job.id
    for n in range(10):
        await box.put(b"%d" % n)
        await settled(server, box, n + 1)
    before = list(server.logs[job_id])
    server.lose(job_id, 7)
    await box.put(b"last")
    await settled(server, box, 11)
    assert server.logs[job_id][:10] == before
    assert server.answer(job_id) == b"0123456789last"
    await finish(box)
    assert server.ended[job_id].seq == 12


async def test_a_loss_found_by_the_end_is_repaired_too(
    server: Server, publisher: Publisher
) -> None:
    box = outbox(publisher)
    job_id = box.adopted.job.id
    for n in range(5):
        await box.put(b"%d" % n)
        await settled(server, box, n + 1)
    server.lose(job_id, 5)
    await finish(box)
    assert server.answer(job_id) == b"01234"
    assert server.ended[job_id].seq == 6


async def test_two_losses_in_a_row(server: Server, publisher: Publisher) -> None:
    box = outbox(publisher)
    job_id = box.adopted.job.id
    for n in range(4):
        await box.put(b"%d" % n)
        await settled(server, box, n + 1)
    for lost in (2, 4):
        server.lose(job_id, lost)
        await box.put(b"+")
        await settled(server, box, 5)
    await finish(box)
    assert server.answer(job_id) == b"0123++"


async def test_a_loss_that_cannot_be_repaired_ends_the_job_as_lost(
    server: Server, publisher: Publisher
) -> None:
    """The frames of an earlier owner are gone: nobody has them."""
    stops = Stops()
    box = outbox(publisher, stops, base=7)
    server.bases[box.adopted.job.id] = 3
    await box.put(b"x")
    async with asyncio.timeout(5):
        await box.ended
    assert stops.reasons == ["lost"]
    assert server.answer(box.adopted.job.id) == b""
    assert server.ended[box.adopted.job.id].outcome == "lost"


@pytest.mark.parametrize("word", ["cancelled", "expired"])
async def test_a_write_learns_of_a_cancel(server: Server, publisher: Publisher, word: str) -> None:
    stops = Stops()
    box = outbox(publisher, stops)
    server.words[box.adopted.job.id] = word
    await box.put(b"1")
    await settled(server, box, 1)
    assert stops.reasons == [word]
    await finish(box, End(outcome=word))
    assert server.ended[box.adopted.job.id].outcome == word


async def test_a_fenced_job_is_silent(server: Server, publisher: Publisher) -> None:
    stops = Stops()
    box = outbox(publisher, stops)
    server.words[box.adopted.job.id] = "fenced"
    await box.put(b"1")
    async with asyncio.timeout(5):
        await box.ended
    calls = len(server.calls)
    await box.put(b"2")
    box.finish(COMPLETED)
    for _ in range(10):
        await asyncio.sleep(0)
    assert stops.reasons == ["fenced"]
    assert len(server.calls) == calls
    assert server.answer(box.adopted.job.id) == b""


async def test_an_end_that_is_fenced_is_over(server: Server, publisher: Publisher) -> None:
    stops = Stops()
    box = outbox(publisher, stops)
    server.words[box.adopted.job.id] = "fenced"
    await finish(box)
    assert stops.reasons == ["fenced"]
    assert server.ended == {}


async def test_one_jobs_trouble_is_not_the_others(server: Server, publisher: Publisher) -> None:
    good, bad = outbox(publisher, owner="o1"), outbox(publisher, owner="o2")
    server.words[bad.adopted.job.id] = "fenced"
    await bad.put(b"x")
    await good.put(b"y")
    await finish(good)
    assert server.answer(good.adopted.job.id) == b"y"
    assert bad.fenced
    assert not good.fenced


async def test_the_end_is_written_once(server: Server, publisher: Publisher) -> None:
    box = outbox(publisher)
    await box.put(b"1")
    await finish(box)
    publisher.mark(box)
    for _ in range(10):
        await asyncio.sleep(0)
    assert server.answer(box.adopted.job.id) == b"1"
    assert len(server.logs[box.adopted.job.id]) == 1


# Backpressure and discarding


async def test_an_application_that_is_far_ahead_waits(server: Server, publisher: Publisher) -> None:
    server.gate.clear()
    box = outbox(publisher)
    part = bytes(OUTBOX_BYTES // 4)
    for _ in range(4):
        await box.put(part)
    put = asyncio.create_task(box.put(part))
    await server.called.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not put.done()
    server.gate.set()
    async with asyncio.timeout(5):
        await put
    await finish(box)
    assert server.answer(box.adopted.job.id) == part * 5


async def test_a_discard_lets_a_waiting_application_go(
    server: Server, publisher: Publisher
) -> None:
    server.gate.clear()
    box = outbox(publisher)
    put = asyncio.create_task(box.put(bytes(OUTBOX_BYTES + 1)))
    await server.called.wait()
    assert not put.done()
    box.discard()
    async with asyncio.timeout(1):
        await put
    server.gate.set()
    await finish(box, End(outcome="cancelled"))
    assert len(server.answer(box.adopted.job.id)) < OUTBOX_BYTES


async def test_what_was_discarded_never_goes_out(server: Server, publisher: Publisher) -> None:
    box = outbox(publisher)
    box.put_head(SSE)
    await box.put(event("secret"))
    box.discard()
    await finish(box, End(outcome="failed", code="engine_error"))
    job_id = box.adopted.job.id
    # No head either: the failure can still become the answer's status.
    assert server.frames(job_id) == []
    assert server.ended[job_id].seq == 1


async def test_a_completed_answer_cannot_be_cut_short_any_more(
    server: Server, publisher: Publisher
) -> None:
    """A stop that comes while the last frames wait for the queue is too late."""
    body = bytes(3 * PART_BYTES) + b"end"
    box = outbox(publisher)
    await box.put(body)
    box.finish(COMPLETED)
    box.discard()
    async with asyncio.timeout(5):
        await box.ended
    assert server.answer(box.adopted.job.id) == body
    assert server.ended[box.adopted.job.id].outcome == "completed"


async def test_advanced_says_whether_a_client_may_have_seen_something(
    server: Server, publisher: Publisher
) -> None:
    box = outbox(publisher, base=3)
    server.bases[box.adopted.job.id] = 3
    assert not box.advanced
    await box.put(b"x")
    await settled(server, box, 1)
    assert box.advanced


async def test_frames_that_the_test_server_takes_are_real(server: Server) -> None:
    """The double behaves as the scripts do where they were tried."""
    append = append_of("j", "o", 0, 1, [encode(Frame([b"a"]))])
    assert (await server.write([append], []))[0] == [Verdict("ok", 1)]
    assert (await server.write([append], []))[0] == [Verdict("ok", 1)]
    gap = append_of("j", "o", 0, 3, [b""])
    assert (await server.write([gap], []))[0] == [Verdict("gap", 1)]
