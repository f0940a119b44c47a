"""The HTTP application: routes, and the life of the process's long tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.cors import Cors
from gateway.endpoints import ENDPOINTS, Endpoint
from gateway.errors import NotStored
from gateway.exchange import Exchange, exchange_of
from gateway.gateway import Gateway
from gateway.handlers import install
from gateway.health import Health
from gateway.openapi import describe
from gateway.paths import route_path
from gateway.settings import GatewaySettings
from shared.logs import Log

if TYPE_CHECKING:
    from shared.otel import Spans

log = Log("gateway")

Handler = Callable[[Request], Awaitable[Response]]


class Application(FastAPI):
    """FastAPI with an `Exchange` around every request.

    It is the outermost layer on purpose: a relayed answer writes past every layer inside it.
    """

    gateway: Gateway
    prefix: str
    """A proxy's, of paths. Not FastAPI's `root_path`, which would be taken off once more."""
    cors: Cors
    spans: Spans | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI application."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope["path"] = route_path(scope["path"], self.prefix)
        exchange = Exchange(scope, send, self.cors)
        receive = exchange.watch(receive)
        if self.spans is not None and not exchange.probe:
            exchange.begin_span(self.spans, scope)
        try:
            preflight = self.cors.preflight(scope)
            if preflight is None:
                # What the framework adds to a scope is not kept while a stream is open.
                await super().__call__(dict(scope), receive, exchange.send)
                if exchange.answer is not None:
                    await exchange.answer(scope, receive, exchange.send)
            else:
                await exchange.send_empty(204, preflight)
        except Exception:  # Answered already, if it could be; uvicorn's line wouldn't say whose.
            log.error("request.broke", exc=True, **exchange.about())
        finally:
            exchange.finish(self.gateway.metrics)


class HandedOver:
    """An answer that begins when the framework is done with its request: its layers' frames would
    be a fourth of what an open stream takes."""

    def __init__(self, answer: ASGIApp) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Leave it to `Application`, which gives it the same `scope`, `receive` and `send`."""
        exchange_of(scope).answer = self._answer


def create_app(
    settings: GatewaySettings,
    *,
    on_failure: Callable[[], None] = lambda: None,
    spans: Spans | None = None,
) -> Application:
    """Return the application. `on_failure` is called when it can't go on and must be ended."""
    gateway = Gateway(settings, on_failure=on_failure)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            tasks = group.create_task(gateway.run())
            try:
                yield
            finally:
                await gateway.close()
                tasks.cancel()

    app = Application(
        title="Headrace",
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.gateway = gateway
    app.prefix = settings.root_path
    app.spans = spans
    app.cors = Cors(settings.cors_origins)
    app.router.redirect_slashes = False
    install(app)
    for endpoint in ENDPOINTS:
        app.add_route(endpoint.path, _relayed(gateway, endpoint), methods=["POST"])
    _add_own_routes(app, gateway)
    return app


def _relayed(gateway: Gateway, endpoint: Endpoint) -> Handler:
    async def answer(request: Request) -> Response:
        return cast(Response, HandedOver(await gateway.answer(endpoint, request)))

    return answer


def _add_own_routes(app: FastAPI, gateway: Gateway) -> None:
    health = Health(gateway)

    async def models(request: Request) -> Response:
        caller = await gateway.identify(request)
        await gateway.models.known()
        return _json({"object": "list", "data": gateway.models.listing(caller)})

    async def model(request: Request) -> Response:
        caller = await gateway.identify(request)
        await gateway.models.known()
        return _json(gateway.models.card(request.path_params["name"], caller))

    async def version(request: Request) -> Response:
        await gateway.models.known()
        return _json({"version": gateway.models.engines()})

    async def openapi(request: Request) -> Response:
        return _json(describe(app.routes))

    async def stored(request: Request) -> Response:
        await gateway.identify(request)
        raise NotStored

    async def job(request: Request) -> Response:
        exchange_of(request.scope).endpoint = "/v1/jobs/{id}"
        caller = await gateway.identify(request)
        return _json(await gateway.jobs.status(request.path_params["job_id"], caller.tenant))

    async def stream(request: Request) -> Response:
        if request.method == "HEAD":  # There is no need to read an answer for its head.
            return await job(request)
        relayed = await gateway.resume(request.path_params["job_id"], request)
        return cast(Response, HandedOver(relayed))

    async def cancel(request: Request) -> Response:
        exchange_of(request.scope).endpoint = "/v1/jobs/{id}/cancel"
        caller = await gateway.identify(request)
        return _json(await gateway.jobs.cancel(request.path_params["job_id"], caller.tenant))

    app.add_route("/healthz", health.healthz, methods=["GET"])
    app.add_route("/readyz", health.readyz, methods=["GET"])
    app.add_route("/health", health.health, methods=["GET"])
    app.add_route("/metrics", health.metrics, methods=["GET"])
    app.add_route("/version", version, methods=["GET"])
    app.add_route("/openapi.json", openapi, methods=["GET"])
    app.add_route("/v1/models", models, methods=["GET"])
    app.add_route("/v1/models/{name:path}", model, methods=["GET"])
    app.add_route("/v1/responses/{response_id}", stored, methods=["GET", "DELETE"])
    app.add_route("/v1/responses/{response_id}/cancel", stored, methods=["POST"])
    app.add_route("/v1/responses/{response_id}/input_items", stored, methods=["GET"])
    app.add_route("/v1/jobs/{job_id}", job, methods=["GET"])
    app.add_route("/v1/jobs/{job_id}/stream", stream, methods=["GET"])
    app.add_route("/v1/jobs/{job_id}/cancel", cancel, methods=["POST"])


def _json(content: Any) -> Response:
    return JSONResponse(content)
