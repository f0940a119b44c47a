"""No process outlives the launcher, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from compose.console import Console
from compose.processes import session_members, start

ROOT = Path(__file__).parents[2]

LAUNCHER = """
import asyncio, os, sys
from pathlib import Path
from compose.console import Console
from compose.processes import start

async def main():
    child = await start("child", ["sleep", "60"], {}, Console(sys.stdout, colour=False), Path())
    print(child.pid, flush=True)
    await child.wait()

asyncio.run(main())
"""


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def eventually(condition: Callable[[], bool], limit_s: float = 5) -> bool:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


async def test_lines_come_with_their_origin_and_the_last_are_kept() -> None:
    stream = io.StringIO()
    script = "import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr)"
    console = Console(stream, colour=False)
    child = await start("worker", [sys.executable, "-c", script], {}, console, ROOT)
    assert await child.wait() == 0
    assert stream.getvalue() == "worker   | out\nworker   | err\n"
    assert list(child.tail) == ["out", "err"]


async def test_monstrous_line_is_dropped_and_the_next_ones_are_read() -> None:
    script = "print('x' * 5_000_000); print('after')"
    console = Console(io.StringIO(), colour=False)
    child = await start("worker", [sys.executable, "-c", script], {}, console, ROOT)
    assert await child.wait() == 0
    assert child.tail[-1] == "after"


async def test_sweep_kills_what_left_the_process_group() -> None:
    script = (
        "import os, subprocess, time\n"
        "p = subprocess.Popen(['sleep', '60'], process_group=0)\n"
        "print(p.pid, flush=True)\n"
    )
    console = Console(io.StringIO(), colour=False)
    child = await start("worker", [sys.executable, "-c", script], {}, console, ROOT)
    assert await child.wait() == 0
    orphan = int(child.tail[0])
    assert session_members(child.pid) == [orphan]
    await child.sweep()
    assert await asyncio.to_thread(eventually, lambda: not alive(orphan))


async def test_terminals_interrupt_does_not_reach_the_children() -> None:
    console = Console(io.StringIO(), colour=False)
    child = await start("worker", ["sleep", "60"], {}, console, ROOT)
    assert os.getpgid(child.pid) != os.getpgid(0)
    child.send(signal.SIGTERM)
    assert await child.wait() == -signal.SIGTERM


def test_killed_launcher_leaves_nothing_behind() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as launcher:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        assert alive(child)
        launcher.kill()
        launcher.wait()
        assert eventually(lambda: not alive(child))
