"""The gateway's server: uvicorn, with the project's limits and drain."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import uvicorn

from gateway import descriptors
from gateway.app import Application, create_app
from gateway.bounded import bounded
from gateway.settings import GatewaySettings
from shared import spans
from shared.garbage import collect_rarely
from shared.logs import Log
from shared.settings import WRONG_SETTING

if TYPE_CHECKING:
    from shared.otel import Spans

log = Log("gateway")

_BROKEN_OFF = "ASGI callable returned without completing response."
_LOOK_S = 0.05
_MARGIN_S = 5
"""Between the cutting of what is open and the end of the server's patience."""


class Server(uvicorn.Server):
    """uvicorn, with a drain that begins when it is asked to end."""

    application: Application

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, or leave with the names of the settings that are wrong."""
        try:
            await super().startup(sockets)
        except SystemExit as leaving:
            if not isinstance(leaving.__context__, OSError):
                raise
            log.error(
                "gateway.not_listening",
                wrong="HEADRACE_HOST, HEADRACE_PORT",
                host=self.config.host,
                port=self.config.port,
                reason=str(leaving.__context__),
            )
            sys.exit(WRONG_SETTING)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what is new, stop listening, let the open requests end, then the application."""
        gateway = self.application.gateway
        gateway.drain()
        until = time.monotonic() + gateway.settings.drain_delay_s
        while time.monotonic() < until and not self.force_exit:  # noqa: ASYNC110 (uvicorn's flag)
            await asyncio.sleep(_LOOK_S)
        await super().shutdown(sockets)


def quiet(record: logging.LogRecord) -> bool:
    """Drop uvicorn's lines for a body that is broken off, which is how a failed stream ends, and
    for an address that can't be listened on, which is told better."""
    return record.msg != _BROKEN_OFF and not isinstance(record.msg, OSError)


def build_server(config: GatewaySettings, spanning: Spans | None = None) -> Server:
    """Return a server that isn't started yet."""
    logging.getLogger("uvicorn.error").addFilter(quiet)

    def end() -> None:
        server.should_exit = True

    app = create_app(config, on_failure=end, spans=spanning)
    server = Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            loop="uvloop",
            http=bounded(config.max_header_bytes, app.cors),
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
    """Run until SIGTERM or SIGINT; exit 0 after a drain, 1 after a failure, 2 where it can't
    listen. `sockets`: bound."""
    needed = descriptors.needed(config.max_streams, config.redis_connections)
    allowed = descriptors.allow(needed)
    if allowed < needed:
        log.warning("descriptors.few", allowed=allowed, needed=needed, hint="raise ulimit -n")
    spanning = spans.start(config, "headrace-gateway", config.gateway_id)
    server = build_server(config, spanning)

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(1 if server.application.gateway.failed else 0)

    # uvicorn raises the signal again when it has ended: then, or before it has begun, just leave.
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    collect_rarely()
    log.info("gateway.started", gateway=config.gateway_id, host=config.host, port=config.port)
    try:
        server.run(sockets)
    finally:
        if spanning is not None:
            spanning.close()
    sys.exit(1 if server.application.gateway.failed else 0)
