"""`headrace-admin keys …` on a real server, as text and JSON."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from shared import apikeys
from shared.admin.__main__ import main
from shared.apikeys import KeyStore
from shared.connection import Connections
from shared.keys import Keys
from shared.protocol import KeyRecord
from shared.settings import RedisSettings
from tests.support.valkey import ValkeyServer

Call = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def prefix(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> str:
    own = f"keys{secrets.token_hex(6)}"
    monkeypatch.setenv("HEADRACE_REDIS_URL", valkey.url)
    monkeypatch.setenv("HEADRACE_KEY_PREFIX", own)
    return own


@pytest.fixture
def call(prefix: str, capsys: pytest.CaptureFixture[str]) -> Call:
    def run(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code: int = main(line.split())
        except SystemExit as left:
            code = int(str(left.code))
        written = capsys.readouterr()
        return code, written.out, written.err

    return run


def document(answer: tuple[int, str, str]) -> Any:
    code, out, err = answer
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_secret_is_shown_once_and_kept_nowhere(call: Call, valkey: ValkeyServer) -> None:
    made = document(
        call(
            "--json keys create reports --tenant acme --models llama,tiny --highest-lane batch "
            "--on-disconnect grace=5 --max-tokens 100 --max-in-flight 3 --max-body-bytes 4096 "
            "--requests-per-minute 60 --tokens-per-minute 9000 "
            "--weight 2.5"
        )
    )
    secret, key_id = made.pop("secret"), made["id"]
    assert apikeys.id_in(secret) == key_id
    told = {
        "name": "reports",
        "tenant": "acme",
        "state": "enabled",
        "models": ["llama", "tiny"],
        "lane": "batch",
        "highest_lane": "batch",
        "on_disconnect": "grace=5",
        "max_tokens": 100,
        "max_in_flight": 3,
        "max_body_bytes": 4096,
        "requests_per_minute": 60,
        "tokens_per_minute": 9000,
        "weight": 2.5,
        "old_secret_until": None,
    }
    assert {name: made[name] for name in told} == told
    shown = document(call(f"--json keys show {key_id}"))
    assert shown.pop("secret") is None
    assert shown == made
    (listed,) = document(call("--json keys list"))["keys"]
    assert listed == {**made, "secret": None}
    for name in valkey.command("KEYS", "keys*:keys"):
        assert secret[-48:].encode() not in b"".join(valkey.command("HGETALL", name))


def test_text_for_people(call: Call) -> None:
    assert call("keys list") == (0, "none\n", "")
    _, out, _ = call("keys create me")
    found = re.search(r"^secret +(sk-hr-([0-9a-f]{12})-[0-9a-f]{48})$", out, re.M)
    assert found is not None
    assert re.search(r"^tenant +me$", out, re.M)
    assert "can't be shown again" in out
    for line in ("keys list", f"keys show {found[2]}", f"keys disable {found[2]}"):
        code, out, err = call(line)
        assert (code, err) == (0, "")
        assert found[2] in out
        assert "sk-hr-" not in out
    assert re.search(r"^state +disabled$", out, re.M)
    assert call(f"keys delete {found[2]}") == (0, f"{found[2]}  deleted\n", "")
    assert call("keys list") == (0, "none\n", "")


def test_keys_are_disabled_and_enabled(call: Call) -> None:
    key_id = document(call("--json keys create me"))["id"]
    for word, state in (("disable", "disabled"), ("disable", "disabled"), ("enable", "enabled")):
        assert document(call(f"--json keys {word} {key_id}"))["state"] == state


def test_an_edit_changes_what_is_given_and_nothing_else(call: Call, prefix: str) -> None:
    limits = "--max-tokens 5 --max-in-flight 6 --requests-per-minute 7 --on-disconnect continue"
    made = document(call(f"--json keys create me --tenant t --models a,b {limits}"))
    made.pop("secret")
    edit = f"--json keys edit {made['id']}"
    told = document(call(f"{edit} --tokens-per-minute 100 --requests-per-minute 0"))
    assert told == {**made, "secret": None, "requests_per_minute": None, "tokens_per_minute": 100}
    told = document(
        call(
            f"{edit} --name you --models= --highest-lane batch --lane batch --max-body-bytes 9 "
            "--max-tokens 1 --max-in-flight 0 --on-disconnect default"
        )
    )
    assert (told["name"], told["tenant"], told["models"]) == ("you", "t", [])
    assert (told["lane"], told["highest_lane"], told["on_disconnect"]) == ("batch", "batch", None)
    assert (told["max_body_bytes"], told["max_tokens"], told["max_in_flight"]) == (9, 1, None)
    assert document(call(f"--json keys show {made['id']}")) == told
    for options, code in (("", "nothing_given"), ("--lane interactive", "wrong_lane")):
        status, out, _ = call(f"{edit} {options}")
        assert (status, json.loads(out)["error"]["code"]) == (1, code)
    assert document(call(f"--json keys show {made['id']}")) == told


async def test_an_edited_key_keeps_its_secret(call: Call, prefix: str) -> None:
    made = document(await asyncio.to_thread(call, "--json keys create me"))
    await asyncio.to_thread(call, f"keys edit {made['id']} --requests-per-minute 3")
    clients = Connections(RedisSettings(key_prefix=prefix), name="test")
    (record,) = await KeyStore(clients, Keys(prefix)).find([made["id"]])
    await clients.aclose()
    assert record is not None
    assert apikeys.opens(record, made["secret"], 0)
    assert record.requests_per_minute == 3


def test_rotation_leaves_the_last_secret_for_its_grace(call: Call, prefix: str) -> None:
    first = document(call("--json keys create me"))
    second = document(call(f"--json keys rotate {first['id']} --grace 60"))
    third = document(call(f"--json keys rotate {first['id']} --grace 60"))
    assert third["old_secret_until"] > third["created"] + 59
    last = document(call(f"--json keys rotate {first['id']} --grace 0"))
    assert last["old_secret_until"] is None
    assert len({one["secret"] for one in (first, second, third, last)}) == 4


async def test_a_secret_is_valid_until_its_grace_is_over(call: Call, prefix: str) -> None:
    first = document(await asyncio.to_thread(call, "--json keys create me"))
    second = document(await asyncio.to_thread(call, f"--json keys rotate {first['id']} --grace 60"))
    settings = RedisSettings(key_prefix=prefix)
    clients = Connections(settings, name="test")
    (record,) = await KeyStore(clients, Keys(prefix)).find([first["id"]])
    await clients.aclose()
    assert record is not None
    over_ms = second["old_secret_until"] * 1000
    assert apikeys.opens(record, first["secret"], over_ms - 1)
    assert not apikeys.opens(record, first["secret"], over_ms)
    assert apikeys.opens(record, second["secret"], over_ms)


@pytest.mark.parametrize(
    "word", ["show", "disable", "enable", "rotate", "delete", "edit --max-tokens 1"]
)
def test_there_is_no_such_key(call: Call, word: str) -> None:
    command, *more = word.split()
    code, out, err = call(f"--json keys {command} 0123456789ab {' '.join(more)}")
    assert (code, json.loads(out)["error"]["code"]) == (1, "key_not_found")
    assert "0123456789ab" in err


@pytest.mark.parametrize(
    "line",
    [
        "keys create",
        "keys create a/b",
        "keys create me --lane fast",
        "keys create me --max-tokens -1",
        "keys create me --on-disconnect stay",
        "keys create me --requests-per-minute 1000001",
        "keys create me --tokens-per-minute 1000000001",
        "keys create me --tokens-per-minute -1",
        "keys create me --tokens-per-minute many",
        "keys edit",
        "keys edit SECRET --max-tokens 1",
        "keys edit 0123456789ab --tenant other",
        "keys edit 0123456789ab --requests-per-minute 1.5",
        "keys show SECRET",
        "keys rotate 0123456789ab --grace -1",
    ],
)
def test_wrong_arguments(call: Call, line: str) -> None:
    secret = apikeys.new_secret("0123456789ab")
    code, out, err = call(line.replace("SECRET", secret))
    assert (code, out) == (2, "")
    assert secret not in err


def test_the_default_lane_is_not_above_the_highest(call: Call) -> None:
    code, _, err = call("keys create me --lane interactive --highest-lane batch")
    assert code == 1
    assert "above the highest" in err


async def test_changes_at_once_are_not_lost(prefix: str) -> None:
    clients = Connections(RedisSettings(key_prefix=prefix), name="test")
    store = KeyStore(clients, Keys(prefix))

    def more(found: Any) -> Any:
        return KeyRecord(id="a" * 12, tenant="t", max_tokens=getattr(found, "max_tokens", 0) + 1)

    await asyncio.gather(*(store.change("a" * 12, more) for _ in range(20)))
    (record,) = await store.find(["a" * 12])
    await clients.aclose()
    assert record is not None
    assert record.max_tokens == 20
