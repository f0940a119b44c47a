"""One example of each record, fixed for ever: what it looks like on the wire is in `golden.txt`."""

from __future__ import annotations

from typing import Any

from shared.keys import new_job_id, tag
from shared.protocol import (
    AdapterRecord,
    End,
    Frame,
    Head,
    Job,
    KeyRecord,
    ModelRecord,
    Usage,
    WorkerRecord,
)

POOL = "test-model"
TAG = tag(POOL, 0)


def make_job(**changes: Any) -> Job:
    """Return a job of the test pool with an id of its own."""
    fields: dict[str, Any] = {
        "id": new_job_id(TAG),
        "path": "/v1/chat/completions",
        "body": b'{"model":"test-model"}',
        "model": POOL,
        "lane": "interactive",
    }
    return Job(**(fields | changes))


EXAMPLES: dict[str, Any] = {
    "job": Job(
        id="0123456789abcdef0123456789abcdef",
        path="/v1/chat/completions",
        body=b'{"model":"m"}',
        content_type="application/json",
        model="m",
        lane="batch",
        stream=True,
        sequences=2,
        max_tokens_given=True,
        tenant="t",
        request_id="r",
        gateway="g",
    ),
    "frame_items": Frame([b"one", (b"two",)]),
    "frame_head": Frame([(b"{}",)], Head(200, "application/json")),
    "frame_template": Frame([b"x"], None, (b"data: ", b"\n\n")),
    "frame_end": Frame(
        end=End(outcome="failed", code="engine_error", message="It failed.", usage=Usage(3, 2, 1))
    ),
    "frame_end_completed": Frame(end=End(outcome="completed")),
    "usage": Usage(prompt_tokens=300, completion_tokens=20, cached_tokens=16),
    "worker": WorkerRecord(
        id="w-1",
        pool="m",
        shards=1,
        models=["m", "adapter"],
        state="ready",
        seats=8,
        reserve=2,
        running=3,
        waiting=1,
        kv_usage=0.5,
        version="0.1.0",
        engine="vllm 0.32.0",
        started_ms=1_700_000_000_000,
    ),
    "model": ModelRecord(
        name="adapter", pool="m", shards=1, max_model_len=4096, parent="m", created=1_700_000_000
    ),
    "adapter": AdapterRecord(name="ours", source="/adapters/ours", asked_ms=1_700_000_000_000),
    "key": KeyRecord(
        id="0123456789ab",
        name="n",
        tenant="t",
        secrets=[(b"h", 1_700_000_000_000), (b"i", 0)],
        models=["m"],
        lane="batch",
        highest_lane="interactive",
        on_disconnect="continue",
        max_tokens=100,
        max_in_flight=4,
        max_body_bytes=4096,
        disabled=True,
        created_ms=1_700_000_000_000,
    ),
}
