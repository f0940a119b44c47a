"""The command line of `headrace-admin`, and what it says when it can't do anything."""

from __future__ import annotations

import asyncio
import json
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from pydantic import SecretStr

from shared.admin import __main__ as admin
from shared.admin.arguments import parser
from shared.admin.settings import AdminSettings
from shared.errors import QueueUnavailable
from tests.support.valkey import free_port

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "dead",
        "show",
        "stop",
        "status more",
        "jobs --lane slow",
        "jobs --state done",
        "jobs --limit 0",
        "jobs --limit many",
        "jobs --limit 100001",
        "drain w --wait -1",
        "drain w --wait nan",
        "dead requeue j --timeout 0.5",
        "dead requeue j --timeout 86401",
        "keys create k --weight 0",
        "keys create k --weight nan",
        "keys create k --weight 101",
        "dead purge",
        "dead purge j --all",
        "dead purge --all --pool p",
    ],
)
def test_wrong_usage_is_exit_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        admin.main(line.split())
    assert leaving.value.code == 2
    assert capsys.readouterr().err.startswith("usage: headrace-admin")


@pytest.mark.parametrize("line", ["--json dead list", "dead --json list", "dead list --json"])
def test_json_is_taken_before_and_behind_the_command(line: str) -> None:
    assert parser().parse_args(line.split()).json is True


def test_without_json_it_is_text() -> None:
    assert parser().parse_args(["dead", "list"]).json is False


def test_a_wrong_setting_is_exit_2_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_FORCE_CANCEL_S", "soon")
    with pytest.raises(SystemExit) as leaving:
        admin.main(["status"])
    assert leaving.value.code == 2
    assert "wrong setting HEADRACE_FORCE_CANCEL_S" in capsys.readouterr().err


def test_an_absent_queue_is_exit_3_and_one_line_without_the_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    monkeypatch.setenv("HEADRACE_REDIS_URL", f"redis://user:hunter2@127.0.0.1:{port}/0")
    assert admin.main(["--json", "status"]) == 3
    written = capsys.readouterr()
    assert written.err.startswith(f"headrace-admin: the queue at 127.0.0.1:{port} cannot be used: ")
    assert written.err.count("\n") == 1
    assert json.loads(written.out)["error"]["code"] == "queue_unavailable"
    assert "hunter2" not in written.err + written.out


def test_a_socket_is_named_by_its_path() -> None:
    settings = AdminSettings(redis_url=SecretStr("unix:///nowhere/redis.sock"))
    said = admin._unreachable(settings, QueueUnavailable())
    assert said.startswith("the queue at /nowhere/redis.sock cannot be used: ")


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(admin, "run", interrupted)
    assert admin.main(["status"]) == 130


def test_the_installed_program_is_this_one() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["headrace-admin"].partition(":")
    assert getattr(import_module(module), name) is admin.main
    assert not asyncio.iscoroutinefunction(admin.main)
