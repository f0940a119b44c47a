"""Event ids: numbered by the bytes alone, however they are cut into parts."""

from __future__ import annotations

import random

import pytest

from gateway.events import Numbering

EVENTS = [
    b"data: a\n\n",
    b"event: x\ndata: b\ndata: c\n\n",
    b"data: \xc3\xa9\n\n",
    b"data: [DONE]\n\n",
]
STREAM = b"".join(EVENTS)
NUMBERED = [b"id: %d\n%b" % (number, event) for number, event in enumerate(EVENTS, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_numbers_do_not_depend_on_the_parts(seed: int) -> None:
    rng = random.Random(seed)
    numbering, out, at = Numbering(), b"", 0
    while at < len(STREAM):
        size = rng.randint(1, 12)
        out += numbering.pass_on(STREAM[at : at + size])
        assert out == b"" or out.endswith(b"\n\n"), "an event is never begun and left"
        at += size
    assert out == b"".join(NUMBERED)
    assert numbering.rest() == b""


@pytest.mark.parametrize("after", range(7))
def test_what_was_had_is_skipped(after: int) -> None:
    assert Numbering(after=after).pass_on(STREAM) == b"".join(NUMBERED[after:])
    assert Numbering(after=after, ids=False).pass_on(STREAM) == b"".join(EVENTS[after:])


def test_a_comment_has_no_number_and_no_blank_line() -> None:
    assert Numbering().pass_on(b": hello\n\ndata: a\n\n") == b": hello\nid: 1\ndata: a\n\n"


def test_what_has_no_end_is_left() -> None:
    numbering = Numbering()
    assert numbering.pass_on(b"data: a\n\ndata: b") == b"id: 1\ndata: a\n\n"
    assert numbering.rest() == b"data: b"
