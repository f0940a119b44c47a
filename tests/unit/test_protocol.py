"""Messages and log entries: a frame with its number, its owner and its base around it."""

from __future__ import annotations

import pytest

from shared.protocol import Envelope, Frame, decode_frame, encode, open_entry, open_message


@pytest.mark.parametrize("body", [b"", b"plain", b"a b  c ", b" \n\x00\xff 9-0", bytes(range(256))])
def test_a_message_is_taken_apart_whatever_its_body_holds(body: bytes) -> None:
    assert open_message(b"17 ab01 3 " + body) == Envelope(17, b"ab01", 3, body)


@pytest.mark.parametrize("body", [b"", b"a b  c ", bytes(range(256))])
def test_a_log_entry_is_taken_apart_whatever_its_body_holds(body: bytes) -> None:
    assert open_entry(b"17-0", b"- 3 " + body) == Envelope(17, b"-", 3, body)


def test_channel_and_log_say_the_same() -> None:
    body = encode(Frame([b"x y", (b"z",)]))
    message = open_message(b"5 owner 2 " + body)
    assert message == open_entry(b"5-0", b"owner 2 " + body)
    assert decode_frame(message.body).items == [b"x y", (b"z",)]


@pytest.mark.parametrize("message", [b"", b"1", b"1 o 0", b"x o 0 b"])
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        open_message(message)


def test_thin_and_whole_items_stay_different() -> None:
    items = decode_frame(encode(Frame([b"a", (b"a",), b"", (b"",)]))).items
    assert items == [b"a", (b"a",), b"", (b"",)]
    assert [type(item) for item in items] == [bytes, tuple, bytes, tuple]
