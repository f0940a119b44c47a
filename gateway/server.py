"""The gateway's server: uvicorn, with the project's limits and drain."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from types import FrameType
from typing import NoReturn

import uvicorn

from gateway import descriptors
from gateway.app import Application, create_app
from gateway.bounded import bounded
from gateway.settings import GatewaySettings
from shared.garbage import collect_rarely
from shared.logs import Log

log = Log("gateway")

_BROKEN_OFF = "ASGI callable returned without completing response."
_LOOK_S = 0.05
_MARGIN_S = 5
"""Between the cutting of what is open and the end of the server's patience."""


class Server(uvicorn.Server):
    """uvicorn, with a drain that begins when it is asked to end."""

    application: Application

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what is new, stop listening, let the open requests end, then the application."""
        gateway = self.application.gateway
        gateway.drain()
        until = time.monotonic() + gateway.settings.drain_delay_s
        while time.monotonic() < until and not self.force_exit:  # noqa: ASYNC110 (uvicorn's flag)
            await asyncio.sleep(_LOOK_S)
        await super().shutdown(sockets)


def quiet_broken_off(record: logging.LogRecord) -> bool:
    """Drop uvicorn's line for a body that is broken off: that is how a failed stream ends."""
    return record.msg != _BROKEN_OFF


def build_server(config: GatewaySettings) -> Server:
    """Return a server that isn't started yet."""
    logging.getLogger("uvicorn.error").addFilter(quiet_broken_off)

    def end() -> None:
        server.should_exit = True

    app = create_app(config, on_failure=end)
    server = Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            loop="uvloop",
            http=bounded(config.max_header_bytes),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=4096,
            timeout_keep_alive=config.http_keepalive_s,
            timeout_graceful_shutdown=int(config.drain_timeout_s) + _MARGIN_S,
        )
    )
    server.application = app
    return server


def serve(config: GatewaySettings, sockets: list[socket.socket] | None = None) -> NoReturn:
    """Run until SIGTERM or SIGINT; exit 0 after a drain, 1 after a failure. `sockets`: bound."""
    needed = descriptors.needed(config.max_streams, config.redis_connections)
    allowed = descriptors.allow(needed)
    if allowed < needed:
        log.warning("descriptors.few", allowed=allowed, needed=needed, hint="raise ulimit -n")
    server = build_server(config)

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(1 if server.application.gateway.failed else 0)

    # uvicorn raises the signal again when it has ended: then, or before it has begun, just leave.
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    collect_rarely()
    log.info("gateway.started", gateway=config.gateway_id, host=config.host, port=config.port)
    server.run(sockets)
    sys.exit(1 if server.application.gateway.failed else 0)
