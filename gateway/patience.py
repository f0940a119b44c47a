"""What becomes of a job whose client has left, as a header or a setting says it."""

from __future__ import annotations

import re

_SECONDS = re.compile(r"[0-9]{1,10}(\.[0-9]{1,10})?")


def seconds(text: str) -> float | None:
    """Return a plain decimal number above 0; None for anything else."""
    number = float(text) if _SECONDS.fullmatch(text) else 0.0
    return number if number > 0 else None


def patience(policy: str) -> float | None:
    """Return how long a job goes on without its client; None: to its end. Raises `ValueError`."""
    policy = policy.strip().lower()
    if policy == "cancel":
        return 0.0
    if policy == "continue":
        return None
    name, _, text = policy.partition("=")
    grace_s = seconds(text) if name == "grace" else None
    if grace_s is None:
        raise ValueError("must be `cancel`, `continue` or `grace=<seconds>`")
    return grace_s
