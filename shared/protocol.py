"""The records that cross Redis, and their MessagePack form.

Records are frozen and self-contained. A reader takes records of an older or newer writer: fields
that it doesn't know are ignored, fields that are missing have defaults. `Frame` is an array on the
wire, so its fields may only be appended.
"""

from __future__ import annotations

import msgspec

NOBODY = "-"
"""The owner in a frame that no worker wrote: a queued job's cancel or expiry."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request on its way to a worker: everything that is needed to run it."""

    version: int = 1
    id: str
    path: str
    """Path of the worker's application, `/v1/chat/completions`."""
    body: bytes
    content_type: str = "application/json"
    model: str
    lane: str
    stream: bool = False
    """What the client asked for. What it gets is in the answer's own headers."""
    sequences: int = 1
    """Sequences that it takes in the engine: `n`."""
    max_tokens_given: bool = False
    max_tokens: int = 0
    """Longest answer that its caller may have, whatever the body says; 0: as the worker does it."""
    tenant: str = ""
    weight: float = 1.0
    """Of its caller: a tenant's turns go by it."""
    request_id: str = ""
    """The client's own id for it, for log lines only."""
    gateway: str = ""
    patience_s: float | None = None
    """How long it goes on with nobody reading its answer; None: to its end."""
    failover: str = "continue"
    """`continue`, or `error`: once something was sent, no other worker may go on with it."""
    traceparent: str = ""
    """W3C's trace context of whoever sent it, for the worker's spans and the engine's."""
    tracestate: str = ""


class Head(msgspec.Struct, frozen=True):
    """Status and headers of the application's answer."""

    status: int
    content_type: str


class Usage(msgspec.Struct, frozen=True):
    """Tokens, counted by the engine."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended: once, in its last frame."""

    outcome: str
    """`completed` (the application's answer is whole, whatever its status), `failed`, `cancelled`,
    `expired` or `lost`."""
    code: str = ""
    """Code from `shared.errors` unless completed."""
    message: str = ""
    usage: Usage | None = None


Item = bytes | tuple[bytes]
"""A part of the answer: `bytes` stand between the template's two halves, `(bytes,)` stand alone."""


Delta = tuple[list[int], str | None, int | str | None]
"""What one step of the engine added to an answer: token ids, finish reason, stop reason."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """What a job produced in one turn of its worker's loop."""

    items: list[Item] = []
    head: Head | None = None
    """Comes once per attempt, before any item."""
    template: tuple[bytes, bytes] | None = None
    """Beginning and end of the items from here on."""
    end: End | None = None
    tokens: list[Delta] = []
    """What the items were made from: another worker continues the answer from it."""


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself with each beat."""

    id: str
    pool: str
    shards: int = 1
    models: list[str]
    state: str
    """`starting`, `ready` or `draining`."""
    seats: int
    reserve: int = 0
    """Seats that batch work may not take."""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    version: str = ""
    engine: str = ""
    started_ms: int = 0
    adapters: dict[str, tuple[int, str]] = {}
    """Wanted adapter that it has dealt with → the `asked_ms` of the wish, and why it can't be
    loaded; empty: it is."""


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A model name that some worker has served."""

    name: str
    pool: str
    shards: int = 1
    max_model_len: int = 0
    parent: str | None = None
    created: int = 0
    """Unix time, seconds."""


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter (LoRA) that is wanted on all workers of a pool."""

    name: str
    source: str
    """As the engine takes it: a directory on each worker's machine, or a repository's name."""
    asked_ms: int = 0
    """When it was asked for, by the server's clock: one wish differs from the next by it."""


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An API key: whose it is and what it may do. Its secret is not in it."""

    id: str
    name: str = ""
    """For people."""
    tenant: str
    """Keys of one tenant see each other's jobs."""
    secrets: list[tuple[bytes, int]] = []
    """SHA-256 of each secret, and until when it is valid: Unix time in milliseconds, 0 for ever."""
    models: list[str] = []
    """What it may use; empty: all."""
    lane: str = "interactive"
    """Of requests that ask for none."""
    highest_lane: str = "interactive"
    """The most urgent one that it may ask for."""
    on_disconnect: str = ""
    """What becomes of a job whose client has left; empty: as the gateway does it."""
    max_tokens: int = 0
    """Longest answer; 0: as the worker does it. So it is with what follows."""
    max_in_flight: int = 0
    max_body_bytes: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Prompts and answers, charged when a job has ended."""
    weight: float = 1.0
    """Share of its tenant's turns, beside those of others that wait in the same lane."""
    disabled: bool = False
    created_ms: int = 0


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
"""Record → MessagePack."""

_frame_decoder = msgspec.msgpack.Decoder(Frame)
decode_frame = _frame_decoder.decode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_usage = msgspec.msgpack.Decoder(Usage).decode
decode_worker = msgspec.msgpack.Decoder(WorkerRecord).decode
decode_model = msgspec.msgpack.Decoder(ModelRecord).decode
decode_adapter = msgspec.msgpack.Decoder(AdapterRecord).decode
decode_key = msgspec.msgpack.Decoder(KeyRecord).decode


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """A frame with its place in the job's log. `owner` and `base` are as the scripts wrote them."""

    seq: int
    owner: bytes
    base: int
    """The log's last number when that owner began."""
    body: bytes
    """An encoded `Frame`."""


def stamp(owner: str, base: int) -> bytes:
    """Return what stands between the number and the body of all messages of one owner."""
    return b" %b %d " % (owner.encode(), base)


def seal_message(seq: int, stamped: bytes, body: bytes) -> bytes:
    """Return a frame as it stands in the job's log and goes to its channel."""
    return b"%d%b%b" % (seq, stamped, body)


def open_message(message: bytes) -> Envelope:
    """Take apart a frame from a job's log or channel: `<seq> <owner> <base> <body>`."""
    seq, owner, base, body = message.split(b" ", 3)
    return Envelope(int(seq), owner, int(base), body)
