"""A gateway asks for the file descriptors that its clients take."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys

from gateway.descriptors import needed
from tests.support.waiting import until


def allowed(soft: int, hard: int, count: int) -> list[int]:
    """Return what a process with such limits is told, and its soft limit afterwards."""
    code = (
        "import resource as r; from gateway.descriptors import allow;"
        f"r.setrlimit(r.RLIMIT_NOFILE, ({soft}, {hard}));"
        f"print(allow({count}), r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return [int(word) for word in done.stdout.split()]


def test_the_soft_limit_is_raised_as_far_as_the_hard_one_lets_it() -> None:
    assert allowed(64, 1000, 500) == [500, 500]
    assert allowed(64, 300, 500) == [300, 300]
    assert allowed(700, 1000, 500) == [500, 700]


def test_the_usual_soft_limit_is_less_than_a_gateway_needs() -> None:
    assert needed(4096, 32) > 1024


async def test_a_gateway_asks_at_its_start() -> None:
    code = (
        "import resource as r; from gateway.__main__ import main;"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, r.getrlimit(r.RLIMIT_NOFILE)[1])); main()"
    )
    variables = {**os.environ, "HEADRACE_PORT": "0", "HEADRACE_MAX_STREAMS": "20"}
    variables["HEADRACE_REDIS_URL"] = "redis://127.0.0.1:1"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=variables)
    try:
        await until(
            lambda: resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] == needed(20, 32),
            "the limit is raised",
            timeout=30,
        )
    finally:
        process.kill()
        await process.wait()
