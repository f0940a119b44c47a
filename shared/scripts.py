"""Loads the Lua files and calls them by EVALSHA, falling back to EVAL where one isn't known.

A server forgets its scripts when it restarts or fails over; the fallback teaches it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import NoScriptError

_FOLDER = files("shared") / "lua"
_PARTS = {
    "submit": ("ring", "enqueue"),
    "requeue": ("ring", "enqueue"),
    "claim": ("ring",),
    "hand_back": ("ring",),
    "adopt": ("end_job",),
    "cancel": ("end_job",),
    "finish": ("end_job",),
    "leave": ("end_job",),
    "admit": ("window",),
    "settle": ("window",),
    "peek": ("without_body",),
    "peek_dead": ("without_body",),
}
"""What several scripts share: script → the files that stand before it."""
_REFUSED_WHEN_FULL = frozenset({"submit", "requeue", "remember", "admit", "change_key"})
"""At `maxmemory` new work is refused; everything that ends, frees or goes on must get through."""

NAMES = (
    "submit",
    "create_lanes",
    "claim",
    "adopt",
    "publish",
    "finish",
    "cancel",
    "beat",
    "hand_back",
    "attach",
    "leave",
    "readers",
    "remember",
)
"""The transitions. `announce` is the registry's; `requeue` and the peeks are `headrace-admin`'s."""

Args = Sequence[Any]


def source(name: str, *, shebang: bool = True, sharded: bool = False) -> str:
    """Return a script's full text. fakeredis doesn't know the shebang line.

    `sharded`: for a cluster, where a job's channel lives with its keys.
    """
    names = (*_PARTS.get(name, ()), name)
    text = "".join((_FOLDER / f"{one}.lua").read_text() for one in names)
    if sharded:
        text = text.replace("'PUBLISH'", "'SPUBLISH'").replace("'NUMSUB'", "'SHARDNUMSUB'")
    if not shebang:
        return text
    return ("#!lua\n" if name in _REFUSED_WHEN_FULL else "#!lua flags=allow-oom\n") + text


class Script:
    """One Lua file, callable with its keys and arguments."""

    def __init__(self, name: str, *, shebang: bool = True, sharded: bool = False) -> None:
        self.source = source(name, shebang=shebang, sharded=sharded)
        self._sha = sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, redis: Redis, keys: Sequence[str], args: Args) -> Any:
        try:
            return await redis.evalsha(self._sha, len(keys), *keys, *args)
        except NoScriptError:
            return await redis.eval(self.source, len(keys), *keys, *args)

    def add(self, pipeline: Pipeline, keys: Sequence[str] | Sequence[bytes], args: Args) -> None:
        """Queue the call in a pipeline, whose owner answers `NoScriptError` with `teach`."""
        pipeline.evalsha(self._sha, len(keys), *keys, *args)

    async def teach(self, redis: Redis) -> None:
        """Load the script into the server."""
        await redis.script_load(self.source)
