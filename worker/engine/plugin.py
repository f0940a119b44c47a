"""vLLM's general plugin: its child processes die with the worker, and are deaf to its terminal.

They also learn to go on with answers that another worker's engine began (`vllm_patches`).

vLLM's children share the worker's process group, so a Ctrl-C ends streams that the worker means to
drain; and a worker that is SIGKILLed leaves its engine core running, holding the GPU's memory. vLLM
calls `register` in each of its processes; it acts only in children of a Headrace worker.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

from worker.engine import vllm_patches

MARK = "_HEADRACE_ENGINE"
"""Set by the worker for the processes that it starts; a plain `vllm serve` here stays as it is."""

PR_SET_PDEATHSIG = 1


def register() -> None:
    """Bind a child's life to its parent's. Safe to call several times."""
    parent = multiprocessing.parent_process()
    if parent is None or MARK not in os.environ or sys.platform != "linux":
        return
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that died before the call above sends no signal any more. Only a different parent
    # together with a dead one means that: a fork server is a different parent, too.
    if os.getppid() != parent.pid and not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)
    prepare_for_continued()


def prepare_for_continued() -> None:
    """Have this process take requests that have outputs already, on releases tested for it."""
    vllm = sys.modules.get("vllm")
    if vllm is not None and vllm_patches.applies_to(vllm.__version__):
        vllm_patches.install()
