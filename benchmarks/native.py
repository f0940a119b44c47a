"""The backend and the load generator in C, which are never the bottleneck; built when they are
needed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accounts import Account, Bill
from benchmarks.layout import Layout, on_core
from benchmarks.targets import Target, running
from tests.support.bound import bound
from tests.support.valkey import free_port

_SOURCES = Path(__file__).parent / "native"
_BUILT = Path(__file__).parents[1] / ".headrace/native"


def build(name: str) -> str:
    """Return the path of a program, compiled if its source is new. Raises where there is no cc."""
    source = _SOURCES / f"{name}.c"
    program = _BUILT / f"{name}-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    if not program.exists():
        _BUILT.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cc", "-O2", "-o", str(program), str(source)], check=True)
    return str(program)


@asynccontextmanager
async def backend(layout: Layout, step_ms: float) -> AsyncIterator[Target]:
    """Run the backend. What it says of clients that leave is in the file `told`."""
    port = free_port()
    command = [build("backend"), str(port), str(step_ms)]
    async with running("backend", command, port, layout.worker) as process:
        yield Target("direct", port, {"backend": process.pid}, told=process.log_path)


@dataclass(frozen=True)
class Load:
    """What the load generator saw while all streams were open."""

    bill: Bill
    """`generator` is the load generator."""
    tokens: int
    reads: int
    """From a connection, with at least a token."""
    wanted: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    grown: float
    """Median delay of the last third of the time, over that of the first."""

    def summary(self) -> dict[str, Any]:
        shares = {"p50_ms": self.p50_ms, "p95_ms": self.p95_ms, "p99_ms": self.p99_ms}
        due = round(self.tokens / self.wanted, 3)
        return {"tokens": self.tokens, "of_due": due, **shares, **self.bill.summary()}


async def load(
    target: Target, layout: Layout, *, streams: int, step_ms: float, ramp_s: float, window_s: float
) -> Load:
    """Hold streams open and count what comes. Raises where one of them fails."""
    most = int((ramp_s + 40 + window_s) * 1000 / step_ms)
    command = [build("client"), str(target.port), str(streams), str(ramp_s), "1", str(window_s)]
    with on_core(layout.client):
        process = await asyncio.create_subprocess_exec(
            *bound([*command, str(most)]), stdout=asyncio.subprocess.PIPE
        )
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        account = Account({**target.pids, "generator": process.pid})
        if line != b"begin\n" or await process.stdout.readline() != b"end\n":
            raise RuntimeError(f"{target.name}: {line.decode()}")
        bill = account.close()
        seen = json.loads(await process.stdout.readline())
    finally:
        process.kill()
        await process.wait()
    grown = seen["last_third_ms"] / max(seen["first_third_ms"], 0.001)
    wanted = streams * window_s * 1000 / step_ms
    delays = (seen["p50_ms"], seen["p95_ms"], seen["p99_ms"])
    return Load(bill, seen["tokens"], seen["reads"], wanted, *delays, grown)
