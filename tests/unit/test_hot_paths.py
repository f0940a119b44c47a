"""What a token costs on its way through worker and gateway, in calls: no clock is asked.

The paths are the real ones from end to end; only sockets and the server behind them are not.
A bound that is exceeded says that work per token was added, one that is far from what is reached
can be lowered.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, cast

import hiredis
import pytest
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import Connection

from gateway.channels import Channels
from gateway.cors import Cors
from gateway.exchange import Exchange
from gateway.relay import JobStream
from gateway.respond import RelayedAnswer
from gateway.settings import GatewaySettings
from gateway.sweeper import Sweeper
from gateway.turn import Turn
from shared import protocol
from shared.connection import _packed
from shared.keys import Keys, new_job_id
from shared.outcomes import Adopted, Claimed, LogPage
from shared.protocol import End, Frame, Head
from shared.pubsub import Subscriber, _Link
from shared.transitions import Transitions
from tests.support import cycle
from tests.support.counting import counted
from tests.support.cycle import FakeTransport, make_cycle, unchunked
from tests.wire.records import TAG, make_job
from worker.publisher import Publisher
from worker.run import Run

STREAMS = 32
STEPS = 50
WARM_STEPS = 5
TURNS = 8
"""Of the loop, after which everything of a step has got through."""

GATEWAY_CALLS = {1: 30, 3: 17}
"""Per token, by how many come at once: from the channel's bytes to those for the client."""
WORKER_CALLS = 30
"""Per token, from the application's message to the server's verdict."""
WORKER_CALLS_PER_STEP = 700
"""Beside those, however many jobs there are: a round trip."""

EVENT = b'data: {"id":"%b","object":"chat.completion.chunk","model":"m","choices":[%b]}\n\n'


def event(job_id: str, step: int) -> bytes:
    words = b'{"index":0,"delta":{"content":" word%d"},"finish_reason":null}' % step
    return EVENT % (job_id.encode(), words)


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


# The gateway


class FakeSubmitter:
    """Knows when a stream is over."""

    def abandon(self, stream: JobStream) -> None:
        assert stream.ended

    def close(self, stream: JobStream) -> None: ...


class Client:
    """A request whose answer is relayed through uvicorn's own cycle."""

    def __init__(
        self, submitter: Any, settings: GatewaySettings, sweeper: Sweeper, turn: Turn
    ) -> None:
        self.job_id = new_job_id(TAG)
        self.transport = FakeTransport()
        self.stream = JobStream(
            self.job_id,
            "interactive",
            read_log=no_log,
            limit_bytes=settings.stream_buffer_bytes,
            deadline=asyncio.get_running_loop().time() + 600,
            turn=turn,
        )
        self.cycle = make_cycle(self.transport)
        self.answer = RelayedAnswer(
            Exchange(cast(Any, self.cycle.scope), cast(Any, self.cycle.send), Cors(())),
            self.stream,
            asked_stream=True,
            settings=settings,
            submitter=submitter,
            sweeper=sweeper,
        )
        self._seq = itertools.count(1)

    async def run(self) -> None:
        await self.cycle.run_asgi(cast(Any, self.answer))

    def message(self, frame: Frame) -> bytes:
        body = protocol.encode(frame)
        parts = (b"message", Keys().channel(self.job_id), b"%d o 0 %b" % (next(self._seq), body))
        return bytes(hiredis.pack_command(parts))


async def no_log(job_id: str, after: int, count: int) -> LogPage:
    raise AssertionError("the log was read")


@pytest.mark.parametrize("frames_at_once", [1, 3])
async def test_a_frame_is_relayed_with_few_calls_and_in_few_writes(frames_at_once: int) -> None:
    settings = GatewaySettings()
    subscriber = Subscriber(settings, name="test", ack_timeout_s=1)
    link = _Link(subscriber)
    channels = Channels(cast(Any, OneSubscriber(subscriber)))
    sweeper, turn = Sweeper(), Turn()
    clients = [Client(FakeSubmitter(), settings, sweeper, turn) for _ in range(STREAMS)]
    for client in clients:
        await channels.open(Keys().channel(client.job_id), client.stream)

    def step_bytes(step: int) -> bytes:
        return b"".join(
            client.message(frame)
            for turn in range(frames_at_once)
            for client in clients
            for frame in [relayed(client.job_id, step * frames_at_once + turn)]
        )

    tasks = [asyncio.create_task(client.run()) for client in clients]
    await turns()
    for step in range(WARM_STEPS):
        link.data_received(step_bytes(step))
        await turns()
    written = [len(client.transport.writes) for client in clients]
    data = [step_bytes(step) for step in range(WARM_STEPS, WARM_STEPS + STEPS)]
    with counted(__file__, cycle.__file__) as calls:
        for one in data:
            link.data_received(one)
            await turns()
    for client, before in zip(clients, written, strict=True):
        assert len(client.transport.writes) - before == STEPS
    link.data_received(b"".join(c.message(Frame(end=End(outcome="completed"))) for c in clients))
    await asyncio.gather(*tasks)

    for client in clients:
        head, body = unchunked(b"".join(client.transport.writes))
        assert head.startswith(b"HTTP/1.1 200")
        steps = (WARM_STEPS + STEPS) * frames_at_once
        assert body == b"".join(event(client.job_id, step) for step in range(steps))
    per_token = calls.count / (STREAMS * STEPS * frames_at_once)
    assert per_token <= GATEWAY_CALLS[frames_at_once]


def relayed(job_id: str, step: int) -> Frame:
    """Return a step's frame as a worker sends it: the first whole, the others thinned."""
    whole = event(job_id, step)
    prefix, _, rest = whole.partition(b"word")
    number, _, suffix = rest.partition(b'"')
    if step == 0:
        return Frame([(whole,)], Head(200, "text/event-stream"))
    template = (prefix + b"word", b'"' + suffix) if step == 1 else None
    return Frame([number], None, template, None, [([step], None, None)])


class OneSubscriber:
    """Subscriptions that stand at once."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    async def subscribe(self, channel: str, sink: Any) -> None:
        self._subscriber.sinks[channel.encode()] = sink
        sink.on_subscribed()


# The worker


class FakeServer:
    """Answers `publish` as the script does, and keeps what it was sent."""

    def __init__(self) -> None:
        self.last: Counter[bytes] = Counter()
        self.messages: dict[bytes, list[bytes]] = {}
        self.calls = 0

    def reply(self, command: list[bytes]) -> bytes:
        if command[0] != b"EVALSHA":
            return b"+OK\r\n"
        self.calls += 1
        keys = command[3 : 3 + int(command[2])]
        args = iter(command[3 + len(keys) :])
        verdicts = [self._append(key, args) for key in keys[::2]]
        return b"*%d\r\n" % len(verdicts) + b"".join(verdicts)

    def _append(self, key: bytes, args: Iterator[bytes]) -> bytes:
        owner, channel, first, count = itertools.islice(args, 4)
        assert owner == b"owner"
        assert channel == key.replace(b":job:", b":ch:")
        assert int(first) == self.last[key] + 1
        self.messages.setdefault(key, []).extend(itertools.islice(args, int(count)))
        self.last[key] += int(count)
        return b"*2\r\n$2\r\nok\r\n:%d\r\n" % self.last[key]

    def answer(self, key: bytes) -> bytes:
        parts: list[bytes] = []
        prefix = suffix = b""
        for message in self.messages[key]:
            frame = protocol.decode_frame(protocol.open_message(message).body)
            prefix, suffix = frame.template or (prefix, suffix)
            for item in frame.items:
                parts += (prefix, item, suffix) if isinstance(item, bytes) else item
        return b"".join(parts)


class FakeWriter:
    """The sending half of a connection to the fake server."""

    def __init__(self, server: FakeServer, reader: asyncio.StreamReader) -> None:
        self._server = server
        self._reader = reader
        self._parser = hiredis.Reader()

    def writelines(self, parts: Iterable[bytes]) -> None:
        for part in parts:
            self._parser.feed(part)
        while (command := self._parser.gets()) is not False:
            self._reader.feed_data(self._server.reply(command))

    async def drain(self) -> None: ...

    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...


class FakeConnection(_packed(Connection)):  # type: ignore[misc]
    """A connection as the worker's are, without a socket."""

    server: ClassVar[FakeServer]

    async def _connect(self) -> None:
        self._reader = asyncio.StreamReader()
        self._writer = FakeWriter(self.server, self._reader)


class FakeEngine:
    """Its application is the test."""

    async def abort(self, job_id: str) -> None: ...


async def _publish(jobs: int) -> tuple[float, FakeServer, list[Run]]:
    """Return the calls of one step, all jobs together."""
    server = FakeConnection.server = FakeServer()
    pool = BlockingConnectionPool(connection_class=FakeConnection, protocol=2)
    transitions = Transitions(Redis.from_pool(pool), Keys(), result_ttl_s=60)
    publisher = Publisher(transitions)
    writing = asyncio.create_task(publisher.run())
    runs = []
    for _ in range(jobs):
        job = make_job(id=new_job_id(TAG), stream=True)
        adopted = Adopted(job, Claimed(TAG, job.lane, False, b"1-0", job.id), "owner", 1, 0, 60, 0)
        runs.append(Run(adopted, cast(Any, FakeEngine()), publisher))
    headers = [(b"content-type", b"text/event-stream")]
    for run in runs:
        await run._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def step(number: int) -> None:
        for run in runs:
            run.call.deltas.append(([number], None, None))
            part = event(run.adopted.job.id, number)
            await run._send({"type": "http.response.body", "body": part, "more_body": True})
        await turns()

    for number in range(WARM_STEPS):
        await step(number)
    before = server.calls
    with counted(__file__) as calls:
        for number in range(WARM_STEPS, WARM_STEPS + STEPS):
            await step(number)
    assert server.calls - before == STEPS
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await pool.aclose()
    return calls.count / STEPS, server, runs


async def test_a_step_is_published_in_one_command_with_few_calls_per_token() -> None:
    few, _, _ = await _publish(1)
    many, server, runs = await _publish(1 + STREAMS)
    for run in runs:
        answer = server.answer(Keys().job(run.adopted.job.id).encode())
        steps = range(WARM_STEPS + STEPS)
        assert answer == b"".join(event(run.adopted.job.id, step) for step in steps)
    per_token = (many - few) / STREAMS
    assert per_token <= WORKER_CALLS
    assert few <= WORKER_CALLS_PER_STEP
