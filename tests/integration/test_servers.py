"""Sockets, TLS and logins, for commands and subscriptions alike; what is said when they fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import SecretStr

from shared.connection import Connections, reason
from shared.errors import QueueUnavailable
from shared.keys import Keys
from shared.registry import Registry
from shared.settings import RedisSettings
from shared.subscribers import Subscribers
from tests.integration.test_pubsub import Ear
from tests.support.tls import Certificates, TlsFront
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

PASSWORD = "hunter2"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    socket = tmp_path_factory.mktemp("socket") / "valkey.sock"
    with ValkeyServer("--unixsocket", str(socket)) as server:
        server.command("ACL", "SETUSER", "us/er", "on", f">{PASSWORD}", "~*", "&*", "+@all")
        server.command("ACL", "SETUSER", "deaf", "on", f">{PASSWORD}", "~*", "+@all", "-subscribe")
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


def settings(url: str) -> RedisSettings:
    return RedisSettings(redis_url=SecretStr(url), redis_timeout_s=1)


@asynccontextmanager
async def both(url: str) -> AsyncIterator[tuple[Connections, Subscribers]]:
    """Connections for commands, and one for subscriptions."""
    commands = Connections(settings(url), name="test")
    subscriber = Subscribers(settings(url), name="test-pubsub", ack_timeout_s=1)
    task = asyncio.create_task(subscriber.run())
    try:
        yield commands, subscriber
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await commands.aclose()


async def check(url: str, channel: str) -> None:
    """Check that a message that a command publishes is heard."""
    async with both(url) as (commands, subscriber):
        ear = Ear()
        await subscriber.subscribe(channel, ear)
        assert await commands.run("", lambda redis: redis.publish(channel, "hello")) == 1
        assert await ear.heard(1) == [b"hello"]


async def why(url: str) -> str:
    """Return why commands can't be given at a URL."""
    async with both(url) as (commands, _):
        with pytest.raises(QueueUnavailable) as raised:
            await Registry(commands, Keys()).snapshot()
    return reason(raised.value)


async def test_a_socket(server: ValkeyServer) -> None:
    path = server.command("CONFIG", "GET", "unixsocket")[1].decode()
    await check(f"unix://{path}", "by-socket")
    await check(f"unix://us%2Fer:{PASSWORD}@{path}?db=3", "by-socket")


async def test_tls_with_an_authority_of_ones_own(
    server: ValkeyServer, certificates: Certificates
) -> None:
    async with TlsFront(certificates, server.host, server.port) as front:
        url = f"rediss://us%2Fer:{PASSWORD}@127.0.0.1:{front.port}"
        await check(f"{url}?ssl_ca_certs={certificates.authority}", "by-tls")
        await check(f"{url}?ssl_cert_reqs=none", "by-tls")


async def test_an_unknown_authority_is_refused_by_both(
    server: ValkeyServer, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async with TlsFront(certificates, server.host, server.port) as front:
        url = f"rediss://:{PASSWORD}@127.0.0.1:{front.port}"
        assert "CERTIFICATE_VERIFY_FAILED" in await why(url)
        async with both(url) as (_, subscriber):
            with pytest.raises(QueueUnavailable):
                await subscriber.subscribe("by-tls", Ear())
    assert any("CERTIFICATE_VERIFY_FAILED" in one for one in told(caplog))


def told(caplog: pytest.LogCaptureFixture, event: str = "pubsub.lost") -> list[str]:
    """Return the reasons in log lines."""
    lines: list[Any] = [one for one in caplog.records if one.getMessage() == event]
    return [one.fields["reason"] for one in lines]


@pytest.mark.parametrize(
    ("login", "expected"),
    [
        ("default:wrong-word@", "invalid username-password pair"),
        ("us%2Fer:wrong-word@", "invalid username-password pair"),
        ("nobody:hunter2@", "invalid username-password pair"),
        ("", "Authentication required"),
    ],
)
async def test_a_wrong_login_is_said_once_and_without_the_password(
    login: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with ValkeyServer() as server:
        server.command("ACL", "SETUSER", "default", f">{PASSWORD}", "resetpass", f">{PASSWORD}")
        url = f"redis://{login}{server.host}:{server.port}"
        assert expected.lower() in (await why(url)).lower()
        async with both(url) as (_, subscriber):
            with pytest.raises(QueueUnavailable):
                await subscriber.subscribe("news", Ear())
        reasons = told(caplog)
        assert len(reasons) <= 2  # One for each subscriber.
        assert any(expected.lower() in one.lower() for one in reasons)
        shown = " ".join(str(vars(one)) for one in caplog.records)
        assert "wrong-word" not in shown
        assert PASSWORD not in shown


async def test_a_subscription_that_is_not_permitted_is_said_once_and_not_hammered(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"redis://deaf:{PASSWORD}@{server.host}:{server.port}"
    async with both(url) as (_, subscriber):
        begun = asyncio.get_running_loop().time()
        subscriber.keep("news", Ear())
        await until(lambda: subscriber.reconnects >= 5, "tries", timeout=6)
        assert asyncio.get_running_loop().time() - begun > 0.05 + 0.1 + 0.2 + 0.4
    (told_reason,) = told(caplog)
    assert "permission" in told_reason


async def test_connections_have_their_name_on_sockets_too(server: ValkeyServer) -> None:
    path = server.command("CONFIG", "GET", "unixsocket")[1].decode()
    async with both(f"unix://{path}") as (commands, _):
        assert await commands.run("", lambda redis: redis.client_getname()) == "test"
