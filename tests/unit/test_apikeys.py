"""Secrets of API keys: their form, and what of them is kept."""

from __future__ import annotations

import msgspec
import pytest

from shared import apikeys
from shared.protocol import KeyRecord

NOW_MS = 1_000_000


def record(*secrets: tuple[str, int]) -> KeyRecord:
    kept = [(apikeys.hash_of(secret), until_ms) for secret, until_ms in secrets]
    return KeyRecord(id="0123456789ab", tenant="t", secrets=kept)


def test_a_secret_tells_its_key_and_nobody_guesses_it() -> None:
    key_id = apikeys.new_id()
    secrets = {apikeys.new_secret(key_id) for _ in range(100)}
    assert len(secrets) == 100
    assert {apikeys.id_in(secret) for secret in secrets} == {key_id}
    assert all(len(secret.rpartition("-")[2]) == 48 for secret in secrets)


@pytest.mark.parametrize(
    "text",
    ["", "none", "sk-hr-", "sk-hr-0123456789ab-", "sk-hr-0123456789AB-" + "0" * 48, "x" * 10_000],
)
def test_what_is_no_secret_has_no_id(text: str) -> None:
    assert apikeys.id_in(text) is None


def test_a_key_is_opened_by_its_own_secrets_alone() -> None:
    one, other = apikeys.new_secret("0123456789ab"), apikeys.new_secret("0123456789ab")
    assert apikeys.opens(record((one, 0)), one, NOW_MS)
    assert not apikeys.opens(record((one, 0)), other, NOW_MS)
    assert not apikeys.opens(record(), one, NOW_MS)


def test_an_old_secret_ends_with_its_grace() -> None:
    old, new = apikeys.new_secret("0123456789ab"), apikeys.new_secret("0123456789ab")
    both = record((old, NOW_MS), (new, 0))
    assert apikeys.opens(both, old, NOW_MS - 1)
    assert not apikeys.opens(both, old, NOW_MS)
    assert apikeys.opens(both, new, NOW_MS)


def test_a_record_holds_nothing_of_the_secret() -> None:
    secret = apikeys.new_secret("0123456789ab")
    assert secret[-48:].encode() not in msgspec.msgpack.encode(record((secret, 0)))


def test_a_record_of_an_unknown_form_is_no_key() -> None:
    assert apikeys.readable(b"\xc1") is None
    assert apikeys.readable(msgspec.msgpack.encode({"id": 5})) is None
