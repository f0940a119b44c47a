"""One terminal for several processes: each line with its origin in front."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator
from typing import TextIO

COLOURS = {"headrace": "1", "valkey": "90", "gateway": "36", "worker": "35"}
"""By the part of the name before its number, as SGR codes."""
WIDTH = 9


def colour_wanted(stream: TextIO) -> bool:
    """Colour only where a person looks and hasn't said no (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Console:
    """Writes prefixed lines; while it is held, they wait."""

    def __init__(self, stream: TextIO, *, colour: bool) -> None:
        self._stream = stream
        self._colour = colour
        self._held: list[str] | None = None
        self._closed = False

    def line(self, name: str, text: str) -> None:
        """Write one line of a process."""
        prefix = f"{name:<{WIDTH}}|"
        if self._colour:
            code = COLOURS.get(name.split("-")[0], "0")
            prefix = f"\x1b[{code}m{prefix}\x1b[0m"
        whole = f"{prefix} {text}\n"
        if self._held is None:
            self._write(whole)
        else:
            self._held.append(whole)

    def say(self, text: str) -> None:
        """Write the launcher's own words."""
        for line in text.splitlines():
            self.line("headrace", line)

    def block(self, text: str) -> None:
        """Write lines to be copied: nothing in front."""
        self._write(text)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep lines back while something else is writing to the terminal."""
        self._held = []
        try:
            yield
        finally:
            lines, self._held = self._held, None
            self._write("".join(lines))

    def _write(self, text: str) -> None:
        if self._closed or not text:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._closed = True

    def abandoned(self) -> bool:
        """Tell whether nobody reads any more: the terminal or the pipe's other end is gone."""
        poll = select.poll()
        poll.register(self._stream.fileno(), 0)
        return self._closed or bool(poll.poll(0))
