"""Who calls: the API keys that this process has met, kept for a moment.

A key is looked up when it is first met, and again before that moment is over: so long may one that
was disabled still be taken. What is met at the same time is looked up in one command, one command
at a time: a flood of wrong keys costs the queue no more than one.
"""

from __future__ import annotations

import asyncio
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from gateway.errors import Forbidden, InvalidApiKey, Overloaded, TokensAboveLimit
from gateway.settings import GatewaySettings
from shared import apikeys
from shared.apikeys import KeyStore
from shared.errors import HeadraceError, QueueUnavailable
from shared.keys import LANES
from shared.logs import Log
from shared.protocol import KeyRecord

if TYPE_CHECKING:
    from gateway.body import Fields

log = Log("gateway")

ANYONE = KeyRecord(id="", tenant="")
"""Who calls a gateway that asks for no keys."""

_MOST_KEPT = 10_000
"""Keys that are remembered, and as many that there aren't."""
_MOST_WANTED = 10_000
"""Keys that wait to be looked up."""
_AT_ONCE = 500
_RETRY_S = 0.25


class _Kept:
    """Keys with their records, the oldest dropped."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[KeyRecord | None, float]] = {}

    def put(self, key_id: str, record: KeyRecord | None, until: float) -> None:
        self._records.pop(key_id, None)
        self._records[key_id] = record, until
        if len(self._records) > _MOST_KEPT:
            del self._records[next(iter(self._records))]

    def get(self, key_id: str) -> tuple[KeyRecord | None, float] | None:
        return self._records.get(key_id)

    def drop(self, key_id: str) -> None:
        self._records.pop(key_id, None)


class Callers:
    """Tells callers by their keys. `run()` is one of the process's long tasks."""

    def __init__(self, settings: GatewaySettings, store: KeyStore) -> None:
        self._store = store
        self._cache_s = settings.auth_cache_s
        self._timeout_s = settings.submit_timeout_s
        self._host = settings.host
        self._open: bool | None = {"open": True, "keys": False}.get(settings.auth)
        """Whether no key is asked for; None: not known yet. What has been closed stays closed."""
        self._watches = settings.auth == "auto" and is_loopback(settings.host)
        """Open while there are no keys."""
        if settings.auth == "auto" and not self._watches:
            self._open = False
        self._decided = asyncio.Event()
        self._found = _Kept()
        self._missed = _Kept()
        self._wanted: dict[str, asyncio.Future[bool]] = {}
        """Keys to be looked up → whether that has been done."""
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Look keys up until cancelled."""
        if self._open and not is_loopback(self._host):
            self._warn()
        while True:
            if self._watches:
                await self._watch()
            await self._wait_wanted()
            await self._look_up(list(self._wanted)[:_AT_ONCE])

    async def identify(self, headers: Headers) -> KeyRecord:
        """Return whose request this is. Raises `InvalidApiKey`, `Unavailable`."""
        if self._open is None:
            await self._wait_decided()
        if self._open:
            return ANYONE
        secret = _secret(headers)
        if not secret:
            raise InvalidApiKey(
                "You didn't provide an API key. Send it as `Authorization: Bearer <key>`."
            )
        key_id = apikeys.id_in(secret)
        record = None if key_id is None else await self._record(key_id)
        if record is None or not apikeys.opens(record, secret, time.time() * 1000):
            raise InvalidApiKey
        if record.disabled:
            raise InvalidApiKey("This API key is disabled.")
        return record

    async def _record(self, key_id: str) -> KeyRecord | None:
        kept = self._found.get(key_id) or self._missed.get(key_id)
        now = asyncio.get_running_loop().time()
        if kept is None or now >= kept[1]:
            await self._await_lookup(key_id)
            kept = self._found.get(key_id) or self._missed.get(key_id)
        elif kept[0] is not None and now >= kept[1] - self._cache_s / 2:
            self._want(key_id)  # So that a key in use is never waited for.
        return kept[0] if kept else None

    async def _await_lookup(self, key_id: str) -> None:
        if key_id not in self._wanted and len(self._wanted) >= _MOST_WANTED:
            raise Overloaded(retry_after_s=1)
        try:
            async with asyncio.timeout(self._timeout_s):
                done = await asyncio.shield(self._want(key_id))
        except TimeoutError as error:
            raise QueueUnavailable from error
        if not done:
            raise QueueUnavailable

    def _want(self, key_id: str) -> asyncio.Future[bool]:
        future = self._wanted.get(key_id)
        if future is None:
            future = self._wanted[key_id] = asyncio.get_running_loop().create_future()
            self._wake.set()
        return future

    async def _wait_wanted(self) -> None:
        """Wait for a key to look up or, where the keys are watched, for the next look at them."""
        if self._wanted:
            return
        self._wake.clear()
        if not self._watches:
            await self._wake.wait()
            return
        try:
            async with asyncio.timeout(_RETRY_S if self._open is None else self._cache_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _look_up(self, key_ids: list[str]) -> None:
        if not key_ids:
            return
        until = asyncio.get_running_loop().time() + self._cache_s
        try:
            records = await self._store.find(key_ids)
        except HeadraceError:
            records = None
        for key_id, record in zip(key_ids, records or (), strict=False):
            kept, other = (
                (self._missed, self._found) if record is None else (self._found, self._missed)
            )
            kept.put(key_id, record, until)
            other.drop(key_id)
        for key_id in key_ids:
            self._wanted.pop(key_id).set_result(records is not None)

    async def _watch(self) -> None:
        """See whether there are keys by now."""
        try:
            exist = await self._store.exist()
        except HeadraceError:  # What was so, stays so.
            return
        if exist:
            if self._open:
                log.info("auth.closed")
            self._open = self._watches = False
        elif self._open is None:
            self._open = True
            self._warn()
        self._decided.set()

    async def _wait_decided(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._decided.wait()
        except TimeoutError as error:
            raise QueueUnavailable from error

    def _warn(self) -> None:
        hint = "anybody who reaches it is served; see headrace-admin keys create"
        log.warning("auth.open", host=self._host, hint=hint)


def is_loopback(host: str) -> bool:
    """Tell whether an address to listen on can be reached from this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def check_model(caller: KeyRecord, name: str) -> None:
    """Refuse a model that a caller may not use. Raises `Forbidden`."""
    if not may_use(caller, name):
        raise Forbidden(f"This API key may not use the model `{name[:200]}`.", param="model")


def may_use(caller: KeyRecord, name: str) -> bool:
    """Tell whether a caller may use a model."""
    return not caller.models or name in caller.models


def check_tokens(caller: KeyRecord, fields: Fields) -> None:
    """Refuse what asks for more tokens than a minute has for it. Raises `TokensAboveLimit`."""
    most = caller.tokens_per_minute
    if not most or (given := fields.asked_tokens) is None:
        return
    name, each = given
    asked = min(each, caller.max_tokens or each) * fields.sequences
    if asked > most:
        raise TokensAboveLimit(
            f"The request asks for up to {asked} tokens; this API key has {most} in a minute.",
            param=name,
        )


def lane_for(caller: KeyRecord, asked: str | None) -> str:
    """Return the lane of a caller's request. Raises `Forbidden`."""
    if asked is None:
        return caller.lane
    if LANES.index(asked) < LANES.index(caller.highest_lane):
        raise Forbidden(
            f"This API key's highest lane is `{caller.highest_lane}`.", param="service_tier"
        )
    return asked


def _secret(headers: Headers) -> str:
    scheme, _, secret = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer":
        return secret.strip()
    return headers.get("x-api-key", "").strip()
