"""API keys: secrets, of which only hashes are kept, and the records that say what each may do.

A secret is `sk-hr-<id>-<random>`: its key is found by the id, without an index of secrets. It is
random, long and never chosen by people, so that a plain SHA-256 of it can't be guessed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from hmac import compare_digest
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis

from shared import protocol
from shared.border import translated
from shared.connection import Clients
from shared.keys import REGISTRY, Keys
from shared.protocol import KeyRecord, encode
from shared.scripts import Script

T = TypeVar("T")

LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0

_ID_BYTES = 6
_RANDOM_BYTES = 24
_SECRET = re.compile(r"sk-hr-([0-9a-f]{12})-[0-9a-f]{48}")
_ID = re.compile(r"[0-9a-f]{12}")


def new_id() -> str:
    """Return an id for a key: 12 hexadecimal digits."""
    return secrets.token_hex(_ID_BYTES)


def new_secret(key_id: str) -> str:
    """Return a secret for a key."""
    return f"sk-hr-{key_id}-{secrets.token_hex(_RANDOM_BYTES)}"


def hash_of(secret: str) -> bytes:
    """Return what is kept of a secret."""
    return sha256(secret.encode()).digest()


def id_in(secret: str) -> str | None:
    """Return the id of the key that a secret is for; None if it has not a secret's form."""
    found = _SECRET.fullmatch(secret)
    return found[1] if found else None


def is_key_id(text: str) -> bool:
    """Tell whether a text has the form of a key's id."""
    return _ID.fullmatch(text) is not None


def opens(record: KeyRecord, secret: str, now_ms: float) -> bool:
    """Tell whether a secret is one of a key's, and still valid."""
    digest = hash_of(secret)
    return any(
        compare_digest(kept, digest) and (until_ms == 0 or now_ms < until_ms)
        for kept, until_ms in record.secrets
    )


class KeyStore:
    """Reads and writes the keys' records. Raises `QueueUnavailable`."""

    def __init__(self, clients: Clients, keys: Keys) -> None:
        self._clients = clients
        self._name = keys.api_keys()
        self._change = Script("change_key")

    async def exist(self) -> bool:
        """Tell whether there is any key."""
        return bool(await self._at(lambda redis: redis.exists(self._name)))

    async def find(self, key_ids: Sequence[str]) -> list[KeyRecord | None]:
        """Return the records of keys; None where there is none, or none that can be read here."""
        found: Any = await self._at(lambda redis: redis.hmget(self._name, list(key_ids)))
        return [readable(one) if one else None for one in found]

    async def all(self) -> list[KeyRecord]:
        """Return all keys that can be read here, oldest first."""
        found: Any = await self._at(lambda redis: redis.hgetall(self._name))
        records = [one for one in map(readable, found.values()) if one is not None]
        return sorted(records, key=lambda one: (one.created_ms, one.id))

    async def change(
        self, key_id: str, make: Callable[[KeyRecord | None], KeyRecord | None]
    ) -> KeyRecord | None:
        """Put in a record's place what `make` makes of it, None for nothing; return that.

        `make` is called again where somebody else was faster. What it raises, goes out.
        """
        while True:
            was: Any = await self._at(lambda redis: redis.hget(self._name, key_id))
            made = make(protocol.decode_key(was) if was else None)
            if await self._replace(key_id, was or b"", b"" if made is None else encode(made)):
                return made

    async def _replace(self, key_id: str, was: bytes, new: bytes) -> bool:
        args = [key_id, was, new]
        return bool(await self._at(lambda redis: self._change(redis, [self._name], args)))

    async def _at(self, operation: Callable[[Redis], Awaitable[T]]) -> T:
        async with translated():
            return await self._clients.run(REGISTRY, operation)


def readable(record: bytes) -> KeyRecord | None:
    """Decode a key's record; None where it was written in a form that isn't known here."""
    try:
        return protocol.decode_key(record)
    except msgspec.MsgspecError:
        return None
