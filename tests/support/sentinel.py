"""A master, its replica and the Sentinel that watches them, for tests."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from tests.support.cluster import wait
from tests.support.valkey import ValkeyServer

SERVICE = "queue"


def sentinel_of(
    master: ValkeyServer, *, down_after_ms: int = 800, port: int | None = None
) -> ValkeyServer:
    """Return a Sentinel that watches a master from its start on, and decides alone."""
    watch = [
        f"sentinel monitor {SERVICE} {master.host} {master.port} 1",
        f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}",
        f"sentinel failover-timeout {SERVICE} 3000",
    ]
    return ValkeyServer("--sentinel", port=port, config="\n".join(watch) + "\n")


class Watched:
    """Master, replica and Sentinel, running inside `with`; `command` is for the master of now."""

    def __init__(self, *args: str, down_after_ms: int = 800) -> None:
        """Further `args` go to both servers."""
        settings = ("--repl-diskless-sync-delay", "0", "--shutdown-timeout", "0", *args)
        self.servers = [ValkeyServer(*settings), ValkeyServer(*settings)]
        self.sentinel = sentinel_of(self.servers[0], down_after_ms=down_after_ms)
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        return f"redis+sentinel://{self.sentinel.host}:{self.sentinel.port}/{SERVICE}"

    def __enter__(self) -> Self:
        try:
            for server in self.servers:
                self._stack.enter_context(server)
            first, second = self.servers
            second.command("REPLICAOF", first.host, first.port)
            wait(lambda: _linked(second), "the replica has its master's data")
            self._stack.enter_context(self.sentinel)
            wait(self._watched, "Sentinel knows the replica")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _watched(self) -> bool:
        told = self.sentinel.command("SENTINEL", "REPLICAS", SERVICE)
        return bool(told) and b"master-link-status" in told[0] and b"ok" in told[0]

    @property
    def master(self) -> ValkeyServer:
        """The master, as Sentinel tells it."""
        _, port = self.sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(one for one in self.servers if one.port == int(port))

    @property
    def replica(self) -> ValkeyServer:
        master = self.master
        return next(one for one in self.servers if one is not master)

    def command(self, *words: str | bytes | int) -> Any:
        """Run a command at the master."""
        return self.master.command(*words)

    def wait_failover(self, old: ValkeyServer) -> ValkeyServer:
        """Wait until another is the master, and return it."""
        wait(lambda: self.master is not old, "a new master")
        new = self.master
        wait(lambda: new.command("ROLE")[0] == b"master", "it knows")
        return new


def _linked(server: ValkeyServer) -> bool:
    return b"master_link_status:up" in server.command("INFO", "replication")
