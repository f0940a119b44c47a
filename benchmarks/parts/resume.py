"""Resuming: how long a client that comes back takes to have a finished answer again."""

from __future__ import annotations

import time

from benchmarks.figures import Bar, Options, Part, quantile
from benchmarks.layout import Layout, on_core
from benchmarks.load import check, connect
from benchmarks.targets import Target, pool
from tests.support.sse import open_response

_TOKENS = 1000
_TIMES = 50
_SIMULATED = {"ttft_ms": 0, "tpot_ms": 1, "stamps": True, "faults": False}


async def run(options: Options) -> Part:
    layout = Layout.here()
    part = Part("resume", f"A finished stream of {_TOKENS:,} tokens, read again from its beginning")
    p50s, p95s = [], []
    async with pool(layout, _SIMULATED) as target:
        with on_core(layout.client):
            job_id = await _finished(target)
            for _ in range(options.rounds(5)):
                took_ms = sorted([await _resumed(target, job_id) for _ in range(_TIMES)])
                p50s.append(quantile(took_ms, 0.5))
                p95s.append(quantile(took_ms, 0.95))
                part.record({"target": target.name, "p50_ms": p50s[-1], "p95_ms": p95s[-1]})
    part.add("p50, to `[DONE]`", "ms", p50s, Bar("<=", 50))
    part.add("p95, to `[DONE]`", "ms", p95s)
    part.notes.append("On a connection of its own each time, connecting included.")
    return part


async def _finished(target: Target) -> str:
    """Have an answer generated; return its job's id."""
    url = f"http://127.0.0.1:{target.port}/v1/chat/completions"
    fields = {"stream": True, "max_tokens": _TOKENS, "messages": [{"role": "user", "content": "?"}]}
    async with open_response(url, fields) as response:
        async for _ in response.events():
            pass
        return response.headers["x-job-id"]


async def _resumed(target: Target, job_id: str) -> float:
    """Return how many milliseconds it takes to have the whole answer."""
    request = (
        f"GET /v1/jobs/{job_id}/stream?after=0 HTTP/1.1\r\nhost: 127.0.0.1:{target.port}\r\n\r\n"
    )
    began = time.monotonic()
    connection = await connect(target.port)
    try:
        answer = await connection.ask(request.encode())
    finally:
        connection.close()
    took_ms = (time.monotonic() - began) * 1000
    check([answer])
    if len(answer.arrivals) != _TOKENS - 1:  # The last one has no stamp.
        raise RuntimeError(f"{len(answer.arrivals)} tokens with a stamp of {_TOKENS}")
    return took_ms
