"""Continues an answer that another engine began: says again what was said, then has it go on.

The recorded steps go through vLLM's own output processor, with their boundaries, so that the
detokenizer, the stop strings and the application's parsers come to the state they had. Then the
engine gets the request together with its outputs (`vllm_patches`), unless they include its end.
Imports no vLLM.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from worker.engine.interface import Delta
from worker.engine.vllm_patches import KEY

MakeStep = Callable[[str, list[int], str | None, int | str | None], Any]
"""Makes vLLM's `EngineCoreOutput` of a request's id, new tokens, finish reason, stop reason."""

BREATH = 32
"""After so many recorded steps the other requests have a turn."""


class CannotContinueError(Exception):
    """The recorded steps don't lead here to where they led before; the message says how."""


class Backlog:
    """Stands for a request's queue while recorded steps are fed, and keeps what they yield."""

    def __init__(self) -> None:
        self.outputs: deque[Any] = deque()

    def put(self, output: Any) -> None:
        if isinstance(output, Exception):
            raise output
        self.outputs.append(output)

    def play_first(self, queue: Any) -> None:
        """Have a queue give these first, one at a time; it would merge what is put into it."""

        def get_nowait() -> Any:
            if self.outputs:
                return self.outputs.popleft()
            del queue.get_nowait  # Back to the class's own.
            return queue.get_nowait()

        queue.get_nowait = get_nowait


class Replay:
    """One request that is continued, from its registration until the engine may have it."""

    def __init__(
        self,
        steps: Sequence[Delta],
        processor: Any,
        request: Any,
        make_step: MakeStep,
        max_model_len: int,
    ) -> None:
        self.outputs = 0
        """What the application will have been told again, once fed."""
        self._steps = steps
        self._processor = processor
        self._request = request
        self._make_step = make_step
        self._max_model_len = max_model_len

    async def feed(self) -> bool:
        """Go through the recorded steps; tell whether the engine has anything left to do.

        Raises `CannotContinueError`, with nothing of the request left behind.
        """
        try:
            return await self._feed()
        except BaseException:
            self._processor.abort_requests([self._request.request_id], internal=True)
            raise

    async def _feed(self) -> bool:
        request_id = self._request.request_id
        state = self._processor.request_states[request_id]
        tokens = [token for step in self._steps for token in step[0]]
        queue, interval, backlog = state.queue, state.stream_interval, Backlog()
        state.queue, state.stream_interval = backlog, 1
        for number, step in enumerate(self._steps, 1):
            self._feed_step(request_id, step)
            if number % BREATH == 0:
                await asyncio.sleep(0)
            if request_id not in self._processor.request_states:
                break
        state.queue, state.stream_interval = queue, interval
        self.outputs = len(backlog.outputs)
        if self.outputs != len(self._steps):
            raise CannotContinueError(f"it ended at step {self.outputs} of {len(self._steps)}")
        backlog.play_first(queue)
        if request_id not in self._processor.request_states:
            return False
        if self._steps[-1][1] is not None:
            raise CannotContinueError("it didn't end where it had")
        if state.prompt_len + len(tokens) >= self._max_model_len:
            raise CannotContinueError("it is longer than this engine's max_model_len")
        # What comes next is a prefill, to vLLM's statistics too.
        state.is_prefilling = True
        state.sent_tokens_offset = len(tokens)
        self._request.sampling_params.extra_args = {KEY: tokens}
        return True

    def _feed_step(self, request_id: str, step: Delta) -> None:
        """Put one step through the output processor, as if it came from the engine."""
        tokens, finish, stop = step
        if finish == "stop" and isinstance(stop, str):
            # The processor found the stop string, and must find it again; the engine didn't know.
            finish = stop = None
        made = self._make_step(request_id, list(tokens), finish, stop)
        processor = self._processor
        tracing, processor.tracing_enabled = processor.tracing_enabled, False
        try:
            processor.process_outputs([made])
        finally:
            processor.tracing_enabled = tracing


class Replays:
    """The requests that are being continued, from registration to the engine."""

    def __init__(self, llm: Any, make_step: MakeStep) -> None:
        self._processor = llm.output_processor
        self._make_step = make_step
        self._max_model_len = llm.model_config.max_model_len
        self._waiting: dict[str, Replay] = {}
        stop_at_core(llm.engine_core, self._waiting)

    def expect(self, request: Any, steps: Sequence[Delta]) -> Replay:
        """Have a request, just registered, continued before the engine is given it."""
        replay = Replay(steps, self._processor, request, self._make_step, self._max_model_len)
        self._waiting[request.request_id] = replay
        return replay


def stop_at_core(core: Any, waiting: dict[str, Replay]) -> None:
    """Let requests that are continued come to the engine core only when, and if, they need it."""
    add_request: Callable[[Any], Awaitable[None]] = core.add_request_async

    async def add(request: Any) -> None:
        replay = waiting.pop(request.request_id, None) if waiting else None
        if replay is None or await replay.feed():
            await add_request(request)

    core.add_request_async = add
