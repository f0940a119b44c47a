"""Messages: a frame with its number, its owner and its base around it."""

from __future__ import annotations

import pytest

from shared.protocol import Envelope, Frame, decode_frame, encode, open_message, seal_message, stamp


@pytest.mark.parametrize("body", [b"", b"plain", b"a b  c ", b" \n\x00\xff 9-0", bytes(range(256))])
def test_a_message_is_taken_apart_whatever_its_body_holds(body: bytes) -> None:
    assert open_message(b"17 ab01 3 " + body) == Envelope(17, b"ab01", 3, body)


def test_a_sealed_message_is_a_message() -> None:
    body = encode(Frame([b"x y", (b"z",)]))
    message = seal_message(5, stamp("owner", 2), body)
    assert message == b"5 owner 2 " + body
    assert open_message(message) == Envelope(5, b"owner", 2, body)


@pytest.mark.parametrize("message", [b"", b"1", b"1 o 0", b"x o 0 b"])
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        open_message(message)


def test_thin_and_whole_items_stay_different() -> None:
    items = decode_frame(encode(Frame([b"a", (b"a",), b"", (b"",)]))).items
    assert items == [b"a", (b"a",), b"", (b"",)]
    assert [type(item) for item in items] == [bytes, tuple, bytes, tuple]
