"""The bytes that the simulated engine answers with: vLLM's events and bodies, field for field.

Order and presence of fields are vLLM 0.32's (a test holds the two together): it writes the fields
that it set, null ones too, and leaves `usage` out of every event but the last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from worker.engine.interface import Model
from worker.engine.simulated_outputs import Output
from worker.engine.simulated_text import JSON_PIECES, VOCABULARY_SIZE, word

FINGERPRINT = "simulated-1"
DONE = b"data: [DONE]\n\n"

_LOGPROB = -0.25
_HOLE = "\x00"
_HOLE_JSON = msgspec.json.encode(_HOLE)


def usage_fields(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


class Answer(ABC):
    """One request's answer: the envelope that its events share, and the running count."""

    prefix: str
    object: str
    stream_object: str

    def __init__(
        self,
        request_id: str,
        *,
        created: int,
        model: str,
        prompt_tokens: int,
        choices: int,
        logprobs: int | None,
        usage_chunk: bool,
        usage_throughout: bool,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.id = f"{self.prefix}-{request_id}"
        self.created = created
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.choices = choices
        self.logprobs = logprobs
        """Alternatives to tell per token, or None."""
        self.usage_chunk = usage_chunk
        self.usage_throughout = usage_throughout
        self._clock = clock
        """Gives the moment that an event shows in its word's place."""
        self._counts = [0] * choices
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._plain = None if usage_throughout or logprobs is not None else self._templates()

    @abstractmethod
    def opening(self) -> list[bytes]:
        """Return the events that come with the first token, before it."""

    @abstractmethod
    def stream_choice(self, output: Output, text: str) -> dict[str, Any]:
        """Return an event's choice."""

    @abstractmethod
    def choice(self, index: int, text: str, finish: str, logprobs: Any) -> dict[str, Any]:
        """Return a whole choice, for an answer in one piece."""

    @abstractmethod
    def token_logprobs(self, index: int, texts: Sequence[str]) -> dict[str, Any]:
        """Return the log-probabilities of tokens, in the endpoint's form."""

    def event(self, output: Output) -> bytes:
        """Return the event for an output. Nearly all are the same bytes around another word."""
        index, token, finish = output
        if token is not None:
            self._counts[index] += 1
        if self._plain is not None and token is not None and finish is None:
            head, tail = self._plain[index]
            word_json = JSON_PIECES[token] if self._clock is None else b'" @%d"' % self._clock()
            return head + word_json + tail
        text = "" if token is None else word(token)
        fields = self._envelope([self.stream_choice(output, text)])
        if self.usage_throughout:
            fields["usage"] = self.running_usage(self._counts[index])
        if finish is not None and not self.usage_chunk:
            fields["system_fingerprint"] = FINGERPRINT
        return _sse(fields)

    def usage_event(self) -> bytes:
        fields = self._envelope([])
        fields["usage"] = usage_fields(self.prompt_tokens, sum(self._counts))
        fields["system_fingerprint"] = FINGERPRINT
        return _sse(fields)

    def running_usage(self, completion_tokens: int) -> dict[str, Any]:
        return usage_fields(self.prompt_tokens, completion_tokens)

    def body(self, outputs: Sequence[Sequence[Output]]) -> bytes:
        """Return the answer in one piece, from each choice's outputs."""
        choices = []
        for index, own in enumerate(outputs):
            texts = [word(output.token) for output in own if output.token is not None]
            self._counts[index] = len(texts)
            logprobs = None if self.logprobs is None else self.token_logprobs(index, texts)
            choices.append(self.choice(index, "".join(texts), own[-1].finish or "stop", logprobs))
        fields = {
            **self._envelope(choices, self.object),
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": _usage_in_full(self.prompt_tokens, sum(self._counts)),
            **self.trailing_fields(),
        }
        return msgspec.json.encode(fields)

    def trailing_fields(self) -> dict[str, Any]:
        return {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}

    def _envelope(self, choices: list[dict[str, Any]], kind: str | None = None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind or self.stream_object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _templates(self) -> list[tuple[bytes, bytes]]:
        """Return what stands before and after the word in each choice's events."""
        templates = []
        for index in range(self.choices):
            choice = self.stream_choice(Output(index, None, None), _HOLE)
            head, _, tail = _sse(self._envelope([choice])).rpartition(_HOLE_JSON)
            templates.append((head, tail))
        return templates


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    object = "chat.completion"
    stream_object = "chat.completion.chunk"

    def opening(self) -> list[bytes]:
        events = []
        for index in range(self.choices):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            fields = self._envelope([choice])
            if self.usage_throughout:
                fields["usage"] = self.running_usage(0)
            events.append(_sse({**fields, "prompt_token_ids": None, "prompt_text": None}))
        return events

    def running_usage(self, completion_tokens: int) -> dict[str, Any]:
        return {**super().running_usage(completion_tokens), "completion_tokens_details": None}

    def stream_choice(self, output: Output, text: str) -> dict[str, Any]:
        logprobs = None
        if self.logprobs is not None and output.token is not None:
            logprobs = self.token_logprobs(output.choice, [text])
        choice = {
            "index": output.choice,
            "delta": {"content": text},
            "logprobs": logprobs,
            "finish_reason": output.finish,
        }
        if output.finish is not None:
            choice["stop_reason"] = None
        choice["token_ids"] = None
        return choice

    def choice(self, index: int, text: str, finish: str, logprobs: Any) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": None,
            "routed_experts": None,
        }

    def token_logprobs(self, index: int, texts: Sequence[str]) -> dict[str, Any]:
        content = []
        for text in texts:
            others = alternatives(text, self.logprobs or 0)
            top = [_chat_logprob(each, at) for at, each in enumerate(others)]
            content.append({**_chat_logprob(text, 0), "top_logprobs": top})
        return {"content": content}

    def trailing_fields(self) -> dict[str, Any]:
        before = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        return {**before, **super().trailing_fields()}


class CompletionAnswer(Answer):
    prefix = "cmpl"
    object = "text_completion"
    stream_object = "text_completion"

    def opening(self) -> list[bytes]:
        return []

    def stream_choice(self, output: Output, text: str) -> dict[str, Any]:
        logprobs = None
        if self.logprobs is not None and output.token is not None:
            logprobs = self.token_logprobs(output.choice, [text])
        return {
            "index": output.choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish,
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }

    def choice(self, index: int, text: str, finish: str, logprobs: Any) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "routed_experts": None,
        }

    def token_logprobs(self, index: int, texts: Sequence[str]) -> dict[str, Any]:
        offset = sum(map(len, self._texts[index]))
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._texts[index] += texts
        tops = [alternatives(text, self.logprobs or 0) for text in texts]
        return {
            "text_offset": offsets,
            "token_logprobs": [_LOGPROB] * len(texts),
            "tokens": list(texts),
            "top_logprobs": [{each: _LOGPROB - at for at, each in enumerate(top)} for top in tops],
        }


def embedding_fields(
    request_id: str, created: int, model: str, vectors: Sequence[list[float] | str], tokens: int
) -> dict[str, Any]:
    """Return the body of an answer with embeddings, as numbers or in base64."""
    data = [
        {"index": index, "object": "embedding", "embedding": vector}
        for index, vector in enumerate(vectors)
    ]
    return {
        "id": f"embd-{request_id}",
        "object": "list",
        "created": created,
        "model": model,
        "data": data,
        "usage": _usage_in_full(tokens, 0),
    }


def model_fields(model: Model, created: int) -> dict[str, Any]:
    """Return a model as the list of models shows it."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "headrace",
        "root": model.name,
        "parent": model.parent,
        "max_model_len": model.max_model_len,
        "permission": [],
    }


def _usage_in_full(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    return {**usage_fields(prompt_tokens, completion_tokens), **details}


def alternatives(text: str, count: int) -> list[str]:
    """Return `count` words that might have come in a word's place, itself first."""
    others = (word(token) for token in range(VOCABULARY_SIZE - 1, 255, -1))
    return [text, *(other for other in others if other != text)][:count]


def _chat_logprob(text: str, rank: int) -> dict[str, Any]:
    return {"token": text, "logprob": _LOGPROB - rank, "bytes": list(text.encode())}


def _sse(fields: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"
