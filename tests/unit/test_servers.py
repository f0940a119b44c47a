"""URLs of servers: taken apart, and refused without telling a login."""

from __future__ import annotations

import pytest

from shared.servers import SLOTS, Address, Servers, parse, slot
from shared.settings import RedisSettings, read


@pytest.mark.parametrize(
    ("url", "kind", "seeds"),
    [
        ("redis://", "server", [("127.0.0.1", 6379)]),
        ("redis://queue", "server", [("queue", 6379)]),
        ("redis://queue:7000/2", "server", [("queue", 7000)]),
        ("rediss://[::1]:7000", "server", [("::1", 7000)]),
        ("unix:///run/redis.sock", "unix", []),
        ("redis+sentinel://a,b:27000/queue", "sentinel", [("a", 26379), ("b", 27000)]),
        (
            "redis+sentinel://[fe80::1]:1,[fe80::2]/queue/3",
            "sentinel",
            [("fe80::1", 1), ("fe80::2", 26379)],
        ),
        ("redis+cluster://a:1,b,c:3", "cluster", [("a", 1), ("b", 6379), ("c", 3)]),
        ("rediss+cluster://a/0", "cluster", [("a", 6379)]),
    ],
)
def test_kinds_and_seeds(url: str, kind: str, seeds: list[tuple[str, int]]) -> None:
    location = parse(url)
    assert location.kind == kind
    assert location.seeds == tuple(Address(*one) for one in seeds)
    assert location.tls == url.startswith("rediss")


@pytest.mark.parametrize(
    ("url", "login"),
    [
        ("redis://queue", {}),
        ("redis://:s%2F%40%3A%3F@queue/2", {"password": "s/@:?", "db": 2}),
        ("redis://us%65r:pw@queue", {"username": "user", "password": "pw"}),
        ("unix://user:pw@/run/redis.sock?db=3", {"username": "user", "password": "pw", "db": 3}),
        ("redis+sentinel://user:pw@a,b/queue/1", {"username": "user", "password": "pw", "db": 1}),
        ("redis+cluster://:pw@a,b", {"password": "pw"}),
        (
            "rediss://:pw@queue?ssl_ca_certs=%2Fetc%2Fca.pem&ssl_check_hostname=false",
            {"password": "pw", "ssl_ca_certs": "/etc/ca.pem", "ssl_check_hostname": False},
        ),
    ],
)
def test_logins(url: str, login: dict[str, object]) -> None:
    assert parse(url).login == login


def test_sentinels_have_a_login_of_their_own() -> None:
    options = "sentinel_username=watch&sentinel_password=s1&ssl_ca_certs=ca.pem"
    location = parse(f"rediss+sentinel://user:pw@a/queue?{options}")
    assert location.login == {"username": "user", "password": "pw", "ssl_ca_certs": "ca.pem"}
    assert location.sentinel == {"username": "watch", "password": "s1", "ssl_ca_certs": "ca.pem"}


WRONG = [
    "redis://:hunter2@queue:port",
    "redis://:hunter2@queue:70000",
    "redis://:hunter2@queue:0",
    "redis://:hunter2@queue/x",
    "redis://:hunter2@queue/1/2",
    "redis://:hunter2@a,b",
    "redis://:hun/ter2@queue",
    "redis://:hun@ter2@queue",
    "redis://:hun?ter2@queue",
    "redis://hunter2@queue",
    "redis://:hunter2@queue?socket_timeout=99",
    "redis://:hunter2@queue?ssl_ca_certs=ca.pem",
    "rediss://:hunter2@queue?ssl_cert_reqs=perhaps",
    "rediss://:hunter2@queue?ssl_min_version=new",
    "unix://:hunter2@",
    "unix://:hunter2@host/run/redis.sock",
    "redis+sentinel://:hunter2@a,b",
    "redis+sentinel://:hunter2@a/queue/x",
    "redis+sentinel://:hunter2@a,,b/queue",
    "redis+cluster://:hunter2@a/1",
    "redis+cluster://:hunter2@a/queue",
    "redis+cluster://:hunter2@a?sentinel_password=x",
    "redis+cloud://:hunter2@a",
]


@pytest.mark.parametrize("url", WRONG)
def test_a_wrong_url_stops_the_start_and_tells_no_password(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", url)
    with pytest.raises(SystemExit) as leaving:
        read(RedisSettings)
    told = capsys.readouterr().err
    assert leaving.value.code == 2
    assert told.startswith("headrace: wrong setting HEADRACE_REDIS_URL: ")
    assert len(told.splitlines()) == 1
    assert "ter2" not in told


def test_locations_are_shown_without_logins() -> None:
    url = (
        "rediss+sentinel://user:hunter2@a:1,b/queue?sentinel_password=hunter2&ssl_password=hunter2"
    )
    location = parse(url)
    assert str(location) == "a:1,b:26379/queue"
    assert "hunter2" not in repr(location)


@pytest.mark.parametrize(
    ("tag", "place"),
    [("123456789", 12739), ("", 0), ("foo", 12182), ("registry", slot("registry"))],
)
def test_slots_are_those_of_the_specification(tag: str, place: int) -> None:
    assert slot(tag) == place
    assert 0 <= place < SLOTS


async def test_a_moved_slot_is_known_until_something_else_moves() -> None:
    servers = Servers(parse("redis+cluster://a"), timeout_s=1)
    assert servers.known("foo") is None
    servers.moved(slot("foo"), Address("b", 1))
    assert servers.known("foo") == Address("b", 1)
    assert await servers.locate("foo") == Address("b", 1)
    servers.forget()
    assert servers.known("foo") is None
