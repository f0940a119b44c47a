"""Python's collector of cycles, set for processes in which hardly anything is cyclic garbage."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000
_YOUNG_COLLECTIONS = 20
"""Per collection of the next older generation."""


def collect_rarely() -> None:
    """Leave what exists now out of all collections, and have them less often.

    Otherwise a process with hundreds of streams spends a tenth of its time in looking through live
    objects: each token brings some.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, _YOUNG_COLLECTIONS, _YOUNG_COLLECTIONS)
