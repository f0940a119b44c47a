"""Requests with an idempotency key: one job answers all that send the same key and body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import blake2b

import msgspec

from gateway import form
from gateway.body import BIG_BYTES, FORM_TYPE
from gateway.errors import IdempotencyConflict
from gateway.in_flight import Told
from gateway.relay import JobStream
from gateway.submit import Limits, Submitter
from shared.errors import Cancelled, Unavailable
from shared.protocol import Job, KeyRecord
from shared.transitions import Transitions

_TRIES = 4
_SIZE = 16


class KeyedRequests:
    """Finds the job of a key or makes it. Only hashes of keys and bodies are stored."""

    def __init__(self, transitions: Transitions, submitter: Submitter, *, ttl_s: float) -> None:
        self._transitions = transitions
        self._submitter = submitter
        self._ttl_s = ttl_s
        """What is kept of an answer; a key is kept as long beyond the request's time limit."""

    async def open(
        self,
        job: Job,
        caller: KeyRecord,
        key: str,
        *,
        new_id: Callable[[], str],
        limits: Limits,
        timeout_s: float,
        told: Told = lambda _: None,
    ) -> JobStream:
        """Return the stream of the key's job, from its beginning. Raises `IdempotencyConflict`.

        A job that ended without an answer (cancelled, expired, failed) gives way to a new one.
        """
        digest = _hash(job.tenant.encode(), key.encode())
        large = len(job.body) > BIG_BYTES
        fingerprint = await asyncio.to_thread(fingerprint_of, job) if large else fingerprint_of(job)
        instead = ""
        for _ in range(_TRIES):
            found = await self._transitions.remember(
                digest, fingerprint, job.id, ttl_s=timeout_s + self._ttl_s, instead=instead
            )
            if found is None:
                raise IdempotencyConflict
            job = msgspec.structs.replace(job, id=found)
            try:
                stream = await self._submitter.open(
                    job, caller, limits=limits, timeout_s=timeout_s, told=told, shared=True
                )
            except Cancelled:  # Before it was submitted.
                pass
            else:
                if stream.joined in ("", "completed"):
                    return stream
                self._submitter.close(stream)
            instead = found
            job = msgspec.structs.replace(job, id=new_id())
        raise Unavailable


def fingerprint_of(job: Job) -> str:
    """Return the hash of what a job asks: of a form's parts, whose boundary is new each time."""
    if job.content_type.lower().startswith(FORM_TYPE):
        return _hash(job.path.encode(), *form.parts(job.body, job.content_type))
    return _hash(job.path.encode(), job.body)


def _hash(*parts: bytes) -> str:
    digest = blake2b(digest_size=_SIZE)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()
