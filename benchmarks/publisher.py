"""A worker without an engine or a serving layer: it shows what the gateway does, not what they do.

python -m benchmarks.publisher STEP_MS

It takes jobs, writes their frames and ends them by the same transitions as a worker, log, fencing
and sequence included; all jobs get their token in the same step, in one call. Prompts and what is
written of clients that leave are as in `native/backend.c`; also `claimed <n> <ns>` of each job.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import sys
import time

from shared import protocol, settings
from shared.connection import Connections
from shared.errors import LanesLost
from shared.keys import Keys, tag
from shared.outcomes import Adopted, Append, Claimed, Finish
from shared.protocol import End, Frame, Head, ModelRecord, WorkerRecord
from shared.registry import Registry
from shared.subscribers import Subscribers
from shared.transitions import Transitions
from worker.settings import WorkerSettings

_POOL, _LANE, _SEATS = "simulated", "interactive", 8192
_BLOCK_S = 1.0
_MARK = re.compile(rb"mark (\w+) (\d+)")
_LONG = re.compile(rb'"max_tokens": ?(\d+)')
_HEAD = Head(200, "text/event-stream; charset=utf-8")
_PREFIX = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"simulated","choices":[{"index":0,"delta":{"content":" @'
)
_SUFFIX = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
_DONE = protocol.encode(Frame(items=[(b"data: [DONE]\n\n",)]))


class Running:
    """A job that gets a token in each step."""

    __slots__ = ("adopted", "begun", "kind", "left", "mark", "seq", "stopped")

    def __init__(self, adopted: Adopted) -> None:
        found, long = _MARK.search(adopted.job.body), _LONG.search(adopted.job.body)
        self.adopted = adopted
        self.kind, self.mark = (found[1], int(found[2])) if found else (b"busy", 0)
        self.left = int(long[1]) if long else 16
        self.seq = adopted.base
        self.begun = False
        self.stopped = ""


class Publisher:
    """Takes jobs, and writes a step of all of them at a pace."""

    def __init__(self, given: WorkerSettings, step_s: float) -> None:
        self._id, self._given, self._step_s = given.worker_id, given, step_s
        self._tag = tag(_POOL, 0)
        self._keys = Keys(given.key_prefix)
        name = f"headrace-publisher-{self._id}"
        self._clients = Connections(given, name=name)
        self._blocking = Connections(given, name=f"{name}-claim", block_s=_BLOCK_S)
        self._subscriber = Subscribers(given, name=f"{name}-control", ack_timeout_s=2)
        ttl_s = given.result_ttl_s
        self._transitions = Transitions(self._clients, self._keys, result_ttl_s=ttl_s)
        self._registry = Registry(self._clients, self._keys)
        self._jobs: dict[str, Running] = {}
        self._fresh: list[Running] = []
        self._now = asyncio.Event()
        self._writing = asyncio.Lock()
        """Frames of a job must arrive in order: one call at a time."""

    async def run(self) -> None:
        await self._transitions.create_lanes([self._tag])
        async with asyncio.TaskGroup() as group:
            group.create_task(self._subscriber.run())
            self._subscriber.keep(self._keys.control(self._tag, self._id), self)
            for loop in (self._beat, self._claim, self._step, self._begin):
                group.create_task(loop())

    def on_message(self, message: bytes) -> None:
        """Take a nudge: a client has left."""
        at = time.monotonic_ns()
        verb, job_id, *_ = message.decode().split(" ")
        if verb == "cancel" and (job := self._jobs.get(job_id)) is not None:
            job.stopped = "cancelled"
            print("gone", job.mark, at, flush=True)

    def on_subscribed(self) -> None: ...

    async def _beat(self) -> None:
        model = ModelRecord(name=_POOL, pool=_POOL, max_model_len=32768)
        while True:
            await self._registry.announce(
                WorkerRecord(id=self._id, pool=_POOL, models=[_POOL], state="ready", seats=_SEATS),
                [model],
                self._given.lease_s,
            )
            owned = [job.adopted for job in self._jobs.values()]
            await self._transitions.beat(self._tag, self._id, owned)
            await asyncio.sleep(self._given.beat_s)

    async def _claim(self) -> None:
        while True:
            try:
                found = await self._transitions.claim(self._tag, {_LANE: 64}, self._id)
                if not found:
                    found = await self._transitions.wait_claim(
                        self._blocking, self._tag, {_LANE: 64}, self._id, _BLOCK_S
                    )
            except LanesLost:
                await self._transitions.create_lanes([self._tag])
                continue
            at = time.monotonic_ns()
            await asyncio.gather(*(self._adopt(one, at) for one in found))

    async def _adopt(self, claimed: Claimed, at: int) -> None:
        adopted = await self._transitions.adopt(claimed, secrets.token_hex(8), self._id)
        if isinstance(adopted, Adopted):
            job = self._jobs[claimed.job_id] = Running(adopted)
            print("claimed", job.mark, at)
            if job.kind != b"prefill":
                self._fresh.append(job)
                self._now.set()

    async def _begin(self) -> None:
        """Write first tokens at once."""
        while True:
            await self._now.wait()
            self._now.clear()
            fresh, self._fresh = self._fresh, []
            await self._write(fresh)

    async def _step(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + self._step_s, time.monotonic() - self._step_s)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            jobs = self._jobs.values()
            busy = [job for job in jobs if job.begun and (job.kind == b"busy" or job.stopped)]
            await self._write(busy + [job for job in jobs if job.stopped and not job.begun])
            sys.stdout.flush()

    async def _write(self, jobs: list[Running]) -> None:
        async with self._writing:
            await self._write_step([job for job in jobs if job.adopted.job.id in self._jobs])

    async def _write_step(self, jobs: list[Running]) -> None:
        stamp = b"%d" % time.monotonic_ns()
        common = protocol.encode(Frame(items=[stamp], tokens=[([1234], None, None)]))
        appends: list[Append] = []
        ends: list[Finish] = []
        writing: list[Running] = []
        for job in jobs:
            adopted = job.adopted
            if not job.stopped and job.left > 0:
                bodies = [common if job.begun else _first(stamp)]
                job.begun = True
                job.left -= 1
                if job.left == 0:
                    bodies.append(_DONE)
                stamped = protocol.stamp(adopted.owner, adopted.base)
                messages = [
                    protocol.seal_message(seq, stamped, body)
                    for seq, body in enumerate(bodies, job.seq + 1)
                ]
                append = Append(adopted.job.id, adopted.owner, job.seq + 1, messages)
                job.seq += len(bodies)
                appends.append(append)
                writing.append(job)
            if job.stopped or job.left == 0:
                self._jobs.pop(adopted.job.id, None)
                ends.append(_finish(job))
        verdicts, _ = await self._transitions.write(appends, ends)
        for job, verdict in zip(writing, verdicts, strict=True):
            if verdict.word != "ok" and job.left:
                job.stopped = job.stopped or "cancelled"


def _first(stamp: bytes) -> bytes:
    return protocol.encode(Frame(items=[stamp], head=_HEAD, template=(_PREFIX, _SUFFIX)))


def _finish(job: Running) -> Finish:
    outcome = job.stopped or "completed"
    body = protocol.encode(Frame(end=End(outcome=outcome)))
    adopted = job.adopted
    return Finish(adopted.job.id, adopted.owner, _LANE, job.seq + 1, body, outcome)


def main() -> None:
    import uvloop

    publisher = Publisher(settings.read(WorkerSettings), float(sys.argv[1]) / 1000)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(publisher.run())


if __name__ == "__main__":
    main()
