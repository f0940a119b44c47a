"""Requests with an idempotency key: one job answers all that send the same key and body."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import msgspec

from gateway.errors import IdempotencyConflict
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
    ) -> JobStream:
        """Return the stream of the key's job, from its beginning. Raises `IdempotencyConflict`.

        A job that ended without an answer (cancelled, expired, failed) gives way to a new one.
        """
        digest = _hash(job.tenant.encode(), key.encode())
        fingerprint = _hash(job.path.encode(), job.body)
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
                    job, caller, limits=limits, timeout_s=timeout_s, shared=True
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


def _hash(*parts: bytes) -> str:
    digest = blake2b(digest_size=_SIZE)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()
