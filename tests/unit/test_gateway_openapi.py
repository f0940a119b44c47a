"""The API's description has all that is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from gateway.app import create_app
from gateway.endpoints import ENDPOINTS
from gateway.openapi import describe
from gateway.settings import GatewaySettings
from shared.errors import HeadraceError, tree

API = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return describe(create_app(GatewaySettings()).routes)


def test_every_route_is_in_it(document: dict[str, Any]) -> None:
    there = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in create_app(GatewaySettings()).routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    described = {(path, method) for path, one in document["paths"].items() for method in one}
    assert described == there
    assert len(there) > 25


def test_every_endpoint_takes_a_model_and_our_headers(document: dict[str, Any]) -> None:
    for endpoint in ENDPOINTS:
        operation = document["paths"][endpoint.path]["post"]
        media_type = "multipart/form-data" if endpoint.takes_form else "application/json"
        schema = operation["requestBody"]["content"][media_type]["schema"]
        assert "model" in schema["required"]
        told = {one["$ref"].rpartition("/")[2] for one in operation["parameters"]}
        assert {"X-Request-Timeout", "X-Failover", "Idempotency-Key", "traceparent"} <= told
        assert ("text/event-stream" in operation["responses"]["200"]["content"]) == endpoint.streams


def test_every_error_is_in_it(document: dict[str, Any]) -> None:
    responses = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    for kind in tree(HeadraceError):
        if kind.__module__.split(".")[0] in ("shared", "gateway"):
            assert kind.code in responses[str(kind.status)]["description"].split(", ")


def test_every_request_header_is_in_it(document: dict[str, Any]) -> None:
    section = API.read_text().split("\n## Headers\n")[1].split("| answer header |")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", section, re.M)
    documented = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert set(document["components"]["parameters"]) == documented - {"Authorization"}


def test_the_open_routes_are_the_documented_ones(document: dict[str, Any]) -> None:
    sentence = API.read_text().split("on every route but ")[1].split("which ask for none")[0]
    described = {
        path
        for path, one in document["paths"].items()
        if any(operation.get("security") == [] for operation in one.values())
    }
    assert described == set(re.findall(r"`(/[^`]+)`", sentence))
