"""The process's one pub/sub connection, on a real server that fails in many ways."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from pydantic import SecretStr

from shared.errors import QueueUnavailable
from shared.pubsub import Subscriber
from shared.settings import RedisSettings
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyServer


class Ear:
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.subscriptions = 0
        self._news = asyncio.Event()

    def on_message(self, message: bytes) -> None:
        self.messages.append(message)
        self._news.set()

    def on_subscribed(self) -> None:
        self.subscriptions += 1
        self._news.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def heard(self, count: int, timeout_s: float = 5) -> list[bytes]:
        await self.until(lambda: len(self.messages) >= count, timeout_s)
        return self.messages


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


def make(url: str, *, ack_s: float = 2, dead_s: float = 2, timeout_s: float = 1.5) -> Subscriber:
    settings = RedisSettings(redis_url=SecretStr(url), redis_timeout_s=timeout_s)
    return Subscriber(settings, name="test-pubsub", ack_timeout_s=ack_s, dead_after_s=dead_s)


@asynccontextmanager
async def running(subscriber: Subscriber, *, connected: bool = True) -> AsyncIterator[Subscriber]:
    task = asyncio.create_task(subscriber.run())
    try:
        if connected:
            await until(lambda: subscriber.connected)
        yield subscriber
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool], timeout_s: float = 5) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def links(server: ValkeyServer) -> list[str]:
    listed: str = server.command("CLIENT", "LIST").decode()
    return [line for line in listed.splitlines() if "name=test-pubsub" in line]


def kill(server: ValkeyServer) -> None:
    assert server.command("CLIENT", "KILL", "TYPE", "pubsub") >= 1


# Messages


async def test_messages_reach_the_sink_of_their_channel(server: ValkeyServer) -> None:
    async with running(make(server.url)) as subscriber:
        one, two = Ear(), Ear()
        await subscriber.subscribe("one", one)
        await subscriber.subscribe("two", two)
        assert (one.subscriptions, two.subscriptions) == (1, 1)
        for n in range(100):
            server.command("PUBLISH", "one", b"1 %d\r\n\x00\xff" % n)
        server.command("PUBLISH", "two", b"")
        assert await one.heard(100) == [b"1 %d\r\n\x00\xff" % n for n in range(100)]
        assert await two.heard(1) == [b""]


async def test_nothing_is_missed_after_the_acknowledgement(server: ValkeyServer) -> None:
    async with running(make(server.url)) as subscriber:
        for n in range(50):
            ear = Ear()
            await subscriber.subscribe(f"ack-{n}", ear)
            assert server.command("PUBLISH", f"ack-{n}", b"x") == 1
            await ear.heard(1)


async def test_two_thousand_channels_on_one_connection(server: ValkeyServer) -> None:
    async with running(make(server.url)) as subscriber:
        ears = {f"many-{n}": Ear() for n in range(2000)}
        await asyncio.gather(*(subscriber.subscribe(name, ear) for name, ear in ears.items()))
        assert len(links(server)) == 1
        assert server.command("PUBSUB", "NUMSUB", "many-1999") == [b"many-1999", 1]
        for name in ("many-0", "many-1234", "many-1999"):
            server.command("PUBLISH", name, name)
            assert await ears[name].heard(1) == [name.encode()]

        kill(server)
        for ear in ears.values():
            await ear.until(lambda ear=ear: ear.subscriptions == 2)  # type: ignore[misc]
        for name in ("many-0", "many-777", "many-1999"):
            ears[name].messages.clear()
            assert server.command("PUBLISH", name, b"again") == 1
            assert await ears[name].heard(1) == [b"again"]
        for name, ear in ears.items():
            subscriber.unsubscribe(name, ear)
        await until(lambda: b"many-0" not in server.command("PUBSUB", "CHANNELS", "many-*"))
        assert len(links(server)) == 1


async def test_a_message_of_forty_megabytes(server: ValkeyServer) -> None:
    """Above the server's limit for a subscriber's buffer the link is cut; the next one works."""
    async with running(make(server.url)) as subscriber:
        ear = Ear()
        await subscriber.subscribe("large", ear)
        server.command("CONFIG", "SET", "client-output-buffer-limit", "pubsub 0 0 0")
        try:
            body = os.urandom(1 << 20) * 40
            assert server.command("PUBLISH", "large", body) == 1
            (message,) = await ear.heard(1, timeout_s=20)
            assert message == body
            assert ear.subscriptions == 1
        finally:
            limit = "pubsub 32mb 8mb 60"
            server.command("CONFIG", "SET", "client-output-buffer-limit", limit)
        # Far above the limit and what the sockets hold together; nobody reads while it is sent.
        server.command("PUBLISH", "large", body + body)
        await ear.until(lambda: ear.subscriptions == 2)
        server.command("PUBLISH", "large", b"small")
        await ear.until(lambda: ear.messages[-1] == b"small")


# Subscribing and unsubscribing


async def test_unsubscribing(server: ValkeyServer) -> None:
    async with running(make(server.url)) as subscriber:
        ear, stranger = Ear(), Ear()
        await subscriber.subscribe("left", ear)
        subscriber.unsubscribe("left", stranger)
        assert server.command("PUBLISH", "left", b"1") == 1
        await ear.heard(1)
        subscriber.unsubscribe("left", ear)
        subscriber.unsubscribe("left", ear)
        await until(lambda: server.command("PUBLISH", "left", b"2") == 0)
        assert ear.messages == [b"1"]
        assert subscriber.sinks == {}
        await subscriber.subscribe("left", ear)
        assert server.command("PUBLISH", "left", b"3") == 1
        await ear.heard(2)


async def test_a_sink_that_was_replaced_hears_nothing_and_takes_nothing_away(
    server: ValkeyServer,
) -> None:
    async with running(make(server.url)) as subscriber:
        old, new = Ear(), Ear()
        await subscriber.subscribe("same", old)
        await subscriber.subscribe("same", new)
        subscriber.unsubscribe("same", old)
        assert server.command("PUBLISH", "same", b"x") == 1
        assert await new.heard(1) == [b"x"]
        assert old.messages == []


async def test_a_kept_sink_needs_no_link(server: ValkeyServer) -> None:
    subscriber = make(server.url)
    ear = Ear()
    subscriber.keep("kept", ear)
    async with running(subscriber):
        await ear.until(lambda: ear.subscriptions == 1)
        late = Ear()
        subscriber.keep("kept-late", late)
        await late.until(lambda: late.subscriptions == 1)
        kill(server)
        await late.until(lambda: late.subscriptions == 2)
        await ear.until(lambda: ear.subscriptions == 2)
        assert server.command("PUBLISH", "kept", b"x") == 1
        await ear.heard(1)


async def test_a_sink_that_raises_costs_the_link_but_not_the_process(
    server: ValkeyServer,
) -> None:
    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))

    class Broken(Ear):
        def on_message(self, message: bytes) -> None:
            super().on_message(message)
            if message == b"bad":
                raise ZeroDivisionError

    async with running(make(server.url)) as subscriber:
        broken, ear = Broken(), Ear()
        await subscriber.subscribe("broken", broken)
        await subscriber.subscribe("whole", ear)
        server.command("PUBLISH", "broken", b"bad")
        await ear.until(lambda: ear.subscriptions == 2)
        server.command("PUBLISH", "whole", b"x")
        assert await ear.heard(1) == [b"x"]
    assert faults


# A link that breaks


async def test_a_killed_link_is_replaced_at_once(server: ValkeyServer) -> None:
    async with running(make(server.url)) as subscriber:
        ear = Ear()
        await subscriber.subscribe("killed", ear)
        for count in range(2, 6):
            begun = time.monotonic()
            kill(server)
            await ear.until(lambda count=count: ear.subscriptions == count)  # type: ignore[misc]
            assert time.monotonic() - begun < 0.5
        assert subscriber.reconnects == 4
        assert len(links(server)) == 1


async def test_a_frozen_server_is_noticed_and_found_again(server: ValkeyServer) -> None:
    async with running(make(server.url, dead_s=0.6, timeout_s=0.3)) as subscriber:
        ear = Ear()
        await subscriber.subscribe("frozen", ear)
        server.pause()
        try:
            begun = time.monotonic()
            await until(lambda: not subscriber.connected)
            assert 0.5 < time.monotonic() - begun < 2
            with pytest.raises(QueueUnavailable):
                await subscriber.subscribe("meanwhile", Ear())
        finally:
            server.resume()
        await ear.until(lambda: ear.subscriptions == 2)
        server.command("PUBLISH", "frozen", b"x")
        assert await ear.heard(1) == [b"x"]


async def test_a_link_that_is_silently_gone_is_replaced(server: ValkeyServer) -> None:
    async with (
        TcpProxy.to(server.url) as proxy,
        running(make(proxy.url, dead_s=0.6, timeout_s=0.3)) as subscriber,
    ):
        ear = Ear()
        await subscriber.subscribe("half-open", ear)
        proxy.swallow()
        await until(lambda: not subscriber.connected)
        proxy.heal()
        await ear.until(lambda: ear.subscriptions == 2)
        server.command("PUBLISH", "half-open", b"x")
        assert await ear.heard(1) == [b"x"]


async def test_a_quiet_link_stays(server: ValkeyServer) -> None:
    async with running(make(server.url, dead_s=0.7)) as subscriber:
        ear = Ear()
        await subscriber.subscribe("quiet", ear)
        await asyncio.sleep(1.5)
        assert subscriber.reconnects == 0
        assert ear.subscriptions == 1


async def test_an_acknowledgement_that_does_not_come(server: ValkeyServer) -> None:
    async with (
        TcpProxy.to(server.url) as proxy,
        running(make(proxy.url, ack_s=0.1)) as subscriber,
    ):
        proxy.drop_replies()
        begun = time.monotonic()
        with pytest.raises(QueueUnavailable):
            await subscriber.subscribe("late", Ear())
        assert time.monotonic() - begun < 1
        assert subscriber.sinks == {}


async def test_a_subscription_that_was_given_up_leaves_nothing(server: ValkeyServer) -> None:
    async with (
        TcpProxy.to(server.url) as proxy,
        running(make(proxy.url)) as subscriber,
    ):
        proxy.delay(0.05)
        ear = Ear()
        given_up = asyncio.create_task(subscriber.subscribe("given-up", ear))
        await asyncio.sleep(0.01)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        proxy.heal()
        await until(lambda: server.command("PUBSUB", "NUMSUB", "given-up")[1] == 0)
        assert subscriber.sinks == {}
        assert ear.subscriptions == 0
        await subscriber.subscribe("given-up", ear)
        assert server.command("PUBLISH", "given-up", b"x") == 1


async def test_a_link_that_breaks_under_a_subscription(server: ValkeyServer) -> None:
    async with (
        TcpProxy.to(server.url) as proxy,
        running(make(proxy.url, ack_s=30)) as subscriber,
    ):
        proxy.drop_replies()
        waiting = asyncio.create_task(subscriber.subscribe("broken", Ear()))
        await asyncio.sleep(0.01)
        proxy.heal()
        proxy.cut()
        with pytest.raises(QueueUnavailable):
            await asyncio.wait_for(waiting, 5)
        await until(lambda: subscriber.connected)
        assert subscriber.sinks == {}


async def test_subscribing_while_the_server_is_down_fails_quickly() -> None:
    with ValkeyServer() as server:
        async with running(make(server.url)) as subscriber:
            ear = Ear()
            await subscriber.subscribe("kept", ear)
            server.kill()
            await until(lambda: not subscriber.connected)
            begun = time.monotonic()
            with pytest.raises(QueueUnavailable):
                await subscriber.subscribe("down", Ear())
            assert time.monotonic() - begun < 0.5
            server.start()
            await ear.until(lambda: ear.subscriptions == 2)
            assert set(subscriber.sinks) == {b"kept"}


async def test_a_server_that_is_not_there_yet() -> None:
    with ValkeyServer() as gone:
        url, port = gone.url, gone.port
    async with running(make(url), connected=False) as subscriber:
        with pytest.raises(QueueUnavailable):
            await subscriber.subscribe("early", Ear())
        with ValkeyServer(port=port):
            await until(lambda: subscriber.connected)


async def test_a_server_that_resets_every_link_is_not_stormed(server: ValkeyServer) -> None:
    async with TcpProxy.to(server.url) as proxy:
        proxy.refuse()
        async with running(make(proxy.url), connected=False) as subscriber:
            await asyncio.sleep(0.6)
            assert 1 <= proxy.accepted <= 6
            proxy.heal()
            await until(lambda: subscriber.connected)


async def test_a_cancelled_run_closes_its_link(server: ValkeyServer) -> None:
    subscriber = make(server.url)
    before = asyncio.all_tasks()
    async with running(subscriber):
        await subscriber.subscribe("closing", Ear())
        waiting = asyncio.create_task(asyncio.sleep(0))
        await waiting
    assert not subscriber.connected
    await until(lambda: links(server) == [])
    assert asyncio.all_tasks() == before


# How to get in


async def test_a_password() -> None:
    with ValkeyServer() as server:
        server.command("CONFIG", "SET", "requirepass", "s3cr:t/@")
        url = f"redis://:s3cr%3At%2F%40@127.0.0.1:{server.port}/0"
        async with running(make(url)) as subscriber:
            await subscriber.subscribe("in", Ear())


async def test_a_user_with_few_rights() -> None:
    rule = "user gate on >pw resetchannels &headrace:* -@all +subscribe +unsubscribe +ping +hello"
    rule += " +client|setname +client|setinfo"
    with ValkeyServer("--user", *rule.split()[1:]) as server:
        url = f"redis://gate:pw@127.0.0.1:{server.port}/0"
        async with running(make(url)) as subscriber:
            ear = Ear()
            await subscriber.subscribe("headrace:x", ear)
            server.command("PUBLISH", "headrace:x", b"x")
            assert await ear.heard(1) == [b"x"]


@pytest.mark.parametrize("login", ["", ":wrong@", "nobody:pw@"])
async def test_a_wrong_login_gets_no_link(login: str) -> None:
    with ValkeyServer() as server:
        server.command("CONFIG", "SET", "requirepass", "right")
        url = f"redis://{login}127.0.0.1:{server.port}/0"
        async with running(make(url), connected=False) as subscriber:
            await asyncio.sleep(0.3)
            assert not subscriber.connected
            with pytest.raises(QueueUnavailable):
                await subscriber.subscribe("in", Ear())


async def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "valkey.sock"
    with ValkeyServer("--unixsocket", str(path)) as server:
        async with running(make(f"unix://{path}?db=0")) as subscriber:
            ear = Ear()
            await subscriber.subscribe("local", ear)
            server.command("PUBLISH", "local", b"x")
            assert await ear.heard(1) == [b"x"]
