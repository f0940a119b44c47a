"""File descriptors: each client takes one, and a process is given few unless it asks."""

from __future__ import annotations

import resource

_SPARE = 64
"""For the log, the port, and what libraries open."""


def needed(streams: int, connections: int) -> int:
    """Return how many a gateway needs: as many idle clients as streams, and its links."""
    return 2 * streams + 2 * connections + _SPARE


def allow(count: int) -> int:
    """Raise this process's soft limit to `count` where the hard one lets it; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
