"""Reads a request's body and the few fields of it that the gateway needs."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, Self

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gateway import limits
from gateway.errors import ClientGone, Overloaded, error_response
from gateway.exchange import exchange_of
from gateway.settings import GatewaySettings
from shared.errors import (
    BodyTooLarge,
    HeadraceError,
    InvalidJSON,
    InvalidRequest,
    UnsupportedMediaType,
)

_LANES = {
    "flex": "batch",
    "batch": "batch",
    "default": "interactive",
    "priority": "interactive",
}
"""`service_tier` → lane."""
FORM_TYPE = "multipart/form-data"
_BOM = b"\xef\xbb\xbf"
_TRUE_WORDS = frozenset({"true", "1", "yes", "on", "t", "y"})
_INT_DIGITS = 4300
"""Python, and so the worker, refuses longer integers."""
_DIGITS = b"0123456789"
_MOST_SEQUENCES = 65_536
_DEEP = 500
"""Less than what the parser takes, which is not the same everywhere."""
BIG_BYTES = 256 << 10
"""Larger bodies are looked at in a thread, so that nobody else waits for it."""
_LINGER_S = 2.0
_LINGER_BYTES = 256 << 20


class Fields(msgspec.Struct, frozen=True):
    """What the gateway looks at. Of any type: a wrong one is the worker's to refuse."""

    model: Any = None
    stream: Any = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    service_tier: Any = None
    background: Any = None
    previous_response_id: Any = None
    conversation: Any = None

    @property
    def lane(self) -> str | None:
        """The lane that the request asks for, if it does."""
        tier = self.service_tier
        return _LANES.get(tier) if isinstance(tier, str) else None

    @property
    def asks_stream(self) -> bool:
        """Whether the worker will understand `stream` as true."""
        return _is_true(self.stream)

    @property
    def sequences(self) -> int:
        """How many sequences the request takes in the engine."""
        return self.n if type(self.n) is int and 1 <= self.n <= _MOST_SEQUENCES else 1

    @property
    def max_tokens_given(self) -> bool:
        """Whether the request limits its answer's length itself."""
        limits = (self.max_tokens, self.max_completion_tokens, self.max_output_tokens)
        return any(limit is not None for limit in limits)

    @property
    def asked_tokens(self) -> tuple[str, int] | None:
        """The name and the value of the answer's length that the request asks for, if it does."""
        for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
            asked = getattr(self, name)
            if type(asked) is int:
                return name, asked
        return None


_decoder = msgspec.json.Decoder(Fields)


def _is_true(value: Any) -> bool:
    if isinstance(value, str):
        return value.lower() in _TRUE_WORDS
    return value is True or value == 1


class Room:
    """The bytes of all bodies that are being read or submitted, with a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.taken = 0

    def take(self, size: int) -> None:
        """Raises `Overloaded`, having taken nothing."""
        if self.taken + size > self._limit:
            raise Overloaded(retry_after_s=random.uniform(1, 5))
        self.taken += size

    def give_back(self, size: int) -> None:
        self.taken -= size


class Share:
    """What one request holds of the room, given back at the end of its `with`."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._size = 0

    def take(self, size: int) -> None:
        self._room.take(size)
        self._size += size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._room.give_back(self._size)


async def read(
    request: Request, share: Share, *, limit: int, timeout_s: float, form: bool = False
) -> bytes:
    """Read a body, counting; raise as soon as it is known to be too large, or of a wrong type."""
    _check_type(request.headers.get("content-type"), form=form)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    total = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                total += len(chunk)
                if total > limit:
                    raise _too_large(limit)
                share.take(len(chunk))
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks).removeprefix(_BOM)
    except TimeoutError as error:
        raise InvalidRequest("The request's body did not arrive in time.") from error


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request's body is larger than {limit} bytes.")


def _check_type(content_type: str | None, *, form: bool) -> None:
    media_type = (content_type or "application/json").split(";")[0].strip().lower()
    if form:
        if media_type != FORM_TYPE:
            raise UnsupportedMediaType(f"The request's content type must be {FORM_TYPE}.")
    elif media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType("The request's content type must be application/json.")


async def checked(body: bytes, settings: GatewaySettings) -> Fields:
    """Decode a body and hold it to the limits. Raises `InvalidJSON`, `InvalidRequest`."""
    if len(body) > BIG_BYTES:
        return await asyncio.to_thread(_checked, body, settings)
    return _checked(body, settings)


def _checked(body: bytes, settings: GatewaySettings) -> Fields:
    fields = decode(body)
    limits.check(body, settings)
    return fields


def decode(body: bytes) -> Fields:
    """Return the needed fields of a body. Raises `InvalidJSON`, `InvalidRequest`."""
    try:
        str(body, "utf-8")
        fields = _decoder.decode(body)
        if (at := _huge_number(body)) is not None:
            _check_number(body, at)
    except UnicodeDecodeError as error:
        raise InvalidJSON("The request's body is not valid UTF-8.") from error
    except msgspec.ValidationError as error:
        if "Expected `object`" in str(error):
            raise InvalidRequest("The request's body must be a JSON object.") from error
        param = str(error).partition("`$.")[2].partition("`")[0] or None
        raise InvalidJSON(f"The request's body is not valid: {error}.", param=param) from error
    except msgspec.DecodeError as error:
        raise InvalidJSON(f"The request's body is not valid JSON: {error}.") from error
    except RecursionError as error:
        param = limits.deep_field(body, _DEEP)
        raise InvalidJSON("The request's body is nested too deeply.", param=param) from error
    return fields


def _huge_number(body: bytes) -> int | None:
    """Return where a run of digits is longer than a worker would read, perhaps in a string.

    Such a run covers one of every 4,300 bytes: the search looks at those only.
    """
    for at in range(_INT_DIGITS - 1, len(body), _INT_DIGITS):
        if 48 <= body[at] <= 57:
            before = body[max(0, at - _INT_DIGITS) : at]
            after = body[at : at + _INT_DIGITS + 1]
            start = at - len(before) + len(before.rstrip(_DIGITS))
            if at + len(after) - len(after.lstrip(_DIGITS)) - start > _INT_DIGITS:
                return start
    return None


def _check_number(body: bytes, at: int) -> None:
    """Refuse a body that a worker couldn't read because of its numbers."""
    try:
        json.loads(body)
    except ValueError as error:
        message = "The request's body holds a number that is too long."
        raise InvalidJSON(message, param=limits.field_at(body, at)) from error


def refuse_stored_state(fields: Fields) -> None:
    """Refuse what would need one worker's memory: a pool doesn't have it."""
    if _is_true(fields.background):
        raise InvalidRequest("Background responses are not supported here.", param="background")
    for name in ("previous_response_id", "conversation"):
        if getattr(fields, name) is not None:
            raise InvalidRequest(
                "Responses are not stored here: send the conversation in `input`.", param=name
            )


class Refusal:
    """The answer to a body that was not read to its end: said, then the connection is closed.

    What the client still sends is read and dropped for a moment. Closed at once, the connection
    would be reset, and the client might never see the answer.
    """

    def __init__(self, error: HeadraceError) -> None:
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI application."""
        form = exchange_of(scope).form
        response = error_response(self._error, {"connection": "close"}, form)
        await send(
            {
                "type": "http.response.start",
                "status": response.status_code,
                "headers": response.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        if not any(name == b"expect" for name, _ in scope["headers"]):
            await self._linger(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _linger(self, receive: Receive) -> None:
        left = _LINGER_BYTES
        try:
            async with asyncio.timeout(_LINGER_S):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
        except TimeoutError:
            return
