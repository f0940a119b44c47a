"""Several gateways on one port: the port, the pauses, the command line."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from gateway import ports
from gateway.__main__ import main
from gateway.processes import Member, Supervisor


def test_one_that_keeps_dying_is_started_again_after_growing_pauses(tmp_path: Path) -> None:
    supervisor = Supervisor(2, str(tmp_path), patience_s=1)
    member = Member(1)
    pauses = []
    for _ in range(8):
        member.pid, member.started_at = 1, time.monotonic()
        supervisor._note_end(member, 1)
        pauses.append(member.pause_s)
        assert member.again_at > time.monotonic() - 1
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 10, 10]
    member.started_at = time.monotonic() - 60
    supervisor._note_end(member, -9)
    assert member.pause_s == 0.25
    assert supervisor.code == 0


def test_a_port_is_held_for_those_that_share_it() -> None:
    held = ports.reserve("127.0.0.1", 0)
    port = ports.port_of(held)
    shared = [ports.bind("127.0.0.1", port) for _ in range(2)]
    for one in shared:
        one[0].listen()
    for one in (held, *shared):
        one[0].close()


def test_a_port_that_others_share_is_refused() -> None:
    others = ports.bind("127.0.0.1", 0)
    others[0].listen()
    with pytest.raises(OSError, match="in use"):
        ports.reserve("127.0.0.1", ports.port_of(others))
    others[0].close()


def test_a_name_with_several_addresses_is_bound_to_one_port_on_each() -> None:
    held = ports.reserve("localhost", 0)
    assert len({one.getsockname()[1] for one in held}) == 1
    for one in held:
        one.close()


def test_a_wrong_number_of_processes_stops_the_start_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_PROCESSES", "1")
    monkeypatch.setattr(sys, "argv", ["headrace-gateway", "--processes", "none"])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 2
    assert "HEADRACE_PROCESSES" in capsys.readouterr().err
