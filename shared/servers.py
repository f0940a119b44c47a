"""Where the queue's servers are: a fixed one, Sentinel's master, or a cluster's primaries.

| URL | meaning |
|---|---|
| `redis://[user:password@]host[:port][/db]` | one server |
| `unix://[user:password@]/path[?db=]` | one server, by its socket |
| `redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db]` | Sentinel's master |
| `redis+cluster://[user:password@]host[:port][,host[:port]...]` | a cluster |

`rediss…` is the same over TLS. The address is asked for anew at every connect: that is how a
failover is followed.
"""

from __future__ import annotations

import re
from binascii import crc_hqx
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from shared.errors import QueueUnavailable
from shared.logs import Log

log = Log("servers")

SLOTS = 16_384

_URL = re.compile(
    r"(?P<tls>rediss?)\+(?P<kind>sentinel|cluster)://"
    r"(?:(?P<user>[^:@/]*):(?P<password>[^@/]*)@)?"
    r"(?P<seeds>[^/]+)(?:/(?P<service>[^/]+)(?:/(?P<db>\d+))?)?/?"
)


@dataclass(frozen=True)
class Address:
    """A server's host and TCP port."""

    host: str
    port: int


@dataclass(frozen=True)
class Location:
    """A URL of several servers, taken apart."""

    kind: str
    """`sentinel` or `cluster`."""
    seeds: tuple[Address, ...]
    service: str = ""
    tls: bool = False
    login: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of a connection to a data server: user, password, database."""


def parse(url: str) -> Location | None:
    """Take a URL of several servers apart; None for one server's. Raises `ValueError`."""
    if "+" not in url.split("://", 1)[0]:
        return None
    match = _URL.fullmatch(url)
    if match is None or (match["kind"] == "sentinel") != bool(match["service"]):
        raise ValueError("is not a URL of Sentinel or of a cluster")
    login: dict[str, Any] = {}
    if match["password"]:
        login = {"username": unquote(match["user"]) or None, "password": unquote(match["password"])}
    if match["db"]:
        login["db"] = int(match["db"])
    default = 26_379 if match["kind"] == "sentinel" else 6379
    seeds = tuple(_address(seed, default) for seed in match["seeds"].split(","))
    return Location(match["kind"], seeds, match["service"] or "", match["tls"] == "rediss", login)


def _address(text: str, default_port: int) -> Address:
    host, _, port = text.rpartition(":")
    return Address(host or port, int(port) if host else default_port)


def slot(tag: str) -> int:
    """Return the cluster slot of the keys that share a hash tag."""
    return crc_hqx(tag.encode(), 0) % SLOTS


class Servers:
    """Finds the server of a tag. Raises `QueueUnavailable`."""

    def __init__(self, location: Location, *, timeout_s: float) -> None:
        self.sharded = location.kind == "cluster"
        """Whether tags live on different servers."""
        self._location = location
        self._timeout_s = timeout_s
        self._options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "protocol": 2,
            "ssl": location.tls,
            "retry": Retry(NoBackoff(), 0),
        }
        self._primaries: list[tuple[int, int, Address]] = []
        """First slot, last slot, primary."""
        self._sentinel: Any = None

    async def locate(self, tag: str) -> Address:
        """Return the server that has a tag's keys now."""
        if not self.sharded:
            return await self._master()
        for _ in range(2):
            for first, last, address in self._primaries:
                if first <= slot(tag) <= last:
                    return address
            await self._read_slots()
        raise QueueUnavailable

    def forget(self) -> None:
        """Ask again: something has moved."""
        self._primaries = []

    async def _master(self) -> Address:
        if self._sentinel is None:
            seeds = [(seed.host, seed.port) for seed in self._location.seeds]
            self._sentinel = Sentinel(  # type: ignore[no-untyped-call]
                seeds, sentinel_kwargs=self._options
            )
        try:
            host, port = await self._sentinel.discover_master(self._location.service)
        except RedisError as error:
            raise QueueUnavailable from error
        return Address(host, port)

    async def _read_slots(self) -> None:
        """Ask the first node that answers: known ones, then the seeds."""
        known = dict.fromkeys([address for _, _, address in self._primaries])
        for node in (*known, *self._location.seeds):
            redis = Redis(host=node.host, port=node.port, **self._options, **self._location.login)
            try:
                rows: Any = await redis.execute_command(  # type: ignore[no-untyped-call]
                    "CLUSTER", "SLOTS"
                )
            except (RedisError, OSError, TimeoutError) as error:
                log.debug("cluster.node_unreachable", node=node, error=type(error).__name__)
                continue
            finally:
                await redis.aclose()
            self._primaries = [_range(row, node) for row in rows]
            return
        raise QueueUnavailable


def _range(row: Any, asked: Address) -> tuple[int, int, Address]:
    """Read a row of CLUSTER SLOTS. A node that doesn't know its own host is the one asked."""
    first, last, primary = row[0], row[1], row[2]
    host = primary[0].decode() if primary[0] else asked.host
    return first, last, Address(host, primary[1])
