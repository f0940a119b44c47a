"""The bytes of each record are a contract with processes of other versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared import protocol
from tests.wire.records import EXAMPLES


def _golden() -> dict[str, bytes]:
    lines = Path(__file__).with_name("golden.txt").read_text().splitlines()
    pairs = (line.split(" ") for line in lines if not line.startswith("#"))
    return {name: bytes.fromhex(digits) for name, digits in pairs}


def decoder(name: str) -> Callable[[bytes], Any]:
    """Return the decoder of an example."""
    decode: Callable[[bytes], Any] = getattr(protocol, f"decode_{name.split('_')[0]}")
    return decode


def test_every_example_has_golden_bytes() -> None:
    assert list(_golden()) == list(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_record_is_written_as_ever(name: str) -> None:
    """Fields may have been added since; what was there has its place, name, type and value."""
    golden = msgspec.msgpack.decode(_golden()[name])
    now = msgspec.msgpack.decode(protocol.encode(EXAMPLES[name]))
    if isinstance(golden, list):
        assert now[: len(golden)] == golden
    else:
        assert {key: now.get(key) for key in golden} == golden


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_record_is_read_as_ever(name: str) -> None:
    record = decoder(name)(_golden()[name])
    assert record == EXAMPLES[name]
    assert type(record) is type(EXAMPLES[name])
