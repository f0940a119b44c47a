"""What the operating system has counted: processor time and memory of processes, and of all."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_UTIME, _STIME = 11, 12
"""Fields of /proc/<pid>/stat, counted behind the command."""


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used so far, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[_UTIME]) + int(fields[_STIME])) * _TICK_S


def machine_s() -> tuple[float, float]:
    """Return the time that all processes have used, and the time that the host took away."""
    user, nice, system, _, _, _, _, steal = (
        int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system) * _TICK_S, steal * _TICK_S


def resident_kib(pid: int) -> int:
    """Return a process's resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


@dataclass(frozen=True)
class Bill:
    """Who used how much processor time in an interval, in cores (1 = all of one core)."""

    wall_s: float
    cores: Mapping[str, float]
    """By role: the processes that are measured, and `client`, the load generator."""
    others: float
    """Everything else on the machine: the background load."""
    steal: float
    """Taken away by the host."""

    def us_per(self, role: str, count: int) -> float:
        """Return a role's microseconds per piece of work."""
        return self.cores[role] * self.wall_s / max(count, 1) * 1e6

    def summary(self) -> dict[str, float]:
        """Return what to keep of it with a round."""
        used = {f"{role}_cores": round(cores, 3) for role, cores in self.cores.items()}
        return {**used, "others_cores": round(self.others, 3), "steal_cores": round(self.steal, 3)}


class Account:
    """Counts from its making until `close()`."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = {**pids, "client": os.getpid()}
        self._began = self._read()

    def _read(self) -> tuple[float, dict[str, float], float, float]:
        used = {role: cpu_s(pid) for role, pid in self._pids.items()}
        return (time.monotonic(), used, *machine_s())

    def close(self) -> Bill:
        at, used, busy, stolen = self._read()
        began_at, began_used, began_busy, began_stolen = self._began
        wall_s = at - began_at
        cores = {role: (used[role] - began_used[role]) / wall_s for role in used}
        others = (busy - began_busy) / wall_s - sum(cores.values())
        return Bill(wall_s, cores, max(0.0, others), (stolen - began_stolen) / wall_s)
