"""A client of any kind of server, which looks on through faults: it follows and repeats."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ConstantBackoff

from shared.servers import parse


def client_of(url: str) -> Any:
    """Return redis-py's own client for a URL. Its commands may be sent more than once."""
    location = parse(url)
    retry = Retry(ConstantBackoff(0.1), 30)
    options: dict[str, Any] = {"protocol": 2, "socket_timeout": 2, **location.login}
    seeds = [(one.host, one.port) for one in location.seeds]
    if location.kind == "cluster":
        nodes = [ClusterNode(*one) for one in seeds]
        return RedisCluster(startup_nodes=nodes, retry=retry, **options)
    if location.kind == "sentinel":
        sentinel = Sentinel(seeds)  # type: ignore[no-untyped-call]
        master: Any = sentinel.master_for(location.service, retry=retry, **options)
        close = master.aclose

        async def close_all() -> None:
            await close()
            for one in sentinel.sentinels:
                await one.aclose()

        master.aclose = close_all
        return master
    return Redis.from_url(url, protocol=2, socket_timeout=2)
