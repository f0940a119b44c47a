"""What the worker asks of an engine: an ASGI application with a load, a pulse and an end.

A job is run by calling `Engine.app` as an ASGI application, with no socket. What can't be said in
an HTTP request (limits, accounting, what went wrong behind the answer) crosses in a `Call`, which
the worker puts into `CURRENT` before the call; a context variable follows the application into
every task that it starts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


Delta = tuple[list[int], str | None, int | str | None]
"""Token ids, finish reason and stop reason of one step; as in `shared.protocol`."""


class EngineStartError(Exception):
    """The engine could not be started; the message says why and what to change."""


class AdapterError(Exception):
    """An adapter can't be loaded or unloaded; the message says why."""


@dataclass(frozen=True)
class Model:
    """A model name that the engine answers to."""

    name: str
    max_model_len: int
    """Prompt and answer together, tokens."""
    parent: str | None = None
    """The model that an adapter (LoRA) was loaded on."""


@dataclass(frozen=True)
class Load:
    """How busy the engine is, as of its last step."""

    running: int
    waiting: int
    kv_usage: float
    """Share of the KV cache in use, 0 to 1."""


@dataclass
class Usage:
    """Tokens counted by the engine, whether or not the client asked for usage."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class Call:
    """One attempt at a job, as the engine sees it.

    The worker fills in the first part; the engine writes the second while the application runs.
    """

    job_id: str
    max_tokens_given: bool = True
    """False when the body sets no limit: the worker's default applies, not the model's length."""
    max_tokens: int = 0
    """Longest answer that the job's caller may have, if above 0, below the worker's own ceiling."""
    resume: list[Delta] | None = None
    """What earlier attempts have generated. The engine goes through it again without computing it,
    so that the application says again what it said, and then continues."""

    usage: Usage = field(default_factory=Usage)
    fault: str | None = None
    """Set when the answer isn't genuine: the engine died or ended the request uninvited.

    Whatever the application says after that (an answer that looks complete, a 500) must not reach
    the client as the model's answer.
    """
    deltas: list[Delta] = field(default_factory=list)
    """What each step added, in the order in which the application saw it, for answers that another
    worker could continue (`Engine.resumable`). The worker takes from it whenever the application
    sends; after `resume` comes only what is new."""
    tokens: list[list[int]] = field(default_factory=list)
    """Token ids generated so far, one list per engine request of the job, in order of arrival."""


CURRENT: ContextVar[Call] = ContextVar("headrace_call")


class Engine(Protocol):
    """A started engine serves until `stop()` is called or `wait_failed()` returns."""

    app: App
    """Answers `http` scopes of ASGI spec version 2.3; ends soon after `http.disconnect`."""
    models: Sequence[Model]
    """Served names, the pool's own name first."""
    seats: int
    """Requests that it runs at once."""
    version: str
    """Name and version, for people: `vllm 0.32.0`."""

    async def start(self) -> None:
        """Load the model and answer one warm-up request. Raises `EngineStartError`."""

    def resumable(self, path: str, body: bytes) -> bool:
        """Tell whether `Call.resume` can carry this request's answer over to this engine."""

    def load(self) -> Load:
        """Return the load as of the last step, from memory, without awaiting."""

    def progress(self) -> int:
        """Return a number that grows with each step of the engine."""

    async def wait_failed(self) -> str:
        """Return the reason, once the engine has failed for good. Waits otherwise."""

    async def load_adapter(self, name: str, source: str) -> None:
        """Answer to `name` with an adapter, too: it is in `models` then. Raises `AdapterError`."""

    async def unload_adapter(self, name: str) -> None:
        """Answer to it no more; what runs goes on. Raises `AdapterError`."""

    async def abort(self, job_id: str) -> None:
        """End what the engine still runs for a job: the fallback when a disconnect wasn't heard."""

    async def stop(self) -> None:
        """Free everything, child processes included. Safe to call twice and after a failure."""
