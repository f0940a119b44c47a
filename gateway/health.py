"""Is the process alive, can it serve, and how does it fare."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.gateway import Gateway


class Health:
    """Handlers for probes and scrapes; none asks the queue anything."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def healthz(self, request: Request) -> Response:
        """Liveness: the process answers. What is wrong with the queue, no restart would cure."""
        return JSONResponse({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """Readiness: the queue is reached and a worker is there."""
        gateway = self._gateway
        reached = gateway.subscriber.connected and gateway.models.reachable
        workers = gateway.models.ready_workers
        ready = reached and workers > 0 and not gateway.draining and not gateway.failed
        state = {
            "ready": ready,
            "redis": reached,
            "workers": workers,
            "draining": gateway.draining,
        }
        return JSONResponse(state, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text form."""
        return Response(self._gateway.render_metrics(), media_type=CONTENT_TYPE_LATEST)
