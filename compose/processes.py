"""Child processes that never outlive the launcher, and whose output goes to its console.

Three things see to that: the kernel kills a child when the launcher dies, however it dies; each
child leads a session of its own, so that the terminal's Ctrl-C reaches the launcher alone, which
stops them in order; and what a child left behind in its session is killed after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from compose.console import Console

TAIL = 15
"""Last lines kept of each child, to show when it dies."""
LINE_LIMIT = 1 << 20
_PR_SET_PDEATHSIG = 1
_SESSION_FIELD = 3
"""Of /proc/<pid>/stat, counted behind the command: state, ppid, pgrp, session."""

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(number: int, parent: int) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), number)


class Child:
    """One started process."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        output: asyncio.StreamReader,
        console: Console,
    ) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._process = process
        self._output = output
        self._console = console
        self._pump = asyncio.create_task(self._read())

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the end and for the last lines; return the exit code."""
        code = await self._process.wait()
        # A grandchild that lives on would keep the pipe open: don't wait for that.
        await asyncio.wait({self._pump}, timeout=1)
        return code

    def send(self, number: int) -> None:
        """Send a signal to the process alone, not to its own children."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def sweep(self) -> None:
        """Kill what is left of the process's session."""
        for pid in session_members(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.wait({self._pump}, timeout=1)
        self._pump.cancel()

    async def _read(self) -> None:
        while True:
            try:
                raw = await self._output.readline()
            except ValueError:  # longer than LINE_LIMIT: dropped
                continue
            if not raw:
                return
            text = raw.decode(errors="replace").rstrip()
            self.tail.append(text)
            self._console.line(self.name, text)


async def start(
    name: str, command: Sequence[str], env: Mapping[str, str], console: Console, cwd: Path
) -> Child:
    """Start a process; its output, both streams, goes to the console."""
    parent = os.getpid()
    # A pipe of our own: asyncio's makes `wait()` last until every grandchild has closed it too.
    reading, writing = os.pipe()
    output = asyncio.StreamReader(limit=LINE_LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reading, "rb", buffering=0)
    )
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=writing,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent),
        )
    finally:
        os.close(writing)
    return Child(name, process, output, console)


def session_members(session: int) -> list[int]:
    """List the processes of a session, whatever their process group and parent."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[_SESSION_FIELD]) == session and fields[0] != "Z":
                members.append(int(entry.name))
    return members
