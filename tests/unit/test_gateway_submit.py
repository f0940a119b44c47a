"""When a client that was refused is told to come back."""

from __future__ import annotations

import pytest

from gateway.submit import retry_s
from shared.outcomes import Submitted


@pytest.mark.parametrize(
    ("oldest_s", "least", "most"),
    [(0, 1, 2), (5, 1, 2), (100, 10, 20), (10_000, 60, 60)],
)
def test_a_full_lane_says_when_it_will_have_room(oldest_s: float, least: int, most: int) -> None:
    told = [retry_s(Submitted("full", 1000, oldest_s)) for _ in range(50)]
    assert least <= min(told) <= max(told) <= most
    assert len(set(told)) > 1 or least == most
