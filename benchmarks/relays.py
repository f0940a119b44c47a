"""Other relays in the gateway's place, in front of the C backend. They keep no queue and no log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from benchmarks.layout import Layout
from benchmarks.targets import Target, folder, running
from tests.support.processes import Process
from tests.support.valkey import free_port

_NGINX = """
daemon off; worker_processes 1; master_process off; pid {folder}/pid; error_log {folder}/error;
worker_rlimit_nofile 20000;
events {{ worker_connections 10000; }}
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
_LITELLM = """
model_list:
  - model_name: simulated
    litellm_params:
      {{model: openai/simulated, api_base: "http://127.0.0.1:{engine}/v1", api_key: none}}
litellm_settings: {{telemetry: false}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""
"""Without keys, as all of them: it listens on this machine only."""
_IMPORT_S = 90.0
"""LiteLLM's start."""

Relay = Callable[[str, Layout, Target], AbstractAsyncContextManager[Target]]


def _relayed(name: str, port: int, process: Process, engine: Target) -> Target:
    return Target(name, port, {"gateway": process.pid, **engine.pids}, told=engine.told)


@asynccontextmanager
async def _nginx(program: str, layout: Layout, engine: Target) -> AsyncIterator[Target]:
    port = free_port()
    with folder() as path:
        config = path / "nginx.conf"
        config.write_text(_NGINX.format(folder=path, engine=engine.port, port=port))
        command = [program, "-c", str(config), "-p", str(path)]
        async with running("nginx", command, port, layout.gateway) as process:
            yield _relayed("nginx", port, process, engine)


@asynccontextmanager
async def _vllm_router(program: str, layout: Layout, engine: Target) -> AsyncIterator[Target]:
    port = free_port()
    command = [program, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"http://127.0.0.1:{engine.port}", "--policy", "round_robin"]
    command += ["--prometheus-port", str(free_port()), "--log-level", "warning"]
    command += ["--max-concurrent-requests", "8192"]
    async with running("vllm-router", command, port, layout.gateway) as process:
        yield _relayed("vllm-router", port, process, engine)


@asynccontextmanager
async def _smg(program: str, layout: Layout, engine: Target) -> AsyncIterator[Target]:
    port = free_port()
    command = [program, "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"http://127.0.0.1:{engine.port}", "--policy", "round_robin"]
    command += ["--prometheus-port", str(free_port()), "--log-level", "warn"]
    command += ["--backend", "vllm", "--max-concurrent-requests", "8192"]
    command += ["--disable-tokenizer-autoload"]
    async with running("smg", command, port, layout.gateway) as process:
        yield _relayed("smg", port, process, engine)


@asynccontextmanager
async def _litellm(program: str, layout: Layout, engine: Target) -> AsyncIterator[Target]:
    port = free_port()
    with folder() as path:
        config = path / "config.yaml"
        config.write_text(_LITELLM.format(engine=engine.port))
        command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--telemetry", "False"]
        starting = running(
            "litellm",
            command,
            port,
            layout.gateway,
            path="/health/liveliness",
            start_s=_IMPORT_S,
        )
        async with starting as process:
            yield _relayed("litellm", port, process, engine)


RELAYS: dict[str, Relay] = {
    "nginx": _nginx,
    "vllm-router": _vllm_router,
    "smg": _smg,
    "litellm": _litellm,
}
SLOW = ("litellm",)
"""Can't carry 512 streams at 20 ms: measured with a few."""
