"""vLLM as an engine: its own HTTP application on its own AsyncLLM, in this process, no socket.

engine = VllmEngine(
    ["MODEL", "--max-num-seqs", "16"],
    default_max_tokens=1024, max_tokens_ceiling=8192, warm_up_timeout_s=120,
)
await engine.start()
await engine.app(scope, receive, send)
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import threading
import traceback
from collections.abc import MutableMapping, Sequence
from typing import Any

from shared.logs import Log
from worker.engine import vllm_build
from worker.engine.asgi import ask
from worker.engine.interface import AdapterError, App, EngineStartError, Load, Model, Receive, Send
from worker.engine.owner import OwnerThread
from worker.engine.vllm_load import Gauge
from worker.engine.vllm_proxy import EngineProxy
from worker.engine.vllm_resume_requests import continuable

log = Log("vllm")

WATCH_S = 0.1
"""How often to look for the engine's death, should vLLM's own task not have ended of it."""

SEE_S = 60.0
"""For one short request, by an engine that is warm."""


async def not_started(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    """Stand for the application until there is one."""
    raise RuntimeError("the engine has not been started")


class VllmEngine:
    """Fulfils `worker.engine.interface.Engine`; `args` are what `vllm serve` takes."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        default_max_tokens: int,
        max_tokens_ceiling: int,
        warm_up_timeout_s: float,
    ) -> None:
        self.app: App = not_started
        self.models: Sequence[Model] = ()
        self.seats = 0
        self.version = "vllm"
        self._args = list(args)
        self._default_max_tokens = default_max_tokens
        self._max_tokens_ceiling = max_tokens_ceiling
        self._warm_up_timeout_s = warm_up_timeout_s
        self._gauge = Gauge()
        self._owner: OwnerThread[tuple[Any, Any]] | None = None
        self._llm: Any = None
        self._adapters: Any = None
        self._proxy: EngineProxy | None = None
        self._statistics: asyncio.Task[None] | None = None
        self._stopping = threading.Event()
        self._continues = False

    async def start(self) -> None:
        """Load the model and answer one warm-up request. Raises `EngineStartError`."""
        self._owner = OwnerThread(self._build, name="vllm-owner")
        try:
            self._llm, parsed = await self._owner.result()
            await self._open(parsed)
        except BaseException as error:
            # The frames hold a half-built engine, its sockets and its memory.
            traceback.clear_frames(error.__traceback__)
            await self.stop()
            if isinstance(error, EngineStartError) or not isinstance(error, Exception):
                raise
            raise EngineStartError(f"vLLM didn't start: {error or type(error).__name__}") from error

    def resumable(self, path: str, body: bytes) -> bool:
        """Tell whether `Call.resume` can carry this request's answer over to this engine."""
        return self._continues and continuable(path, body)

    def load(self) -> Load:
        """Return the load as of the engine's last step."""
        return self._gauge.load()

    def progress(self) -> int:
        """Return the number of steps so far."""
        return self._gauge.steps

    async def wait_failed(self) -> str:
        """Return the reason, once the engine has failed for good; never because of `stop()`."""
        llm = self._llm
        while not llm.errored:
            # This task of vLLM's ends with the core's process, and when it fails itself. It
            # begins with the first request.
            if llm.output_handler is None:
                await asyncio.sleep(WATCH_S)
            else:
                await asyncio.wait({llm.output_handler}, timeout=WATCH_S)
        if self._stopping.is_set():
            await asyncio.Event().wait()
        return vllm_build.describe_failure(llm)

    async def load_adapter(self, name: str, source: str) -> None:
        """Answer to `name` with an adapter, too. Raises `AdapterError`."""
        if self._llm.vllm_config.lora_config is None:
            raise AdapterError("the worker was started without --enable-lora")
        await vllm_build.load_adapter(self._adapters, name, source)
        self.models = await list_models(self.app)

    async def unload_adapter(self, name: str) -> None:
        """Answer to it no more; what runs goes on. Raises `AdapterError`."""
        await vllm_build.unload_adapter(self._adapters, name)
        self.models = await list_models(self.app)

    async def abort(self, job_id: str) -> None:
        """End what still runs for a job, and settle its usage; having nothing to do is fine."""
        if self._proxy is not None:
            await self._proxy.abort_job(job_id)

    async def stop(self) -> None:
        """Free everything, child processes included. Also ends a start that is under way."""
        self._stopping.set()
        if self._statistics is not None:
            self._statistics.cancel()
            self._statistics = None
        owner, self._owner = self._owner, None
        if owner is not None:
            vllm_build.silence(self._llm)
            # In a thread, as vLLM waits for its processes; shielded, as half a stop leaves them.
            llm = await asyncio.shield(asyncio.to_thread(free, owner))
            if llm is not None:
                vllm_build.close_sockets(llm)
            self._llm = self._proxy = self._adapters = None
            self.app = not_started
            gc.unfreeze()
            # What is left in cycles holds the weights' and the caches' memory.
            gc.collect()

    def _build(self) -> tuple[Any, Any]:
        """Do, in the owner's thread, what blocks: imports, weights, the core's process."""
        vllm_build.prepare_environment(self._args)
        self.version = f"vllm {vllm_build.check_version()}"
        self._check_stopping()
        parsed = vllm_build.parse_args(self._args)
        return vllm_build.create_llm(parsed, self._gauge, self._check_stopping), parsed

    def _check_stopping(self) -> None:
        if self._stopping.is_set():
            raise EngineStartError("stopped while starting")

    async def _open(self, parsed: Any) -> None:
        """Put the application on the loaded engine, and see it answer."""
        llm = self._llm
        # Profiling has left dummy images and the like in memory.
        await llm.reset_mm_cache()
        self.seats = vllm_build.count_seats(llm)
        tasks = await llm.get_supported_tasks()
        why_not = "" if "generate" in tasks else "the model doesn't generate"
        why_not = why_not or vllm_build.why_not_continue(llm)
        self._proxy = vllm_build.create_proxy(
            llm,
            default_max_tokens=self._default_max_tokens,
            max_tokens_ceiling=self._max_tokens_ceiling,
            continues=not why_not,
        )
        app = await vllm_build.create_app(self._proxy, parsed, tasks)
        self.models = await list_models(app)
        self._adapters = vllm_build.adapters_of(app)
        try:
            async with asyncio.timeout(self._warm_up_timeout_s):
                await warm_up(app, self.models[0].name, tasks)
        except TimeoutError:
            raise EngineStartError(
                f"no answer to the warm-up request within {self._warm_up_timeout_s} s"
            ) from None
        why_not = why_not or await see_continued(llm)
        self._continues = not why_not
        if why_not and "generate" in tasks:
            log.warning("failover.limited", reason=why_not)
        # The application's lifespan would do these two, but none runs without a server.
        gc.collect()
        gc.freeze()
        self._statistics = asyncio.create_task(vllm_build.log_statistics(llm))
        self.app = app


def free(owner: OwnerThread[tuple[Any, Any]]) -> Any:
    """Shut the engine down, or end its start; return it, once its processes are gone."""
    while not owner.finished(timeout=0.1):
        # Without its core vLLM's constructor gives up, and cleans up after itself.
        for child in multiprocessing.active_children():
            if child.name.startswith("EngineCore"):
                child.terminate()
    made = owner.release()
    if made is None:
        return None
    llm, _ = made
    llm.shutdown()
    return llm


async def list_models(app: App) -> list[Model]:
    """Ask the application for its models: the served names, then the adapters."""
    status, content = await ask(app, "GET", "/v1/models")
    if status != 200:
        raise EngineStartError(f"the application doesn't list its models: {status} {content!r}")
    cards = json.loads(content)["data"]
    longest = max(card.get("max_model_len") or 0 for card in cards)
    return [
        Model(card["id"], card.get("max_model_len") or longest, card.get("parent"))
        for card in cards
    ]


async def warm_up(app: App, model: str, tasks: Sequence[str]) -> None:
    """See one request answered: the first one can take a minute, and must not be a client's."""
    answer = ""
    for path, body in warm_ups(tasks):
        status, content = await ask(app, "POST", path, {"model": model, **body})
        if status == 200:
            return
        answer = f"{path} answered {status} {content.decode(errors='replace')[:500]}"
    if answer:
        raise EngineStartError(f"the warm-up failed: {answer}")


async def see_continued(llm: Any) -> str:
    """Return why the engine can't continue an answer, having tried; empty if it can."""
    try:
        async with asyncio.timeout(SEE_S):
            return await vllm_build.see_continued(llm)
    except Exception as error:
        return f"trying it failed: {error or type(error).__name__}"


def warm_ups(tasks: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """List the requests that a model with such tasks may answer, the most telling first."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    by_task: list[tuple[str, str, dict[str, Any]]] = [
        ("generate", "/v1/chat/completions", chat),
        ("generate", "/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
        ("embed", "/v1/embeddings", {"input": "Hi"}),
        ("classify", "/classify", {"input": "Hi"}),
        ("score", "/score", {"text_1": "Hi", "text_2": "Hi"}),
    ]
    known = [(path, body) for task, path, body in by_task if task in tasks]
    if known or "transcription" in tasks:
        # One that only transcribes would want a sound file; its first request has to wait.
        return known
    # Multi-vector and reward models pool, under names that differ by release.
    return [("/pooling", {"input": "Hi"})]
