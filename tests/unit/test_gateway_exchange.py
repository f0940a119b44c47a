"""How an exchange is counted."""

from __future__ import annotations

import pytest
from starlette.types import Message, Scope

from gateway.cors import Cors
from gateway.exchange import Exchange
from gateway.metrics import Metrics


async def nowhere(message: Message) -> None:
    """Send to nobody."""


@pytest.mark.parametrize(
    ("status", "outcome"), [(0, "cut"), (200, "completed"), (404, "invalid_request")]
)
def test_what_was_never_answered_does_not_count_as_completed(status: int, outcome: str) -> None:
    scope: Scope = {"method": "POST", "path": "/v1/chat/completions", "headers": []}
    exchange = Exchange(scope, nowhere, Cors(()))
    exchange.endpoint, exchange.status = "/v1/chat/completions", status
    metrics = Metrics()
    exchange.finish(metrics)
    assert f'outcome="{outcome}"}} 1.0'.encode() in metrics.render()
