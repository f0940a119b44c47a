"""What `headrace-admin` writes for people."""

from __future__ import annotations

import pytest

from shared.admin import text
from shared.admin.documents import Cancelled, Drained, JobRow, Jobs
from shared.admin.layout import clean, duration, facts, moment, size, table
from shared.protocol import Usage


def test_columns_are_aligned_and_numbers_stand_right() -> None:
    assert table(("name", "jobs"), [("a", 5), ("longer", 12345)]) == (
        "NAME     JOBS\na           5\nlonger  12345\n"
    )


def test_what_is_not_known_is_a_dash_and_no_rows_are_none() -> None:
    assert table(("a", "b"), [(None, ""), ("x", 0)]) == "A  B\n-  -\nx  0\n"
    assert table(("a",), []) == "none\n"


def test_facts_that_are_not_known_are_left_out() -> None:
    assert facts([("id", "x"), ("worker", None), ("frames", 0)]) == "id      x\nframes  0\n"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, None),
        (0.04, "0.0s"),
        (9.94, "9.9s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (3600, "1h00m"),
        (7_800, "2h10m"),
        (4 * 86_400 + 3 * 3600, "4d03h"),
    ],
)
def test_durations(seconds: float | None, shown: str | None) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 40, "3072.0 GiB"),
    ],
)
def test_sizes(count: int, shown: str) -> None:
    assert size(count) == shown


def test_moments_are_in_utc() -> None:
    assert moment(0.25) == "1970-01-01 00:00:00.250Z"
    assert moment(None) is None


def test_nothing_moves_the_terminals_cursor() -> None:
    assert clean("a\x1b[2Jb\nc\u202e") == "a?[2Jb?c?"
    row = JobRow(
        id="0" * 32,
        state="queued",
        pool="p",
        lane="batch",
        model="m",
        tenant="\x1b[31mred\n",
        age_s=1,
        worker=None,
        attempts=0,
        position=1,
    )
    shown = text.render(Jobs(jobs=[row], total=3))
    assert "\x1b" not in shown
    assert "?[31mred?" in shown
    assert shown.endswith("1 of 3; more with --limit\n")


def test_an_end_is_told_in_one_line() -> None:
    ended = Cancelled(id="j", outcome="already_finished", ended="failed", usage=None)
    assert text.render(ended) == "j  already_finished, failed\n"
    usage = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
    ended = Cancelled(id="j", outcome="cancelled_running", ended="cancelled", usage=usage)
    assert text.render(ended) == "j  cancelled_running; prompt 7 (4 cached), completion 3\n"


def test_a_worker_that_has_not_left_tells_what_it_runs() -> None:
    drained = Drained(worker="w", outcome="draining", running=2, waited_s=5)
    assert text.render(drained) == "w  draining after 5.0s, 2 running\n"
