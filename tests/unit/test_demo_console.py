"""What the launcher writes to the terminal."""

from __future__ import annotations

import io
import os

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


def test_closed_pipe_is_told_once() -> None:
    told = []
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    console = Console(stream, colour=False)
    console.on_closed = lambda: told.append(True)
    console.say("nobody reads this")
    console.say("nor this")
    assert told == [True]
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert colour_wanted(Terminal())
    assert not colour_wanted(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour_wanted(Terminal())
