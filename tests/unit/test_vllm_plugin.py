"""vLLM's children: bound to the worker's life, and only they."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.waiting import until
from worker.engine import plugin

PR_GET_PDEATHSIG = 2


def death_signal() -> int:
    """Return the signal that this process gets when its parent dies, 0 for none."""
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


def report(to: Connection) -> None:
    """In a child: act as vLLM does, and tell what has come of it."""
    plugin.register()
    plugin.register()
    to.send((death_signal(), os.getpgrp() == os.getpid()))


def outcome_in_child() -> tuple[int, bool]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=report, args=(there,))
    child.start()
    outcome: tuple[int, bool] = here.recv()
    child.join()
    return outcome


def test_a_child_of_a_worker_dies_with_it_and_has_its_own_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(plugin.MARK, "1")
    assert outcome_in_child() == (signal.SIGKILL, True)


def test_a_child_of_anything_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.MARK, raising=False)
    assert outcome_in_child() == (0, False)


def test_the_worker_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.MARK, "1")
    before = (death_signal(), os.getpgrp())
    plugin.register()
    assert (death_signal(), os.getpgrp()) == before


ORPHAN = """
import multiprocessing, os, sys, time
from pathlib import Path
from worker.engine import plugin

def be_orphaned(folder):
    while os.getppid() == multiprocessing.parent_process().pid:
        time.sleep(0.01)
    (folder / "orphaned").touch()
    plugin.register()
    (folder / "went on").touch()

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(
        target=be_orphaned, args=(Path(sys.argv[1]),)
    )
    child.start()
    (Path(sys.argv[1]) / "pid").write_text(str(child.pid))
    time.sleep(0.5)
    os._exit(0)
"""


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def test_a_child_whose_worker_died_before_it_was_bound_ends_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(plugin.MARK, "1")
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    parent = await asyncio.create_subprocess_exec(sys.executable, script, tmp_path)
    assert await parent.wait() == 0
    pid = int((tmp_path / "pid").read_text())
    await until(lambda: not is_running(pid), "the orphan's end", timeout=10)
    assert (tmp_path / "orphaned").exists()
    assert not (tmp_path / "went on").exists()
