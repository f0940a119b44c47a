"""Runs a program that dies with the test run: `python bound.py PARENT_PID PROGRAM ARGS...`.

The kernel kills it when its parent is gone, also when pytest was killed and could clean up nothing.
It is a program of its own because the alternative, a hook between fork and exec, isn't safe where
the parent has threads. The parent is the thread that starts it: start processes in the main thread.
"""

from __future__ import annotations

import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def bound(command: list[str]) -> list[str]:
    """Return the command line that runs a command bound to this process."""
    # -I -S: nothing of the environment is needed, and starting takes a third of the time.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    import ctypes

    parent, *command = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the parent is gone already")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
