"""A real cluster for tests: three primaries, each with a replica if need be."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from shared.servers import SLOTS, slot
from tests.support.valkey import ValkeyServer, free_port

PRIMARIES = 3
_WAIT_S = 15.0


class Cluster:
    """A cluster's servers, running inside `with`.

    A server that is gone doesn't take the slots of the others with it.
    """

    def __init__(self, *args: str, replicas: bool = False, node_timeout_ms: int = 800) -> None:
        """Further `args` go to every server."""
        self._args = [
            *("--cluster-enabled", "yes"),
            *("--cluster-node-timeout", str(node_timeout_ms)),
            *("--cluster-require-full-coverage", "no"),
            # A replica is promoted whatever it may lack.
            *("--cluster-replica-validity-factor", "0"),
            *("--repl-diskless-sync-delay", "0"),
            *("--shutdown-timeout", "0"),
            *args,
        ]
        self._buses: dict[int, int] = {}
        self.servers = [self._server() for _ in range(PRIMARIES * (2 if replicas else 1))]
        """The primaries first; replica `n + 3` is that of `n`, to begin with."""
        self._stack = ExitStack()

    def _server(self) -> ValkeyServer:
        port = free_port()
        self._buses[port] = bus = free_port()
        return ValkeyServer(*self._args, "--cluster-port", str(bus), port=port)

    @property
    def url(self) -> str:
        seeds = ",".join(f"{one.host}:{one.port}" for one in self.servers)
        return f"redis+cluster://{seeds}"

    @property
    def running(self) -> list[ValkeyServer]:
        return [one for one in self.servers if one.running]

    @property
    def primaries(self) -> list[ValkeyServer]:
        return [one for one in self.running if one.command("ROLE")[0] == b"master"]

    def __enter__(self) -> Self:
        try:
            for server in self.servers:
                self._stack.enter_context(server)
            self._join()
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

    def _join(self) -> None:
        first = self.servers[0]
        for at, server in enumerate(self.servers[:PRIMARIES]):
            begin, end = at * SLOTS // PRIMARIES, (at + 1) * SLOTS // PRIMARIES - 1
            server.command("CLUSTER", "ADDSLOTSRANGE", begin, end)
            server.command("CLUSTER", "SET-CONFIG-EPOCH", at + 1)
        for server in self.servers[1:]:
            server.command("CLUSTER", "MEET", first.host, first.port, self._buses[first.port])
        count = len(self.servers)
        wait(lambda: all(len(nodes(one)) == count for one in self.servers), "all nodes know all")
        for primary, replica in zip(self.servers, self.servers[PRIMARIES:], strict=False):
            replica.command("CLUSTER", "REPLICATE", node_id(primary))
        wait(self._sound, "the cluster is up")

    def _sound(self) -> bool:
        up = all(b"cluster_state:ok" in one.command("CLUSTER", "INFO") for one in self.servers)
        linked = all(
            b"master_link_status:up" in one.command("INFO", "replication")
            for one in self.servers[PRIMARIES:]
        )
        whole = all(len(one.command("CLUSTER", "SLOTS")) == PRIMARIES for one in self.servers)
        return up and linked and whole

    # --- who has what ---

    def owner(self, tag: str) -> ValkeyServer:
        """Return the server that has a tag's keys, as most of the running ones say."""
        told = [_owner_port(one, slot(tag)) for one in self.running]
        port = max(set(told), key=told.count)
        return next(one for one in self.servers if one.port == port)

    def replica_of(self, primary: ValkeyServer) -> ValkeyServer:
        """Return a server's own replica."""
        return self.servers[(self.servers.index(primary) + PRIMARIES) % (2 * PRIMARIES)]

    def wait_owner(self, tag: str, server: ValkeyServer) -> None:
        """Wait until all that run say that a server has a tag's keys."""
        place = slot(tag)
        wait(
            lambda: all(_owner_port(one, place) == server.port for one in self.running),
            f"slot {place} at {server.port}",
        )

    def command(self, tag: str, *words: str | bytes | int) -> Any:
        """Run a command where a tag's keys are."""
        return self.owner(tag).command(*words)

    # --- faults ---

    def fail(self, tag: str) -> tuple[ValkeyServer, ValkeyServer]:
        """SIGKILL the server that has a tag's keys; return it and its replica."""
        primary = self.owner(tag)
        replica = self.replica_of(primary)
        primary.kill()
        return primary, replica

    def other(self, tag: str) -> ValkeyServer:
        """Return a primary that does not have a tag's keys."""
        owner = self.owner(tag)
        return next(one for one in self.primaries if one is not owner)

    def open_move(self, tag: str, to: ValkeyServer) -> None:
        """Begin to move a tag's slot: its keys may be here or there from now on."""
        place, source = slot(tag), self.owner(tag)
        to.command("CLUSTER", "SETSLOT", place, "IMPORTING", node_id(source))
        source.command("CLUSTER", "SETSLOT", place, "MIGRATING", node_id(to))

    def move(self, tag: str, to: ValkeyServer) -> int:
        """Move a tag's slot by hand, key by key; return the number of keys."""
        place, source = slot(tag), self.owner(tag)
        self.open_move(tag, to)
        moved = 0
        while keys := source.command("CLUSTER", "GETKEYSINSLOT", place, 10):
            source.command("MIGRATE", to.host, to.port, "", 0, 5000, "KEYS", *keys)
            moved += len(keys)
        for server in dict.fromkeys([to, source, *self.primaries]):
            server.command("CLUSTER", "SETSLOT", place, "NODE", node_id(to))
        self.wait_owner(tag, to)
        return moved

    def move_whole(self, tag: str, to: ValkeyServer) -> None:
        """Move a tag's slot in one piece, as Valkey 9 can."""
        place, source = slot(tag), self.owner(tag)
        source.command("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", place, place, "NODE", node_id(to))
        self.wait_owner(tag, to)


def node_id(server: ValkeyServer) -> bytes:
    told: bytes = server.command("CLUSTER", "MYID")
    return told


def nodes(server: ValkeyServer) -> list[bytes]:
    """Return the nodes that a server is in contact with, itself included."""
    lines = server.command("CLUSTER", "NODES").splitlines()
    return [line for line in lines if b"handshake" not in line and b"fail" not in line]


def _owner_port(server: ValkeyServer, place: int) -> int:
    for row in server.command("CLUSTER", "SLOTS"):
        if row[0] <= place <= row[1]:
            return int(row[2][1])
    return 0


def wait(check: Callable[[], bool], what: str, timeout_s: float = _WAIT_S) -> None:
    """Wait for what servers will bring about between them."""
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.02)
