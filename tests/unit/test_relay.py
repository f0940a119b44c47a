"""A job's stream: order, gaps, overflow, owners, loss. The log is a list, the channel is a call."""

from __future__ import annotations

import asyncio

import pytest

from gateway.relay import JobStream, Part
from gateway.turn import Turn
from shared import protocol
from shared.errors import Diverged, HeadraceError, JobLost, QueueUnavailable, RequestTimeout
from shared.outcomes import LogPage
from shared.protocol import End, Envelope, Frame, Head

COMPLETED = Frame(end=End(outcome="completed"))


class FakeLog:
    """A job's log, and the messages that its entries were published as."""

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []
        self.state: str | None = "running"
        self.page = 200
        self.reads: list[int] = []
        self.failures = 0
        self.gate = asyncio.Event()
        self.gate.set()

    def add(self, frame: Frame, owner: bytes = b"a", base: int = 0) -> bytes:
        seq = len(self.envelopes) + 1
        body = protocol.encode(frame)
        self.envelopes.append(Envelope(seq, owner, base, body))
        return b"%d %s %d %s" % (seq, owner, base, body)

    def text(self, text: bytes, owner: bytes = b"a", base: int = 0) -> bytes:
        return self.add(Frame(items=[(text,)]), owner, base)

    async def read(self, job_id: str, after: int, count: int) -> LogPage:
        self.reads.append(after)
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise QueueUnavailable
        count = min(self.page, count)
        found = self.envelopes[after : after + count]
        return LogPage(found, self.state, len(found) == count)


def stream_of(
    log: FakeLog,
    *,
    limit_bytes: int = 10_000,
    timeout_s: float = 60,
    turn: Turn | None = None,
) -> JobStream:
    loop = asyncio.get_running_loop()
    stream = JobStream(
        "job",
        "interactive",
        read_log=log.read,
        limit_bytes=limit_bytes,
        deadline=loop.time() + timeout_s,
        turn=turn,
    )
    stream.on_subscribed()
    return stream


async def take(stream: JobStream) -> Part:
    async with asyncio.timeout(2):
        part = await stream.next()
    assert part is not None
    return part


async def rest(stream: JobStream) -> bytes:
    data = b""
    while True:
        part = await take(stream)
        data += part.data
        if part.end is not None:
            return data


async def test_all_that_is_ready_comes_as_one() -> None:
    log = FakeLog()
    stream = stream_of(log)
    for text in (b"a", b"b", b"c"):
        stream.on_message(log.text(text))
    part = await take(stream)
    assert part.data == b"abc"
    assert part.items == 3
    assert log.reads == []


async def test_template_is_put_around_plain_items_only() -> None:
    log = FakeLog()
    stream = stream_of(log)
    stream.on_message(log.add(Frame(items=[(b"whole;",)], head=Head(200, "x"))))
    stream.on_message(log.add(Frame(items=[b"1", (b"alone;",), b"2"], template=(b"<", b">;"))))
    stream.on_message(log.add(Frame(items=[b"3"])))
    stream.on_message(log.add(Frame(items=[b"4"], template=(b"[", b"]"))))
    part = await take(stream)
    assert part.data == b"whole;<1>;alone;<2>;<3>;[4]"
    assert part.head == Head(200, "x")


async def test_newer_writers_frames_are_understood() -> None:
    log = FakeLog()
    stream = stream_of(log)
    tokens: list[protocol.Delta] = [([1, 2], None, None)]
    stream.on_message(log.add(Frame(items=[(b"a",)], tokens=tokens)))
    assert (await take(stream)).data == b"a"


async def test_numbers_that_came_before_are_dropped() -> None:
    log = FakeLog()
    stream = stream_of(log)
    first, second = log.text(b"a"), log.text(b"b")
    stream.on_message(first)
    stream.on_message(first)
    stream.on_message(second)
    stream.on_message(first)
    assert (await take(stream)).data == b"ab"
    stream.on_message(second)
    stream.on_message(log.add(COMPLETED))
    assert (await take(stream)).data == b""
    assert log.reads == []


async def test_gap_is_read_from_the_log() -> None:
    log = FakeLog()
    stream = stream_of(log)
    stream.on_message(log.text(b"a"))
    log.text(b"b")
    stream.on_message(log.text(b"c"))
    stream.on_message(log.add(COMPLETED))
    assert await rest(stream) == b"abc"
    assert log.reads == [0]


async def test_gap_behind_what_was_relayed_is_read_from_there() -> None:
    log = FakeLog()
    stream = stream_of(log)
    stream.on_message(log.text(b"a"))
    assert (await take(stream)).data == b"a"
    log.text(b"b")
    stream.on_message(log.text(b"c"))
    assert (await take(stream)).data == b"bc"
    assert log.reads == [1]


async def test_what_the_channel_brings_while_the_log_is_read_is_joined() -> None:
    log = FakeLog()
    stream = stream_of(log)
    log.text(b"a")
    stream.on_subscribed()
    log.gate.clear()
    reading = asyncio.ensure_future(take(stream))
    await asyncio.sleep(0)
    stream.on_message(log.text(b"b"))
    stream.on_message(log.text(b"c"))
    log.gate.set()
    data = (await reading).data
    stream.on_message(log.add(COMPLETED))
    assert data + await rest(stream) == b"abc"


async def test_first_acknowledgement_reads_nothing_and_later_ones_do() -> None:
    log = FakeLog()
    stream = stream_of(log)
    log.text(b"lost with the link")
    waiting = asyncio.ensure_future(take(stream))
    await asyncio.sleep(0.01)
    assert log.reads == []
    stream.on_subscribed()
    assert (await waiting).data == b"lost with the link"


async def test_overflow_holds_no_memory_and_loses_nothing() -> None:
    log = FakeLog()
    log.page = 7
    stream = stream_of(log, limit_bytes=1024)
    texts = [b"%4d" % number * 10 for number in range(200)]
    for text in texts:
        stream.on_message(log.text(text))
        held = sum(len(envelope.body) for envelope in stream._queue)
        assert held <= 1024
    stream.on_message(log.add(COMPLETED))
    assert await rest(stream) == b"".join(texts)


async def test_one_message_above_the_limit_comes_from_the_log() -> None:
    log = FakeLog()
    stream = stream_of(log, limit_bytes=1024)
    stream.on_message(log.text(b"x" * 5000))
    stream.on_message(log.add(COMPLETED))
    assert await rest(stream) == b"x" * 5000


async def test_silence_reads_the_log_and_doubles() -> None:
    log = FakeLog()
    stream = stream_of(log)
    start = asyncio.get_running_loop().time()
    waiting = asyncio.ensure_future(take(stream))
    reads = []
    for tenths in range(120):
        before = len(log.reads)
        stream.tick(start + tenths / 10)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if len(log.reads) > before:
            reads.append(tenths / 10)
    assert [round(read) for read in reads] == [1, 3, 7]
    log.text(b"unheard")
    stream.tick(start + 13)
    assert (await waiting).data == b"unheard"


async def test_messages_end_a_silence() -> None:
    log = FakeLog()
    stream = stream_of(log)
    start = asyncio.get_running_loop().time()
    for second in range(20):
        stream.on_message(log.text(b"x"))
        stream.tick(start + second * 0.9)
        await take(stream)
    assert log.reads == []


async def test_owner_that_begins_where_the_client_stands_continues() -> None:
    log = FakeLog()
    stream = stream_of(log)
    stream.on_message(log.text(b"a", b"one", 0))
    stream.on_message(log.text(b"b", b"two", 1))
    stream.on_message(log.add(COMPLETED, b"-", 2))
    assert await rest(stream) == b"ab"


async def test_owner_that_begins_elsewhere_is_not_spliced() -> None:
    log = FakeLog()
    stream = stream_of(log)
    stream.on_message(log.text(b"a", b"one", 0))
    stream.on_message(log.text(b"b", b"one", 0))
    stream.on_message(log.text(b"again", b"two", 1))
    assert (await take(stream)).data == b"ab"
    with pytest.raises(Diverged):
        await take(stream)


async def test_job_that_is_gone_is_lost() -> None:
    log = FakeLog()
    stream = stream_of(log)
    stream.on_message(log.text(b"a"))
    assert (await take(stream)).data == b"a"
    log.state = None
    log.envelopes.clear()
    stream.on_subscribed()
    with pytest.raises(JobLost):
        await take(stream)


async def test_job_that_is_done_without_an_end_is_lost() -> None:
    log = FakeLog()
    log.state = "done"
    stream = stream_of(log)
    stream.on_subscribed()
    with pytest.raises(JobLost):
        await take(stream)
    assert len(log.reads) == 2


async def test_end_between_the_two_reads_of_a_page_is_found() -> None:
    log = FakeLog()
    stream = stream_of(log)
    stream.on_subscribed()

    async def raced(job_id: str, after: int, count: int) -> LogPage:
        log.reads.append(after)
        if len(log.reads) == 1:
            log.add(COMPLETED)
            return LogPage([], "done", False)
        return LogPage(log.envelopes, "done", False)

    stream._read_log = raced
    assert (await take(stream)).end is not None


async def test_server_that_lost_what_it_sent_does_not_make_it_spin() -> None:
    log = FakeLog()
    stream = stream_of(log)
    message = log.text(b"a")
    later = log.text(b"b")
    log.envelopes.clear()
    stream.on_message(later)
    waiting = asyncio.ensure_future(take(stream))
    await asyncio.sleep(0.02)
    assert len(log.reads) == 1
    stream.on_message(message)
    assert (await waiting).data == b"a"


async def test_queue_away_is_waited_for_until_the_deadline() -> None:
    log = FakeLog()
    log.failures = 1_000
    stream = stream_of(log, timeout_s=0.5)
    stream.on_subscribed()
    waiting = asyncio.ensure_future(take(stream))
    loop = asyncio.get_running_loop()
    while not waiting.done():
        stream.tick(loop.time())
        await asyncio.wait([waiting], timeout=0.02)
    assert isinstance(waiting.exception(), RequestTimeout)
    assert 2 <= len(log.reads) <= 5


async def test_queue_back_is_read_on() -> None:
    log = FakeLog()
    log.failures = 1
    stream = stream_of(log)
    log.text(b"a")
    stream.on_subscribed()
    waiting = asyncio.ensure_future(take(stream))
    await asyncio.sleep(0.15)
    stream.tick(asyncio.get_running_loop().time())
    assert (await waiting).data == b"a"


async def test_failure_wakes_and_an_end_outlasts_it() -> None:
    log = FakeLog()
    stream = stream_of(log)
    waiting = asyncio.ensure_future(take(stream))
    await asyncio.sleep(0)
    stream.fail(HeadraceError("first"))
    stream.fail(HeadraceError("second"))
    with pytest.raises(HeadraceError, match="first"):
        await waiting
    other = stream_of(log)
    other.on_message(log.add(COMPLETED))
    await take(other)
    other.fail(HeadraceError())
    assert other.failure is None


async def test_pages_fit_the_buffer() -> None:
    log = FakeLog()
    for _ in range(100):
        log.text(b"x" * 1000)
    log.add(COMPLETED)
    stream = stream_of(log, limit_bytes=5000)
    stream.on_subscribed()
    largest = 0
    await take(stream)
    while not stream.ended:
        largest = max(largest, len((await take(stream)).data))
    assert 3000 <= largest <= 6000


async def test_what_another_attempt_said_is_told_apart() -> None:
    log = FakeLog()
    stream = stream_of(log)
    stream.on_message(log.add(Frame(items=[(b"half",)], head=Head(200, "x"))))
    stream.on_message(log.add(Frame(items=[(b"whole",)], head=Head(400, "x")), b"b", 1))
    part = await take(stream)
    assert part.head == Head(400, "x")
    assert part.data[part.before :] == b"whole"


# Writing past `next`


class Writer:
    """Takes parts at once, as long as it is open."""

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.open = True

    def __call__(self, part: Part, now: float) -> bool:
        if not self.open or part.end is not None:
            return False
        self.data.append(part.data)
        return True


async def test_what_comes_while_it_waits_is_written_at_once_and_as_one() -> None:
    log, writer = FakeLog(), Writer()
    stream = stream_of(log)
    stream.write = writer
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    for text in (b"a", b"b", b"c"):
        stream.on_message(log.text(text))
    await asyncio.sleep(0)
    assert writer.data == [b"abc"]
    assert stream.cursor == 3
    assert not waiting.done()
    stream.on_message(log.add(COMPLETED))
    part = await waiting
    assert part is not None
    assert part.end is not None


async def test_what_is_declined_is_given_to_the_waiting_and_comes_before_the_rest() -> None:
    log, writer = FakeLog(), Writer()
    stream = stream_of(log)
    stream.write = writer
    writer.open = False
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.on_message(log.text(b"a"))
    await asyncio.sleep(0)
    writer.open = True
    stream.on_message(log.text(b"b"))
    part = await waiting
    assert part is not None
    assert part.data == b"a"
    assert (await take(stream)).data == b"b"
    assert writer.data == []


async def test_nothing_is_written_while_the_one_before_is_still_being_sent() -> None:
    log, writer = FakeLog(), Writer()
    stream = stream_of(log)
    stream.write = writer
    stream.on_message(log.text(b"a"))
    await asyncio.sleep(0)
    assert writer.data == []
    assert (await take(stream)).data == b"a"


async def test_a_gap_is_not_written_over() -> None:
    log, writer = FakeLog(), Writer()
    stream = stream_of(log)
    stream.write = writer
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    log.text(b"a")
    stream.on_message(log.text(b"b"))
    part = await waiting
    assert part is not None
    assert part.data == b"ab"
    assert writer.data == []


async def test_a_frame_that_cannot_be_read_ends_its_stream_only() -> None:
    log, writer = FakeLog(), Writer()
    turn = Turn()
    broken, sound = stream_of(log, turn=turn), stream_of(log, turn=turn)
    waiting = []
    for stream in (broken, sound):
        stream.write = writer
        waiting.append(asyncio.create_task(stream.next()))
    await asyncio.sleep(0)
    broken.on_message(b"1 a 0 \xff")
    sound.on_message(log.text(b"a"))
    with pytest.raises(HeadraceError):
        await waiting[0]
    assert writer.data == [b"a"]
    waiting[1].cancel()


async def test_a_failure_comes_after_what_was_written() -> None:
    log, writer = FakeLog(), Writer()
    stream = stream_of(log)
    stream.write = writer
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.on_message(log.text(b"a"))
    stream.on_message(log.text(b"b", b"other", 7))
    with pytest.raises(Diverged):
        await waiting
    assert writer.data == [b"a"]
