"""A pool with real vLLM behind two gateways, and what its engine says of itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.aftermath import Inspector, JobState
from tests.support import vllm as real
from tests.support.processes import Pool
from tests.support.sse import Wire, connect, fetch, request_bytes
from tests.support.valkey import ValkeyServer, free_port
from tests.support.waiting import until

SEATS = 8
CEILING = 120
"""Some seconds of decoding: a test that leaves would notice an engine that goes on."""

ARGS = [
    *real.ARGS,
    *("--enable-auto-tool-choice", "--tool-call-parser", "pythonic"),
    # A long prompt takes many short steps: the one that runs when a client leaves is not cut short.
    *("--max-num-batched-tokens", "128"),
]
START_S = 240.0

ENDLESS = {"ignore_eos": True, "max_tokens": CEILING, "temperature": 0}
CHAT = "/v1/chat/completions"

_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_KV, _GENERATED = "vllm:kv_cache_usage_perc", "vllm:generation_tokens_total"
_JOBS = "headrace_worker_running_jobs"


@dataclass(frozen=True)
class EngineLoad:
    """What the worker's `/metrics` say at one moment."""

    running: float
    waiting: float
    kv: float
    jobs: float
    generated: float

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.jobs)


class Stage:
    """The pool, and a look at its engine and its queue."""

    def __init__(self, pool: Pool, server: ValkeyServer, inspector: Inspector, port: int) -> None:
        self.pool = pool
        self.server = server
        self.inspector = inspector
        self.baseline = 0.0
        """Share of the KV cache in use when nothing runs."""
        self._metrics = f"http://127.0.0.1:{port}/metrics"

    def client(self, gateway: int = 0) -> AsyncOpenAI:
        """Return an SDK client that tries once."""
        url = f"{self.pool.gateways[gateway].url}/v1"
        return AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=real.PATIENCE)

    async def send(self, body: Mapping[str, Any], path: str = CHAT, gateway: int = 0) -> Wire:
        """Send a request on a raw socket and read nothing."""
        url = self.pool.gateways[gateway].url
        wire = await connect(url)
        await wire.send(request_bytes(url + path, {"model": real.NAME, **body}))
        return wire

    async def samples(self) -> dict[str, float]:
        """Return the worker's metrics, summed over their labels."""
        return totals((await fetch(self._metrics))[1].decode())

    async def load(self) -> EngineLoad:
        told = await self.samples()
        return EngineLoad(*(told[name] for name in (_RUNNING, _WAITING, _KV, _JOBS, _GENERATED)))

    async def until_running(self, count: int) -> EngineLoad:
        """Wait until the engine runs so many requests."""
        seen: list[EngineLoad] = []

        async def running() -> EngineLoad:
            load = await self.load()
            if load not in seen[-1:]:
                seen.append(load)
            assert load.running == count, seen[:8] + seen[-2:]
            return load

        return await until(running, f"{count} running", timeout=real.PATIENCE)

    async def until_generated(self, tokens: float) -> EngineLoad:
        """Wait until the engine's count of tokens has reached a number."""

        async def generated() -> EngineLoad:
            load = await self.load()
            assert load.generated >= tokens, load
            return load

        return await until(generated, f"{tokens} tokens", timeout=real.PATIENCE)

    async def until_idle(self, timeout: float = 1) -> None:
        """Wait for the engine to run nothing and to hold nothing in its cache."""

        async def idle() -> bool:
            load = await self.load()
            assert load.idle, load
            assert load.kv == self.baseline, load
            return True

        await until(idle, "an idle engine", timeout=timeout, every=0.01)

    async def job_ids(self) -> set[str]:
        return set(await self.inspector.job_ids())

    async def new_jobs(self, before: set[str], count: int) -> set[str]:
        """Wait until there are so many more jobs than before, and return their ids."""

        async def arrived() -> set[str]:
            new = await self.job_ids() - before
            assert len(new) == count, new
            return new

        return await until(arrived, f"{count} jobs", timeout=real.PATIENCE, every=0.005)

    async def ended(self, ids: set[str], timeout: float = 1) -> dict[str, JobState]:
        """Wait until all of these jobs have ended, and return them."""

        async def over() -> dict[str, JobState]:
            jobs = await self.inspector.jobs(ids)
            assert all(job.outcome for job in jobs.values()), jobs
            return jobs

        return await until(over, "the jobs' ends", timeout=timeout, every=0.005)


@asynccontextmanager
async def running_stage() -> AsyncIterator[Stage]:
    """Start everything, which takes most of a minute."""
    port = free_port()
    worker = {
        "metrics_port": port,
        "default_max_tokens": real.DEFAULT_MAX_TOKENS,
        "max_tokens_ceiling": CEILING,
    }
    with pytest.MonkeyPatch.context() as patch, ValkeyServer() as server:
        for name, value in real.ENVIRONMENT.items():
            patch.setenv(name, value)
        inspector = Inspector(server.url)
        async with Pool(
            server.url,
            *ARGS,
            gateways=2,
            engine="vllm",
            worker=worker,
            gateway={"registry_refresh_s": 0.1},
            timeout=START_S,
        ) as pool:
            stage = Stage(pool, server, inspector, port)
            await stage.until_idle(timeout=10)
            yield stage
        await inspector.close()


def totals(text: str) -> dict[str, float]:
    """Return samples by their names, summed over their labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found
