"""The spans of a job's attempt on this worker, and of its wait before the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.run import Run

if TYPE_CHECKING:
    from shared.otel import Spans


def begin(spans: Spans, run: Run) -> None:
    """Begin an attempt; what the engine does belongs to it."""
    adopted, job = run.adopted, run.adopted.job
    if adopted.attempts == 1:
        wait = spans.begin("headrace.queue", run.trace, ago_s=adopted.waited_s)
        wait.end({"headrace.job": job.id, "headrace.lane": job.lane})
    run.span = spans.begin("headrace.attempt", run.trace, kind="consumer")
    run.trace = run.span.trace


def end(run: Run, outcome: str) -> None:
    """End an attempt that is over."""
    if run.span is None:
        return
    adopted, job, usage = run.adopted, run.adopted.job, run.call.usage
    facts: dict[str, str | int | float | bool] = {
        "headrace.job": job.id,
        "headrace.request": job.request_id,
        "headrace.lane": job.lane,
        "headrace.attempt": adopted.attempts,
        "headrace.queue_wait_s": round(adopted.waited_s, 4),
        "headrace.outcome": outcome,
        "gen_ai.request.model": job.model,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }
    if job.tenant:
        facts["headrace.tenant"] = job.tenant
    run.span.end(facts, failed=outcome if outcome in ("failed", "expired", "lost") else "")
