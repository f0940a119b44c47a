"""Serves the simulated engine's application by uvicorn alone: what the pool is compared with.

python -m benchmarks.direct PORT
"""

from __future__ import annotations

import asyncio
import sys

import uvicorn

from shared import settings
from worker.engine.simulated import SimulatedEngine, SimulatedSettings


async def serve(port: int) -> None:
    engine = SimulatedEngine(
        settings.read(SimulatedSettings), default_max_tokens=None, max_tokens_ceiling=None
    )
    await engine.start()
    config = uvicorn.Config(
        engine.app,
        host="127.0.0.1",
        port=port,
        http="httptools",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        backlog=4096,
    )
    await uvicorn.Server(config).serve()


def main() -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
