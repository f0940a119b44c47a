"""The API's description in OpenAPI's form, made from the routes, the endpoints and the errors.

Bodies of requests and answers are vLLM's: here they are outlined, its documentation has the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.routing import BaseRoute, Route

from gateway.endpoints import ENDPOINTS, Endpoint
from gateway.error_forms import ANTHROPIC, form_of
from gateway.exchange import PROBES
from shared.errors import HeadraceError, tree

VLLM_DOCS = "https://docs.vllm.ai/en/latest/serving/openai_compatible_server/"
_OPEN = frozenset({*PROBES, "/version", "/openapi.json"})
"""Routes that ask for no API key."""
_JSON, _SSE = "application/json", "text/event-stream"
_JOB_ID = "^[0-9a-f]{32}$"

_SECONDS = r"^[0-9]{1,9}(\.[0-9]{1,9})?$"
_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "X-Request-Timeout": ("Time limit in seconds, queueing included", {"pattern": _SECONDS}),
    "X-On-Disconnect": (
        "What becomes of the job when its client leaves",
        {"pattern": r"^(cancel|continue|grace=[0-9]{1,9}(\.[0-9]{1,9})?)$"},
    ),
    "X-Failover": (
        "Whether another worker may go on with a stream",
        {"enum": ["continue", "error"]},
    ),
    "X-Stream-Resumable": ("Whether events carry ids", {"enum": ["true", "false"]}),
    "Idempotency-Key": (
        "Sends a request again without doing it twice",
        {"pattern": "^[!-~]{1,255}$"},
    ),
    "Last-Event-ID": ("The last event that was had", {"pattern": "^[0-9]{1,9}$"}),
    "X-Request-Id": ("For log lines; comes back", {"pattern": "^[!-~]{1,128}$"}),
    "traceparent": ("W3C's trace context", {"maxLength": 200}),
    "tracestate": ("W3C's trace context", {"maxLength": 512}),
}
"""Request header → what it is for, and the form of its value. docs/api.md has more of them."""
_ALWAYS = ("X-Request-Id", "traceparent", "tracestate")
_OF_JOBS = tuple(name for name in _HEADERS if name not in ("Last-Event-ID", *_ALWAYS))
_OF_STREAMS = ("X-Stream-Resumable", "Last-Event-ID")

_ANSWER_HEADERS = {
    "X-Request-Id": {"schema": {"type": "string"}, "description": "The request's id"},
    "X-Job-Id": {"schema": {"type": "string"}, "description": "The job's id, if there is one"},
    "Retry-After": {"schema": {"type": "string"}, "description": "Seconds; at 429 and 503"},
}


def describe(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """Return the document, OpenAPI 3.1."""
    relayed = {endpoint.path: endpoint for endpoint in ENDPOINTS}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if not isinstance(route, Route):
            continue
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            made = _operation(path, method, relayed.get(path))
            paths.setdefault(path, {})[method.lower()] = made
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": _version()},
        "externalDocs": {"url": VLLM_DOCS, "description": "Bodies of requests and answers"},
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "parameters": {name: _header(name) for name in _HEADERS},
        },
    }


def _operation(path: str, method: str, endpoint: Endpoint | None) -> dict[str, Any]:
    names = [*_ALWAYS]
    if endpoint is not None:
        names += _OF_JOBS
    parameters = [_path_parameter(name) for name in re.findall(r"\{(\w+)\}", path)]
    if path.endswith("/stream"):
        names += _OF_STREAMS
        after = {"type": "string", "pattern": _HEADERS["Last-Event-ID"][1]["pattern"]}
        parameters.append({"name": "after", "in": "query", "schema": after})
    parameters += [{"$ref": f"#/components/parameters/{name}"} for name in names]
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}"),
        "parameters": parameters,
        "responses": _responses(path, endpoint),
    }
    if endpoint is not None:
        operation["tags"] = [endpoint.kind]
        operation["requestBody"] = {"required": True, "content": _body(endpoint)}
        operation["externalDocs"] = {"url": VLLM_DOCS}
    if path in _OPEN:
        operation["security"] = []
    return operation


def _body(endpoint: Endpoint) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": {"type": "string", "minLength": 1}}
    if endpoint.streams:
        fields["stream"] = {"type": "boolean"}
    if endpoint.takes_form:
        fields["file"] = {"type": "string", "format": "binary"}
        schema = {"type": "object", "properties": fields, "required": ["model", "file"]}
        return {"multipart/form-data": {"schema": schema}}
    schema = {"type": "object", "properties": fields, "required": ["model"]}
    return {_JSON: {"schema": schema}}


def _responses(path: str, endpoint: Endpoint | None) -> dict[str, Any]:
    """Return the answers by status: the answer itself, and each error that there is."""
    streams = path.endswith("/stream") or (endpoint is not None and endpoint.streams)
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    elif path == "/health":
        return {"200": {"description": "Ready"}, "503": {"description": "Not ready"}}
    else:
        content = {_JSON: {"schema": {}}}
        if streams:
            content[_SSE] = {"schema": {}}
        if endpoint is not None and endpoint.takes_form:
            content["text/plain"] = {"schema": {"type": "string"}}
    answers = {"200": {"description": "The answer", "content": content, "headers": _ANSWER_HEADERS}}
    if path in PROBES:
        return answers | {"503": {"description": "Not ready", "content": content}}
    if endpoint is not None:
        answers |= {"422": _refusal(["the engine's own"], path)}
    by_status: dict[int, list[str]] = {}
    for kind in tree(HeadraceError):
        by_status.setdefault(kind.status, []).append(kind.code)
    return answers | {
        str(status): _refusal(sorted(codes), path) for status, codes in sorted(by_status.items())
    }


def _refusal(codes: list[str], path: str) -> dict[str, Any]:
    schemas = [{"$ref": "#/components/schemas/Error"}]
    if form_of(path) is ANTHROPIC:
        schemas.append({"$ref": "#/components/schemas/AnthropicError"})
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {
        "description": ", ".join(codes),
        "content": {_JSON: {"schema": schema}},
        "headers": _ANSWER_HEADERS,
    }


def _header(name: str) -> dict[str, Any]:
    meaning, form = _HEADERS[name]
    schema = {"type": "string", **form}
    return {"name": name, "in": "header", "description": meaning, "schema": schema}


def _path_parameter(name: str) -> dict[str, Any]:
    form = {"pattern": _JOB_ID} if name == "job_id" else {"minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", **form}}


def _version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:  # Run from its sources.
        return "0"


_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": _TEXT_OR_NULL,
                "code": {
                    "type": ["string", "integer", "null"],
                    "description": "One of the gateway's codes, or the engine's status",
                },
            },
        }
    },
}
_ANTHROPIC_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT},
        },
    },
}
