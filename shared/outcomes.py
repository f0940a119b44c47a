"""What goes into the transitions and what comes out of them. Never crosses Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from shared.protocol import Envelope, Job, Usage


@dataclass(frozen=True)
class Submitted:
    """`queued`, `known` (the id was submitted before), `cancelled` (before it came), `full` or
    `tenant_full`."""

    verdict: str
    entries: int = 0
    """Jobs in the lane, where it is full, or of the tenant's that wait there."""
    oldest_s: float = 0
    """How long the oldest of them has been there: as many have ended in that time, or more."""


@dataclass(frozen=True)
class Claimed:
    """A lane's entry that this worker now holds."""

    tag: str
    lane: str
    returned: bool
    entry: bytes
    job_id: str


@dataclass(frozen=True)
class Adopted:
    """A job that this worker now owns."""

    job: Job
    claimed: Claimed
    owner: str
    attempts: int
    base: int
    """The log's last number; this owner's first frame has the next one."""
    left_s: float
    """Until its deadline."""
    waited_s: float
    """Since its submission."""
    strikes: int = 0
    """Above 0: a worker was lost while it ran this job."""
    readers: tuple[str, ...] = ()
    """Who reads its answer: `<gateway>/<number>` each."""


class Append(Struct, frozen=True, gc=False):
    """Encoded frames of one job, to be published in order."""

    job_id: str
    owner: str
    first: int
    """Number of the first message."""
    messages: Sequence[bytes]
    """As `protocol.seal_message` makes them."""


@dataclass(frozen=True)
class Finish:
    """A job's terminal frame, encoded, and its place in the log."""

    job_id: str
    owner: str
    lane: str
    seq: int
    body: bytes
    outcome: str
    usage: Usage | None = None


class Verdict(Struct, frozen=True, gc=False):
    """What became of a write: `ok`; `cancelled` or `expired` (written, but the job is to be
    stopped); `fenced` (another owns the job); `gap` (the log ends at `seq`: send from there)."""

    word: str
    seq: int = 0


@dataclass(frozen=True)
class CancelOutcome:
    """`queued`, `running` (its worker was asked), `forced`, `finished` or `unknown`."""

    word: str
    outcome: str = ""
    """Of a finished job."""
    usage: Usage | None = None


@dataclass(frozen=True)
class Attached:
    """A job whose answer somebody begins to read."""

    state: str
    outcome: str
    lane: str
    stream: bool
    left_s: float
    """Until its deadline."""
    frames: int
    """In its log."""


@dataclass(frozen=True)
class Left:
    """What readers' going has led to: `read` (others are there), `waiting` (for `wait_s`, for
    somebody to come back), `kept` (it goes on to its end), `queued` or `running` (it is cancelled),
    `finished` or `unknown`."""

    word: str
    wait_s: float = 0


@dataclass(frozen=True)
class Readers:
    """Who reads a job's answer."""

    names: tuple[str, ...]
    abandoned: bool
    """Nobody has for longer than the job's patience."""


@dataclass(frozen=True)
class LogPage:
    """Frames of a job's log, in order, and the job's state (None: there is no such job)."""

    envelopes: list[Envelope]
    state: str | None
    more: bool
