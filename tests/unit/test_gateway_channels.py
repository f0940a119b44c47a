"""Several readers on one channel, against a scripted connection."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gateway.channels import Channels
from gateway.relay import JobStream
from shared.errors import QueueUnavailable
from shared.pubsub import Sink
from shared.subscribers import Subscribers


class Connection:
    """Acknowledges a subscription when told to."""

    def __init__(self) -> None:
        self.sinks: dict[str, Sink] = {}
        self.subscribed = 0
        self.acks: list[asyncio.Future[None]] = []

    async def subscribe(self, channel: str, sink: Sink) -> None:
        self.subscribed += 1
        ack = asyncio.get_running_loop().create_future()
        self.acks.append(ack)
        await ack
        self.sinks[channel] = sink
        sink.on_subscribed()

    def unsubscribe(self, channel: str, sink: Sink) -> None:
        if self.sinks.get(channel) is sink:
            del self.sinks[channel]


class Reader:
    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.subscribed = 0

    def on_message(self, message: bytes) -> None:
        self.messages.append(message)

    def on_subscribed(self) -> None:
        self.subscribed += 1


def bench(count: int) -> tuple[Connection, Channels, list[Any]]:
    connection = Connection()
    channels = Channels(cast(Subscribers, connection))
    return connection, channels, [Reader() for _ in range(count)]


def opening(channels: Channels, reader: Any) -> asyncio.Task[None]:
    return asyncio.create_task(channels.open("c", cast(JobStream, reader)))


async def test_one_subscription_serves_all_and_outlives_the_first() -> None:
    connection, channels, (one, two, three) = bench(3)
    tasks = [opening(channels, one), opening(channels, two)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks), "nobody may go on before it stands"
    connection.acks[0].set_result(None)
    await asyncio.gather(*tasks)
    await channels.open("c", three)
    assert connection.subscribed == 1
    connection.sinks["c"].on_message(b"1")
    channels.close("c", one)
    connection.sinks["c"].on_message(b"2")
    channels.close("c", two)
    channels.close("c", two)
    connection.sinks["c"].on_message(b"3")
    assert [one.messages, two.messages, three.messages] == [
        [b"1"],
        [b"1", b"2"],
        [b"1", b"2", b"3"],
    ]
    connection.sinks["c"].on_subscribed()
    assert (one.subscribed, three.subscribed) == (1, 1)
    channels.close("c", three)
    assert connection.sinks == {}


async def test_a_single_readers_method_is_the_channels() -> None:
    connection, channels, (one,) = bench(1)
    task = opening(channels, one)
    await asyncio.sleep(0)
    connection.acks[0].set_result(None)
    await task
    assert cast(Any, connection.sinks["c"]).on_message == one.on_message


@pytest.mark.parametrize("cancelled", [True, False])
async def test_first_that_fails_makes_way(cancelled: bool) -> None:
    connection, channels, (one, two, three) = bench(3)
    first, second, third = (opening(channels, one) for one in (one, two, three))
    await asyncio.sleep(0)
    if cancelled:
        first.cancel()
    else:
        connection.acks[0].set_exception(QueueUnavailable())
    await asyncio.wait([first])
    await asyncio.sleep(0.01)
    assert connection.subscribed == 2
    connection.acks[1].set_result(None)
    await asyncio.gather(second, third)
    connection.sinks["c"].on_message(b"1")
    assert [one.messages, two.messages, three.messages] == [[], [b"1"], [b"1"]]
    assert first.cancelled() == cancelled
    if not cancelled:
        assert isinstance(first.exception(), QueueUnavailable)


async def test_follower_that_leaves_takes_nobody_along() -> None:
    connection, channels, (one, two) = bench(2)
    first, second = opening(channels, one), opening(channels, two)
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    connection.acks[0].set_result(None)
    await first
    connection.sinks["c"].on_message(b"1")
    assert [one.messages, two.messages] == [[b"1"], []]
