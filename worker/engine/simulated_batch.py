"""The simulated engine's scheduler: one loop that gives every running request a token per step.

Like a real batcher it admits as many requests as there are seats and room in the KV cache, keeps
the others waiting in order, and takes the newest back to the queue when the cache runs short. One
timer drives all requests: those that decode at the engine's pace go in lockstep, and only first
tokens and requests with a pace of their own have moments of their own.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from worker.engine.interface import Call
from worker.engine.simulated_faults import NO_FAULTS, Faults
from worker.engine.simulated_outputs import (
    Finish,
    GenerationError,
    InjectedError,
    Output,
    Outputs,
)
from worker.engine.simulated_text import token_at

_EARLY_S = 0.0005
"""A timer may come this much too early (uvloop counts whole milliseconds); it counts as due."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer being generated: a request has one per prompt and choice."""

    choice: int
    base: int
    prompt_tokens: int
    limit: int
    """Tokens to generate. None at all are generated for an embedding."""
    outputs: Outputs
    job_id: str
    finish: Finish = "length"
    faults: Faults = NO_FAULTS
    call: Call | None = None
    tokens: list[int] = field(default_factory=list)
    ticket: int = -1
    """The heap entry that counts; any other entry of this sequence is stale."""


class Batch:
    """Sequences running and waiting, and the loop that advances them."""

    def __init__(
        self,
        *,
        seats: int,
        kv_tokens: int,
        ttft_s: float,
        tpot_s: float,
        prefill_s_per_token: float,
        on_death: Callable[[str], None],
    ) -> None:
        self._seats = seats
        self._kv_tokens = kv_tokens
        self._ttft_s = ttft_s
        self._tpot_s = tpot_s
        self._prefill_s_per_token = prefill_s_per_token
        self._on_death = on_death

        self.steps = 0
        self.stepped_at_ns = 0
        """When the last step began, on the monotonic clock."""
        self.kv_used = 0
        self._dead: str | None = None
        self._hung = False
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, None] = {}
        """In order of admission: the last is the first to make room."""
        self._lockstep: dict[Sequence, None] = {}
        self._tick = 0.0
        """When the sequences in lockstep get their next token."""
        self._timed: list[tuple[float, int, Sequence]] = []
        self._tickets = count()
        self._sleeper: asyncio.Future[bool] | None = None

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # --- what the application asks for ---

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. On an engine that has failed it fails at once."""
        if self._dead is not None:
            self._fault(sequence, self._dead)
            return
        self._waiting.append(sequence)
        self._wake()

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is. Harmless when it has ended."""
        if sequence in self._running:
            self._leave(sequence)
            self._wake()
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def abort(self, job_id: str) -> None:
        """End a job's sequences, with what they have."""
        for sequence in [*self._running, *self._waiting]:
            if sequence.job_id == job_id:
                self.remove(sequence)
                sequence.outputs.put(Output(sequence.choice, None, "abort"))

    def fail(self, reason: str) -> None:
        """Fail everything, now and from now on."""
        self._dead = self._dead or reason
        for sequence in [*self._running, *self._waiting]:
            self.remove(sequence)
            self._fault(sequence, reason)

    # --- the loop ---

    async def run(self) -> None:
        """Step until cancelled, or until a fault ends all progress."""
        while self._dead is None and not self._hung:
            self._admit(time.monotonic())
            if await self._sleep_until(self._next_due()):
                self._step(time.monotonic())

    def _admit(self, now: float) -> None:
        while self._waiting and len(self._running) < self._seats:
            sequence = self._waiting[0]
            context = sequence.prompt_tokens + len(sequence.tokens)
            if self._running and self.kv_used + context >= self._kv_tokens:
                return
            self._waiting.popleft()
            self._running[sequence] = None
            self.kv_used += context
            ttft_ms = sequence.faults.ttft_ms
            ttft_s = self._ttft_s if ttft_ms is None else ttft_ms / 1000
            self._time(sequence, now + ttft_s + context * self._prefill_s_per_token)

    def _next_due(self) -> float | None:
        while self._timed and self._timed[0][2].ticket != self._timed[0][1]:
            heapq.heappop(self._timed)
        if not self._lockstep:
            return self._timed[0][0] if self._timed else None
        return min(self._tick, self._timed[0][0]) if self._timed else self._tick

    async def _sleep_until(self, due: float | None) -> bool:
        """Return True once it is due, False when there may be something else to do first."""
        delay = None if due is None else due - time.monotonic()
        if delay is not None and delay <= _EARLY_S:
            await asyncio.sleep(0)
            return True
        loop = asyncio.get_running_loop()
        sleeper: asyncio.Future[bool] = loop.create_future()
        self._sleeper = sleeper
        timer = None if delay is None else loop.call_later(delay, _settle, sleeper, True)
        try:
            return await sleeper
        finally:
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._sleeper is not None:
            _settle(self._sleeper, False)

    def _step(self, now: float) -> None:
        self.steps += 1
        self.stepped_at_ns = time.monotonic_ns()
        due = now + _EARLY_S
        turn: list[tuple[Sequence, float]] = []
        while self._timed and self._timed[0][0] <= due:
            moment, ticket, sequence = heapq.heappop(self._timed)
            if sequence.ticket == ticket:
                turn.append((sequence, moment))
        if self._lockstep and self._tick <= due:
            turn += [(sequence, self._tick) for sequence in self._lockstep]
            # A step that comes late isn't made up for: an engine doesn't decode faster either.
            self._tick = max(self._tick + self._tpot_s, now)
        for sequence, moment in turn:
            # An earlier one's fault or need for room may have taken this one's turn away.
            if sequence in self._running and not self._hung:
                self._advance(sequence, max(moment, now - self._tpot_s))

    def _advance(self, sequence: Sequence, moment: float) -> None:
        """Give a sequence its next token, or what it asked for in its place."""
        done = len(sequence.tokens)
        if sequence.faults.kind is not None and sequence.faults.at == done:
            self._trigger(sequence, sequence.faults)
            return
        if sequence.limit == 0:
            self._leave(sequence)
            sequence.outputs.put(Output(sequence.choice, None, "stop"))
            return
        token = token_at(sequence.base, done)
        sequence.tokens.append(token)
        self.kv_used += 1
        if sequence.call is not None:
            sequence.call.usage.completion_tokens += 1
        if done + 1 >= sequence.limit:
            self._leave(sequence)
            sequence.outputs.put(Output(sequence.choice, token, sequence.finish))
            return
        sequence.outputs.put(Output(sequence.choice, token, None))
        if sequence not in self._lockstep:
            self._pace(sequence, moment)
        if self.kv_used > self._kv_tokens and len(self._running) > 1:
            self._preempt()

    def _pace(self, sequence: Sequence, moment: float) -> None:
        """Set the moment of the next token: the common one, unless the request has its own pace."""
        if sequence.faults.tpot_ms is not None:
            self._time(sequence, moment + sequence.faults.tpot_ms / 1000)
        elif not self._lockstep:
            self._tick = moment + self._tpot_s
            self._lockstep[sequence] = None
        elif self._tick - moment < self._tpot_s / 2:
            self._time(sequence, self._tick + self._tpot_s)
        else:
            self._lockstep[sequence] = None

    def _time(self, sequence: Sequence, due: float) -> None:
        sequence.ticket = next(self._tickets)
        heapq.heappush(self._timed, (due, sequence.ticket, sequence))

    def _leave(self, sequence: Sequence) -> None:
        del self._running[sequence]
        self._lockstep.pop(sequence, None)
        sequence.ticket = -1
        self.kv_used -= sequence.prompt_tokens + len(sequence.tokens)

    def _preempt(self) -> None:
        victim = next(reversed(self._running))
        self._leave(victim)
        self._waiting.appendleft(victim)

    # --- faults ---

    def _trigger(self, sequence: Sequence, faults: Faults) -> None:
        where = f"asked for at token {faults.at}"
        if faults.kind == "exit":
            os._exit(1)
        elif faults.kind == "hang":
            self._hung = True
        elif faults.kind == "die":
            reason = f"simulated engine death, {where}"
            self.fail(reason)
            self._on_death(reason)
        elif faults.kind == "abort":
            self._leave(sequence)
            _blame(sequence, f"simulated abort, {where}")
            sequence.outputs.put(Output(sequence.choice, None, "abort"))
        elif faults.kind == "error":
            self._leave(sequence)
            _blame(sequence, f"simulated error, {where}")
            sequence.outputs.fail(GenerationError("Internal server error"))
        else:
            self._leave(sequence)
            sequence.outputs.fail(InjectedError(f"simulated exception, {where}"))

    def _fault(self, sequence: Sequence, reason: str) -> None:
        _blame(sequence, reason)
        sequence.outputs.fail(
            GenerationError("EngineCore encountered an issue. See stack trace for the root cause.")
        )


def _blame(sequence: Sequence, reason: str) -> None:
    if sequence.call is not None and sequence.call.fault is None:
        sequence.call.fault = reason


def _settle(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
