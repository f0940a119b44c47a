"""What the commands answer: as JSON it is these records, as text what `text` makes of them.

Times are Unix time, durations and ages seconds.
"""

from __future__ import annotations

import msgspec

from shared.protocol import Usage


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A document or a part of one."""


class Lane(Record, frozen=True, kw_only=True):
    """One lane of one pool, all shards."""

    pool: str
    lane: str
    queued: int
    running: int
    """Claimed by a worker."""
    oldest_s: float | None
    """How long the next job has waited since it was submitted."""


class Worker(Record, frozen=True, kw_only=True):
    """A worker whose lease stands."""

    id: str
    pool: str
    state: str
    seats: int
    reserve: int
    running: int
    waiting: int
    kv_usage: float
    version: str
    engine: str
    models: list[str]
    age_s: float


class Model(Record, frozen=True, kw_only=True):
    """A model name that is served, or was within the last week."""

    name: str
    pool: str
    shards: int
    workers: int
    """Workers that are ready to serve it."""
    max_model_len: int
    parent: str | None


class Dead(Record, frozen=True, kw_only=True):
    """A pool's dead-letter."""

    pool: str
    jobs: int


class Server(Record, frozen=True, kw_only=True):
    """One of the queue's servers."""

    address: str
    reached: bool
    """What follows is empty where it isn't."""
    name: str
    version: str
    used_memory: int
    maxmemory: int
    """0: no limit."""
    maxmemory_policy: str


class Status(Record, frozen=True, kw_only=True):
    """Answer of `status`."""

    lanes: list[Lane]
    workers: list[Worker]
    models: list[Model]
    dead: list[Dead]
    servers: list[Server]
    """One, or a cluster's primaries."""
    warnings: list[str]


class AdapterWorker(Record, frozen=True, kw_only=True):
    """What a ready worker says of an adapter."""

    worker: str
    state: str
    """`loaded`, `unloaded`, `failed`, or `waiting`: nothing yet."""
    reason: str
    """Why it failed."""


class Adapter(Record, frozen=True, kw_only=True):
    """An adapter that is wanted on all workers of a pool."""

    name: str
    source: str
    asked: float
    workers: list[AdapterWorker]


class Adapters(Record, frozen=True, kw_only=True):
    """Answer of `lora list`."""

    pool: str
    adapters: list[Adapter]


class AdapterChange(Record, frozen=True, kw_only=True):
    """Answer of `lora load` and `lora unload`."""

    pool: str
    name: str
    source: str | None
    outcome: str
    """`loaded`, `unloaded`, `failed`, `timed_out`, or `no_worker`: none is ready."""
    workers: list[AdapterWorker]
    waited_s: float


class JobRow(Record, frozen=True, kw_only=True):
    """A job in its lane."""

    id: str
    state: str
    """`queued`, `claimed` (not begun yet), `running` or `gone` (only its entry is left)."""
    pool: str
    lane: str
    model: str | None
    tenant: str | None
    age_s: float | None
    """Since its submission."""
    worker: str | None
    attempts: int
    position: int | None
    """Of a queued job: 1 is the next of its lane."""


class Jobs(Record, frozen=True, kw_only=True):
    """Answer of `jobs`."""

    jobs: list[JobRow]
    total: int
    """Queued and running jobs in the lanes that were asked for."""


class Attempt(Record, frozen=True, kw_only=True):
    """A worker began a job."""

    worker: str
    at: float


class Times(Record, frozen=True, kw_only=True):
    """When what happened to a job."""

    submitted: float | None
    started: float | None
    """By its last worker."""
    finished: float | None
    deadline: float | None
    waited_s: float | None
    """From submission to the last start, or until now."""
    ran_s: float | None
    """From the last start to the end, or until now."""
    kept_s: float | None
    """Until it is forgotten."""


class Error(Record, frozen=True, kw_only=True):
    """Why a job did not complete."""

    code: str
    message: str


class Job(Record, frozen=True, kw_only=True):
    """Answer of `show`: a job without what was asked and answered."""

    id: str
    state: str
    outcome: str | None
    error: Error | None
    pool: str | None
    lane: str
    position: int | None
    worker: str | None
    cancel: str | None
    """A cancel that its worker has still to carry out."""
    attempts: int
    strikes: int
    history: list[Attempt]
    times: Times
    usage: Usage | None
    frames: int
    readers: list[str]
    """Who relays its answer to a client, or did until its end."""
    model: str | None
    stream: bool | None
    tenant: str | None
    """This and what follows is kept until the job ends."""
    path: str | None
    sequences: int | None
    body_bytes: int | None
    request_id: str | None
    gateway: str | None


class Cancelled(Record, frozen=True, kw_only=True):
    """Answer of `cancel`."""

    id: str
    outcome: str
    ended: str
    usage: Usage | None


class Drained(Record, frozen=True, kw_only=True):
    """Answer of `drain`."""

    worker: str
    outcome: str
    """`left`, `draining` (not yet left) or `unheard` (nobody listens on its channel)."""
    running: int
    waited_s: float


class DeadJob(Record, frozen=True, kw_only=True):
    """A job in the dead-letter."""

    id: str
    pool: str | None
    died: float
    age_s: float
    model: str | None
    lane: str | None
    tenant: str | None
    path: str | None
    stream: bool | None
    sequences: int | None
    body_bytes: int
    request_id: str | None
    gateway: str | None
    history: list[Attempt]


class DeadJobs(Record, frozen=True, kw_only=True):
    """Answer of `dead list`."""

    jobs: list[DeadJob]
    total: int


class Requeued(Record, frozen=True, kw_only=True):
    """Answer of `dead requeue`."""

    id: str
    """The new job's."""
    was: str
    pool: str | None
    lane: str


class Purged(Record, frozen=True, kw_only=True):
    """Answer of `dead purge`."""

    purged: int


class Key(Record, frozen=True, kw_only=True):
    """Answer of `keys create`, `edit`, `show`, `disable`, `enable` and `rotate`: an API key."""

    id: str
    name: str
    tenant: str
    secret: str | None
    """Where it has just been made; it is kept nowhere."""
    state: str
    """`enabled` or `disabled`."""
    models: list[str]
    """Empty: all."""
    lane: str
    highest_lane: str
    on_disconnect: str | None
    max_tokens: int | None
    max_in_flight: int | None
    max_body_bytes: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    weight: float
    created: float
    old_secret_until: float | None
    """Until when the secret before the last rotation is valid, too."""


class Keys(Record, frozen=True, kw_only=True):
    """Answer of `keys list`."""

    keys: list[Key]


class KeyDeleted(Record, frozen=True, kw_only=True):
    """Answer of `keys delete`."""

    id: str
