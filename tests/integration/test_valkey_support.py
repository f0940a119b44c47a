"""The tests' own Valkey server and link to it: each fault that they offer is what it says."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tests.support.bound import bound
from tests.support.processes import Process
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until


def test_the_shared_server_answers(valkey: ValkeyServer) -> None:
    assert valkey.command("PING") == b"PONG"
    assert b"\r\nvalkey_version:" in valkey.command("INFO", "server")


def test_each_own_server_is_alone(valkey: ValkeyServer, own_valkey: ValkeyServer) -> None:
    assert own_valkey.port != valkey.port
    own_valkey.command("SET", "k", "v")
    assert valkey.command("EXISTS", "k") == 0


def test_kill_loses_what_was_not_saved(own_valkey: ValkeyServer) -> None:
    own_valkey.command("SET", "k", "v")
    own_valkey.kill()
    with pytest.raises(redis.ConnectionError):
        own_valkey.command("PING")
    own_valkey.restart()
    assert own_valkey.command("GET", "k") is None


def test_an_append_only_file_survives_a_kill() -> None:
    with ValkeyServer(appendonly=True) as server:
        server.command("SET", "k", "v")
        port, pid = server.port, server.pid
        server.restart()
        assert (server.port, server.command("GET", "k")) == (port, b"v")
        assert server.pid != pid
    assert not server.directory.exists()


def test_maxmemory_refuses_instead_of_evicting() -> None:
    with ValkeyServer(maxmemory="3mb") as server:

        def fill() -> None:
            for index in range(100):
                server.command("SET", f"k{index}", b"x" * 100_000)

        with pytest.raises(redis.OutOfMemoryError):
            fill()
        assert server.command("EXISTS", "k0") == 1


def test_a_paused_server_accepts_and_does_not_answer(own_valkey: ValkeyServer) -> None:
    with redis.Redis(host=own_valkey.host, port=own_valkey.port, socket_timeout=0.1) as client:
        client.connection_pool.connection_kwargs["retry"] = None
        assert client.ping()
        own_valkey.pause()
        with pytest.raises(redis.TimeoutError):
            client.set("k", "v")
        own_valkey.resume()
        assert client.ping()


def test_a_wrong_argument_is_told() -> None:
    server = ValkeyServer("--no-such-option", "1")
    with pytest.raises(RuntimeError, match="didn't start"):
        server.start()


# --- the link ---


@pytest.fixture
async def proxy(own_valkey: ValkeyServer) -> AsyncIterator[TcpProxy]:
    async with TcpProxy.to(own_valkey.url) as proxy:
        yield proxy


@pytest.fixture
async def client(proxy: TcpProxy) -> AsyncIterator[redis.asyncio.Redis]:
    client = redis.asyncio.Redis.from_url(
        proxy.url, socket_timeout=0.5, retry=Retry(NoBackoff(), 0)
    )
    async with client:
        yield client


async def test_the_proxy_passes(proxy: TcpProxy, client: redis.asyncio.Redis) -> None:
    big = b"x" * 3_000_000
    await client.set("k", big)
    assert await client.get("k") == big
    assert (proxy.accepted, proxy.open) == (1, 1)


async def test_delay_keeps_the_order(proxy: TcpProxy, client: redis.asyncio.Redis) -> None:
    await client.ping()
    proxy.delay(0.05)
    began = time.monotonic()
    assert await client.rpush("list", *range(100)) == 100
    assert 0.1 <= time.monotonic() - began < 0.5
    proxy.heal()
    assert await client.lrange("list", 0, -1) == [str(n).encode() for n in range(100)]


async def test_a_dropped_reply_was_a_command(
    proxy: TcpProxy, client: redis.asyncio.Redis, own_valkey: ValkeyServer
) -> None:
    await client.ping()
    proxy.drop_replies()
    with pytest.raises(redis.TimeoutError):
        await client.incr("n")
    assert own_valkey.command("GET", "n") == b"1"


async def test_swallowed_bytes_leave_the_connection_open(
    proxy: TcpProxy, client: redis.asyncio.Redis, own_valkey: ValkeyServer
) -> None:
    await client.ping()
    proxy.swallow()
    with pytest.raises(redis.TimeoutError):
        await client.incr("n")
    # redis-py has closed its side by now; the server never hears of it.
    assert own_valkey.command("GET", "n") is None
    assert b" cmd=ping " in own_valkey.command("CLIENT", "LIST")
    assert proxy.open == 1


async def test_cut_connections_are_reset_and_new_ones_work(
    proxy: TcpProxy, client: redis.asyncio.Redis
) -> None:
    async with client.pubsub() as subscriber:
        await subscriber.subscribe("channel")
        assert await subscriber.get_message(timeout=1) is not None
        assert proxy.cut() == 1
        with pytest.raises(redis.ConnectionError):
            await subscriber.parse_response()
    assert await client.ping()
    proxy.refuse()
    proxy.cut()
    with pytest.raises(redis.ConnectionError):
        await client.ping()
    proxy.heal()
    assert await client.ping()


async def test_cut_after_a_command_loses_only_its_reply(
    proxy: TcpProxy, client: redis.asyncio.Redis, own_valkey: ValkeyServer
) -> None:
    await client.ping()
    proxy.cut_after(b"INCR")
    with pytest.raises(redis.ConnectionError):
        await client.incr("n")
    assert own_valkey.command("GET", "n") == b"1"
    assert await client.incr("n") == 2


# --- processes ---

_PARENT = """
import subprocess, sys
sleep = "import time; print(1, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", sleep])
print(child.pid, flush=True)
child.wait()
"""


def _program(tmp_path: Path, source: str, **settings: object) -> Process:
    return Process("program", [sys.executable, "-c", source], settings, tmp_path / "log")


async def test_a_process_is_told_its_settings_and_its_log_is_kept(tmp_path: Path) -> None:
    source = "import os; print(os.environ['HEADRACE_COLOUR'], len(os.environ)); exit(3)"
    process = _program(tmp_path, source, colour="blue")
    process.start()
    assert await process.wait() == 3
    assert process.log.startswith("blue ")
    with pytest.raises(RuntimeError, match="ended"):
        await process.wait_log("red")
    process.start()
    await process.wait()
    assert process.log.count("blue") == 2
    await process.close()


async def test_a_process_can_be_killed_and_frozen(tmp_path: Path) -> None:
    source = "import time\nwhile True: print(time.time(), flush=True); time.sleep(0.005)"
    process = _program(tmp_path, source)
    process.start()
    await until(lambda: process.log, "the first line")
    process.pause()
    await asyncio.sleep(0.05)
    log = process.log
    await asyncio.sleep(0.05)
    assert process.log == log
    process.resume()
    await until(lambda: process.log != log, "more lines")
    process.kill()
    assert await process.wait() == -signal.SIGKILL


async def test_a_child_left_behind_is_told_and_ended(tmp_path: Path) -> None:
    process = _program(tmp_path, _PARENT)
    process.start()
    await until(lambda: process.log.count("\n") == 2, "both running")
    assert len(process.family()) == 2
    process.kill()
    with pytest.raises(AssertionError, match="no process left"):
        await process.close()
    await until(lambda: not process.family(), "the child's end")


async def test_what_a_test_run_started_dies_with_it() -> None:
    run = f"import sys; sys.path.insert(0, {os.getcwd()!r})\n" + (
        "import subprocess, time\n"
        "from tests.support.bound import bound\n"
        "print(subprocess.Popen(bound(['sleep', '60'])).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    # Blocking is harmless here: nothing else runs in this loop.
    command = [sys.executable, "-c", run]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:  # noqa: ASYNC220
        assert parent.stdout is not None
        child = int(await asyncio.to_thread(parent.stdout.readline))
        await until(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n", "the child")
        parent.kill()
        await until(lambda: _gone(child), "the child's end")


def test_a_parent_that_is_gone_already_starts_nothing() -> None:
    command = bound(["echo", "started"])
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, check=False, timeout=10)
    assert (done.returncode, done.stdout) == (1, b"")


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
