"""Who calls, from a store of keys that counts how often it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from starlette.datastructures import Headers

from gateway import callers
from gateway.callers import ANYONE, Callers, check_model, is_loopback, lane_for
from gateway.errors import Forbidden, InvalidApiKey
from gateway.settings import GatewaySettings
from shared import apikeys
from shared.apikeys import KeyStore
from shared.errors import QueueUnavailable
from shared.protocol import KeyRecord
from tests.support.waiting import until


class Store(KeyStore):
    """Keys in memory."""

    def __init__(self) -> None:
        self.records: dict[str, KeyRecord] = {}
        self.away = False
        self.asked: list[list[str]] = []

    def make(self, **fields: Any) -> str:
        key_id = apikeys.new_id()
        secret = apikeys.new_secret(key_id)
        kept = [(apikeys.hash_of(secret), 0)]
        self.records[key_id] = KeyRecord(id=key_id, tenant="acme", secrets=kept, **fields)
        return secret

    async def exist(self) -> bool:
        await asyncio.sleep(0)
        if self.away:
            raise QueueUnavailable
        return bool(self.records)

    async def find(self, key_ids: Sequence[str]) -> list[KeyRecord | None]:
        self.asked.append(list(key_ids))
        await asyncio.sleep(0.005)
        if self.away:
            raise QueueUnavailable
        return [self.records.get(one) for one in key_ids]


def bearer(secret: str) -> Headers:
    return Headers({"authorization": f"Bearer {secret}"})


@asynccontextmanager
async def running(store: Store, **settings: Any) -> AsyncIterator[Callers]:
    given = {"auth": "keys", "submit_timeout_s": 0.2, **settings}
    one = Callers(GatewaySettings(**given), store)
    task = asyncio.get_running_loop().create_task(one.run())
    try:
        yield one
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_key_is_looked_up_once() -> None:
    store = Store()
    secret = store.make()
    async with running(store) as known:
        found = await asyncio.gather(*(known.identify(bearer(secret)) for _ in range(50)))
        assert {one.tenant for one in found} == {"acme"}
        await known.identify(Headers({"x-api-key": secret}))
        await known.identify(Headers({"authorization": f"bearer  {secret} "}))
    assert len(store.asked) == 1


async def test_a_flood_of_wrong_keys_is_one_command_at_a_time() -> None:
    store = Store()
    wrong = [apikeys.new_secret(apikeys.new_id()) for _ in range(1000)]
    async with running(store) as known:
        for _ in range(3):
            told = await asyncio.gather(
                *(known.identify(bearer(one)) for one in wrong), return_exceptions=True
            )
            assert {type(one) for one in told} == {InvalidApiKey}
    assert len(store.asked) <= 3
    assert sum(map(len, store.asked)) == 1000


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "_MOST_KEPT", 10)
    store = Store()
    secrets = [store.make() for _ in range(30)]
    async with running(store) as known:
        for secret in secrets:
            await known.identify(bearer(secret))
        asked = len(store.asked)
        await known.identify(bearer(secrets[-1]))
        assert len(store.asked) == asked
        await known.identify(bearer(secrets[0]))
        assert len(store.asked) == asked + 1


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer none"},
        {"authorization": "Basic c2stOnNr"},
        {"x-api-key": "sk-hr-0123456789ab"},
        {"x-api-key": "\xe9" * 67},
    ],
)
async def test_what_is_no_key_is_refused_without_a_look(headers: dict[str, str]) -> None:
    store = Store()
    async with running(store) as known:
        with pytest.raises(InvalidApiKey):
            await known.identify(Headers(headers))
    assert store.asked == []


async def test_another_secret_of_a_known_key_is_wrong() -> None:
    store = Store()
    secret = store.make()
    async with running(store) as known:
        await known.identify(bearer(secret))
        with pytest.raises(InvalidApiKey, match="Incorrect API key provided"):
            await known.identify(bearer(secret[:-1] + ("0" if secret[-1] != "0" else "1")))


async def test_a_disabled_key_is_refused_though_it_is_in_use() -> None:
    store = Store()
    secret = store.make()
    key_id = apikeys.id_in(secret)
    assert key_id is not None
    async with running(store, auth_cache_s=0.1) as known:
        await known.identify(bearer(secret))
        store.records[key_id] = msgspec.structs.replace(store.records[key_id], disabled=True)

        async def refused() -> bool:
            try:
                await known.identify(bearer(secret))
            except InvalidApiKey as error:
                return "disabled" in str(error)
            return False

        await until(refused, "the key is refused", every=0.005)
        store.records.clear()

        async def gone() -> bool:
            try:
                await known.identify(bearer(secret))
            except InvalidApiKey as error:
                return "Incorrect" in str(error)
            return False

        await until(gone, "the key is forgotten", every=0.005)


async def test_without_the_queue_known_keys_do_and_others_do_not() -> None:
    store = Store()
    secret, other = store.make(), store.make()
    async with running(store, auth_cache_s=60) as known:
        await known.identify(bearer(secret))
        store.away = True
        await known.identify(bearer(secret))
        with pytest.raises(QueueUnavailable):
            await known.identify(bearer(other))
        store.away = False
        await known.identify(bearer(other))


async def test_a_loopback_gateway_is_open_until_there_is_a_key() -> None:
    store = Store()
    async with running(store, auth="auto", auth_cache_s=0.1) as known:
        assert await known.identify(Headers({"authorization": "Bearer none"})) is ANYONE
        secret = store.make()

        async def closed() -> bool:
            try:
                await known.identify(Headers({}))
            except InvalidApiKey:
                return True
            return False

        await until(closed, "keys are asked for", every=0.005)
        assert (await known.identify(bearer(secret))).tenant == "acme"
        store.records.clear()
        for _ in range(5):
            await asyncio.sleep(0.05)
            with pytest.raises(InvalidApiKey):
                await known.identify(Headers({}))


async def test_where_it_is_not_known_whether_there_are_keys_nobody_is_served() -> None:
    store = Store()
    store.away = True
    async with running(store, auth="auto") as known:
        with pytest.raises(QueueUnavailable):
            await known.identify(Headers({}))
        store.away = False
        await until(lambda: known._open, "it is known")
        assert await known.identify(Headers({})) is ANYONE


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
async def test_elsewhere_a_gateway_is_never_open_by_itself(host: str) -> None:
    async with running(Store(), auth="auto", host=host) as known:
        with pytest.raises(InvalidApiKey):
            await known.identify(Headers({}))
    async with running(Store(), auth="open", host=host) as known:
        assert await known.identify(Headers({})) is ANYONE


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_addresses_of_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


def test_lanes_and_models_of_a_key() -> None:
    batch = KeyRecord(id="k", tenant="t", lane="batch", highest_lane="batch", models=["a"])
    assert lane_for(batch, None) == "batch"
    assert lane_for(batch, "batch") == "batch"
    with pytest.raises(Forbidden):
        lane_for(batch, "interactive")
    either = KeyRecord(id="k", tenant="t", lane="batch")
    assert lane_for(either, None) == "batch"
    assert lane_for(either, "interactive") == "interactive"
    assert lane_for(ANYONE, None) == "interactive"
    check_model(batch, "a")
    check_model(either, "b")
    with pytest.raises(Forbidden):
        check_model(batch, "b")
