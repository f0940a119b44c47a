"""Refuses small bodies that ask for much: one table, field → bound, for all endpoints.

Nothing here knows what a request means. What is within the bounds goes to the worker, right or
wrong, and what is beyond them names its parameter.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import accumulate

import msgspec

from gateway.errors import AboveLimit
from gateway.settings import GatewaySettings

_NAMED_BYTES = 1 << 20
"""How much of a body is walked through for a name, token by token."""
_TOKEN = re.compile(rb'"((?:[^"\\]|\\.)*)"|[\[\]{}]', re.DOTALL)
_HUGE = re.compile(rb"(?<![0-9.])[0-9.]+[eE]\+?[0-9]{3,}")
_NUMBER_BYTES = 64
"""A longer number is beyond every bound; a longer text is none."""
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[]{}"))
_STEP = [(byte in b"[{") - (byte in b"]}") for byte in range(256)]


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()


_Raw = msgspec.Raw
_fields = msgspec.json.Decoder(dict[str, _Raw])
_items = msgspec.json.Decoder(list[_Raw])
_messages = msgspec.json.Decoder(list[_Message])


def _number(raw: _Raw) -> float:
    """Return a number as the worker will read it, from a text too; 0 for what is none."""
    view = memoryview(raw)
    if len(view) > _NUMBER_BYTES:
        return math.inf if view[0] in b"-0123456789" else 0
    try:
        return float(json.loads(bytes(view)))
    except (TypeError, ValueError):
        return 0
    except OverflowError:
        return math.inf


def _count(raw: _Raw, bound: int) -> int:
    """Return how many items a list or an object has; 1 for all else, and for few of them."""
    view = memoryview(raw)
    if len(view) <= bound or view[0] not in b"[{":  # An item takes a byte and a comma.
        return 1
    return len(_items.decode(view) if view[0] in b"[" else _fields.decode(view))


def _check_number(name: str, raw: _Raw, bound: int) -> None:
    if _number(raw) > bound:
        raise AboveLimit(f"`{name}` may be {bound:,} at most.", param=name)


def _check_items(name: str, raw: _Raw, bound: int) -> None:
    if _count(raw, bound) > bound:
        raise AboveLimit(f"`{name}` may have {bound:,} items at most.", param=name)


def _check_inputs(name: str, raw: _Raw, bound: int) -> None:
    if not _is_tokens(raw):
        _check_items(name, raw, bound)


def _is_tokens(raw: _Raw) -> bool:
    """Tell whether a list is one prompt, in token ids."""
    head = bytes(memoryview(raw)[:16])
    return head[:1] == b"[" and head[1:].lstrip()[:1].isdigit()


def _check_messages(name: str, raw: _Raw, bound: int) -> None:
    if len(memoryview(raw)) <= bound:
        return
    _check_items(name, raw, bound)
    try:
        messages = _messages.decode(raw)
    except msgspec.ValidationError:  # Not messages: the worker's to refuse.
        return
    for message in messages:
        if len(memoryview(message.content)) and _count(message.content, bound) > bound:
            raise AboveLimit(f"A message may have {bound:,} parts at most.", param=name)


def _check_bytes(name: str, raw: _Raw, bound: int) -> None:
    if len(memoryview(raw)) > bound:
        raise AboveLimit(f"`{name}` may have {bound:,} bytes at most.", param=name)


def _check_tools(name: str, raw: _Raw, bound: int) -> None:
    view = memoryview(raw)
    if len(view) <= bound or view[0] not in b"[":
        return
    if any(len(memoryview(tool)) > bound for tool in _items.decode(view)):
        raise AboveLimit(f"Each of `{name}` may have {bound:,} bytes at most.", param=name)


BOUNDS: tuple[tuple[str, Callable[[str, _Raw, int], None], str], ...] = (
    ("max_choices", _check_number, "n best_of"),
    ("max_request_logprobs", _check_number, "logprobs top_logprobs prompt_logprobs"),
    ("max_stops", _check_items, "stop stop_sequences stop_token_ids bad_words"),
    ("max_logit_bias", _check_items, "logit_bias"),
    ("max_list_items", _check_items, "tools functions"),
    ("max_list_items", _check_messages, "messages"),
    ("max_list_items", _check_inputs, "prompt input inputs texts images documents items queries"),
    ("max_list_items", _check_inputs, "text_1 text_2 data_1 data_2"),
    ("max_schema_bytes", _check_bytes, "response_format structured_outputs text output_config"),
    ("max_schema_bytes", _check_bytes, "output_format guided_json guided_regex guided_grammar"),
    ("max_schema_bytes", _check_tools, "tools functions"),
)
"""Setting, how its fields are measured, and which they are."""

_BY_FIELD: dict[str, list[tuple[str, Callable[[str, _Raw, int], None]]]] = {}
for _setting, _measure, _names in BOUNDS:
    for _name in _names.split():
        _BY_FIELD.setdefault(_name, []).append((_setting, _measure))


def check(body: bytes, settings: GatewaySettings) -> None:
    """Refuse a valid JSON object that asks for too much. Raises `AboveLimit`."""
    _check_structure(body, settings)
    fields = _fields.decode(body)
    for name in fields.keys() & _BY_FIELD.keys():
        for setting, measure in _BY_FIELD[name]:
            measure(name, fields[name], getattr(settings, setting))
    if "n" in fields and "prompt" in fields:
        _check_sequences(fields["n"], fields["prompt"], settings.max_list_items)


def _check_sequences(n: _Raw, prompt: _Raw, bound: int) -> None:
    """Hold the product of choices and prompts to a bound."""
    if _is_tokens(prompt) or (choices := _number(n)) <= 1:
        return
    if choices * _count(prompt, 0) > bound:
        raise AboveLimit(f"`n` times the prompts may be {bound:,} at most.", param="n")


def _check_structure(body: bytes, settings: GatewaySettings) -> None:
    """Check depth, number of values and their size, whatever the fields are."""
    deepest, most = settings.max_json_depth, settings.max_json_values
    bare = _outside_texts(body)
    openers = bare.count(b"{") + bare.count(b"[")
    if openers + bare.count(b",") > most:
        raise AboveLimit(
            f"The request's body may have {most:,} values at most.", param=_largest(body)
        )
    if openers > deepest and _depth(bare) > deepest:
        raise AboveLimit(
            f"The request's body may be nested {deepest} deep at most.",
            param=deep_field(body, deepest),
        )
    if any(math.isinf(float(number)) for number in _HUGE.findall(bare)):
        raise AboveLimit("The request's body holds a number that is too large.", param=_huge(body))


def _outside_texts(body: bytes) -> bytes:
    """Return valid JSON without its texts. All in C: a body may be large."""
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(body.split(b'"')[::2])


def _depth(bare: bytes) -> int:
    structure = bare.translate(None, _NO_STRUCTURE)
    return max(accumulate(map(_STEP.__getitem__, structure)))


def _huge(body: bytes) -> str | None:
    """Return the field with a number beyond what a float can be, and so infinite for the worker."""
    for name, raw in _fields.decode(body).items():
        numbers = _HUGE.findall(_outside_texts(bytes(memoryview(raw))))
        if any(math.isinf(float(number)) for number in numbers):
            return name
    return None


def _largest(body: bytes) -> str | None:
    fields = _fields.decode(body)
    return max(fields, key=lambda name: len(memoryview(fields[name])), default=None)


def deep_field(body: bytes, deepest: int) -> str | None:
    """Return the field in whose value a body is nested deeper than that, if it is soon found."""
    return _field_where(body, lambda depth, _: depth > deepest)


def field_at(body: bytes, position: int) -> str | None:
    """Return the field in whose value a byte is, if it is soon found."""
    return _field_where(body[: position + 1] + b"[", lambda _, at: at > position)


def _field_where(body: bytes, found: Callable[[int, int], bool]) -> str | None:
    """Return the field that is at the first place that is `found(depth, position)`."""
    depth, field = 0, b""
    for token in _TOKEN.finditer(body, 0, _NAMED_BYTES):
        mark = token[0]
        if mark in (b"{", b"["):
            depth += 1
            if found(depth, token.start()):
                return field.decode("utf-8", "replace") or None
        elif mark in (b"}", b"]"):
            depth -= 1
        elif depth == 1:
            field = token[1]
    return None
