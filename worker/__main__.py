"""`headrace-worker [arguments of vllm serve]`: one engine, taking jobs until SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

from shared import spans
from shared.garbage import collect_rarely
from shared.logs import configure
from shared.settings import read
from worker.engine.interface import Engine
from worker.metrics import WorkerMetrics
from worker.settings import WorkerSettings
from worker.worker import Worker

if TYPE_CHECKING:
    from shared.otel import Spans


def make_engine(settings: WorkerSettings, args: list[str]) -> Engine:
    """Make the engine that the settings name; only its own module is imported."""
    limits = {
        "default_max_tokens": settings.default_max_tokens,
        "max_tokens_ceiling": settings.max_tokens_ceiling,
    }
    if settings.engine == "simulated":
        from worker.engine.simulated import SimulatedEngine, SimulatedSettings

        return SimulatedEngine(read(SimulatedSettings), **limits)
    from worker.engine.vllm import VllmEngine

    return VllmEngine(args, warm_up_timeout_s=settings.start_timeout_s, **limits)


async def serve(settings: WorkerSettings, args: list[str], spanning: Spans | None) -> int:
    worker = Worker(settings, make_engine(settings, args), WorkerMetrics(), spanning)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, worker.stop)
    return await worker.run()


def main() -> None:
    settings = read(WorkerSettings)
    configure(settings.log_format, settings.log_level)
    collect_rarely()
    spanning = spans.start(settings, "headrace-worker", settings.worker_id)
    try:
        from uvloop import run
    except ImportError:
        from asyncio import run
    try:
        code = run(serve(settings, sys.argv[1:], spanning))
    finally:
        if spanning is not None:
            spanning.close()
    sys.exit(code)


if __name__ == "__main__":
    main()
