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
        """Readiness: the queue is reached, and a worker is there or is worth waiting for."""
        gateway = self._gateway
        state = {
            "ready": self._ready(),
            "redis": self._reached(),
            "workers": gateway.models.ready_workers,
            "draining": gateway.draining,
        }
        return JSONResponse(state, 200 if state["ready"] else 503)

    async def health(self, request: Request) -> Response:
        """Readiness as `vllm serve` tells it: by the status alone."""
        return Response(status_code=200 if self._ready() else 503)

    def _reached(self) -> bool:
        return self._gateway.subscriber.connected and self._gateway.models.reachable

    def _ready(self) -> bool:
        gateway = self._gateway
        servable = gateway.models.servable
        return self._reached() and servable and not gateway.draining and not gateway.failed

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text form."""
        return Response(self._gateway.render_metrics(), media_type=CONTENT_TYPE_LATEST)
