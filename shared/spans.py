"""Spans, if they are asked for. If not, nothing is imported for them, and nothing done."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shared.settings import WRONG_SETTING, RedisSettings

if TYPE_CHECKING:
    from shared.otel import Spans


def start(settings: RedisSettings, service: str, instance: str) -> Spans | None:
    """Return where the process's spans begin, or leave where what is asked for isn't installed."""
    if not settings.tracing:
        return None
    try:
        from shared.otel import Spans

        return Spans.exporting(service, instance)
    except ImportError as error:
        hint = "OpenTelemetry is not installed: pip install 'headrace[tracing]'"
        sys.stderr.write(f"headrace: wrong setting HEADRACE_TRACING: {hint} ({error})\n")
        sys.exit(WRONG_SETTING)
