"""`keys …`: API keys. A secret is shown when it is made, and never again."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import msgspec

from shared import apikeys
from shared.admin.access import Access, Refused
from shared.admin.arguments import KEY_LIMITS
from shared.admin.documents import Key, KeyDeleted, Keys
from shared.keys import LANES
from shared.protocol import KeyRecord

_EDITED = ("name", "models", "lane", "highest_lane", "on_disconnect", *KEY_LIMITS)
"""What may be changed: not whose it is, for its jobs are theirs."""


async def create(access: Access, args: argparse.Namespace) -> Key:
    """Make a key. Raises `Refused`."""
    highest = args.highest_lane
    lane = args.lane or highest
    key_id = apikeys.new_id()
    secret = apikeys.new_secret(key_id)
    record = KeyRecord(
        id=key_id,
        name=args.name,
        tenant=args.tenant or args.name,
        secrets=[(apikeys.hash_of(secret), 0)],
        models=args.models,
        lane=lane,
        highest_lane=highest,
        on_disconnect=args.on_disconnect or "",
        **{name: getattr(args, name) for name in KEY_LIMITS},
        weight=args.weight,
        created_ms=int(await access.now() * 1000),
    )
    _check_lanes(record)

    def make(found: KeyRecord | None) -> KeyRecord:
        if found is not None:
            raise Refused("there is such a key already: try again", "key_exists")
        return record

    await access.api_keys.change(key_id, make)
    return _key(record, await access.now(), secret)


async def listing(access: Access) -> Keys:
    """List all keys, oldest first."""
    now = await access.now()
    return Keys(keys=[_key(record, now) for record in await access.api_keys.all()])


async def show(access: Access, key_id: str) -> Key:
    """Tell all about a key but its secret."""
    (record,) = await access.api_keys.find([key_id])
    return _key(_known(record, key_id), await access.now())


async def disable(access: Access, key_id: str, *, disabled: bool) -> Key:
    """Have a key refused, or taken again."""
    return await _change(
        access, key_id, lambda record: msgspec.structs.replace(record, disabled=disabled)
    )


async def edit(access: Access, args: argparse.Namespace) -> Key:
    """Change what was given of a key. Raises `Refused`."""
    given = {name: getattr(args, name) for name in _EDITED}
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise Refused("nothing to change; see keys edit --help", "nothing_given")

    def changed(record: KeyRecord) -> KeyRecord:
        new = msgspec.structs.replace(record, **changes)
        _check_lanes(new)
        return new

    return await _change(access, args.key, changed)


async def rotate(access: Access, key_id: str, grace_s: float) -> Key:
    """Give a key a new secret. The newest of its old ones stays valid for a while."""
    secret = apikeys.new_secret(key_id)
    until_ms = int((await access.now() + grace_s) * 1000)

    def renewed(record: KeyRecord) -> KeyRecord:
        kept = [(old, until_ms) for old, until in record.secrets[-1:] if until == 0 and grace_s]
        return msgspec.structs.replace(record, secrets=[*kept, (apikeys.hash_of(secret), 0)])

    return await _change(access, key_id, renewed, secret)


async def delete(access: Access, key_id: str) -> KeyDeleted:
    """Forget a key."""

    def gone(record: KeyRecord | None) -> None:
        _known(record, key_id)

    await _replace(access, key_id, gone)
    return KeyDeleted(id=key_id)


async def _change(
    access: Access,
    key_id: str,
    make: Callable[[KeyRecord], KeyRecord],
    secret: str | None = None,
) -> Key:
    record = await _replace(access, key_id, lambda found: make(_known(found, key_id)))
    return _key(_known(record, key_id), await access.now(), secret)


async def _replace(
    access: Access, key_id: str, make: Callable[[KeyRecord | None], KeyRecord | None]
) -> KeyRecord | None:
    try:
        return await access.api_keys.change(key_id, make)
    except msgspec.MsgspecError:
        raise Refused(f"the record of key `{key_id}` can't be read here", "unreadable") from None


def _check_lanes(record: KeyRecord) -> None:
    lane, highest = record.lane, record.highest_lane
    if LANES.index(lane) < LANES.index(highest):
        raise Refused(f"lane {lane} is above the highest lane, {highest}", "wrong_lane")


def _known(record: KeyRecord | None, key_id: str) -> KeyRecord:
    if record is None:
        raise Refused(f"no key `{key_id}`; see keys list", "key_not_found")
    return record


def _key(record: KeyRecord, now: float, secret: str | None = None) -> Key:
    ends = [until_ms / 1000 for _, until_ms in record.secrets if until_ms > now * 1000]
    return Key(
        id=record.id,
        name=record.name,
        tenant=record.tenant,
        secret=secret,
        state="disabled" if record.disabled else "enabled",
        models=record.models,
        lane=record.lane,
        highest_lane=record.highest_lane,
        on_disconnect=record.on_disconnect or None,
        max_tokens=record.max_tokens or None,
        max_in_flight=record.max_in_flight or None,
        max_body_bytes=record.max_body_bytes or None,
        requests_per_minute=record.requests_per_minute or None,
        tokens_per_minute=record.tokens_per_minute or None,
        weight=record.weight,
        created=record.created_ms / 1000,
        old_secret_until=max(ends, default=None),
    )
