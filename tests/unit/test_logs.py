"""Log lines: events and their facts, for people and for machines."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import pytest

from shared.logs import Log, about, configure
from tests.wire.records import make_job


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("headrace")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def test_a_console_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure("console", "info")
    Log("test").info("job.claimed", job="5f", lane="batch")
    line = capsys.readouterr().err
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} info +job\.claimed job=5f lane=batch\n", line)


def test_a_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json", "debug")
    Log("test").debug("job.claimed", job="5f", size=3, odd=b"\xff")
    line = json.loads(capsys.readouterr().err)
    assert line.pop("time") > 0
    assert line == {
        "level": "debug",
        "event": "job.claimed",
        "job": "5f",
        "size": 3,
        "odd": "b'\\xff'",
    }


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_traceback_goes_along(capsys: pytest.CaptureFixture[str], form: str) -> None:
    configure(form, "info")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        Log("test").error("job.raised", exc=True)
    text = capsys.readouterr().err
    assert "ZeroDivisionError" in text
    assert len(text.splitlines()) == 1 if form == "json" else len(text.splitlines()) > 1


def test_less_severe_lines_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    configure("console", "warning")
    Log("test").info("job.claimed")
    logging.getLogger("somebody.else").info("chatter")
    assert capsys.readouterr().err == ""


def test_a_line_about_a_job_tells_whose_it_is() -> None:
    job = make_job(request_id="r", tenant="t", body=b"secret")
    assert about(job) == {"job": job.id, "request": "r", "tenant": "t", "model": job.model}
    assert about(make_job(id="i")) == {"job": "i", "model": job.model}


@pytest.mark.parametrize("form", ["console", "json"])
def test_no_field_breaks_a_line_or_makes_it_long(
    capsys: pytest.CaptureFixture[str], form: str
) -> None:
    configure(form, "info")
    Log("test").info("job.claimed", path="a\nb\x1b[31m\u2028c", reason="x" * 100_000)
    text = capsys.readouterr().err
    assert len(text.splitlines()) == 1
    assert len(text) < 1300
    assert "\x1b" not in text
