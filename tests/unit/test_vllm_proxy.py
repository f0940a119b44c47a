"""The proxy before vLLM's engine: limits, accounts and faults, on an engine made of a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from worker.engine.interface import CURRENT, Call, Usage
from worker.engine.vllm_proxy import EngineProxy

DELTA, CUMULATIVE, FINAL_ONLY = "delta", "cumulative", "final_only"


class DeadError(Exception):
    """Stands for vLLM's EngineDeadError."""


class GenerateError(Exception):
    """Stands for vLLM's EngineGenerateError."""


@dataclass
class Params:
    """Stands for SamplingParams."""

    n: int = 1
    max_tokens: int | None = 10
    min_tokens: int = 0
    output_kind: str = DELTA
    extra_args: dict[str, Any] | None = None


@dataclass
class State:
    """Stands for what vLLM's output processor keeps of a request."""

    request_id: str
    request_index: int = 0
    prompt_len: int = 4
    num_cached_tokens: int = 0
    made: list[int] = field(default_factory=list)
    parent_req: Any = None
    pooling: bool = False

    @property
    def detokenizer(self) -> Any:
        return None if self.pooling else SimpleNamespace(output_token_ids=self.made)


def output(*choices: tuple[int, list[int], str | None], cached: int = 0, prompt: int = 4) -> Any:
    return SimpleNamespace(
        prompt_token_ids=[0] * prompt,
        num_cached_tokens=cached,
        finished=False,
        outputs=[SimpleNamespace(index=i, token_ids=t, finish_reason=f) for i, t, f in choices],
    )


def pooled(numbers: int, *, error: Any = None) -> Any:
    data = SimpleNamespace(numel=lambda: numbers)
    return SimpleNamespace(
        prompt_token_ids=[0] * 3,
        num_cached_tokens=1,
        finished=True,
        outputs=SimpleNamespace(data=data),
        error=error,
    )


class Processor:
    def __init__(self) -> None:
        self.request_states: dict[str, State] = {}

    def add_request(self, request: State, prompt: Any = None) -> None:
        self.request_states[request.request_id] = request


class FakeLLM:
    """Registers each request's states, then plays its script: outputs, errors, waits."""

    def __init__(self, script: list[Any], states: Callable[[str], list[State]] | None = None):
        self.output_processor = Processor()
        self.started: list[tuple[Any, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.closed = 0
        self.is_tracing_enabled = "AsyncLLM's own"
        self.dead_error = DeadError("gone")
        self._script = script
        self._states = states or (lambda request_id: [State(request_id)])

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **kw: Any
    ) -> AsyncGenerator[Any, None]:
        self.started.append((params, kw))
        try:
            if isinstance(prompt, Exception):
                raise prompt
            for state in self._states(request_id):
                self.output_processor.add_request(state)
            for step in self._script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            self.closed += 1
            self.output_processor.request_states.clear()

    encode = generate

    async def abort(self, ids: list[str], internal: bool = False) -> None:
        assert internal
        self.aborted += ids

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kw: Any) -> None:
        self.aborted.append("notified")


def proxy_of(llm: FakeLLM) -> EngineProxy:
    return EngineProxy(
        llm,
        default_max_tokens=16,
        max_tokens_ceiling=64,
        dead_error=DeadError,
        generate_error=GenerateError,
        delta_kind=DELTA,
    )


async def drain(outputs: AsyncGenerator[Any, None]) -> int:
    return len([output async for output in outputs])


@pytest.fixture
def call() -> Any:
    """A job of which this test is the application."""
    made = Call("j1")
    token = CURRENT.set(made)
    yield made
    CURRENT.reset(token)


# --- limits ---


@pytest.mark.parametrize(
    ("given", "asked", "allowed"),
    [
        (True, 10, 10),
        (True, 64, 64),
        (True, 65, 64),
        (True, None, 64),
        (False, 2000, 16),
        (False, 8, 8),
        (False, None, 16),
    ],
)
async def test_max_tokens_is_held_to_the_ceiling_and_absent_means_the_default(
    call: Call, given: bool, asked: int | None, allowed: int
) -> None:
    call.max_tokens_given = given
    llm = FakeLLM([])
    await drain(proxy_of(llm).generate("p", Params(max_tokens=asked), "r"))
    assert llm.started[0][0].max_tokens == allowed


@pytest.mark.parametrize(
    ("given", "asked", "own", "allowed"),
    [
        (True, 65, 10, 10),
        (True, 8, 10, 8),
        (True, 65, 99, 64),
        (False, None, 10, 10),
        (False, 9, 99, 9),
    ],
)
async def test_max_tokens_is_held_to_the_callers_own_ceiling(
    call: Call, given: bool, asked: int | None, own: int, allowed: int
) -> None:
    call.max_tokens_given, call.max_tokens = given, own
    llm = FakeLLM([])
    await drain(proxy_of(llm).generate("p", Params(max_tokens=asked, min_tokens=50), "r"))
    assert llm.started[0][0].max_tokens == allowed
    assert llm.started[0][0].min_tokens == min(50, allowed)


async def test_min_tokens_does_not_ask_for_more_than_the_ceiling(call: Call) -> None:
    llm = FakeLLM([])
    await drain(proxy_of(llm).generate("p", Params(max_tokens=500, min_tokens=400), "r"))
    assert llm.started[0][0].min_tokens == 64


async def test_a_client_reaches_neither_priority_nor_extra_args(call: Call) -> None:
    llm = FakeLLM([])
    params = Params(extra_args={"kv_transfer_params": {"do_remote_prefill": True}, "own": 1})
    await drain(
        proxy_of(llm).generate(
            "p", params, "r", priority=-9, data_parallel_rank=7, trace_headers={"a": "b"}
        )
    )
    assert llm.started == [(Params(), {"trace_headers": {"a": "b"}})]


async def test_kv_transfer_params_of_a_refused_request_go_nowhere(call: Call) -> None:
    llm = FakeLLM([])
    await proxy_of(llm).notify_kv_transfer_request_rejected("r", {"do_remote_prefill": True})
    assert llm.aborted == []


async def test_a_beam_search_is_limited_as_a_whole_and_its_prompt_counted_once(call: Call) -> None:
    llm = FakeLLM([output((0, [1], "length"))])
    proxy = proxy_of(llm)
    limits = []

    async def beam_search(*, prompt: Any, params: Any, request_id: str) -> None:
        limits.append(params.max_tokens)
        for step in range(3):
            await drain(proxy.generate(prompt, Params(max_tokens=1), f"{request_id}-{step}"))

    limited = proxy.limited_beams(beam_search)
    await limited(
        prompt={"prompt_token_ids": [0] * 4}, params=Params(max_tokens=999), request_id=""
    )
    assert limits == [64]
    assert call.usage == Usage(prompt_tokens=4, completion_tokens=3)


async def test_a_call_that_is_no_job_passes_through_untouched() -> None:
    llm = FakeLLM([output((0, [1], "abort"))])
    params = Params(max_tokens=5000, extra_args={"own": 1})
    assert await drain(proxy_of(llm).generate("p", params, "r", priority=3)) == 1
    assert llm.started == [(Params(max_tokens=5000, extra_args={"own": 1}), {"priority": 3})]


async def test_everything_else_is_the_engines_own(call: Call) -> None:
    assert proxy_of(FakeLLM([])).is_tracing_enabled == "AsyncLLM's own"


# --- accounts ---

SCRIPTS = {
    DELTA: [[1, 2], [3], [4, 5]],
    CUMULATIVE: [[1, 2], [1, 2, 3], [1, 2, 3, 4, 5]],
    FINAL_ONLY: [[1, 2, 3, 4, 5]],
}


@pytest.mark.parametrize("kind", SCRIPTS)
async def test_usage_and_tokens_are_the_same_for_every_kind_of_output(
    call: Call, kind: str
) -> None:
    parts = SCRIPTS[kind]
    last = len(parts) - 1
    script = [
        output((0, ids, "stop" if i == last else None), cached=2) for i, ids in enumerate(parts)
    ]
    await drain(proxy_of(FakeLLM(script)).generate("p", Params(output_kind=kind), "r"))
    assert call.usage == Usage(prompt_tokens=4, completion_tokens=5, cached_tokens=2)
    assert call.tokens == [[1, 2, 3, 4, 5]]
    assert call.fault is None


async def test_several_choices_share_one_prompt(call: Call) -> None:
    script = [
        output((0, [1], None), (1, [7], None)),
        output((1, [8], "stop")),
        output((0, [2, 3], "length")),
    ]
    await drain(proxy_of(FakeLLM(script)).generate("p", Params(n=2), "r"))
    assert call.usage == Usage(prompt_tokens=4, completion_tokens=5)
    assert call.tokens == [[1, 2, 3], [7, 8]]


async def test_several_prompts_count_each(call: Call) -> None:
    proxy = proxy_of(FakeLLM([output((0, [1], "stop"), cached=1)]))
    both = [proxy.generate("p", Params(), f"r-{i}") for i in range(2)]
    await asyncio.gather(*(drain(one) for one in both))
    assert call.usage == Usage(prompt_tokens=8, completion_tokens=2, cached_tokens=2)
    assert call.tokens == [[1], [1]]


async def test_embedding_counts_its_prompt(call: Call) -> None:
    llm = FakeLLM([pooled(576)], lambda r: [State(r, prompt_len=3, pooling=True)])
    await drain(proxy_of(llm).encode("p", SimpleNamespace(), "r", priority=2))
    assert call.usage == Usage(prompt_tokens=3, cached_tokens=1)
    assert llm.started[0][1] == {}


async def test_tokens_that_nobody_read_count_after_a_disconnect(call: Call) -> None:
    states = [State("0_r", 0, made=[1, 2, 3]), State("1_r", 1, made=[4])]
    llm = FakeLLM([asyncio.Event()], lambda _: states)
    proxy = proxy_of(llm)
    task = asyncio.create_task(drain(proxy.generate("p", Params(n=2, output_kind=FINAL_ONLY), "r")))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert call.usage == Usage(prompt_tokens=4, completion_tokens=4)
    assert call.tokens == [[1, 2, 3], [4]]
    assert call.fault is None
    assert llm.closed == 1


async def test_a_stream_that_is_left_is_closed_at_once_and_no_fault(call: Call) -> None:
    llm = FakeLLM([output((0, [1], None)), output((0, [2], None))])
    outputs = proxy_of(llm).generate("p", Params(), "r")
    await anext(outputs)
    assert llm.closed == 0
    await outputs.aclose()
    assert llm.closed == 1
    assert call.fault is None
    assert call.usage == Usage(prompt_tokens=4, completion_tokens=1)


async def test_a_request_that_the_engine_never_got_costs_nothing(call: Call) -> None:
    invalid = GenerateError("the input could not be processed")
    with pytest.raises(GenerateError):
        await drain(proxy_of(FakeLLM([])).generate(invalid, Params(), "r"))
    assert call.usage == Usage()
    assert call.fault is None


# --- faults ---


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_uninvited_end_is_a_fault_and_reaches_the_application_as_one(
    call: Call, reason: str
) -> None:
    script = [output((0, [1, 2], None)), output((0, [3], reason))]
    outputs = proxy_of(FakeLLM(script)).generate("p", Params(), "r")
    await anext(outputs)
    with pytest.raises(GenerateError):
        await anext(outputs)
    assert call.fault == f"the engine ended the request: {reason}"
    assert call.tokens == [[1, 2, 3]]


async def test_one_choice_of_several_ending_uninvited_is_a_fault(call: Call) -> None:
    script = [output((0, [1], "stop"), (1, [2], "abort"))]
    with pytest.raises(GenerateError):
        await drain(proxy_of(FakeLLM(script)).generate("p", Params(n=2), "r"))
    assert call.fault is not None


async def test_a_dead_engine_is_a_fault(call: Call) -> None:
    script = [output((0, [1], None)), DeadError("gone")]
    with pytest.raises(DeadError):
        await drain(proxy_of(FakeLLM(script)).generate("p", Params(), "r"))
    assert call.fault == "the engine is dead: gone"


async def test_an_engine_that_was_dead_before_the_request_is_a_fault(call: Call) -> None:
    proxy = proxy_of(FakeLLM([]))
    with pytest.raises(DeadError):
        await drain(proxy.generate(DeadError("gone"), Params(), "r"))
    assert call.fault == "the engine is dead: gone"


async def test_an_application_that_finds_the_engine_dead_is_a_fault(call: Call) -> None:
    assert isinstance(proxy_of(FakeLLM([])).dead_error, DeadError)
    assert call.fault == "the engine is dead"


async def test_an_engine_that_fails_at_one_request_is_a_fault(call: Call) -> None:
    script = [output((0, [1], None)), GenerateError("out of range")]
    with pytest.raises(GenerateError):
        await drain(proxy_of(FakeLLM(script)).generate("p", Params(), "r"))
    assert call.fault == "the engine failed: out of range"


async def test_a_clients_error_is_not_a_fault(call: Call) -> None:
    script = [ValueError("no such adapter")]
    with pytest.raises(ValueError, match="adapter"):
        await drain(proxy_of(FakeLLM(script)).generate("p", Params(), "r"))
    assert call.fault is None


async def test_an_embedding_without_numbers_is_a_fault(call: Call) -> None:
    llm = FakeLLM([pooled(0)], lambda r: [State(r, pooling=True)])
    with pytest.raises(GenerateError):
        await drain(proxy_of(llm).encode("p", SimpleNamespace(), "r"))
    assert call.fault == "the engine ended the request: abort"


# --- abort ---


async def test_aborting_a_job_ends_its_requests_through_their_parents_and_is_no_fault(
    call: Call,
) -> None:
    parent = SimpleNamespace(request_id="r")
    states = [State(f"{i}_r", i, made=[i], parent_req=parent) for i in range(2)]
    aborted = asyncio.Event()
    llm = FakeLLM([aborted, output((0, [], "abort"), (1, [], "abort"))], lambda _: states)
    proxy = proxy_of(llm)
    task = asyncio.create_task(drain(proxy.generate("p", Params(n=2), "r")))
    await asyncio.sleep(0)
    await proxy.abort_job("another")
    assert llm.aborted == []
    await proxy.abort_job("j1")
    assert llm.aborted == ["r"]
    assert call.usage.completion_tokens == 2
    aborted.set()
    assert await task == 1
    assert call.fault is None
    assert call.usage.completion_tokens == 2


async def test_nothing_is_remembered_of_jobs_that_have_ended(call: Call) -> None:
    llm = FakeLLM([output((0, [1], "stop"))])
    proxy = proxy_of(llm)
    await drain(proxy.generate("p", Params(), "r"))
    await proxy.abort_job("j1")
    assert llm.aborted == []
