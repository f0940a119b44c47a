"""Workers with real vLLM that are killed while they stream: their clients notice a pause.

Answers of several kinds, staggered so that a loss meets each at another moment, are compared with
what the same pool says undisturbed. `make faults` kills at ten moments, `make test` at one.

python -m pytest -p tests.faults.report tests/e2e/test_vllm_failover_processes.py
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.faults.aftermath import Inspector
from tests.faults.clients import EXACT
from tests.faults.scene import Record, Result
from tests.faults.scene import Row as Fault
from tests.support import vllm as real
from tests.support.continuation import COMPLETIONS, ROWS, Row
from tests.support.processes import Pool, WorkerProcess
from tests.support.sse import Event, open_response
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM isn't installed"),
    pytest.mark.skipif(not real.MODEL.exists(), reason="no model: python compose/model.py"),
]

USAGE = {"stream_options": {"include_usage": True}}
LONG = 48
KINDS = [
    Row(row.name, {**row.fields, **USAGE}, row.says, row.path, LONG)
    for row in ROWS
    if row.name
    in (
        "chat",
        "tool call, `tool_choice: required`",
        "`response_format: json_schema`",
        "presence and frequency penalties",
        "a stop string",
        "characters of several tokens",
        "usage throughout",
        "completions, tokens",
    )
]
STAGGER_S = 0.25
AT_ONCE = 4
"""Answers under way when a worker is killed."""
START_S = 300.0

Kill = Callable[[WorkerProcess], None]


@dataclass(eq=False)
class Stream:
    """A request as a client makes it, and what came of it."""

    row: Row
    events: list[Event] = field(default_factory=list)
    job_id: str = ""

    async def run(self, url: str) -> None:
        async with open_response(url + self.row.path, self.row.body) as response:
            assert response.status == 200, await response.body()
            self.job_id = response.headers["x-job-id"]
            async for event in response.events():
                if event.data is not None:
                    self.events.append(event)
            last = self.events[-1].data if self.events else None
            assert response.clean, f"{self.job_id} ({self.row.name}): {response.ending} at {last}"

    @property
    def stall_s(self) -> float:
        """The longest pause between two events."""
        times = [event.at for event in self.events]
        return max(after - before for before, after in pairwise(times))

    def said(self) -> dict[str, Any]:
        """Return what a client makes of it: not how it was cut into events."""
        assert self.events, self.row.name
        assert self.events[-1].done, self.events[-1]
        chunks = [event.json() for event in self.events[:-1]]
        assert all("error" not in chunk for chunk in chunks), chunks[-1]
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        prefix = "cmpl" if self.row.path == COMPLETIONS else "chatcmpl"
        assert chunks[0]["id"].startswith(f"{prefix}-{self.job_id}")
        text, arguments = "", ""
        roles, names, ids, finishes = [], [], [], []
        for chunk in chunks:
            for choice in chunk["choices"]:
                delta = choice.get("delta", choice)
                text += delta.get("content") or delta.get("text") or ""
                roles += [delta["role"]] if delta.get("role") else []
                finishes += [choice["finish_reason"]] if choice.get("finish_reason") else []
                for call in delta.get("tool_calls") or []:
                    ids += [call["id"]] if call.get("id") else []
                    names += [call["function"]["name"]] if call["function"].get("name") else []
                    arguments += call["function"].get("arguments") or ""
        assert len(ids) == len(names)
        usages = [chunk["usage"] for chunk in chunks if not chunk["choices"]]
        return {
            "text": text,
            "arguments": arguments,
            "roles": roles,
            "names": names,
            "finishes": finishes,
            "usages": usages,
        }


@dataclass
class Stage:
    """Two workers, a gateway, and what they say undisturbed."""

    pool: Pool
    inspector: Inspector
    undisturbed: dict[str, dict[str, Any]] = field(default_factory=dict)

    async def replace(self) -> None:
        """Have two workers again."""
        while sum(worker.running for worker in self.pool.workers) < 2:
            self.pool.add_worker()
        await self.pool.wait_ready()

    async def owners(self, streams: list[Stream]) -> list[str]:
        """Return the names of the workers that streams come from."""
        jobs = await self.inspector.jobs([stream.job_id for stream in streams])
        return [jobs[stream.job_id].worker for stream in streams]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    with pytest.MonkeyPatch.context() as patch, ValkeyServer() as server:
        for name, value in real.ENVIRONMENT.items():
            patch.setenv(name, value)
        inspector = Inspector(server.url)
        async with Pool(
            server.url,
            *real.ARGS,
            *("--enable-auto-tool-choice", "--tool-call-parser", "pythonic"),
            workers=2,
            engine="vllm",
            gateway={"registry_refresh_s": 0.1},
            timeout=START_S,
        ) as pool:
            made = Stage(pool, inspector)
            streams = [Stream(row) for row in KINDS]
            await asyncio.gather(*(stream.run(pool.url) for stream in streams))
            made.undisturbed = {stream.row.name: stream.said() for stream in streams}
            yield made
        await inspector.close()


def core_of(worker: WorkerProcess) -> int:
    """Return the process of a worker's engine core."""
    for pid in real.descendants(worker.pid):
        if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    raise AssertionError("no engine core")


def kill_worker(worker: WorkerProcess) -> None:
    worker.kill()


def kill_core(worker: WorkerProcess) -> None:
    os.kill(core_of(worker), signal.SIGKILL)


def ended(stream: Stream) -> bool:
    return bool(stream.events) and stream.events[-1].done


async def disturb(stage: Stage, kill: Kill, when: int) -> tuple[list[Stream], list[Stream]]:
    """Kill a worker that tells several answers, one of them `when` events long.

    Returns all streams, and those that were cut.
    """
    streams = [Stream(row) for row in KINDS]

    async def worth_killing() -> list[Stream]:
        begun = [s for s in streams if s.events and not ended(s)]
        if len(begun) < AT_ONCE or all(len(s.events) < when for s in begun):
            return []
        by_worker: dict[str, list[Stream]] = {}
        for name, stream in zip(await stage.owners(begun), begun, strict=True):
            by_worker.setdefault(name, []).append(stream)
        return max(by_worker.values(), key=len)

    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.run(stage.pool.url))
            await asyncio.sleep(STAGGER_S)
        hit = await until(worth_killing, f"{when} events", timeout=real.PATIENCE, every=0.01)
        (name, *_) = await stage.owners(hit)
        victim = next(worker for worker in stage.pool.workers if worker.name == name)
        kill(victim)
        # Only what still had something to say is a proof.
        hit = [s for s in hit if not ended(s)]
    assert await victim.wait(timeout=30) != 0
    return streams, hit


async def prove(stage: Stage, streams: list[Stream], hit: list[Stream]) -> None:
    """Check what clients got, and what the queue tells of it."""
    for stream in streams:
        assert stream.said() == stage.undisturbed[stream.row.name], stream.row.name
    assert hit, "the worker was killed when it told nothing"
    jobs = await stage.inspector.jobs([stream.job_id for stream in streams])
    await stage.inspector.check_ended_once(jobs)
    for stream in streams:
        usage = jobs[stream.job_id].usage
        assert usage is not None
        (said,) = stage.undisturbed[stream.row.name]["usages"]
        assert usage.prompt_tokens == said["prompt_tokens"]
        assert usage.completion_tokens == said["completion_tokens"]
    for stream in hit:
        assert jobs[stream.job_id].attempts == 2


async def show(stage: Stage, fault: Fault, kill: Kill, moments: list[int], record: Record) -> None:
    """Kill at each of the moments; the row for the table is of the answers that were cut."""
    result = Result(fault)
    record("fault", fault.name)
    for when in moments:
        await stage.replace()
        try:
            streams, hit = await disturb(stage, kill, when)
            await prove(stage, streams, hit)
        except BaseException:
            for process in stage.pool.processes:
                sys.stderr.write(f"--- {process.name}, {when}\n{process.log[-6000:]}\n")
            raise
        result.outcomes[EXACT] += len(hit)
        result.stalls += [stream.stall_s for stream in hit]
    result.stalls.sort()
    assert result.stalls[-1] <= fault.stall_s, result.stalls
    record("result", result)


@pytest.fixture
def everything(request: pytest.FixtureRequest) -> bool:
    """Whether this is `make faults`."""
    return bool(request.config.pluginmanager.has_plugin("tests.faults.report"))


async def test_the_pool_says_all_kinds(stage: Stage) -> None:
    said = stage.undisturbed
    assert said["chat"]["text"]
    assert said["tool call, `tool_choice: required`"]["names"] == ["weather"]
    assert said["`response_format: json_schema`"]["text"].startswith("{")
    assert said["a stop string"]["finishes"] == ["stop"]
    assert said["chat"]["usages"][0]["completion_tokens"] == LONG


async def test_answers_of_a_killed_worker_go_on(
    stage: Stage, everything: bool, record_property: Record
) -> None:
    fault = Fault("worker with vLLM SIGKILL, 10 moments", stall_s=8.0)
    moments = [2, 5, 9, 13, 17, 21, 26, 31, 36, 41] if everything else [9]
    await show(stage, fault, kill_worker, moments, record_property)


async def test_answers_of_a_killed_engine_go_on(
    stage: Stage, everything: bool, record_property: Record
) -> None:
    """Its worker gives them back at once, and ends."""
    fault = Fault("vLLM's engine process SIGKILL", stall_s=8.0)
    await show(stage, fault, kill_core, [7, 15, 30] if everything else [15], record_property)
