"""Gateways and workers as processes of their own, and whole pools of them.

Each has its log in a file, can be killed, frozen or asked to stop, and is bound to the test run:
whatever happens to pytest, nothing stays behind. Waiting is asynchronous throughout, because what
a process waits for (a proxy to Redis) may run in the test's own event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self
from weakref import WeakSet

from tests.support.bound import bound
from tests.support.sse import fetch
from tests.support.valkey import free_port
from tests.support.waiting import until

_REPOSITORY = Path(__file__).parents[2]
_SHOWN_LINES = 12
_GRACE_S = 5.0
"""How long a process may take to stop at the end of a test, before it is killed."""


class Process:
    """One program, started with settings as `HEADRACE_*` variables and none from outside."""

    known: ClassVar[WeakSet[Process]] = WeakSet()

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        settings: Mapping[str, object],
        log_path: Path,
    ) -> None:
        self.name = name
        self.log_path = log_path
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        self._environment = clean | _variables("HEADRACE_", settings)
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._session = 0
        self.known.add(self)

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} isn't running"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def start(self) -> None:
        """Start it, also again after an end. Its log goes on in the same file."""
        assert not self.running, f"{self.name} is running already"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                bound(self._command),
                cwd=_REPOSITORY,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A session of its own, so that its children can be found, and Ctrl-C misses it.
                start_new_session=True,
            )
        self._session = self._process.pid

    def terminate(self) -> None:
        """Ask it to stop (SIGTERM)."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it on the spot (SIGKILL)."""
        self.signal(signal.SIGKILL)

    def pause(self) -> None:
        """Freeze it (SIGSTOP)."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    async def wait(self, timeout: float = 10) -> int:
        """Wait for its end and return its exit status, negative for a signal."""
        await until(lambda: not self.running, f"end of {self.name}", timeout=timeout)
        assert self.returncode is not None
        return self.returncode

    async def wait_log(self, text: str, timeout: float = 10) -> None:
        """Wait until its log holds a text. Raises at once if it ends without."""

        def logged() -> bool:
            if text in self.log:
                return True
            self.check_running()
            return False

        await until(logged, f"{text!r} in the log of {self.name}", timeout=timeout)

    def check_running(self) -> None:
        """Raise, with the log, if it has ended."""
        if not self.running:
            raise RuntimeError(f"{self.name} has ended ({self.returncode}):\n{self.log[-4000:]}")

    def family(self) -> list[int]:
        """Return the processes that it started and that still run, and itself if it does."""
        return [] if self._session == 0 else _session_members(self._session)

    async def close(self, grace_s: float = _GRACE_S) -> None:
        """Stop it, by force if need be, and raise if anything of it stays behind."""
        if self.running:
            self.resume()
            self.terminate()
            try:
                await self.wait(grace_s)
            except AssertionError:
                self.kill()
                await self.wait()
        try:
            await until(lambda: not self.family(), f"no process left by {self.name}", timeout=1)
        finally:
            for pid in self.family():
                os.kill(pid, signal.SIGKILL)


def last_words() -> str:
    """Return the ends of the running processes' logs, for the report of a test that fails."""
    words = ""
    for process in sorted(Process.known, key=lambda process: process.name):
        if process.running:
            lines = process.log.splitlines()[-_SHOWN_LINES:]
            words += f"{process.name}\n" + "".join(f"  {line[:300]}\n" for line in lines)
    return words


class GatewayProcess(Process):
    """A gateway on a port of its own."""

    def __init__(self, redis_url: str, name: str, log_path: Path, **settings: object) -> None:
        self.port = free_port()
        given = {"redis_url": redis_url, "host": "127.0.0.1", "port": self.port, **settings}
        super().__init__(name, [sys.executable, "-m", "gateway"], given, log_path)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def readiness(self) -> tuple[int, Any]:
        """Return status and body of `/readyz`; 0 and nothing while it doesn't listen."""
        try:
            response, body = await fetch(f"{self.url}/readyz")
        except ConnectionError:
            return 0, None
        return response.status, json.loads(body) if body[:1] in (b"{", b"[") else None

    async def wait_ready(self, workers: int = 0, timeout: float = 15) -> None:
        """Wait until it listens and, if workers are expected, is ready and sees that many."""

        async def ready() -> bool:
            self.check_running()
            status, body = await self.readiness()
            return bool(status) if workers == 0 else status == 200 and _workers(body) >= workers

        what = f"{self.name} ready with {workers} workers"
        await until(ready, what, timeout=timeout, every=0.05)


class WorkerProcess(Process):
    """A worker; `args` are arguments of `vllm serve`, `simulated` the simulated engine's settings.

    A simulated engine is fast and takes faults, unless told otherwise.
    """

    def __init__(
        self,
        redis_url: str,
        name: str,
        log_path: Path,
        *args: str,
        engine: Literal["simulated", "vllm"] = "simulated",
        simulated: Mapping[str, object] | None = None,
        **settings: object,
    ) -> None:
        given = {"redis_url": redis_url, "engine": engine, "worker_id": name, "metrics_port": 0}
        command = [sys.executable, "-m", "worker", *args]
        super().__init__(name, command, {**given, **settings}, log_path)
        if engine == "simulated":
            paces = {"faults": True, "ttft_ms": 0, "tpot_ms": 1, **(simulated or {})}
            self._environment |= _variables("HEADRACE_SIMULATED_", paces)


class Pool:
    """Gateways and workers on one Redis, all ready once `async with` is entered.

    `gateway` and `worker` are settings that all of a kind share, `simulated` those of the engines.
    A process can be given a Redis URL of its own, for a proxy in between.
    """

    def __init__(
        self,
        redis_url: str,
        *args: str,
        gateways: int = 1,
        workers: int = 1,
        engine: Literal["simulated", "vllm"] = "simulated",
        gateway: Mapping[str, object] | None = None,
        worker: Mapping[str, object] | None = None,
        simulated: Mapping[str, object] | None = None,
        timeout: float = 20,
    ) -> None:
        self._redis_url = redis_url
        self._args = args
        self._engine: Literal["simulated", "vllm"] = engine
        self._gateway = dict(gateway or {})
        self._worker = dict(worker or {})
        self._simulated = dict(simulated or {})
        self._counts = (gateways, workers)
        self._timeout = timeout
        self._directory = Path(tempfile.mkdtemp(prefix="headrace-pool-"))
        self.gateways: list[GatewayProcess] = []
        self.workers: list[WorkerProcess] = []

    @property
    def url(self) -> str:
        """The first gateway's URL."""
        return self.gateways[0].url

    @property
    def processes(self) -> list[Process]:
        return [*self.gateways, *self.workers]

    def add_gateway(self, redis_url: str | None = None, **settings: object) -> GatewayProcess:
        """Start one more gateway. It isn't ready yet: see `wait_ready`."""
        name = f"gateway-{len(self.gateways)}"
        log_path = self._directory / f"{name}.log"
        given = {**self._gateway, **settings}
        added = GatewayProcess(redis_url or self._redis_url, name, log_path, **given)
        self.gateways.append(added)
        added.start()
        return added

    def add_worker(
        self,
        redis_url: str | None = None,
        *,
        args: Sequence[str] | None = None,
        simulated: Mapping[str, object] | None = None,
        **settings: object,
    ) -> WorkerProcess:
        """Start one more worker, which may serve another model: see `wait_ready` for when it does.

        Its `args` replace the pool's.
        """
        name = f"worker-{len(self.workers)}"
        added = WorkerProcess(
            redis_url or self._redis_url,
            name,
            self._directory / f"{name}.log",
            *(self._args if args is None else args),
            engine=self._engine,
            simulated={**self._simulated, **(simulated or {})},
            **{**self._worker, **settings},
        )
        self.workers.append(added)
        added.start()
        return added

    async def wait_ready(self) -> None:
        """Wait until every gateway that runs sees every worker that runs."""
        workers = sum(worker.running for worker in self.workers)
        for gateway in self.gateways:
            if gateway.running:
                await gateway.wait_ready(workers, self._timeout)

    async def __aenter__(self) -> Self:
        gateways, workers = self._counts
        try:
            for _ in range(workers):
                self.add_worker()
            for _ in range(gateways):
                self.add_gateway()
            await self.wait_ready()
            for worker in self.workers:
                worker.check_running()
        except BaseException:
            await self._close(show=True)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close(show=error is not None)

    async def _close(self, *, show: bool) -> None:
        closed = await asyncio.gather(
            *(process.close() for process in self.processes), return_exceptions=True
        )
        if show:
            for process in self.processes:
                sys.stderr.write(f"--- {process.name} ({process.returncode})\n{process.log}\n")
        shutil.rmtree(self._directory, ignore_errors=True)
        for failure in closed:
            if failure is not None:
                raise failure


def _variables(prefix: str, settings: Mapping[str, object]) -> dict[str, str]:
    """Return settings as environment variables: `tpot_ms=5` is `<prefix>TPOT_MS=5`."""
    return {f"{prefix}{name.upper()}": str(value) for name, value in settings.items()}


def _workers(body: Any) -> int:
    """Return how many workers a `/readyz` body counts or lists."""
    told = body.get("workers", 0) if isinstance(body, dict) else 0
    return told if isinstance(told, int) else len(told)


def _session_members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # After the name, which may hold anything: state, ppid, pgrp, session.
            state, _, _, sid, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(sid) == session and state not in ("Z", "X"):
            members.append(int(entry.name))
    return members


def brief_pool(redis_url: str, model: str) -> Pool:
    """Return one whose answers are brief whatever is asked: for requests that are made up."""
    return Pool(
        redis_url,
        worker={"default_max_tokens": 4, "max_tokens_ceiling": 16},
        simulated={"model": model, "faults": False},
    )
