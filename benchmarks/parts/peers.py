"""Other relays in the gateway's place, in front of the simulated engine; those that are installed.

They keep no queue and no log.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from benchmarks.figures import Options, Part, quantile
from benchmarks.layout import Layout, on_core
from benchmarks.parts.streams import SIMULATED, STREAMS, measure
from benchmarks.rounds import Held, Paced, pace
from benchmarks.targets import Target, direct, folder, pool, running
from tests.support.valkey import free_port

_NGINX = """
daemon off; worker_processes 1; master_process off; pid {folder}/pid; error_log {folder}/error;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 512; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
"""

_AFTER_S = 3.0
"""For the streams that were left to be cancelled."""

Relay = Callable[[str, Layout, Target], AbstractAsyncContextManager[Target]]


async def run(options: Options) -> Part:
    layout = Layout.here()
    part = Part("peers", f"Other relays: {STREAMS} streams at 30 tokens/s, then 8 paced clients")
    found = {name: program for name in _RELAYS if (program := find(name))}
    if not found:
        part.skipped = f"none of {', '.join(_RELAYS)} is installed"
        return part
    part.notes += [f"{name} isn't installed: skipped" for name in _RELAYS if name not in found]
    held: dict[str, list[Held]] = {}
    paced: dict[str, list[Paced]] = {}
    for turn in range(1, 1 + options.rounds(3)):
        for name in ("headrace", *found):
            async with _target(name, found.get(name, ""), layout) as target:
                seconds = options.seconds(6)
                held.setdefault(name, []).append(await measure(target, layout, seconds, part))
                await asyncio.sleep(_AFTER_S)
                with on_core(layout.client):
                    done = await pace(target, 8, seconds=seconds / 2, tokens=8, turn=turn)
                paced.setdefault(name, []).append(done)
    for name, rounds in held.items():
        used = [each.bill.us_per("gateway", each.tokens) for each in rounds]
        part.add(f"CPU per token, {name}", "µs", used)
    for name, rounds in held.items():
        part.add(f"delay p50, {name}", "ms", [quantile(each.all_ms, 0.5) for each in rounds])
    for name, answers in paced.items():
        part.add(f"TTFT p50, {name}", "ms", [quantile(each.ttfts_ms, 0.5) for each in answers])
    return part


@asynccontextmanager
async def _target(name: str, program: str, layout: Layout) -> AsyncIterator[Target]:
    if name == "headrace":
        async with pool(layout, SIMULATED) as target:
            yield target
        return
    async with (
        direct(layout, SIMULATED) as engine,
        _RELAYS[name](program, layout, engine) as target,
    ):
        yield target


@asynccontextmanager
async def _nginx(program: str, layout: Layout, engine: Target) -> AsyncIterator[Target]:
    port = free_port()
    with folder() as path:
        config = path / "nginx.conf"
        config.write_text(_NGINX.format(folder=path, engine=engine.port, port=port))
        command = [program, "-c", str(config), "-p", str(path)]
        async with running("nginx", command, port, layout.gateway) as process:
            yield Target("nginx", port, {"gateway": process.pid, **engine.pids})


@asynccontextmanager
async def _vllm_router(program: str, layout: Layout, engine: Target) -> AsyncIterator[Target]:
    port = free_port()
    command = [program, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"http://127.0.0.1:{engine.port}", "--policy", "round_robin"]
    command += ["--prometheus-port", str(free_port()), "--log-level", "warn"]
    async with running("vllm-router", command, port, layout.gateway) as process:
        yield Target("vllm-router", port, {"gateway": process.pid, **engine.pids})


_RELAYS: dict[str, Relay] = {"nginx": _nginx, "vllm-router": _vllm_router}


def find(name: str) -> str | None:
    """Return a relay's program, from this environment or the system."""
    here = Path(sys.executable).parent / name
    return str(here) if here.is_file() else shutil.which(name, path="/usr/sbin:/usr/bin:/bin")
