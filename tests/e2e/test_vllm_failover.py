"""Every kind of answer that can be continued, cut at ten places and continued on real vLLM.

One engine plays the lost worker and the one that goes on. What a client has seen in the end must be
what it would have seen undisturbed, byte for byte.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import time
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from shared.errors import Diverged
from shared.protocol import Delta
from tests.support import vllm as real
from tests.support.continuation import (
    ROWS,
    Row,
    Telling,
    Told,
    at_once,
    continued,
    tell,
    text_of,
)
from tests.support.waiting import until
from worker.engine import vllm_build, vllm_patches
from worker.engine.interface import Usage
from worker.engine.vllm import VllmEngine
from worker.resume import Past

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    # vLLM and what it imports warn of many deprecations, none of them ours.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM isn't installed"),
    pytest.mark.skipif(not real.MODEL.exists(), reason="no model: python compose/model.py"),
]

NAMES = [row.name for row in ROWS]
TOOL_ID = re.compile(rb'"id":"chatcmpl-tool-[0-9a-f]+"')


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "pythonic")
    async with real.running_engine(*real.ARGS, *tools, "--max-num-seqs", "16") as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(engine: VllmEngine) -> dict[str, Told]:
    """What each row's request is answered with when nothing happens."""
    made = await at_once(*(tell(engine, row, f"whole{at}") for at, row in enumerate(ROWS)))
    return dict(zip(NAMES, made, strict=True))


def same(told: Told, whole: Told, cut: int) -> None:
    """Check a continued answer; only a tool call that began after the cut has an id of its own."""
    early = b"".join(whole.events[:cut])
    ours, theirs = b"".join(told.events), b"".join(whole.events)
    if not TOOL_ID.search(early):
        ours, theirs = TOOL_ID.sub(b"", ours), TOOL_ID.sub(b"", theirs)
    assert ours == theirs, f"cut after {cut} of {len(whole.events)} events"
    assert told.steps == whole.steps
    assert told.call is not None
    assert whole.call is not None
    assert counted(told.call.usage) == counted(whole.call.usage)
    assert [len(tokens) for tokens in told.call.tokens] == [whole.call.usage.completion_tokens]


def counted(usage: Usage) -> tuple[int, int]:
    return usage.prompt_tokens, usage.completion_tokens


@pytest.mark.parametrize("name", NAMES)
async def test_an_answer_goes_on_as_if_nothing_had_happened(
    engine: VllmEngine, undisturbed: dict[str, Told], name: str
) -> None:
    row, whole = ROWS[NAMES.index(name)], undisturbed[name]
    assert engine.resumable(row.path, json.dumps(row.body).encode())
    cuts = whole.cuts()
    for cut, told in zip(
        cuts, await at_once(*(continued(engine, row, whole, cut) for cut in cuts)), strict=True
    ):
        same(told, whole, cut)


async def test_the_rows_are_what_they_are_called(undisturbed: dict[str, Told]) -> None:
    def text(name: str) -> str:
        return text_of(undisturbed[name].events)

    def end(name: str) -> Delta:
        return undisturbed[name].steps[-1]

    for name in NAMES:
        said = b"".join(undisturbed[name].events)
        assert (b'"name":"weather"' in said) == name.startswith("tool call"), name
    assert text("`response_format: json_schema`").startswith("{")
    assert re.fullmatch("(ab?c){9}", text("`structured_outputs` (regex)"))
    assert text("presence and frequency penalties") != text("chat") != text("repetition penalty")
    assert end("a stop string")[1:] == ("stop", "fox")
    assert not text("a stop string").endswith("fox")
    assert text("a stop string that is said").endswith("fox")
    assert end("stop tokens")[1] == "stop"
    assert isinstance(end("stop tokens")[2], int)
    several = undisturbed["characters of several tokens"]
    assert len(several.steps) > len(text("characters of several tokens"))
    assert len(undisturbed["`min_tokens`"].steps) >= 14
    assert "fox" in text("chat")
    assert "fox" not in text("`bad_words`")
    assert end("the model's own end")[1:] == ("stop", None)
    assert end("`max_tokens`")[1] == "length"
    stepped = undisturbed["several tokens an event (`stream_interval`)"].steps
    assert max(len(tokens) for tokens, _, _ in stepped) == 4


async def test_an_answer_can_be_cut_again_and_again(
    engine: VllmEngine, undisturbed: dict[str, Told]
) -> None:
    row, whole = ROWS[0], undisturbed["chat"]
    told = whole
    for cut in (4, 9, 16):
        told = await continued(engine, row, told, cut)
        same(told, whole, cut)


async def test_a_seeded_answer_goes_on_without_a_gap(engine: VllmEngine) -> None:
    """Its rest may be another one than it would have been; what was sent stays."""
    row = Row("", {"temperature": 1, "seed": 7, "ignore_eos": True})
    whole = await tell(engine, row, "seeded")
    told = await continued(engine, row, whole, 12)
    assert told.events[:12] == whole.events[:12]
    assert len(told.steps) == len(whole.steps) == row.tokens
    assert told.call is not None
    assert told.call.usage.completion_tokens == row.tokens
    assert len(text_of(told.events)) > len(text_of(whole.events[:12]))


async def test_an_answer_that_was_over_asks_the_engine_for_nothing(
    engine: VllmEngine, undisturbed: dict[str, Told]
) -> None:
    whole, made = undisturbed["the model's own end"], real.generated()
    row = ROWS[NAMES.index("the model's own end")]
    told = await continued(engine, row, whole, len(whole.events) - 1)
    same(told, whole, len(whole.events) - 1)
    assert real.generated() == made


async def test_only_the_rest_is_computed(engine: VllmEngine, undisturbed: dict[str, Told]) -> None:
    whole, made = undisturbed["chat"], real.generated()
    await continued(engine, ROWS[0], whole, 15)
    assert real.generated() - made == ROWS[0].tokens - whole.seen[14]


async def test_a_continued_request_that_is_left_is_forgotten(
    engine: VllmEngine, undisturbed: dict[str, Told]
) -> None:
    past = undisturbed["chat"].upto(5)
    async with Telling(engine, ROWS[0], "whole0", past) as telling:
        await telling.wait_events(8, timeout=real.PATIENCE)
        telling.disconnect()
        await telling.wait()
    processor = engine._llm.output_processor
    await until(lambda: engine.load().running == 0, "an idle engine")
    assert not processor.request_states
    assert not processor.external_req_ids


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("chat", [([1], None, None), ([2], "stop", "never said")]),
        ("a stop string", [([16438], None, None), ([1], None, None)]),
        ("chat", [([33011] * 2020, None, None)]),
    ],
    ids=["an end that isn't one", "an end too early", "longer than the model allows"],
)
async def test_what_leads_elsewhere_here_is_a_fault(
    engine: VllmEngine, name: str, steps: list[Delta]
) -> None:
    past = Past()
    past.tokens = steps
    row = ROWS[NAMES.index(name)]
    async with Telling(engine, row, "elsewhere", past) as telling:
        await telling.wait(real.PATIENCE)
    assert telling.call is not None
    assert telling.call.fault is not None
    assert "the engine failed: " in telling.call.fault
    assert not engine._llm.output_processor.request_states


async def test_another_answer_is_not_joined_to_what_was_sent(
    engine: VllmEngine, undisturbed: dict[str, Told]
) -> None:
    past = undisturbed["chat"].upto(6)
    past.tokens = [([3575], None, None), *past.tokens[1:]]
    with pytest.raises(Diverged):
        await tell(engine, ROWS[0], "whole0", past)


async def test_a_long_answer_is_gone_through_again_quickly(
    engine: VllmEngine, record_property: Callable[[str, object], None]
) -> None:
    """1,000 steps, while another answer goes on being told."""
    row = Row("", {"ignore_eos": True}, tokens=48)
    past = Past()
    past.tokens = [([260 + at % 50], None, None) for at in range(1000)]
    past.tokens += [([2], "stop", None)]
    other = asyncio.create_task(tell(engine, row, "other"))
    started = time.monotonic()
    told = await tell(engine, row, "long", past)
    took_s = time.monotonic() - started
    await other
    assert len(told.events) == 1003  # The role before, `[DONE]` after.
    record_property("replayed_1000_ms", round(took_s * 1000))
    assert took_s < 2


async def test_penalties_bend_the_rest_by_all_that_was_said(engine: VllmEngine) -> None:
    """Told that it had said one of two words fifty times, the model says the other."""
    row = Row("", {"allowed_token_ids": [260, 281], "frequency_penalty": 2}, tokens=60)
    firsts = []
    for said in (260, 281):
        past = Past()
        past.tokens = [([said], None, None)] * 50
        told = await tell(engine, row, f"bent{said}", past)
        firsts.append(told.steps[0][0])
    assert firsts == [[281], [260]]


async def test_an_engine_without_the_plugin_is_found_out(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await vllm_build.see_continued(engine._llm) == ""
    monkeypatch.setattr(vllm_patches, "KEY", "what another plugin reads")
    assert "plugin" in await vllm_build.see_continued(engine._llm)
    await until(lambda: engine.load().running == 0, "an idle engine")
    assert not engine._llm.output_processor.request_states
