"""What the gateway reads of a form, and what it refuses."""

from __future__ import annotations

import random
import time

import httpx
import pytest

from gateway import form
from gateway.keyed import fingerprint_of
from shared.errors import InvalidRequest
from tests.wire.records import make_job


def upload(fields: dict[str, str], content: bytes = b"RIFF\x00\xff") -> tuple[bytes, str]:
    """Return body and content type of an upload, as an SDK sends it."""
    files = {"file": ("a.wav", content, "audio/wav")}
    request = httpx.Request("POST", "http://gateway", data=fields, files=files)
    return request.read(), request.headers["content-type"]


def test_the_needed_fields_are_read() -> None:
    fields = form.decode(*upload({"model": "caf\u00e9", "stream": "True", "language": "en"}))
    assert fields.model == "caf\u00e9"
    assert fields.asks_stream
    assert fields.lane is None
    assert not fields.max_tokens_given
    assert form.decode(*upload({"model": "m", "max_completion_tokens": "5"})).max_tokens_given
    assert form.decode(*upload({"service_tier": "flex"})).lane == "batch"


def test_a_file_is_never_taken_for_a_field() -> None:
    files = {"model": ("model", b"not a name", "text/plain")}
    request = httpx.Request("POST", "http://gateway", files=files)
    assert form.decode(request.read(), request.headers["content-type"]).model is None


def test_what_a_sound_looks_like_does_not_matter() -> None:
    noise = random.Random(1).randbytes(100_000) + b"\r\n--" * 1000
    assert form.decode(*upload({"model": "m"}, noise)).model == "m"


def test_large_uploads_are_read_fast() -> None:
    content, sent = upload({"model": "m"}, random.Random(2).randbytes(25 << 20))
    start = time.process_time()
    form.decode(content, sent)
    assert time.process_time() - start < 1


GOOD, SENT = upload({"model": "m"})

ENCODED = (
    b"--x\r\nContent-Disposition: form-data; name=\"a\"; name*=utf-8''model\r\n\r\nm\r\n--x--\r\n"
)

BAD = {
    "an encoded name": (ENCODED, "a/b; boundary=x"),
    "empty": (b"", "multipart/form-data"),
    "no boundary": (GOOD, "multipart/form-data"),
    "empty boundary": (GOOD, "multipart/form-data; boundary="),
    "another boundary": (GOOD, "multipart/form-data; boundary=x"),
    "JSON": (b'{"model": "m"}', "multipart/form-data; boundary=x"),
    "no end of a header": (b"--x\r\nContent-Disposition\r\n\r\n", "a/b; boundary=x"),
    "a long header": (b"--x\r\nA: " + b"b" * 10_000 + b"\r\n\r\n", "a/b; boundary=x"),
    "many headers": (b"--x\r\n" + b"A: b\r\n" * 1000 + b"\r\n", "a/b; boundary=x"),
    "many parts": (b"--x\r\nA: b\r\n\r\n1\r\n" * 1001, "a/b; boundary=x"),
    "a long value": upload({"model": "m" * 5000}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_forms_are_refused_in_plain_words(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        form.decode(*BAD[name])
    assert caught.value.status == 400
    assert not any(word in caught.value.message for word in ("Traceback", "<class", "b'", "0x"))


def _fingerprint(made: tuple[bytes, str], path: str = "/v1/audio/transcriptions") -> str:
    sent, content_type = made
    job = make_job(path=path, body=sent, content_type=content_type)
    return fingerprint_of(job)


def test_a_form_is_known_by_its_parts() -> None:
    first, second = upload({"model": "m"}), upload({"model": "m"})
    assert first != second
    assert _fingerprint(first) == _fingerprint(second)
    others = [
        _fingerprint(upload({"model": "n"})),
        _fingerprint(upload({"model": "m"}, b"RIFF\x00")),
        _fingerprint(upload({"model": "m", "language": "en"})),
        _fingerprint(upload({"language": "en", "model": "m"})),
        _fingerprint(first, "/v1/audio/translations"),
    ]
    assert len({_fingerprint(first), *others}) == 1 + len(others)
