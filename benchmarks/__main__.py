"""`python -m benchmarks [part ...]`: run the parts, all by default; exit 1 if a bar is missed."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from benchmarks import report
from benchmarks.figures import Options, Part
from benchmarks.layout import Layout
from benchmarks.parts import (
    admission,
    bodies,
    disconnect,
    idle,
    memory,
    peers,
    publish,
    real_engine,
    redis_cost,
    resume,
    streams,
    ttft,
)

RESULTS = Path(".headrace/bench")
PARTS: dict[str, Callable[[Options], Awaitable[Part]]] = {
    "ttft": ttft.run,
    "streams": streams.run,
    "memory": memory.run,
    "redis": redis_cost.run,
    "publish": publish.run,
    "resume": resume.run,
    "admission": admission.run,
    "bodies": bodies.run,
    "vllm": real_engine.run,
    "peers": peers.run,
    "idle": idle.run,
    "disconnect": disconnect.run,
}
REAL_TIME = "Taken with real-time priority: the background load had to give way."


def measure(name: str, options: Options, commit: str) -> Part:
    """Run one part, in an event loop of its own."""
    began = time.monotonic()
    print(f"{name} ...", flush=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        part = runner.run(_quietly(PARTS[name](options)))
    part.quick = options.quick
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        part.notes.append(REAL_TIME)
    part.when, part.commit = time.strftime("%Y-%m-%d %H:%M"), commit
    end = f"skipped: {part.skipped}" if part.skipped else f"{time.monotonic() - began:.0f} s"
    print(f"{name} {end}", flush=True)
    return part


async def _quietly(part: Awaitable[Part]) -> Part:
    """Keep the collector of garbage out of the load generator's rounds."""
    gc.collect()
    gc.disable()
    try:
        return await part
    finally:
        gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="short rounds: figures mean little")
    parser.add_argument("--write-docs", action="store_true", help=f"bring {report.DOCS} up to date")
    args = parser.parse_args()
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    names = args.parts or list(PARTS)
    # As Ctrl-C: what was started is ended, vLLM's children included.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    print(f"Layout: {Layout.here()}", flush=True)
    commit = report.commit()
    try:
        parts = [measure(name, Options(quick=args.quick), commit) for name in names]
    except KeyboardInterrupt:
        sys.exit(130)
    path = report.save(parts, RESULTS)
    print(report.table(parts))
    if args.write_docs:
        report.write_docs(RESULTS)
    line = report.summary(parts)
    print(f"\n{line} ({path})")
    sys.exit(any(figure.held is False for part in parts for figure in part.figures))


if __name__ == "__main__":
    main()
