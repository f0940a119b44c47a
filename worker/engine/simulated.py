"""An engine without a model: vLLM's answers, a batcher's timing, and faults on request.

For load tests, fault injection and trying the system on a laptop. It answers at a pace that the
settings give, so what a measurement with it shows is the pool, not a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from worker.engine.interface import AdapterError, App, EngineStartError, Load, Model
from worker.engine.simulated_app import SimulatedApp
from worker.engine.simulated_batch import Batch
from worker.engine.simulated_endpoints import Endpoints, Limits
from worker.engine.simulated_text import expected_text

__all__ = ["SimulatedEngine", "SimulatedSettings", "expected_text"]


class SimulatedSettings(BaseSettings):
    """Read from `HEADRACE_SIMULATED_*`."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_SIMULATED_", extra="ignore")

    models: Annotated[tuple[str, ...], NoDecode] = ("simulated",)
    """Names that it answers to, separated by commas; the pool's own name first."""
    max_model_len: int = Field(32768, ge=2)
    """Prompt and answer together, tokens."""
    seats: int = Field(256, ge=1)
    """Requests that run at once; more wait."""
    ttft_ms: float = Field(50.0, ge=0)
    """From a request's admission to its first token."""
    tpot_ms: float = Field(20.0, ge=0)
    """From one token to the next; 0 is as fast as the process can."""
    prefill_ms_per_1k_tokens: float = Field(0.0, ge=0)
    """Added to the time to the first token for each 1,000 tokens of prompt."""
    kv_tokens: int = Field(1_000_000, ge=2)
    """Tokens, of prompts and answers, that fit into the KV cache."""
    load_s: float = Field(0.0, ge=0)
    """How long the start takes."""
    embedding_size: int = Field(64, ge=1)
    lora: bool = True
    """Whether it takes adapters: files, or directories, that are there. They change nothing."""
    answer_tokens: int | None = Field(None, ge=1)
    """Answers end by themselves after so many tokens; unset, they run into their limit."""
    faults: bool = False
    """Whether requests may ask for faults (see `simulated_faults`)."""
    stamps: bool = False
    """Whether a token's text is the moment of its step, ` @<CLOCK_MONOTONIC in ns>`, in streams."""
    created: int | None = None
    """The `created` of every answer; unset, the time of the request."""

    @field_validator("models", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = tuple(name.strip() for name in value.split(",") if name.strip())
        if not value:
            raise ValueError("at least one model name is needed")
        return value


class SimulatedEngine:
    """Fulfils `worker.engine.interface.Engine`."""

    def __init__(
        self,
        settings: SimulatedSettings,
        *,
        default_max_tokens: int | None,
        max_tokens_ceiling: int | None,
    ) -> None:
        self._settings = settings
        self._failure = asyncio.Event()
        self._reason = ""
        self._loop: asyncio.Task[None] | None = None
        self._batch = Batch(
            seats=settings.seats,
            kv_tokens=settings.kv_tokens,
            ttft_s=settings.ttft_ms / 1000,
            tpot_s=settings.tpot_ms / 1000,
            prefill_s_per_token=settings.prefill_ms_per_1k_tokens / 1_000_000,
            on_death=self._fail,
        )
        self._served = [Model(name, settings.max_model_len) for name in settings.models]
        self.models: Sequence[Model] = self._served
        self.seats = settings.seats
        self.version = "simulated 1"
        limits = Limits(
            max_model_len=settings.max_model_len,
            default_max_tokens=default_max_tokens,
            max_tokens_ceiling=max_tokens_ceiling,
            answer_tokens=settings.answer_tokens,
            embedding_size=settings.embedding_size,
        )
        self._endpoints = Endpoints(
            self._batch,
            self.models,
            limits,
            faults=settings.faults,
            created=settings.created,
            stamps=settings.stamps,
        )
        self.app: App = SimulatedApp(self._endpoints.table())

    async def start(self) -> None:
        settings = self._settings
        if settings.kv_tokens < settings.max_model_len:
            raise EngineStartError(
                f"a request of {settings.max_model_len} tokens would not fit into a KV cache of "
                f"{settings.kv_tokens}: lower HEADRACE_SIMULATED_MAX_MODEL_LEN or raise "
                "HEADRACE_SIMULATED_KV_TOKENS"
            )
        await asyncio.sleep(settings.load_s)
        self._loop = asyncio.create_task(self._batch.run(), name="simulated-steps")
        self._loop.add_done_callback(self._stepped_out)

    def resumable(self, path: str, body: bytes) -> bool:
        return self._endpoints.resumable(path, body)

    def load(self) -> Load:
        batch = self._batch
        return Load(batch.running, batch.waiting, batch.kv_used / self._settings.kv_tokens)

    def progress(self) -> int:
        return self._batch.steps

    async def wait_failed(self) -> str:
        await self._failure.wait()
        return self._reason

    async def load_adapter(self, name: str, source: str) -> None:
        if not self._settings.lora:
            raise AdapterError("HEADRACE_SIMULATED_LORA is off")
        if not await asyncio.to_thread(Path(source).exists):
            raise AdapterError(f"there is no adapter at {source}")
        self._served.append(Model(name, self._settings.max_model_len, self.models[0].name))

    async def unload_adapter(self, name: str) -> None:
        self._served[:] = [model for model in self._served if model.name != name]

    async def abort(self, job_id: str) -> None:
        self._batch.abort(job_id)

    async def stop(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            # What it crashed with has been told by then: see `_stepped_out`.
            await asyncio.gather(self._loop, return_exceptions=True)
            self._loop = None
        self._batch.fail("the engine was stopped")

    def _fail(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._failure.set()

    def _stepped_out(self, loop: asyncio.Task[None]) -> None:
        """Nobody awaits the loop while the engine runs: its crash must not pass unnoticed."""
        if not loop.cancelled() and (error := loop.exception()) is not None:
            reason = f"the step loop crashed: {error!r}"
            self._batch.fail(reason)
            self._fail(reason)
