"""What the application answers when a request ends in an exception: an error's body."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import error_response, from_http
from gateway.exchange import exchange_of
from gateway.paths import allowed_methods
from shared.errors import HeadraceError, InvalidRequest


def install(app: FastAPI) -> None:
    """Make the application answer every error in its path's form."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, HeadraceError)
        exchange = exchange_of(request.scope)
        exchange.outcome = error.code
        return error_response(error, form=exchange.form)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = allowed_methods(app.routes, request.scope)
            if request.method == "OPTIONS":
                return Response(status_code=204, headers=headers)
        known = from_http(error)
        exchange = exchange_of(request.scope)
        exchange.outcome = known.code
        response = error_response(known, headers, exchange.form)
        response.status_code = error.status_code
        return response

    async def invalid(request: Request, error: Exception) -> Response:
        response = error_response(InvalidRequest())
        response.status_code = 422
        return response

    async def unexpected(request: Request, error: Exception) -> Response:
        exchange = exchange_of(request.scope)
        exchange.outcome = HeadraceError.code
        return error_response(HeadraceError(), form=exchange.form)

    app.add_exception_handler(HeadraceError, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unexpected)
