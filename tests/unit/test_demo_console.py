"""What the launcher writes to the terminal."""

from __future__ import annotations

import io
import os
import pty
from contextlib import suppress
from pathlib import Path

import pytest

from compose.console import Console, colour_wanted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_line_says_where_it_comes_from() -> None:
    stream = io.StringIO()
    console = Console(stream, colour=False)
    console.line("worker", "ready")
    console.say("one\ntwo")
    console.block("as it is\n")
    assert stream.getvalue() == ("worker   | ready\nheadrace | one\nheadrace | two\nas it is\n")


def test_all_processes_of_a_kind_have_its_colour() -> None:
    stream = io.StringIO()
    console = Console(stream, colour=True)
    console.line("worker-2", "ready")
    assert stream.getvalue() == "\x1b[35mworker-2 |\x1b[0m ready\n"


def test_lines_wait_while_the_answer_is_printed() -> None:
    stream = io.StringIO()
    console = Console(stream, colour=False)
    with console.held():
        console.line("gateway", "later")
        stream.write("Paris\n")
    console.line("gateway", "last")
    assert stream.getvalue() == "Paris\ngateway  | later\ngateway  | last\n"


def test_reader_that_is_gone_is_noticed_before_anything_is_written() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        console = Console(stream, colour=False)
        assert not console.abandoned()
        os.close(reading)
        assert console.abandoned()


def test_terminal_that_is_gone_is_noticed() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        console = Console(stream, colour=False)
        assert not console.abandoned()
        os.close(master)
        assert console.abandoned()


def test_writing_to_nobody_is_no_failure(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        assert not Console(file, colour=False).abandoned()
    with suppress(OSError), Path("/dev/full").open("w", buffering=1) as full:
        console = Console(full, colour=False)
        console.say("no room")
        assert console.abandoned()
        console.say("nor now")


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert colour_wanted(Terminal())
    assert not colour_wanted(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour_wanted(Terminal())
