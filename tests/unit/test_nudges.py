"""Nudges: hints that may be lost, late, or nonsense."""

from __future__ import annotations

import pytest

from tests.unit.test_running import make_run
from worker.cancellation import Nudges
from worker.running import Running


async def test_a_nudge_stops_its_job() -> None:
    running, run = Running(), make_run()
    running.add(run)
    job = run.adopted.job.id
    Nudges(running, lambda: None).on_message(f"cancel {job} o1 expired".encode())
    assert run.stopped == "expired"


@pytest.mark.parametrize(
    "message",
    [
        "cancel {job} another cancelled",
        "cancel {other} o1 cancelled",
        "pause {job} o1 cancelled",
        "cancel {job} o1",
        "cancel {job} o1 cancelled more",
        "",
    ],
)
async def test_what_is_not_for_this_run_changes_nothing(message: str) -> None:
    running, run = Running(), make_run()
    running.add(run)
    text = message.format(job=run.adopted.job.id, other="0" * 32)
    Nudges(running, lambda: None).on_message(text.encode())
    assert run.stopped is None


async def test_what_is_no_text_changes_nothing() -> None:
    Nudges(Running(), lambda: None).on_message(b"\xff\xfe cancel a b")


async def test_after_a_reconnect_a_beat_looks_for_what_was_missed() -> None:
    missed: list[bool] = []
    Nudges(Running(), lambda: missed.append(True)).on_subscribed()
    assert missed == [True]


async def test_a_drain_is_asked_for() -> None:
    asked: list[bool] = []
    nudges = Nudges(Running(), lambda: None, lambda: asked.append(True))
    nudges.on_message(b"drain")
    nudges.on_message(b"drain ")
    assert asked == [True]
