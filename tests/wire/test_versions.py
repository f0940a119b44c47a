"""Old readers with new writers, and the other way round: a pool is upgraded process by process."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared import protocol
from shared.protocol import End, Frame, Head, Job, Usage
from tests.wire.records import EXAMPLES
from tests.wire.test_golden import decoder

MAPS = [name for name in EXAMPLES if not name.startswith("frame")]
REQUIRED = {
    "job": {"id", "path", "body", "model", "lane"},
    "usage": set(),
    "worker": {"id", "pool", "models", "state", "seats"},
    "model": {"name", "pool"},
    "adapter": {"name", "source"},
    "key": {"id", "tenant"},
}


def _as_map(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(protocol.encode(EXAMPLES[name]))
    return fields


@pytest.mark.parametrize("name", MAPS)
def test_fields_of_a_newer_writer_are_ignored(name: str) -> None:
    newer = _as_map(name) | {"of_tomorrow": {"nested": [1, None, b"x"]}}
    assert decoder(name)(msgspec.msgpack.encode(newer)) == EXAMPLES[name]


def test_a_job_of_a_higher_version_is_read() -> None:
    newer = msgspec.msgpack.encode(_as_map("job") | {"version": 99})
    assert protocol.decode_job(newer).version == 99


@pytest.mark.parametrize("name", MAPS)
def test_fields_that_an_older_writer_lacks_have_defaults(name: str) -> None:
    older = {k: v for k, v in _as_map(name).items() if k in REQUIRED[name]}
    record = decoder(name)(msgspec.msgpack.encode(older))
    for field in REQUIRED[name]:
        assert getattr(record, field) == getattr(EXAMPLES[name], field)


@pytest.mark.parametrize("name", MAPS)
def test_no_field_became_required(name: str) -> None:
    config = msgspec.structs.fields(type(EXAMPLES[name]))
    assert {field.name for field in config if field.required} == REQUIRED[name]


def test_fields_appended_to_a_frame_are_ignored() -> None:
    row = msgspec.msgpack.decode(protocol.encode(EXAMPLES["frame_template"]))
    newer = msgspec.msgpack.encode([*row, {"new": 1}, None, [b"more"]])
    assert protocol.decode_frame(newer) == EXAMPLES["frame_template"]


@pytest.mark.parametrize("length", range(4))
def test_a_shorter_frame_of_an_older_writer_is_read(length: int) -> None:
    row = msgspec.msgpack.decode(protocol.encode(Frame([b"x"], Head(200, "t"), (b"a", b"b"))))
    frame = protocol.decode_frame(msgspec.msgpack.encode(row[:length]))
    assert frame.items == ([b"x"] if length > 0 else [])
    assert frame.head == (Head(200, "t") if length > 1 else None)
    assert frame.template == ((b"a", b"b") if length > 2 else None)
    assert frame.end is None


def test_fields_added_to_an_end_and_its_usage_are_ignored() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 0, "audio_tokens": 7}
    end = {"outcome": "completed", "usage": usage, "finish": "stop"}
    frame = protocol.decode_frame(msgspec.msgpack.encode([[], None, None, end]))
    assert frame.end == End(outcome="completed", usage=Usage(1, 2))


def test_a_frames_fields_keep_their_places() -> None:
    row = msgspec.msgpack.decode(
        protocol.encode(Frame([b"i"], Head(200, "t"), (b"p", b"s"), End(outcome="lost")))
    )
    assert row[0] == [b"i"]
    assert row[1] == {"status": 200, "content_type": "t"}
    assert row[2] == [b"p", b"s"]
    assert row[3]["outcome"] == "lost"


def test_records_cannot_be_changed() -> None:
    job = EXAMPLES["job"]
    assert isinstance(job, Job)
    with pytest.raises(AttributeError):
        job.lane = "interactive"  # type: ignore[misc]
