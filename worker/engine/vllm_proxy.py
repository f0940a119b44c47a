"""The engine that vLLM's application sees: the real one, with limits, an account and no pretence.

vLLM's application turns an engine's death and an uninvited abort into an answer that looks
complete. Here is the last place where they can be told from the real thing. Imports no vLLM: what
it touches of vLLM's objects is in this file and in `vllm_build`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from typing import Any

from worker.engine.interface import CURRENT, Call
from worker.engine.vllm_resume import BREATH, MakeStep, Replay, Replays

RECORD: ContextVar[Record] = ContextVar("headrace_record")
"""The request being registered with the engine: set as its generator starts, and read then."""

BEAM: ContextVar[Call | None] = ContextVar("headrace_beam", default=None)
"""The job whose request is a beam search: each of its steps is a request to the engine."""

UNINVITED = frozenset({"abort", "error"})

WORKERS_ALONE = ("priority", "data_parallel_rank", "kv_hints")
"""Arguments that a client's body or header can reach, and that are the worker's to decide."""


class Record:
    """The account of one `generate` or `encode`: a prompt with its choices."""

    __slots__ = (
        "_cached",
        "_delta",
        "_error",
        "_journals",
        "_prompt",
        "call",
        "invited",
        "replay",
        "states",
        "tokens",
    )

    def __init__(
        self,
        call: Call,
        choices: int,
        error: type[Exception],
        *,
        delta: bool = False,
        prompt_counted: bool = False,
        journals: bool = False,
    ) -> None:
        """`journals`: whether its steps are recorded, for another worker to continue from."""
        self.call = call
        self.tokens: list[list[int]] = [[] for _ in range(choices)]
        call.tokens.extend(self.tokens)
        self.states: list[Any] = []
        """vLLM's own state of each engine request, which knows tokens that were never read."""
        self.invited = False
        self.replay: Replay | None = None
        """Where the first outputs come from, if the answer is one that is continued."""
        self._error = error
        self._delta = delta
        self._journals = journals and delta and choices == 1 and not prompt_counted
        self._prompt: int | None = None if prompt_counted else 0
        self._cached: int | None = 0 if prompt_counted else None

    @property
    def sole(self) -> bool:
        """Whether this is one answer to one prompt, step by step: one that can be continued."""
        return self._journals and len(self.call.tokens) == 1

    def register(self, state: Any) -> None:
        """Take note that the engine was given the request: its prompt counts from now on."""
        self.states.append(state)
        self._count_prompt(state.prompt_len)

    def take(self, output: Any) -> None:
        """Account for one output. Raises the fault, if it ends a choice uninvited."""
        if self._cached is None:
            self._count_input(output)
        usage = self.call.usage
        for choice in output.outputs:
            kept = self.tokens[choice.index]
            new = choice.token_ids if self._delta else choice.token_ids[len(kept) :]
            kept.extend(new)
            usage.completion_tokens += len(new)
            if choice.finish_reason in UNINVITED and not self.invited:
                raise self.fault(f"the engine ended the request: {choice.finish_reason}")
            if self.replay is not None and self.replay.outputs:
                self.replay.outputs -= 1
            elif self.sole:
                stop = getattr(choice, "stop_reason", None)
                delta = (list(new), choice.finish_reason, stop)
                self.call.deltas.append(delta)

    def take_pooled(self, output: Any) -> None:
        """Account for an embedding or a score; an aborted one is known by having no numbers."""
        if self._cached is None:
            self._count_input(output)
        if output.finished and not self.invited and not output.outputs.data.numel():
            error = getattr(output, "error", None)
            reason = error.message if error is not None else "abort"
            raise self.fault(f"the engine ended the request: {reason}")

    def fault(self, reason: str) -> Exception:
        """Mark the answer as not genuine, whatever the application makes of it."""
        self.call.fault = self.call.fault or reason
        return self._error(reason)

    def settle(self) -> None:
        """Count what the engine had made by the end and nobody read. Safe to repeat.

        A non-streaming request yields nothing before its end, and a stream that is left behind
        has tokens on their way.
        """
        for state in self.states:
            if self._cached is None:
                self._count_cached(state.num_cached_tokens)
            if state.detokenizer is not None:
                kept = self.tokens[state.request_index]
                unread = state.detokenizer.output_token_ids[len(kept) :]
                kept.extend(unread)
                self.call.usage.completion_tokens += len(unread)

    def _count_input(self, output: Any) -> None:
        encoded = getattr(output, "encoder_prompt_token_ids", None)
        self._count_prompt(len(output.prompt_token_ids or ()) + len(encoded or ()))
        self._count_cached(output.num_cached_tokens)

    def _count_prompt(self, tokens: int) -> None:
        if self._prompt is not None:
            self.call.usage.prompt_tokens += tokens - self._prompt
            self._prompt = tokens

    def _count_cached(self, tokens: int | None) -> None:
        self._cached = tokens or 0
        self.call.usage.cached_tokens += self._cached


class EngineProxy:
    """Stands for AsyncLLM; all that isn't here is AsyncLLM's own."""

    def __init__(
        self,
        llm: Any,
        *,
        default_max_tokens: int,
        max_tokens_ceiling: int,
        dead_error: type[Exception],
        generate_error: type[Exception],
        delta_kind: object,
        make_step: MakeStep | None = None,
    ) -> None:
        """`generate_error` is also what a fault is raised as: the application knows it.

        Without `make_step` no answer can be continued.
        """
        self._llm = llm
        self._default = min(default_max_tokens, max_tokens_ceiling)
        self._ceiling = max_tokens_ceiling
        self._dead_error = dead_error
        self._generate_error = generate_error
        self._delta_kind = delta_kind
        self._running: dict[str, list[Record]] = {}
        self._replays = Replays(llm, make_step) if make_step is not None else None
        watch_registrations(llm.output_processor, self._replays)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    @property
    def dead_error(self) -> Any:
        """What the application raises when it finds the engine dead before it asks it."""
        call = CURRENT.get(None)
        if call is not None:
            call.fault = call.fault or "the engine is dead"
        return self._llm.dead_error

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **kw: Any) -> Any:
        """Generate under the limits of the job that this runs for, if it runs for one."""
        call = CURRENT.get(None)
        if call is None:
            return self._llm.generate(prompt, sampling_params, request_id, **kw)
        self._limit(call, sampling_params)
        sampling_params.extra_args = None
        record = Record(
            call,
            sampling_params.n,
            self._generate_error,
            delta=sampling_params.output_kind == self._delta_kind,
            prompt_counted=BEAM.get() is call,
            journals=self._replays is not None,
        )
        outputs = self._llm.generate(prompt, sampling_params, request_id, **clients_own(kw))
        return self._follow(record, outputs, record.take)

    def encode(self, prompt: Any, pooling_params: Any, request_id: str, **kw: Any) -> Any:
        """Embed, score or classify; counted and watched as `generate` is."""
        call = CURRENT.get(None)
        if call is None:
            return self._llm.encode(prompt, pooling_params, request_id, **kw)
        record = Record(call, 0, self._generate_error)
        outputs = self._llm.encode(prompt, pooling_params, request_id, **clients_own(kw))
        return self._follow(record, outputs, record.take_pooled)

    def limited_beams(self, beam_search: Callable[..., Any]) -> Callable[..., Any]:
        """Put the limits on a serving class's beam search, which asks for one token at a time.

        Its prompt is counted here: each step's prompt is this one and what was found so far.
        """

        def limited(*, prompt: Any, params: Any, **kw: Any) -> Any:
            call = CURRENT.get(None)
            if call is not None:
                BEAM.set(call)
                self._limit(call, params)
                tokens = prompt.get("decoder_prompt", prompt).get("prompt_token_ids", ())
                call.usage.prompt_tokens += len(tokens)
            return beam_search(prompt=prompt, params=params, **kw)

        return limited

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kw: Any) -> None:
        """Drop a client's `kv_transfer_params` here, too: vLLM passes them on with a refusal."""
        if CURRENT.get(None) is None:
            await self._llm.notify_kv_transfer_request_rejected(*args, **kw)

    async def abort_job(self, job_id: str) -> None:
        """End what still runs for a job, and settle its account."""
        for record in list(self._running.get(job_id, ())):
            record.invited = True
            # A choice of several is aborted through its parent: aborted alone it would leave the
            # parent behind for good.
            ids = {(state.parent_req or state).request_id for state in record.states}
            if ids:
                await self._llm.abort(sorted(ids), internal=True)
            record.settle()

    def _limit(self, call: Call, params: Any) -> None:
        limit = self._ceiling if call.max_tokens_given else self._default
        limit = min(limit, call.max_tokens or limit)
        if params.max_tokens is None or params.max_tokens > limit:
            params.max_tokens = limit
        if getattr(params, "min_tokens", 0) > params.max_tokens:
            params.min_tokens = params.max_tokens

    async def _follow(
        self, record: Record, outputs: AsyncGenerator[Any, None], take: Callable[[Any], None]
    ) -> AsyncGenerator[Any, None]:
        """Pass outputs on, counted."""
        RECORD.set(record)
        siblings = self._running.setdefault(record.call.job_id, [])
        siblings.append(record)
        try:
            async for output in outputs:
                take(output)
                yield output
                if record.replay is not None and record.replay.outputs % BREATH == 1:
                    await asyncio.sleep(0)
        except self._dead_error as error:
            record.fault(f"the engine is dead: {error}")
            raise
        except self._generate_error as error:
            # One that comes before the engine was given the request is the request's own.
            if record.states:
                record.fault(f"the engine failed: {error.__cause__ or error}")
            raise
        finally:
            # Closing aborts the request if this generator was left in the middle; vLLM's own
            # would do so only once it is collected.
            await outputs.aclose()
            record.settle()
            siblings.remove(record)
            if not siblings:
                self._running.pop(record.call.job_id, None)


def clients_own(arguments: dict[str, Any]) -> dict[str, Any]:
    """Leave out the arguments that aren't the client's to set."""
    return {name: arguments[name] for name in arguments if name not in WORKERS_ALONE}


def watch_registrations(processor: Any, replays: Replays | None) -> None:
    """Let a request's record see the state that the output processor keeps of it.

    The state holds what no output says: tokens made before a disconnect, the ids to abort by. It
    is also through which an answer is continued, before the engine is given the request.
    """
    add_request = processor.add_request

    def add(request: Any, *args: Any, **kw: Any) -> Any:
        result = add_request(request, *args, **kw)
        record = RECORD.get(None)
        if record is not None and CURRENT.get(None) is record.call:
            record.register(processor.request_states[request.request_id])
            steps = record.call.resume
            if steps and replays is not None and record.sole:
                record.replay = replays.expect(request, steps)
        return result

    processor.add_request = add
