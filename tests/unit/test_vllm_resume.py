"""Going through an answer again: steps in, the same outputs out, and then the engine or nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from shared.protocol import Delta
from tests.unit.test_vllm_proxy import (
    DELTA,
    FINAL_ONLY,
    DeadError,
    FakeLLM,
    GenerateError,
    Params,
    drain,
    output,
)
from tests.unit.test_vllm_proxy import (
    State as Registered,
)
from worker.engine.interface import CURRENT, Call
from worker.engine.vllm_patches import KEY
from worker.engine.vllm_proxy import EngineProxy
from worker.engine.vllm_resume import Backlog, CannotContinueError, Replay, Replays

LIMIT = 100


@dataclass
class State:
    """Stands for what vLLM's output processor keeps of a request."""

    queue: Any
    prompt_len: int = 4
    stream_interval: int = 5
    sent_tokens_offset: int = 0
    is_prefilling: bool = True


class Queue:
    """Stands for vLLM's collector, which merges."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []

    def put(self, output: Any) -> None:
        self.waiting.append(output)

    def get_nowait(self) -> Any:
        return self.waiting.pop(0) if self.waiting else None


@dataclass
class Processor:
    """Passes steps on as outputs; ends a request by its finish reason or at token 13, "stop"."""

    request_states: dict[str, State] = field(default_factory=dict)
    tracing_enabled: bool = True
    aborted: list[str] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)

    def process_outputs(self, steps: list[Any]) -> None:
        assert not self.tracing_enabled
        for step in steps:
            state = self.request_states[step.id]
            assert state.stream_interval == 1
            self.seen.append(step)
            state.is_prefilling = False
            finish = "stop" if 13 in step.tokens else step.finish
            state.queue.put((step.tokens, finish))
            if finish:
                del self.request_states[step.id]

    def abort_requests(self, ids: list[str], internal: bool) -> None:
        assert internal
        self.aborted += ids
        for request_id in ids:
            self.request_states.pop(request_id, None)


class Core:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def add_request_async(self, request: Any) -> None:
        self.asked.append(request)


def make_step(request_id: str, tokens: list[int], finish: str | None, stop: Any) -> Any:
    return SimpleNamespace(id=request_id, tokens=tokens, finish=finish, stop=stop)


def request(request_id: str = "r") -> Any:
    return SimpleNamespace(
        request_id=request_id, sampling_params=SimpleNamespace(extra_args={"left": 1})
    )


@dataclass
class Scene:
    """One request, registered, and the core that may be asked for it."""

    steps: list[Delta]
    prompt: int = 4
    processor: Processor = field(default_factory=Processor)
    core: Core = field(default_factory=Core)
    queue: Queue = field(default_factory=Queue)

    def __post_init__(self) -> None:
        self.request = request()
        self.state = State(self.queue, prompt_len=self.prompt)
        self.processor.request_states["r"] = self.state
        llm = SimpleNamespace(
            output_processor=self.processor,
            engine_core=self.core,
            model_config=SimpleNamespace(max_model_len=LIMIT),
        )
        self.replays = Replays(llm, make_step)
        self.replay: Replay = self.replays.expect(self.request, self.steps)

    async def submit(self) -> None:
        await self.core.add_request_async(self.request)

    def told(self) -> list[Any]:
        """Return what the application gets, as it asks for it."""
        told = []
        while output := self.queue.get_nowait():
            told.append(output)
        return told


async def test_the_steps_are_told_one_by_one_and_then_the_engine_is_asked() -> None:
    scene = Scene([([1, 2], None, None), ([3], None, None)])
    await scene.submit()
    assert scene.replay.outputs == 2
    assert scene.core.asked == [scene.request]
    assert scene.request.sampling_params.extra_args == {KEY: [1, 2, 3]}
    scene.queue.put("from the engine")
    assert scene.told() == [([1, 2], None), ([3], None), "from the engine"]
    assert "get_nowait" not in vars(scene.queue)


async def test_the_requests_state_is_as_before_but_for_what_was_said() -> None:
    scene = Scene([([1, 2], None, None), ([3], None, None)])
    await scene.submit()
    assert scene.state == State(scene.queue, sent_tokens_offset=3)
    assert scene.processor.tracing_enabled


@pytest.mark.parametrize(
    ("last", "fed"),
    [
        (([2], "stop", None), ("stop", None)),
        (([2], "stop", 2), ("stop", 2)),
        (([2], "length", None), ("length", None)),
        (([2], "repetition", "repetition_detected"), ("repetition", "repetition_detected")),
        # The stop string must be found anew: the text before it depends on that.
        (([13], "stop", "word"), (None, None)),
        (([], "stop", None), ("stop", None)),
    ],
)
async def test_an_answer_that_was_over_is_told_without_the_engine(
    last: Delta, fed: tuple[str | None, Any]
) -> None:
    scene = Scene([([1], None, None), last])
    await scene.submit()
    assert scene.core.asked == []
    assert len(scene.told()) == 2
    assert (scene.processor.seen[-1].finish, scene.processor.seen[-1].stop) == fed
    assert scene.processor.aborted == []


@pytest.mark.parametrize(
    ("steps", "prompt", "why"),
    [
        ([([13], None, None), ([1], None, None)], 4, "ended at step 1 of 2"),
        ([([1], None, None), ([2], "stop", "word")], 4, "didn't end where it had"),
        ([([1], None, None), ([2], None, None)], LIMIT - 2, "max_model_len"),
    ],
)
async def test_what_leads_elsewhere_is_refused_and_forgotten(
    steps: list[Delta], prompt: int, why: str
) -> None:
    scene = Scene(steps, prompt)
    with pytest.raises(CannotContinueError, match=why):
        await scene.submit()
    assert scene.core.asked == []
    assert scene.processor.aborted == ["r"]
    assert scene.processor.request_states == {}


async def test_a_request_that_is_left_meanwhile_is_forgotten() -> None:
    scene = Scene([([1], None, None)] * 64)
    submitting = asyncio.create_task(scene.submit())
    await asyncio.sleep(0)
    assert len(scene.processor.seen) == 32
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert scene.processor.aborted == ["r"]
    assert scene.core.asked == []


async def test_other_requests_go_straight_to_the_engine() -> None:
    scene = Scene([([1], None, None)])
    other = request("other")
    await scene.core.add_request_async(other)
    assert scene.core.asked == [other]
    assert other.sampling_params.extra_args == {"left": 1}


async def test_a_request_is_gone_through_once() -> None:
    scene = Scene([([1], None, None)])
    await scene.submit()
    await scene.submit()
    assert len(scene.processor.seen) == 1


def test_an_error_among_the_outputs_is_raised() -> None:
    with pytest.raises(ValueError, match="broken"):
        Backlog().put(ValueError("broken"))


# --- the proxy ---


def proxy_of(llm: Any) -> EngineProxy:
    llm.engine_core = Core()
    llm.model_config = SimpleNamespace(max_model_len=LIMIT)
    return EngineProxy(
        llm,
        default_max_tokens=16,
        max_tokens_ceiling=64,
        dead_error=DeadError,
        generate_error=GenerateError,
        delta_kind=DELTA,
        make_step=make_step,
    )


@pytest.fixture
def call() -> Any:
    """A job of which this test is the application."""
    made = Call("j1")
    token = CURRENT.set(made)
    yield made
    CURRENT.reset(token)


SCRIPT = [output((0, [1, 2], None)), output((0, [3], "stop"))]


async def test_the_steps_that_the_application_sees_are_recorded(call: Call) -> None:
    outputs = proxy_of(FakeLLM(list(SCRIPT))).generate("p", Params(), "r")
    await anext(outputs)
    assert call.deltas == [([1, 2], None, None)]
    call.deltas.clear()  # As the worker does when it publishes them.
    assert await drain(outputs) == 1
    assert call.deltas == [([3], "stop", None)]


@pytest.mark.parametrize(
    "params", [Params(output_kind=FINAL_ONLY), Params(n=2), Params(n=1, output_kind="cumulative")]
)
async def test_answers_that_nobody_could_continue_are_not(call: Call, params: Params) -> None:
    script = [output((0, [1, 2, 3], "stop"))]
    await drain(proxy_of(FakeLLM(script)).generate("p", params, "r"))
    assert call.deltas == []


async def test_nor_are_those_of_several_prompts(call: Call) -> None:
    proxy = proxy_of(FakeLLM(list(SCRIPT)))
    both = [proxy.generate("p", Params(), f"r-{i}") for i in range(2)]
    await asyncio.gather(*(drain(one) for one in both))
    assert call.deltas == []


async def test_an_end_that_the_engine_was_not_asked_for_is_not_recorded(call: Call) -> None:
    script = [output((0, [1], None)), output((0, [2], "abort"))]
    with pytest.raises(GenerateError):
        await drain(proxy_of(FakeLLM(script)).generate("p", Params(), "r"))
    assert call.deltas == [([1], None, None)]


async def test_what_was_recorded_before_counts_but_is_not_recorded_again(call: Call) -> None:
    call.resume = [([1, 2], None, None)]
    fed = asyncio.Event()
    proxy = proxy_of(FakeLLM([fed, *SCRIPT]))
    outputs = proxy.generate("p", Params(), "r")
    waiting = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0)
    (record,) = proxy._running["j1"]
    assert record.replay is not None
    # What feeding would have found, had this been vLLM.
    record.replay.outputs = 1
    fed.set()
    await waiting
    assert await drain(outputs) == 1
    assert call.deltas == [([3], "stop", None)]
    assert call.usage.completion_tokens == 3
    assert call.tokens == [[1, 2, 3]]


async def test_a_beginning_answer_is_not_held_back(call: Call) -> None:
    llm = FakeLLM(list(SCRIPT), lambda request_id: [Registered(request_id)])
    proxy = proxy_of(llm)
    outputs = proxy.generate("p", Params(), "r")
    await anext(outputs)
    (record,) = proxy._running["j1"]
    assert record.replay is None
    await outputs.aclose()
