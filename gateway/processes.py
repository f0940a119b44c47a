"""Several gateways on one port: starts them, starts again those that die, and ends with them.

Each is a gateway of its own, with its own links to the queue and its own name; all that they share
is the port and the folder of their metrics. They die with their supervisor, also when it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass

from gateway import ports
from gateway.settings import GatewaySettings
from shared.logs import Log
from shared.settings import WRONG_SETTING

log = Log("gateway")

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0
_SOUND_S = 30.0
"""One that has lived for so long is started again without a growing pause."""
_MARGIN_S = 14.0
"""Beyond the drain: what a gateway still does after it, and then it is killed."""
_IDLE_S = 3600.0
_PR_SET_PDEATHSIG = 1


def spread(config: GatewaySettings) -> tuple[GatewaySettings, list[socket.socket]]:
    """Start the processes and look after them. Returns in each of them, and nowhere else."""
    try:
        held = ports.reserve(config.host, config.port)
    except OSError as error:
        log.error(
            "gateway.not_listening",
            wrong="HEADRACE_HOST, HEADRACE_PORT",
            host=config.host,
            port=config.port,
            reason=str(error),
        )
        sys.exit(WRONG_SETTING)
    port = ports.port_of(held)
    folder = tempfile.mkdtemp(prefix="headrace-metrics-")
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    log.info("processes.started", processes=config.processes, host=config.host, port=port)
    supervisor = Supervisor(
        config.processes, folder, patience_s=config.drain_delay_s + config.drain_timeout_s
    )
    number = supervisor.run()
    if not number:
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(supervisor.code)
    for one in held:
        one.close()
    name = f"{config.gateway_id[:60]}-{number}"
    own = config.model_copy(update={"port": port, "gateway_id": name})
    return own, ports.bind(config.host, port)


@dataclass
class Member:
    """A place for one process. `pid` is 0 while there is none, and never in its own eyes."""

    number: int
    pid: int = 0
    started_at: float = 0
    again_at: float = 0
    pause_s: float = 0


class Supervisor:
    """Runs so many processes. `folder` holds their metrics."""

    def __init__(self, count: int, folder: str, *, patience_s: float) -> None:
        self.code = 0
        """What to exit with."""
        self._members = [Member(number) for number in range(1, count + 1)]
        self._folder = folder
        self._patience_s = patience_s
        self._kill_at: float | None = None
        """Set once they are to end."""

    def run(self) -> int:
        """Run until all have ended, and return 0; in each process return its number."""
        signals = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signals.add(signal.SIGHUP)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        while self._kill_at is None or any(member.pid for member in self._members):
            for member in self._missing():
                if self._fork(member):
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                    return member.number
            came = signal.sigtimedwait(signals, self._wait_s())
            self._kill_late()
            if came is not None and came.si_signo != signal.SIGCHLD:
                self._end(signal.Signals(came.si_signo))
            self._reap()
        return 0

    def _missing(self) -> list[Member]:
        if self._kill_at is not None:
            return []
        now = time.monotonic()
        return [one for one in self._members if not one.pid and one.again_at <= now]

    def _wait_s(self) -> float:
        """Return how long nothing is due."""
        if self._kill_at is not None:
            due = [self._kill_at]
        else:
            due = [member.again_at for member in self._members if not member.pid]
        return max(min(due) - time.monotonic(), 0) if due else _IDLE_S

    def _fork(self, member: Member) -> bool:
        """Start a member's process; True in that process."""
        parent = os.getpid()
        member.started_at = time.monotonic()
        member.pid = os.fork()
        if member.pid:
            return False
        _die_with(parent)
        # Ctrl-C is for the supervisor, which passes it on: a second one would end the drain.
        os.setpgid(0, 0)
        return True

    def _end(self, number: signal.Signals) -> None:
        """Pass on what asks for the end. One may ask again: SIGINT twice ends the drain."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._patience_s + _MARGIN_S
            log.info("processes.ending", signal=number.name)
        self._signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def _kill_late(self) -> None:
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._signal(signal.SIGKILL)
            self._kill_at = time.monotonic() + _MARGIN_S

    def _signal(self, number: signal.Signals) -> None:
        for member in self._members:
            if member.pid:
                os.kill(member.pid, number)

    def _reap(self) -> None:
        """Take note of those that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for member in self._members:
                if member.pid == pid:
                    self._note_end(member, os.waitstatus_to_exitcode(status))

    def _note_end(self, member: Member, code: int) -> None:
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(member.pid, self._folder)  # type: ignore[no-untyped-call]
        pid, member.pid = member.pid, 0
        if self._kill_at is not None:
            early = code == -signal.SIGTERM  # Before it could drain there was nothing to drain.
            self.code = self.code or int(code != 0 and not early)
            return
        if code == WRONG_SETTING:
            self.code = code
            self._end(signal.SIGTERM)
            return
        now = time.monotonic()
        sound = now - member.started_at >= _SOUND_S
        member.pause_s = (
            _FIRST_PAUSE_S
            if sound
            else min(max(2 * member.pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        )
        member.again_at = now + member.pause_s
        log.error("process.died", number=member.number, pid=pid, code=code, again_s=member.pause_s)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone."""
    with contextlib.suppress(AttributeError):  # Linux has it.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
