"""Faults that a request can ask the simulated engine for, so that tests can break it at a token.

They are written into the prompt, `[[fault:exit@5]]`, where they survive every layer in between, or
as the body field `headrace_fault`, `{"exit": 5}`. What can be said:

    raise@K    the application raises when token K is due: K tokens were answered before
    error@K    the engine ends the request with an error: an error event, then [DONE]
    abort@K    the engine ends the request uninvited: finish_reason "abort", then [DONE]
    exit@K     the process exits on the spot, with status 1
    hang@K     the engine makes no more progress, for this request or any other
    die@K      the engine fails for good, and every request that it runs with it
    tokens=N   the answer is N tokens long and ends by itself, whatever the limits say
    slow:ttft_ms=X,tpot_ms=Y    this request's own pace; either may be left out

Only an engine with faults switched on looks for them: a stranger's prompt must not stop a worker.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

Kind = Literal["raise", "error", "abort", "exit", "hang", "die"]

_KINDS = frozenset(("raise", "error", "abort", "exit", "hang", "die"))
_MARKER = re.compile(r"\[\[fault:(.*?)\]\]")


class FaultSyntaxError(ValueError):
    """A fault could not be read. A silent typo would make a test of a fault pass for nothing."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What one request asked for."""

    kind: Kind | None = None
    at: int = 0
    """The number of tokens answered before the fault."""
    tokens: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None


NO_FAULTS = Faults()


def read_faults(prompt: str, field: object = None) -> Faults:
    """Return what a prompt's markers and a body's `headrace_fault` ask for. The field wins."""
    faults = NO_FAULTS
    for marker in _MARKER.findall(prompt):
        for name, value in _marker_items(marker):
            faults = _with(faults, name, value)
    if field is not None:
        if not isinstance(field, Mapping):
            raise FaultSyntaxError("headrace_fault is an object, like {'exit': 5}")
        for name, value in _field_items(field):
            faults = _with(faults, name, value)
    return faults


def _marker_items(marker: str) -> Iterator[tuple[str, object]]:
    kind, at, position = marker.partition("@")
    if at:
        yield kind, position
        return
    if marker.startswith("slow:"):
        marker = marker.removeprefix("slow:")
    elif not marker.startswith("tokens="):
        raise FaultSyntaxError(f"unknown fault {marker!r}")
    for item in marker.split(","):
        name, _, value = item.partition("=")
        yield name, value


def _field_items(field: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in field.items():
        if name == "slow" and isinstance(value, Mapping):
            yield from value.items()
        else:
            yield name, value


def _with(faults: Faults, name: str, value: object) -> Faults:
    if not isinstance(value, str | int | float):
        raise FaultSyntaxError(f"fault {name!r} needs a number, not {value!r}")
    try:
        if name in _KINDS:
            return replace(faults, kind=cast("Kind", name), at=_count(value, 0))
        if name == "tokens":
            return replace(faults, tokens=_count(value, 1))
        if name == "ttft_ms":
            return replace(faults, ttft_ms=max(0.0, float(value)))
        if name == "tpot_ms":
            return replace(faults, tpot_ms=max(0.0, float(value)))
    except ValueError:
        raise FaultSyntaxError(f"fault {name!r} needs a number, not {value!r}") from None
    raise FaultSyntaxError(f"unknown fault {name!r}")


def _count(value: str | float, least: int) -> int:
    count = int(value)
    if count < least:
        raise ValueError(value)
    return count
