"""What passes from the simulated batch to the application: tokens, ends and errors."""

from __future__ import annotations

import asyncio
from typing import Literal, NamedTuple

Finish = Literal["stop", "length", "abort"]


class GenerationError(Exception):
    """The engine ended a request with an error."""


class InjectedError(Exception):
    """A fault that the application doesn't expect and lets through."""


class Output(NamedTuple):
    """A token of one sequence, and whether it is the last. An end without a token has none."""

    choice: int
    token: int | None
    finish: str | None
    """A `Finish`, or what the log of an earlier attempt says."""


class Outputs:
    """What the engine produced for one request and its application hasn't taken yet."""

    def __init__(self) -> None:
        self._ready: list[Output] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        self._ready.append(output)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake()

    async def take(self) -> list[Output]:
        """Wait for outputs and return all there are; raise the error once they are used up."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        ready, self._ready = self._ready, []
        return ready

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
