"""Frames as a worker would write them."""

from __future__ import annotations

from collections.abc import Sequence

from shared.outcomes import Append
from shared.protocol import seal_message, stamp


def append_of(job_id: str, owner: str, base: int, first: int, bodies: Sequence[bytes]) -> Append:
    """Return the write of some frames' bodies, the first of which has the number `first`."""
    stamped = stamp(owner, base)
    messages = [seal_message(seq, stamped, body) for seq, body in enumerate(bodies, first)]
    return Append(job_id, owner, first, messages)
