"""The endpoints that are relayed to workers: those of vLLM's application that fit a pool.

One generic path serves them all; there is no schema per endpoint. What a request means, and
whether it is right, only the worker knows. `docs/api.md` has the same table for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Endpoint:
    """A path that takes a JSON object by POST, or a form."""

    path: str
    kind: Literal["generate", "pooling", "tokens", "audio"]
    streams: bool = False
    """Whether `stream: true` asks for server-sent events."""

    @property
    def takes_form(self) -> bool:
        """Whether its body is a form with a file in it (multipart)."""
        return self.kind == "audio"


ENDPOINTS = (
    Endpoint("/v1/chat/completions", "generate", streams=True),
    Endpoint("/v1/completions", "generate", streams=True),
    Endpoint("/v1/responses", "generate", streams=True),
    Endpoint("/v1/messages", "generate", streams=True),
    Endpoint("/v1/messages/count_tokens", "tokens"),
    Endpoint("/v1/embeddings", "pooling"),
    Endpoint("/v2/embed", "pooling"),
    Endpoint("/v1/score", "pooling"),
    Endpoint("/score", "pooling"),
    Endpoint("/v1/rerank", "pooling"),
    Endpoint("/v2/rerank", "pooling"),
    Endpoint("/rerank", "pooling"),
    Endpoint("/pooling", "pooling"),
    Endpoint("/classify", "pooling"),
    Endpoint("/tokenize", "tokens"),
    Endpoint("/detokenize", "tokens"),
    Endpoint("/v1/audio/transcriptions", "audio", streams=True),
    Endpoint("/v1/audio/translations", "audio", streams=True),
)
