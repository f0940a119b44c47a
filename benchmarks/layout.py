"""Which process runs on which core, so that rounds can be compared with each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Layout:
    """The core of each role."""

    gateway: int
    """Also of a peer in the gateway's place."""
    worker: int
    """Also of an engine that is asked directly."""
    valkey: int
    client: int

    @classmethod
    def here(cls) -> Self:
        """Use four cores where there are four; on fewer, no core is full at 15,000 tokens/s."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= 4:
            return cls(*cores[:4])
        first, last = cores[0], cores[-1]
        return cls(gateway=first, worker=last, valkey=first, client=last)

    @classmethod
    def relay_apart(cls) -> Self:
        """Give the relay a core of its own, and all else one other: what relays are compared on."""
        cores = sorted(os.sched_getaffinity(0))
        return cls(gateway=cores[0], worker=cores[-1], valkey=cores[-1], client=cores[-1])

    def __str__(self) -> str:
        roles = ("gateway", "worker", "valkey", "client")
        return ", ".join(f"{role} on core {getattr(self, role)}" for role in roles)


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Pin this thread, and the processes that it starts meanwhile, all their threads included."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
