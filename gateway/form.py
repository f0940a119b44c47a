"""Reads the few fields that the gateway needs out of a form with a file in it (multipart)."""

from __future__ import annotations

import logging
import re
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.body import Fields
from shared.errors import InvalidRequest

_MOST_PARTS = 1000
"""The worker, too, takes no more fields than that."""
_MOST_FIELD_BYTES = 4096
_NAMES = frozenset(Fields.__struct_fields__)
_NAME_ENCODED = re.compile(rb";[ \t]*name[ \t]*\*", re.IGNORECASE)
"""Not allowed in forms: some releases of the worker's parser read it, and ours doesn't."""

# It warns of each form that is wrong, which is its client's affair and told to that.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


def parts(body: bytes, content_type: str) -> list[bytes]:
    """Cut a form that was decoded into its parts as they came, by a boundary that is in none."""
    return (b"\r\n" + body).split(b"\r\n--" + _boundary(content_type))


def _boundary(content_type: str) -> bytes:
    return parse_options_header(content_type)[1].get(b"boundary", b"")


def decode(body: bytes, content_type: str) -> Fields:
    """Return the needed fields of a form. Raises `InvalidRequest`."""
    boundary = _boundary(content_type)
    if not boundary:
        raise InvalidRequest("The request's content type names no boundary.")
    found = _Parts()
    try:
        parser = MultipartParser(boundary, found.callbacks())  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"The request's body is not a valid form: {error}.") from error
    return Fields(**found.fields)


class _Parts:
    """Takes in a form part by part; what is no needed field is passed over, files first of all."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self._count = 0
        self._header = b""
        self._value = b""
        self._disposition = b""
        self._name = ""
        self._text = b""

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._take_header,
            "on_header_value": self._take_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take_data,
            "on_part_end": self._end,
        }

    def _begin(self) -> None:
        self._count += 1
        if self._count > _MOST_PARTS:
            raise InvalidRequest(f"The request's form has more than {_MOST_PARTS} parts.")
        self._name, self._text, self._disposition = "", b"", b""

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        if _NAME_ENCODED.search(self._disposition):
            raise InvalidRequest("The request's form has a field with an encoded name.")
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self._name = name if name in _NAMES and b"filename" not in options else ""

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if not self._name:
            return
        self._text += data[start:end]
        if len(self._text) > _MOST_FIELD_BYTES:
            raise InvalidRequest("The value is too long.", param=self._name)

    def _end(self) -> None:
        if self._name:
            self.fields[self._name] = self._text.decode("utf-8", "replace")
