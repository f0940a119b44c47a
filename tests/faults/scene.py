"""A scene: real gateways, workers and a server under load, one fault, and the proof afterwards.

async with stage(Row("worker killed", stall_s=4), workers=3) as scene:
    scene.send(40)
    await scene.flowing()
    (await scene.busiest()).kill()
    await scene.prove()
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from hashlib import sha1
from types import TracebackType
from typing import Self

from shared.scripts import source
from tests.faults.aftermath import Inspector, JobState
from tests.faults.clients import EXACT, Client, Kind
from tests.support.processes import GatewayProcess, Pool, Process, WorkerProcess
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

SIMULATED = {"ttft_ms": 20, "tpot_ms": 25, "seats": 64}
STREAMED: tuple[Kind, ...] = ("chat", "chat", "completion")
MIXED: tuple[Kind, ...] = ("chat", "chat", "completion", "chat", "whole")
STREAMS = 50
TOKENS = 160

Record = Callable[[str, object], None]


@dataclass(frozen=True)
class Row:
    """A fault, what it may do to answers, and for how long it may hold them up."""

    name: str
    allowed: Collection[str] = ()
    """Codes of explicit errors that answers may end with instead of being exact."""
    stall_s: float = 1.5
    forgotten: bool = False
    """Whether the queue may have lost jobs."""


@dataclass
class Result:
    """What a row of the table shows."""

    row: Row
    outcomes: Counter[str] = field(default_factory=Counter)
    stalls: list[float] = field(default_factory=list)
    """Of the exact streams, seconds, sorted."""


class Scene:
    """Everything that one row needs, running inside `async with`."""

    def __init__(
        self,
        row: Row,
        record: Record,
        *,
        gateways: int = 1,
        workers: int = 3,
        server: ValkeyServer | None = None,
        gateway: Mapping[str, object] | None = None,
        worker: Mapping[str, object] | None = None,
        simulated: Mapping[str, object] | None = None,
        gateway_proxy: bool = False,
        worker_proxy: bool = False,
    ) -> None:
        """With a proxy, the first gateway's or worker's link to the server goes through it."""
        self.row = row
        self.server = server or ValkeyServer()
        self.clients: list[Client] = []
        self.gone: set[Process] = set()
        """Processes that have ended, as they should."""
        self._record = record
        self._counts = (gateways, workers)
        self._gateway = dict(gateway or {})
        self._worker = dict(worker or {})
        self._simulated = {**SIMULATED, **(simulated or {})}
        self._proxied = (gateway_proxy, worker_proxy)
        self._stack = AsyncExitStack()
        self._runs: dict[Client, asyncio.Task[None]] = {}
        self._numbers = itertools.count()
        self.pool: Pool
        self.gateway_link: TcpProxy
        self.worker_link: TcpProxy
        self.inspector: Inspector
        record("fault", row.name)

    @property
    def gateways(self) -> list[GatewayProcess]:
        return self.pool.gateways

    @property
    def workers(self) -> list[WorkerProcess]:
        return self.pool.workers

    async def __aenter__(self) -> Self:
        stack = self._stack
        try:
            stack.enter_context(self.server)
            self.inspector = Inspector(self.server.url)
            stack.push_async_callback(self.inspector.close)
            self.gateway_link = await stack.enter_async_context(TcpProxy.to(self.server.url))
            self.worker_link = await stack.enter_async_context(TcpProxy.to(self.server.url))
            self.pool = await stack.enter_async_context(
                Pool(
                    self.server.url,
                    gateways=0,
                    workers=0,
                    gateway=self._gateway,
                    worker=self._worker,
                    simulated=self._simulated,
                )
            )
            stack.push_async_callback(self._stop_clients)
            gateways, workers = self._counts
            for at in range(workers):
                proxied = self._proxied[1] and at == 0
                self.pool.add_worker(self.worker_link.url if proxied else None)
            for at in range(gateways):
                proxied = self._proxied[0] and at == 0
                self.pool.add_gateway(self.gateway_link.url if proxied else None)
            await self.pool.wait_ready()
        except BaseException as error:
            await stack.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def _stop_clients(self) -> None:
        for run in self._runs.values():
            run.cancel()
        await asyncio.gather(*self._runs.values(), return_exceptions=True)

    # --- the load ---

    def send(
        self,
        count: int = STREAMS,
        *,
        tokens: int = TOKENS,
        mix: Sequence[Kind] = MIXED,
        prompt: str = "tell",
        gateways: Sequence[GatewayProcess] = (),
        headers: Mapping[str, str] | None = None,
    ) -> list[Client]:
        """Start so many requests, in turn over all gateways, or over these."""
        urls = [one.url for one in gateways or self.gateways if one.running]
        sent = []
        for at in range(count):
            text = f"{prompt} {next(self._numbers)}: a river under the bridge"
            client = Client(
                urls[at % len(urls)], text, tokens, mix[at % len(mix)], headers=headers or {}
            )
            sent.append(client)
            self.clients.append(client)
            self._runs[client] = asyncio.create_task(client.run())
        return sent

    async def flowing(self, words: int = 8, clients: Sequence[Client] = ()) -> None:
        """Wait until all streams have begun, the answers in one piece with them."""
        streams = [c for c in clients or self.clients if c.streams]
        await until(
            lambda: all(len(c.words) >= words or c.ending for c in streams),
            f"{words} words in every stream",
            timeout=10,
        )

    async def run_of(self, client: Client) -> None:
        """Wait for the end of one request."""
        await self._runs[client]

    async def finished(self, timeout: float = 40) -> None:
        """Wait until all requests have ended, however they did."""
        waiting = [run for run in self._runs.values() if not run.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout)
        hanging = [c for c, run in self._runs.items() if not run.done()]
        now = time.monotonic()
        assert not hanging, f"{len(hanging)} hang: " + ", ".join(
            f"{c.kind} {c.job_id or '-'} {len(c.words)} words, silent {now - c.heard_at:.1f} s"
            for c in hanging
        )
        for run in self._runs.values():
            run.result()

    def script(self, name: str) -> bytes:
        """Return what shows a call of a transition on the wire."""
        return sha1(source(name).encode(), usedforsecurity=False).hexdigest().encode()

    async def busiest(self) -> WorkerProcess:
        """Return the worker that runs most jobs."""
        counts = await self.inspector.running_on()
        name = max(counts, key=lambda worker: counts[worker])
        return next(one for one in self.workers if one.name == name)

    # --- the proof ---

    async def prove(self, *, timeout: float = 40, record: bool = True) -> Result:
        """Check every answer and what is left behind, and record the row."""
        await self.finished(timeout)
        result = self.judge()
        await self.settle()
        if record:
            self._record("result", result)
        return result

    def judge(self, clients: Sequence[Client] = ()) -> Result:
        """Check every answer, token by token."""
        result, wrong = Result(self.row), []
        for client in clients or self.clients:
            try:
                outcome = client.outcome()
            except AssertionError as error:
                wrong.append(str(error))
                continue
            result.outcomes[outcome] += 1
            if outcome == EXACT and client.streams:
                result.stalls.append(client.stall_s)
            if outcome != EXACT and outcome not in self.row.allowed:
                wrong.append(f"{client.kind} {client.job_id} ended as {outcome}: {client.errors}")
        result.stalls.sort()
        assert not wrong, f"{len(wrong)} answers are wrong:\n" + "\n".join(wrong[:20])
        longest = result.stalls[-1] if result.stalls else 0
        assert longest <= self.row.stall_s, (
            f"stalled for {longest:.2f} s, bound {self.row.stall_s} s; longest: "
            + ", ".join(f"{stall:.2f}" for stall in result.stalls[-12:])
        )
        return result

    def add(self, result: Result, outcome: str, count: int) -> None:
        """Record a row whose requests ended in a way that their clients didn't wait for."""
        result.outcomes[outcome] += count
        self._record("result", result)

    async def settle(self) -> None:
        """Check that the pool is at rest, whole, and has left nothing behind."""
        for process in self.pool.processes:
            assert process in self.gone or process.running, (
                f"{process.name} has ended ({process.returncode})"
            )
        alive = [one.name for one in self.workers if one.running]
        inspector = self.inspector
        await inspector.wait_idle(alive)
        jobs = await inspector.jobs(await inspector.job_ids())
        await inspector.check_ended_once(jobs)
        self._compare(jobs)
        assert await inspector.without_ttl() == []

    def _compare(self, jobs: dict[str, JobState]) -> None:
        """Check that the queue tells of each answer what its client saw."""
        for client in self.clients:
            if not client.job_id or client.outcome() != EXACT:
                continue
            job = jobs.get(client.job_id)
            if job is None:
                assert self.row.forgotten, f"{client.job_id} is forgotten"
                continue
            assert job.outcome == "completed", f"{client.job_id} is {job.outcome}"
            assert job.usage is not None
            assert job.usage.completion_tokens == client.tokens, f"{client.job_id}: {job.usage}"

    async def wait_gone(self, process: Process, code: int, timeout: float = 15) -> None:
        """Wait for an end that belongs to the row."""
        self.gone.add(process)
        assert await process.wait(timeout) == code, process.log[-2000:]

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        self.gone.add(process)
        process.kill()
