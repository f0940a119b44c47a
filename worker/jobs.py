"""Runs adopted jobs, each in a task of its own, and sees every one of them to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from shared.errors import EngineFailed, QueueUnavailable, WorkerLost
from shared.logs import Log, about
from shared.outcomes import Adopted
from shared.protocol import End, Job
from shared.transitions import Transitions
from worker import spans as attempt_spans
from worker.engine.interface import Engine
from worker.metrics import WorkerMetrics
from worker.publisher import Publisher
from worker.resume import Past
from worker.run import Run
from worker.running import Running
from worker.waiting import first

if TYPE_CHECKING:
    from shared.otel import Spans

log = Log("jobs")

BROKEN_S = 0.5
"""An engine that dies is known to be dead so soon after its requests fail."""


class Jobs:
    """The tasks of this worker's jobs. `freed` is called whenever seats have become free."""

    def __init__(
        self,
        engine: Engine,
        transitions: Transitions,
        publisher: Publisher,
        running: Running,
        metrics: WorkerMetrics,
        spans: Spans | None = None,
    ) -> None:
        self._engine = engine
        self._transitions = transitions
        self._publisher = publisher
        self._running = running
        self._metrics = metrics
        self._spans = spans
        self._tasks: set[asyncio.Task[None]] = set()
        self.group: asyncio.TaskGroup
        """Where the jobs' tasks live."""
        self.freed: Callable[[], Awaitable[None]]
        self.broken = asyncio.Event()
        """Set when the engine is of no more use."""

    def cancel(self) -> None:
        """Give up what is left: its leases lapse, and others take it over."""
        for task in self._tasks:
            task.cancel()

    def move(self, run: Run, *, restart: bool) -> bool:
        """Give a job that runs to another worker; False if what it has sent can't be continued.

        `restart`: also one whose work so far would be lost.
        """
        job = run.adopted.job
        movable = self._continuable(run) if job.stream else restart
        if movable:
            run.stop("moved")
        return movable

    def begin(self, adopted: Adopted) -> None:
        """Run a job that was just adopted."""
        run = Run(adopted, self._engine, self._publisher)
        if self._spans is not None:
            attempt_spans.begin(self._spans, run)
        job = adopted.job
        earlier = self._running.jobs.get(job.id)
        self._running.add(run)
        self._metrics.queue_wait.labels(job.lane).observe(adopted.waited_s)
        log.info(
            "job.adopted",
            **about(job),
            lane=job.lane,
            attempt=adopted.attempts,
            waited_s=round(adopted.waited_s, 4),
        )
        task = self.group.create_task(self._run(run, earlier))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, run: Run, earlier: Run | None) -> None:
        end: End | None = None
        try:
            try:
                if earlier is not None:
                    # A server that lost its last second has given out the same job again. Engines
                    # don't bear two requests with one id.
                    earlier.stop("fenced")
                    await earlier.over.wait()
                end = await self._execute(run)
            except Exception:
                # One job must not take the others along.
                log.error("job.broke", **about(run.adopted.job), exc=True)
                failed = EngineFailed()
                end = End(outcome="failed", code=failed.code, message=failed.message)
            self._running.free(run)
            if end is not None:
                run.outbox.finish(end)
            if end is not None or run.stopped == "lost":
                await run.outbox.ended
        finally:
            self._running.remove(run)
            self._settled(run, end)
        await self.freed()

    async def _execute(self, run: Run) -> End | None:
        """Run a job; None where it goes on elsewhere."""
        if run.adopted.base > 0 and not await self._continue(run):
            lost = WorkerLost("The worker that streamed the answer was lost.")
            return End(outcome="failed", code=lost.code, message=lost.message)
        end = await run.execute()
        if run.stopped == "moved" and end is None:
            await self._hand_back(run, blame=False)
            return None
        if run.call.fault is None or run.stopped is not None:
            return end
        # Was it this request that failed, or the engine? That shows a moment later.
        await first(self.broken.wait(), timeout_s=BROKEN_S)
        if not self.broken.is_set() or not self._continuable(run):
            return end
        return None if await self._hand_back(run, blame=True) else end

    def _continuable(self, run: Run) -> bool:
        job = run.adopted.job
        return not (job.stream and run.outbox.advanced) or self._resumable(job)

    def _resumable(self, job: Job) -> bool:
        """Tell whether another worker can and may go on with a job of which something was sent."""
        return job.failover != "error" and self._engine.resumable(job.path, job.body)

    async def _hand_back(self, run: Run, *, blame: bool) -> bool:
        """Return a job to the pool; what it has written stays in its log."""
        try:
            await self._transitions.hand_back(run.adopted, blame=blame)
        except QueueUnavailable:
            return False  # Its lease lapses, and another worker takes it over.
        log.warning("job.handed_back", **about(run.adopted.job), blame=blame)
        return True

    async def _continue(self, run: Run) -> bool:
        """Have a run go on where an earlier attempt was cut; False if that can't be done."""
        job = run.adopted.job
        if not job.stream:
            return True  # The gateway holds the answer back until it is whole: begin again.
        if not self._resumable(job):
            return False
        while True:
            try:
                past = await Past.read(self._transitions, run.adopted)
                break
            except QueueUnavailable:
                await first(run.stopping.wait(), timeout_s=0.2)
                if run.stopping.is_set():
                    return False
        if past.whole:
            run.resume(past)
        return past.whole

    def _settled(self, run: Run, end: End | None) -> None:
        """Count a run that is over."""
        job, metrics = run.adopted.job, self._metrics
        outcome = end.outcome if end is not None and not run.outbox.fenced else "elsewhere"
        metrics.jobs.labels(job.lane, outcome).inc()
        attempt_spans.end(run, outcome)
        usage = run.call.usage
        metrics.tokens.labels("prompt").inc(usage.prompt_tokens)
        metrics.tokens.labels("completion").inc(usage.completion_tokens)
        metrics.tokens.labels("cached").inc(usage.cached_tokens)
        if run.stopped is not None:
            phase = "decode" if usage.completion_tokens else "prefill"
            metrics.cancels.labels(phase, run.stopped).inc()
        log.info(
            "job.ended",
            **about(job),
            outcome=outcome,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )
