"""The path of a request as the routes have it, whichever way it came."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope


def route_path(path: str, root_path: str) -> str:
    """Return a path without the proxy's prefix, if it still has that, and without a last slash."""
    if root_path and path.startswith(root_path + "/"):
        path = path[len(root_path) :]
    return path[:-1] if path.endswith("/") and len(path) > 1 else path


def allowed_methods(routes: Iterable[BaseRoute], scope: Scope) -> str:
    """Return the methods that a request's path takes, as `Allow` has them."""
    methods = {"OPTIONS"}
    for route in routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return ", ".join(sorted(methods))
