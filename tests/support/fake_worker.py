"""A worker without an engine: a test decides which frames a job gets, one by one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, Self

from pydantic import SecretStr

from shared import protocol
from shared.connection import connect
from shared.keys import LANES, Keys, tag
from shared.outcomes import Adopted, Finish, Verdict
from shared.protocol import End, Frame, Head, Item, ModelRecord, Usage, WorkerRecord
from shared.registry import Registry
from shared.settings import RedisSettings
from shared.transitions import Transitions
from tests.support.appends import append_of

SSE = "text/event-stream; charset=utf-8"
DONE = (b"data: [DONE]\n\n",)


class Running:
    """A job that the fake worker owns."""

    def __init__(self, worker: FakeWorker, adopted: Adopted) -> None:
        self.worker = worker
        self.adopted = adopted
        self.job = adopted.job
        self.seq = adopted.base

    async def frame(self, *frames: Frame) -> Verdict:
        """Publish frames as one batch."""
        bodies = [protocol.encode(one) for one in frames]
        append = append_of(self.job.id, self.adopted.owner, self.adopted.base, self.seq + 1, bodies)
        (verdict,), _ = await self.worker.transitions.write([append], [])
        if verdict.word in ("ok", "cancelled", "expired"):
            self.seq += len(frames)
        return verdict

    async def head(self, status: int = 200, content_type: str = SSE) -> Verdict:
        """Publish the status and the content type."""
        return await self.frame(Frame(head=Head(status, content_type)))

    async def items(self, *items: Item, template: tuple[bytes, bytes] | None = None) -> Verdict:
        """Publish one frame of items."""
        return await self.frame(Frame(items=list(items), template=template))

    async def end(
        self,
        outcome: str = "completed",
        *,
        code: str = "",
        message: str = "",
        items: Sequence[Item] = (),
        usage: Usage | None = None,
        head: Head | None = None,
    ) -> Verdict:
        """Publish the terminal frame."""
        end = End(outcome=outcome, code=code, message=message, usage=usage)
        body = protocol.encode(Frame(items=list(items), head=head, end=end))
        finish = Finish(
            self.job.id, self.adopted.owner, self.job.lane, self.seq + 1, body, outcome, usage
        )
        _, (verdict,) = await self.worker.transitions.write([], [finish])
        return verdict

    async def stream(self, *texts: bytes, usage: Usage | None = None) -> None:
        """Answer with a whole stream, an event per frame, and `[DONE]`."""
        await self.head()
        for text in texts:
            await self.items((b"data: " + text + b"\n\n",))
        await self.end(items=[DONE], usage=usage)

    async def whole(self, body: bytes, status: int = 200, usage: Usage | None = None) -> None:
        """Answer with one JSON body."""
        head = Head(status, "application/json")
        await self.end(items=[(body,)], head=head, usage=usage)

    async def state(self) -> dict[str, str]:
        """Return the job's record in Redis, without the binary fields."""
        return await self.worker.job_state(self.job.id)


class FakeWorker:
    """Registered and ready, inside `async with`."""

    def __init__(
        self,
        url: str,
        *,
        key_prefix: str = "headrace",
        pool: str = "tiny",
        models: Sequence[str] = (),
        seats: int = 8,
    ) -> None:
        settings = RedisSettings(redis_url=SecretStr(url), key_prefix=key_prefix)
        self.keys = Keys(settings.key_prefix)
        self.redis = connect(settings, name="fake-worker")
        self.transitions = Transitions(self.redis, self.keys, result_ttl_s=60)
        self.registry = Registry(self.redis, self.keys)
        self.pool = pool
        self.tag = tag(pool, 0)
        self.models = [pool, *models]
        self.seats = seats
        self.id = f"fake-{secrets.token_hex(4)}"

    async def announce(self, state: str = "ready") -> None:
        """Write the registry's records."""
        record = WorkerRecord(
            engine="vllm 0.32.0",
            id=self.id,
            pool=self.pool,
            models=self.models,
            state=state,
            seats=self.seats,
        )
        models = [
            ModelRecord(
                name=name,
                pool=self.pool,
                max_model_len=2048,
                parent=None if name == self.pool else self.pool,
                created=1_700_000_000,
            )
            for name in self.models
        ]
        await self.registry.announce(record, models, lease_s=600)

    async def take(self, timeout_s: float = 5) -> Running:
        """Claim and adopt the next job."""
        limits = dict.fromkeys(LANES, 1)
        async with asyncio.timeout(timeout_s):
            while True:
                for claimed in await self.transitions.claim(self.tag, limits, self.id):
                    adopted = await self.transitions.adopt(claimed, secrets.token_hex(8), self.id)
                    if isinstance(adopted, Adopted):
                        return Running(self, adopted)
                await asyncio.sleep(0.002)

    async def depth(self) -> int:
        """Return the number of jobs in all lanes."""
        return sum((await self.transitions.depths(self.tag)).values())

    async def job_ids(self) -> list[str]:
        """Return the ids of all jobs that are known."""
        prefix = f"{self.keys.prefix}:{{{self.tag}}}:job:"
        return [
            key.decode().removeprefix(prefix) async for key in self.redis.scan_iter(prefix + "*")
        ]

    async def job_state(self, job_id: str) -> dict[str, str]:
        """Return a job's record, without the binary fields."""
        raw: Any = await self.redis.hgetall(self.keys.job(job_id))
        return {
            name.decode(): value.decode()
            for name, value in raw.items()
            if name not in (b"rec", b"usage")
        }

    async def wait_outcome(self, job_id: str, timeout_s: float = 5) -> str:
        """Wait until a job has ended and return how."""
        async with asyncio.timeout(timeout_s):
            while True:
                state = await self.job_state(job_id)
                if state.get("state") == "done":
                    return state["outcome"]
                await asyncio.sleep(0.005)

    async def __aenter__(self) -> Self:
        await self.transitions.create_lanes([self.tag])
        await self.announce()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.redis.aclose()
