"""Log lines: one per event, named in the past tense, with its facts as fields.

`log.info("job.claimed", job=job_id, lane=lane)` gives
`12:00:00.123 info  job.claimed job=5f… lane=batch`, or the same as JSON.

What a client chose (an id, a path, a name) may stand in a field: no line is broken by it, or longer
than it should be. What was asked and answered stands in none.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from shared.protocol import Job

_MOST_CHARACTERS = 1000
"""Of one field."""


class Log:
    """A named source of events."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"headrace.{name}")

    def _log(self, level: int, event: str, fields: dict[str, Any], exc: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields}, exc_info=exc)

    def debug(self, event: str, **fields: Any) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, *, exc: bool = False, **fields: Any) -> None:
        """`exc` adds the traceback of the exception being handled."""
        self._log(logging.ERROR, event, fields, exc)


def about(job: Job) -> dict[str, Any]:
    """Return the fields by which a line is found: whose job it is."""
    fields = {"job": job.id, "request": job.request_id, "tenant": job.tenant, "model": job.model}
    return {name: value for name, value in fields.items() if value}


def _printable(value: object) -> str:
    text = str(value)
    if len(text) > _MOST_CHARACTERS:
        text = text[:_MOST_CHARACTERS] + "…"
    return text if text.isprintable() else ascii(text)[1:-1]


class _Console(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = getattr(record, "fields", {})
        facts = "".join(f" {key}={_printable(value)}" for key, value in fields.items())
        level = record.levelname.lower()
        line = f"{clock}.{int(record.msecs):03d} {level:<7} {record.getMessage()}{facts}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        plain = (int, float, bool, type(None))
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **{k: v if isinstance(v, plain) else _printable(v) for k, v in fields.items()},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(log_format: str, level: str) -> None:
    """Send all log lines of the process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _Console())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("headrace").setLevel(level.upper())
