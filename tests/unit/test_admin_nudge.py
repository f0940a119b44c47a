"""The `drain` message on a worker's control channel."""

from __future__ import annotations

from worker.cancellation import Nudges
from worker.running import Running


def test_drain_begins_the_drain_again_and_again() -> None:
    asked: list[str] = []
    nudges = Nudges(Running(), lambda: None, lambda: asked.append("drain"))
    nudges.on_message(b"drain")
    nudges.on_message(b"drain")
    assert asked == ["drain", "drain"]


def test_only_the_whole_word_counts() -> None:
    asked: list[str] = []
    nudges = Nudges(Running(), lambda: None, lambda: asked.append("drain"))
    for message in (b"drain now", b"Drain", b"drains", b""):
        nudges.on_message(message)
    assert asked == []
