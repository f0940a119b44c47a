"""`headrace-worker [arguments of vllm serve]`: one engine, taking jobs until SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys

from shared.garbage import collect_rarely
from shared.logs import configure
from shared.settings import read
from worker.engine.interface import Engine
from worker.metrics import WorkerMetrics
from worker.settings import WorkerSettings
from worker.worker import Worker


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


async def serve(settings: WorkerSettings, args: list[str]) -> int:
    worker = Worker(settings, make_engine(settings, args), WorkerMetrics())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, worker.stop)
    return await worker.run()


def main() -> None:
    settings = read(WorkerSettings)
    configure(settings.log_format, settings.log_level)
    collect_rarely()
    try:
        import uvloop
    except ImportError:
        sys.exit(asyncio.run(serve(settings, sys.argv[1:])))
    sys.exit(uvloop.run(serve(settings, sys.argv[1:])))


if __name__ == "__main__":
    main()
