"""Real vLLM on the demo's model, small enough for two cores, and requests made to it as jobs."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.support.asgi import AppCall
from worker.engine.interface import Call
from worker.engine.vllm import VllmEngine

MODEL = Path(__file__).parents[2] / ".headrace/models/SmolLM2-135M-Instruct"
NAME = "smollm2"
DEFAULT_MAX_TOKENS = 12
MAX_TOKENS_CEILING = 48

PATIENCE = 60
"""Seconds for an answer: the machine may be busy with other things."""

ARGS = [
    *(str(MODEL), "--served-model-name", NAME, "--max-model-len", "2048"),
    # On processors without bfloat16 arithmetic twice as fast, and exact.
    *("--enforce-eager", "--dtype", "float32", "--max-num-seqs", "8"),
]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

_numbers = itertools.count()


@asynccontextmanager
async def running_engine(*args: str) -> AsyncIterator[VllmEngine]:
    """Start vLLM, which takes most of a minute, and stop it; its environment is put back."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_HEADRACE_ENGINE", "VLLM_WORKER_MULTIPROC_METHOD"):
            patch.setenv(name, "")
            patch.delenv(name)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        engine = make_engine(*args)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()


def make_engine(*args: str) -> VllmEngine:
    """Build an engine; the arguments default to those of the shared one."""
    return VllmEngine(
        args or ARGS,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        max_tokens_ceiling=MAX_TOKENS_CEILING,
        warm_up_timeout_s=120,
    )


def job(engine: VllmEngine, path: str, *, max_tokens_given: bool = True, **body: Any) -> AppCall:
    """Make a request as the worker does: as a job, under the job's id."""
    call = Call(f"job{next(_numbers)}", max_tokens_given=max_tokens_given)
    headers = {"content-type": "application/json", "x-request-id": call.job_id}
    return AppCall(engine.app, path, {"model": NAME, **body}, headers=headers, call=call)


def chat(engine: VllmEngine, content: str, **body: Any) -> AppCall:
    """Say something to the model, which answers the same each time."""
    body.setdefault("temperature", 0)
    messages = [{"role": "user", "content": content}]
    return job(engine, "/v1/chat/completions", messages=messages, **body)


async def done(call: AppCall) -> AppCall:
    """Make the request, and return it when it has been answered."""
    async with call:
        return await call.wait(PATIENCE)


def chunks(call: AppCall) -> list[Any]:
    """Decode a stream's events, without the last one that says it is complete."""
    return [json.loads(event) for event in call.events if event != b"[DONE]"]


def generated() -> int:
    """Return vLLM's own count of the tokens that it has generated."""
    families = REGISTRY.collect()
    samples = (sample for family in families for sample in family.samples)
    return int(sum(s.value for s in samples if s.name == "vllm:generation_tokens_total"))


def cores() -> list[BaseProcess]:
    """Return this process's engine cores."""
    children = multiprocessing.active_children()
    return [child for child in children if child.name.startswith("EngineCore")]


def descendants(pid: int) -> list[int]:
    """Return the running processes below a process, whatever their names are."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state != "Z":
            child = int(stat.parent.name)
            found += [child, *descendants(child)]
    return found
