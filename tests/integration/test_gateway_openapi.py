"""Requests made from the API's own description: no fault, no hang, answers as it says."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, CheckContext, GenerationMode, Response
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.support import sse
from tests.support.processes import Pool, brief_pool
from tests.support.valkey import ValkeyServer

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "6"))
"""Of each operation, valid ones and as many that aren't."""
PATIENCE_S = 30.0
MODEL = "simulated"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "One two"},
    "/v1/embeddings": {"input": ["One", "two"]},
    "/tokenize": {"prompt": "One two"},
    "/detokenize": {"tokens": [72, 105]},
}
"""What brings a request to the simulated engine's answer; other bodies it refuses."""


@schemathesis.check
def no_fault(context: CheckContext, response: Response, case: Case[Any]) -> None:
    """Accept no server error but of a time limit that the request itself has set."""
    if response.status_code < 500 or case.operation.path == "/readyz":
        return
    error = response.json()["error"]
    timeout = response.request.headers.get("X-Request-Timeout")
    assert (response.status_code, error["code"]) == (504, "request_timeout"), error
    assert timeout is not None
    assert float(timeout) < PATIENCE_S


CHECKED = [
    no_fault,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]


@pytest.fixture
async def pool(own_valkey: ValkeyServer) -> AsyncIterator[Pool]:
    async with brief_pool(own_valkey.url, MODEL) as started:
        yield started


async def test_answers_are_as_described(pool: Pool) -> None:
    _, raw = await sse.fetch(f"{pool.url}/openapi.json")
    document = json.loads(raw)
    for path, fields in BODIES.items():
        body = document["paths"][path]["post"]["requestBody"]
        schema = body["content"]["application/json"]["schema"]
        schema["properties"] |= {name: {"const": value} for name, value in fields.items()}
        schema["properties"]["model"] = {"enum": [MODEL, MODEL, "no-such-model"]}
        schema["required"] += list(fields)
    told = await asyncio.to_thread(_ask_all, document, pool.url)
    assert len(told) > EXAMPLES * len(document["paths"])
    assert {200, 400, 404} <= set(told)
    assert "Traceback" not in pool.gateways[0].log
    response, _ = await sse.fetch(
        f"{pool.url}/v1/chat/completions", {"model": MODEL, **BODIES["/v1/chat/completions"]}
    )
    assert response.status == 200


def _ask_all(document: dict[str, Any], url: str) -> list[int]:
    told: list[int] = []
    schema = schemathesis.openapi.from_dict(document)
    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=EXAMPLES,
                derandomize=True,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.explicit, Phase.generate],
            )
            def ask(case: Case[Any]) -> None:
                response = case.call_and_validate(
                    base_url=url,
                    checks=CHECKED,
                    timeout=PATIENCE_S,
                )
                told.append(response.status_code)

            ask()
    return told
