"""API keys, made as `headrace-admin` makes them."""

from __future__ import annotations

from typing import Any

import msgspec

from shared import apikeys
from shared.apikeys import KeyStore
from shared.connection import Clients
from shared.keys import Keys
from shared.protocol import KeyRecord


class MadeKey:
    """A key and its secret."""

    def __init__(self, store: KeyStore, record: KeyRecord, secret: str) -> None:
        self._store = store
        self.id = record.id
        self.secret = secret

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}"}

    async def change(self, **changes: Any) -> None:
        def changed(record: KeyRecord | None) -> KeyRecord | None:
            assert record is not None
            return msgspec.structs.replace(record, **changes)

        await self._store.change(self.id, changed)


async def make_key(clients: Clients, keys: Keys, tenant: str = "acme", **fields: Any) -> MadeKey:
    """Make a key with chosen rights."""
    key_id = apikeys.new_id()
    secret = apikeys.new_secret(key_id)
    kept = [(apikeys.hash_of(secret), 0)]
    record = KeyRecord(id=key_id, tenant=tenant, secrets=kept, **fields)
    store = KeyStore(clients, keys)
    await store.change(key_id, lambda _: record)
    return MadeKey(store, record, secret)
