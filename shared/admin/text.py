"""Documents as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.admin.documents import (
    AdapterChange,
    Adapters,
    AdapterWorker,
    Attempt,
    Cancelled,
    DeadJob,
    DeadJobs,
    Drained,
    Job,
    Jobs,
    Key,
    KeyDeleted,
    Keys,
    Purged,
    Record,
    Requeued,
    Server,
    Status,
)
from shared.admin.layout import duration, facts, heading, moment, size, table
from shared.protocol import Usage


def status(document: Status) -> str:
    lanes = [
        (one.pool, one.lane, one.queued, one.running, duration(one.oldest_s))
        for one in document.lanes
    ]
    workers = [
        (
            one.id,
            one.pool,
            one.state,
            one.seats,
            one.running,
            one.waiting,
            f"{one.kv_usage:.0%}",
            " ".join(part for part in (one.version, one.engine) if part),
            duration(one.age_s),
        )
        for one in document.workers
    ]
    models = [
        (one.name, one.pool, one.workers, one.max_model_len or None, one.parent)
        for one in document.models
    ]
    worker_columns = ("id", "pool", "state", "seats", "running", "waiting", "kv", "version", "age")
    parts = [
        *map(_server, document.servers),
        *(f"warning: {one}\n" for one in document.warnings),
        heading("Lanes"),
        table(("pool", "lane", "queued", "running", "oldest"), lanes),
        heading("Workers"),
        table(worker_columns, workers),
        heading("Models"),
        table(("name", "pool", "workers", "max len", "parent"), models),
        heading("Dead-letter"),
        table(("pool", "jobs"), [(one.pool, one.jobs) for one in document.dead]),
    ]
    return "".join(parts)


def _server(server: Server) -> str:
    if not server.reached:
        return f"{server.address}: cannot be reached\n"
    limit = f" of {size(server.maxmemory)}" if server.maxmemory else ", no limit"
    return (
        f"{server.address}: {server.name} {server.version}, "
        f"memory {size(server.used_memory)}{limit}, "
        f"maxmemory-policy {server.maxmemory_policy or 'unknown'}\n"
    )


def jobs(document: Jobs) -> str:
    rows = [
        (
            one.id,
            one.state,
            one.lane,
            one.model,
            one.tenant,
            duration(one.age_s),
            one.worker,
            one.attempts,
            one.position,
        )
        for one in document.jobs
    ]
    columns = ("id", "state", "lane", "model", "tenant", "age", "worker", "attempts", "position")
    return table(columns, rows) + _rest(len(rows), document.total)


def _rest(shown: int, total: int) -> str:
    return f"{shown} of {total}; more with --limit\n" if shown < total else ""


def job(document: Job) -> str:
    times, error = document.times, document.error
    pairs = [
        ("id", document.id),
        ("state", document.state),
        ("outcome", document.outcome),
        ("error", f"{error.code}: {error.message}" if error else None),
        ("pool", document.pool),
        ("lane", document.lane),
        ("position", document.position),
        ("worker", document.worker),
        ("cancel", document.cancel),
        ("attempts", document.attempts),
        ("strikes", document.strikes),
        ("submitted", moment(times.submitted)),
        ("started", moment(times.started)),
        ("finished", moment(times.finished)),
        ("deadline", moment(times.deadline)),
        ("waited", duration(times.waited_s)),
        ("ran", duration(times.ran_s)),
        ("kept for", duration(times.kept_s)),
        ("usage", _usage(document.usage)),
        ("frames", document.frames),
        ("readers", " ".join(document.readers) or None),
        *_request(document),
    ]
    return facts(pairs) + _history(document.history)


def _request(document: Job | DeadJob) -> list[tuple[str, str | int | None]]:
    given = document.body_bytes
    return [
        ("model", document.model),
        ("stream", None if document.stream is None else "yes" if document.stream else "no"),
        ("tenant", document.tenant),
        ("path", document.path),
        ("sequences", document.sequences),
        ("body", None if given is None else size(given)),
        ("request id", document.request_id),
        ("gateway", document.gateway),
    ]


def _usage(usage: Usage | None) -> str | None:
    if usage is None:
        return None
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    return f"prompt {usage.prompt_tokens}{cached}, completion {usage.completion_tokens}"


def _history(history: list[Attempt]) -> str:
    if not history:
        return ""
    rows = [(moment(one.at), one.worker) for one in history]
    return heading("History") + table(("began", "worker"), rows)


def cancelled(document: Cancelled) -> str:
    usage = _usage(document.usage)
    ended = f", {document.ended}" if document.outcome == "already_finished" else ""
    return f"{document.id}  {document.outcome}{ended}{f'; {usage}' if usage else ''}\n"


def drained(document: Drained) -> str:
    running = f", {document.running} running" if document.outcome != "left" else ""
    waited = duration(document.waited_s)
    return facts([(document.worker, f"{document.outcome} after {waited}{running}")])


def dead_jobs(document: DeadJobs) -> str:
    rows = [
        (
            one.id,
            one.pool,
            one.lane,
            one.model,
            one.tenant,
            duration(one.age_s),
            size(one.body_bytes),
            ", ".join(attempt.worker for attempt in one.history),
        )
        for one in document.jobs
    ]
    columns = ("id", "pool", "lane", "model", "tenant", "age", "body", "workers lost")
    return table(columns, rows) + _rest(len(rows), document.total)


def dead_job(document: DeadJob) -> str:
    pairs = [
        ("id", document.id),
        ("pool", document.pool),
        ("lane", document.lane),
        ("died", moment(document.died)),
        ("age", duration(document.age_s)),
        *_request(document),
    ]
    return facts(pairs) + _history(document.history)


def requeued(document: Requeued) -> str:
    return f"{document.was}  requeued as {document.id}\n"


def purged(document: Purged) -> str:
    return f"{document.purged} purged\n"


def key(document: Key) -> str:
    most = document.max_body_bytes
    pairs = [
        ("id", document.id),
        ("name", document.name),
        ("tenant", document.tenant),
        ("secret", document.secret),
        ("state", document.state),
        ("models", ", ".join(document.models) or "all"),
        ("lane", document.lane),
        ("highest lane", document.highest_lane),
        ("on disconnect", document.on_disconnect),
        ("max tokens", document.max_tokens),
        ("max in flight", document.max_in_flight),
        ("max body", None if most is None else size(most)),
        ("requests a minute", document.requests_per_minute),
        ("tokens a minute", document.tokens_per_minute),
        ("weight", f"{document.weight:g}"),
        ("created", moment(document.created)),
        ("old secret until", moment(document.old_secret_until)),
    ]
    note = "\nThis secret is not kept: it can't be shown again.\n" if document.secret else ""
    return facts(pairs) + note


def keys(document: Keys) -> str:
    rows = [
        (
            one.id,
            one.name,
            one.tenant,
            one.state,
            ", ".join(one.models) or "all",
            one.highest_lane,
            one.max_in_flight,
            one.max_tokens,
            one.requests_per_minute,
            one.tokens_per_minute,
            moment(one.created),
        )
        for one in document.keys
    ]
    columns = ("id", "name", "tenant", "state", "models", "highest lane", "in flight", "tokens")
    return table((*columns, "req/min", "tok/min", "created"), rows)


def key_deleted(document: KeyDeleted) -> str:
    return f"{document.id}  deleted\n"


def adapters(document: Adapters) -> str:
    rows = [
        (one.name, worker.worker, worker.state, one.source, moment(one.asked), worker.reason)
        for one in document.adapters
        for worker in one.workers or [AdapterWorker(worker="-", state="no worker", reason="")]
    ]
    return table(("name", "worker", "state", "source", "asked", "reason"), rows)


def adapter_change(document: AdapterChange) -> str:
    rows = [(one.worker, one.state, one.reason) for one in document.workers]
    outcome = document.outcome.replace("_", " ")
    first = f"{document.name}  {outcome} after {duration(document.waited_s)}\n"
    return first + (table(("worker", "state", "reason"), rows) if rows else "")


_FORMS: dict[type[Record], Callable[[Any], str]] = {
    Status: status,
    Jobs: jobs,
    Job: job,
    Cancelled: cancelled,
    Drained: drained,
    DeadJobs: dead_jobs,
    DeadJob: dead_job,
    Requeued: requeued,
    Purged: purged,
    Key: key,
    Keys: keys,
    KeyDeleted: key_deleted,
    Adapters: adapters,
    AdapterChange: adapter_change,
}


def render(document: Record) -> str:
    """Return any document as text."""
    return _FORMS[type(document)](document)
