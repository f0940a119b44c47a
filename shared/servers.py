"""Where the queue's servers are: a fixed one, Sentinel's master, or a cluster's primaries.

| URL | meaning |
|---|---|
| `redis://[[user]:password@]host[:port][/db]` | one server |
| `unix://[[user]:password@]/path[?db=]` | one server, by its socket |
| `redis+sentinel://[[user]:password@]host[:port],.../service[/db]` | Sentinel's master |
| `redis+cluster://[[user]:password@]host[:port],...` | a cluster |

Sentinel is asked at every connect and every second. `rediss…` is the same over TLS, with redis-py's
options `ssl_*` behind a `?`: `ssl_ca_certs`, `ssl_certfile` and so on. Sentinels may have a login
of their own: `sentinel_username`, `sentinel_password`.
"""

from __future__ import annotations

import asyncio
import re
from binascii import crc_hqx
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

from redis.asyncio import Redis
from redis.asyncio.connection import URL_QUERY_ARGUMENT_PARSERS
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from shared.errors import QueueUnavailable
from shared.logs import Log

log = Log("servers")

SLOTS = 16_384

_URL = re.compile(
    r"(?:(?P<scheme>unix)|(?P<tls>rediss?)(?:\+(?P<kind>sentinel|cluster))?)://"
    r"(?:(?P<user>[^:@/?]*)(?::(?P<password>[^@/?]*))?@)?"
    r"(?P<hosts>[^/@?]*)(?P<path>/[^?]*)?(?:\?(?P<query>.*))?"
)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+)(?::(\d{1,5}))?")
_TLS_OPTIONS = frozenset(
    "ssl_ca_certs ssl_ca_path ssl_certfile ssl_keyfile ssl_password ssl_cert_reqs"
    " ssl_check_hostname ssl_min_version ssl_ciphers".split()
)
_SENTINEL_OPTIONS = {"sentinel_username": "username", "sentinel_password": "password"}
_CERT_REQS = ("none", "optional", "required")
MASTER_S = 1.0
"""How long to believe in a master: one that was replaced goes on taking writes, which are lost."""
_ASKED_SHARE = 1 / 3
"""Of the time-out, for one Sentinel or node: one that is frozen must not use up all of it."""


@dataclass(frozen=True, order=True)
class Address:
    """A server's host and TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Location:
    """A URL, taken apart."""

    kind: str
    """`server`, `unix`, `sentinel` or `cluster`."""
    seeds: tuple[Address, ...]
    service: str = ""
    tls: bool = False
    path: str = ""
    """Of a socket."""
    login: dict[str, Any] = field(default_factory=dict, repr=False)
    """Keyword arguments of a connection to a data server: user, password, database, TLS."""
    sentinel: dict[str, Any] = field(default_factory=dict, repr=False)
    """The same, for a Sentinel."""

    def __str__(self) -> str:
        """Say where it is, without logins."""
        hosts = ",".join(map(str, self.seeds))
        return f"{hosts}/{self.service}" if self.service else hosts or self.path


def parse(url: str) -> Location:
    """Take a URL apart. Raises `ValueError`, whose text holds nothing of the URL's login."""
    match = _URL.fullmatch(url)
    if match is None:
        raise ValueError(
            "is no URL of a server; in user and password, percent-encode what is no letter or digit"
        )
    kind = match["scheme"] or match["kind"] or "server"
    tls = match["tls"] == "rediss"
    path, query = unquote(match["path"] or ""), _query(match["query"] or "", tls, kind)
    login = {name: query[name] for name in query if name not in _SENTINEL_OPTIONS}
    sentinel = {_SENTINEL_OPTIONS[name]: query[name] for name in query if name in _SENTINEL_OPTIONS}
    sentinel |= {name: query[name] for name in query if name in _TLS_OPTIONS}
    if match["user"]:
        login["username"] = unquote(match["user"])
    if match["password"]:
        login["password"] = unquote(match["password"])
    elif match["user"]:
        raise ValueError("has a user without a password")
    if kind == "unix":
        if match["hosts"] or not path:
            raise ValueError("must name a socket: unix:///path")
        return Location(kind, (), path=path, login=login)
    service, db = _path(kind, path)
    if db is not None:
        login["db"] = db
    if kind == "cluster" and login.get("db"):
        raise ValueError("names a database; a cluster has only 0")
    default = 26_379 if kind == "sentinel" else 6379
    hosts = match["hosts"] or "127.0.0.1"
    seeds = tuple(_address(one, default) for one in hosts.split(","))
    if kind == "server" and len(seeds) > 1:
        raise ValueError("names several hosts; say +sentinel or +cluster")
    return Location(kind, seeds, service, tls, login=login, sentinel=sentinel)


def _path(kind: str, path: str) -> tuple[str, int | None]:
    """Return service and database."""
    parts = path.strip("/").split("/") if path.strip("/") else []
    service = ""
    if kind == "sentinel":
        if not parts:
            raise ValueError("must name Sentinel's service: redis+sentinel://host/service")
        service = parts.pop(0)
    if len(parts) > 1 or (parts and not parts[0].isdecimal()):
        raise ValueError("must end in the number of a database, or in nothing")
    return service, int(parts[0]) if parts else None


def _query(text: str, tls: bool, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    known = {"db"} | (_TLS_OPTIONS if tls else set())
    if kind == "sentinel":
        known |= _SENTINEL_OPTIONS.keys()
    for name, value in parse_qsl(text, keep_blank_values=True):
        if name not in known:
            told = name if name in _TLS_OPTIONS | _SENTINEL_OPTIONS.keys() else "unknown"
            raise ValueError(f"has an option that it cannot have here: {told}")
        read: Any = URL_QUERY_ARGUMENT_PARSERS.get(name, str)
        try:
            found[name] = read(value)
        except ValueError:
            raise ValueError(f"has a wrong value for {name}") from None
    if found.get("ssl_cert_reqs", _CERT_REQS[0]) not in _CERT_REQS:
        raise ValueError(f"has a wrong value for ssl_cert_reqs: one of {', '.join(_CERT_REQS)}")
    return found


def _address(text: str, default_port: int) -> Address:
    match = _HOST.fullmatch(text)
    if match is None or not 0 < int(match[2] or default_port) < 65_536:
        raise ValueError("has a host or port that can't be")
    return Address(match[1].strip("[]"), int(match[2] or default_port))


def slot(tag: str) -> int:
    """Return the cluster slot of the keys that share a hash tag."""
    return crc_hqx(tag.encode(), 0) % SLOTS


class Servers:
    """Finds the server of a tag. Raises `QueueUnavailable`."""

    def __init__(self, location: Location, *, timeout_s: float) -> None:
        self.sharded = location.kind == "cluster"
        """Whether tags live on different servers."""
        self._location = location
        self._options: dict[str, Any] = {
            "socket_timeout": timeout_s * _ASKED_SHARE,
            "socket_connect_timeout": timeout_s * _ASKED_SHARE,
            "protocol": 2,
            "ssl": location.tls,
            "retry": Retry(NoBackoff(), 0),
        }
        self._reading = asyncio.Lock()
        self._asked_at = 0.0
        self._refreshing: asyncio.Task[None] | None = None
        self._nodes = list(location.seeds)
        """Whom to ask: Sentinels, or a cluster's nodes. The last one that answered first."""
        self._primaries: list[tuple[int, int, Address]] = []
        """First slot, last slot, primary; of Sentinel one, with all slots."""
        self._moved: dict[int, Address] = {}
        """What primaries have said since: slot → primary."""

    def known(self, tag: str) -> Address | None:
        """Return the server that had a tag's keys when last asked; None after `forget`."""
        place = slot(tag)
        if place in self._moved:
            return self._moved[place]
        for first, last, address in self._primaries:
            if first <= place <= last:
                return address
        return None

    @property
    def addresses(self) -> frozenset[Address]:
        """All that have keys, as far as is known."""
        return frozenset([one[2] for one in self._primaries] + list(self._moved.values()))

    async def locate(self, tag: str) -> Address:
        """Return the server that has a tag's keys now."""
        address = self.known(tag)
        if address is None:
            async with self._reading:
                if (address := self.known(tag)) is None:
                    await (self._read_slots() if self.sharded else self._read_master())
                    address = self.known(tag)
        elif not self.sharded:
            self._refresh()
        if address is None:
            raise QueueUnavailable from RedisError("the cluster has no node for this slot")
        return address

    def forget(self) -> None:
        """Ask again: something has moved."""
        self._primaries = []
        self._moved = {}

    def _refresh(self) -> None:
        """Ask Sentinel now and then, with nobody waiting for it."""
        now = asyncio.get_running_loop().time()
        if now - self._asked_at >= MASTER_S and not self._reading.locked():
            self._asked_at = now
            self._refreshing = asyncio.create_task(self._read_master_again())

    async def _read_master_again(self) -> None:
        async with self._reading:
            with suppress(QueueUnavailable):
                await self._read_master()

    def moved(self, place: int, address: Address) -> None:
        """Take a primary's word for where a slot is."""
        if address.host:
            self._moved[place] = address
            self._nodes = list(dict.fromkeys([*self._nodes, address]))

    async def _ask(self, login: dict[str, Any], *command: str) -> tuple[Address, Any]:
        """Ask the nodes in turn until one answers, and return which and what."""
        failure: Exception | None = None
        for node in list(self._nodes):
            # To the end, before it has had the chance to use up the caller's time.
            self._nodes.remove(node)
            self._nodes.append(node)
            redis = Redis(host=node.host, port=node.port, **self._options, **login)
            redis.response_callbacks.clear()
            try:
                reply: Any = await redis.execute_command(*command)  # type: ignore[no-untyped-call]
            except (RedisError, OSError, TimeoutError) as error:
                log.debug("servers.unanswered", host=node.host, port=node.port, error=str(error))
                failure = error
            else:
                if reply:
                    self._nodes.remove(node)
                    self._nodes.insert(0, node)
                    return node, reply
            finally:
                await redis.aclose()
        raise QueueUnavailable from failure or RedisError("Sentinel doesn't know this service")

    async def _read_master(self) -> None:
        service = self._location.service
        command = "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service
        _, (host, port) = await self._ask(self._location.sentinel, *command)
        self._primaries = [(0, SLOTS - 1, Address(host.decode(), int(port)))]
        self._asked_at = asyncio.get_running_loop().time()

    async def _read_slots(self) -> None:
        node, rows = await self._ask(self._location.login, "CLUSTER", "SLOTS")
        self._primaries = [(row[0], row[1], _node(row[2], node)) for row in rows]
        told = [_node(one, node) for row in rows for one in row[2:]]
        self._nodes = list(dict.fromkeys([node, *told, *self._location.seeds]))


def _node(told: Any, asked: Address) -> Address:
    """Read a node in a row of CLUSTER SLOTS. One that doesn't know its host is the one asked."""
    host = told[0].decode() if told[0] else ""
    return Address(asked.host if host in ("", "?") else host, told[1])
