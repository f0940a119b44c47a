"""What is asked of vLLM's own server and of a pool, to see that both say the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.vllm import NAME
from tests.unit.test_gateway_form import upload

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TRANSCRIPTIONS = "/v1/audio/transcriptions"

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"name": "weather", "description": "The weather", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]
NAMED = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


@dataclass(frozen=True)
class Asked:
    """A request, and the status that both are to answer it with."""

    name: str
    path: str
    body: Any
    """Bytes go as they are, anything else as JSON."""
    status: int = 200
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    ours: int | None = None
    """The gateway's own status, where it answers by itself: in OpenAI's words, not in vLLM's."""
    why: str = ""
    """Then: why it does."""

    @property
    def streamed(self) -> bool:
        return isinstance(self.body, dict) and self.body.get("stream") is True

    @property
    def interleaved(self) -> bool:
        """Whether it streams answers to several prompts, whose order is left to chance."""
        return self.streamed and isinstance(self.body.get("prompt"), list)

    @property
    def quick(self) -> bool:
        """Whether `make test` asks it, too."""
        return "plain" in self.name or self.name.startswith("/")

    def __str__(self) -> str:
        return self.name


def _chat(name: str, status: int = 200, **fields: Any) -> Asked:
    body = {"model": NAME, "messages": PARIS, "temperature": 0, "max_tokens": 5, **fields}
    return Asked(f"chat: {name}", CHAT, body, status)


def _completion(name: str, status: int = 200, **fields: Any) -> Asked:
    body = {"model": NAME, "prompt": "One two three", "temperature": 0, "max_tokens": 5, **fields}
    return Asked(f"completions: {name}", COMPLETIONS, body, status)


def _response(name: str, status: int = 200, **fields: Any) -> Asked:
    body = {"model": NAME, "input": "Say hello.", "temperature": 0, "max_output_tokens": 5}
    return Asked(f"responses: {name}", RESPONSES, {**body, **fields}, status)


def _message(name: str, status: int = 200, **fields: Any) -> Asked:
    body = {"model": NAME, "messages": PARIS, "temperature": 0, "max_tokens": 5, **fields}
    return Asked(f"messages: {name}", MESSAGES, body, status)


def _post(name: str, path: str, status: int = 200, **fields: Any) -> Asked:
    return Asked(f"{path}: {name}", path, {"model": NAME, **fields}, status)


def both_ways(*asked: Asked) -> list[Asked]:
    """Return requests as they are and again as streams."""
    streams = [
        replace(one, name=f"{one.name}, streamed", body={**one.body, "stream": True})
        for one in asked
    ]
    return [*asked, *streams]


USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
ALL_USAGE: dict[str, Any] = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}
}
CALLED = [
    *PARIS,
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
]
SOUND = upload({"model": NAME})
UNICODE = "\u65e5\u672c \U0001f600 e\u0301 \u2028 \u05d0 \x7f"

ANSWERED = [
    *both_ways(
        _chat("plain"),
        _chat("two of them", n=2, temperature=0.8, seed=7),
        _chat("logprobs", logprobs=True, top_logprobs=2, max_tokens=3),
        _chat("a stop string", stop=["capital"], max_tokens=12),
        _chat("a stop string that is told", stop="of", include_stop_str_in_output=True),
        _chat("a schema", response_format=SCHEMA, max_tokens=24),
        _chat("JSON", response_format={"type": "json_object"}, max_tokens=12),
        _chat("a tool that must be called", tools=TOOLS, tool_choice=NAMED, max_tokens=24),
        _chat("some tool must be called", tools=TOOLS, tool_choice="required", max_tokens=32),
        _chat("tools that may be called", tools=TOOLS),
        _chat("unicode", messages=[{"role": "user", "content": UNICODE}], max_tokens=8),
        _chat("echo", echo=True),
    ),
    _chat("usage in a chunk", stream=True, **USAGE),
    _chat("usage in all chunks", stream=True, **ALL_USAGE),
    _chat("a tool's answer", messages=CALLED),
    _chat("parts", messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]),
    _chat("a system's words", messages=[{"role": "system", "content": "Be brief."}, *PARIS]),
    _chat("a limit by its other name", max_tokens=None, max_completion_tokens=3),
    _chat("biased", logit_bias={"100": 5}, frequency_penalty=1, presence_penalty=-1),
    _chat(
        "to be continued",
        messages=[*PARIS, {"role": "assistant", "content": "The capital"}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    _chat("token ids", return_token_ids=True, prompt_logprobs=1, max_tokens=2),
    _chat("a role that nobody knows", messages=[{"role": "nobody", "content": "Hi"}]),
    _chat("fields for nobody", user="u", metadata={"a": "b"}, store=True, unknown_field=1),
    *both_ways(
        _completion("plain"),
        _completion("several prompts", prompt=["One two", "Red green"], max_tokens=3),
        _completion("echo and logprobs", echo=True, logprobs=2, max_tokens=2),
        _completion("two of them", n=2, temperature=0.9, seed=3),
        _completion("a stop string", stop=["five"], max_tokens=12),
        _completion("unicode", prompt=UNICODE, max_tokens=8),
    ),
    _completion("token ids", prompt=[504, 905, 1600], max_tokens=3),
    _completion("usage in a chunk", stream=True, **USAGE),
    _completion("a beam search", use_beam_search=True, n=2, max_tokens=3),
    *both_ways(
        _response("plain"),
        _response("a conversation", input=[*PARIS], instructions="Be brief."),
        _response(
            "a schema",
            max_output_tokens=24,
            text={"format": {"type": "json_schema", "name": "city", "schema": CITY}},
        ),
        _response(
            "a tool",
            tools=[{"type": "function", **WEATHER}],
            tool_choice="required",
            max_output_tokens=32,
        ),
    ),
    _response("to be stored", store=True),
    *both_ways(
        _message("plain"),
        _message("a system's words", system="Be brief.", stop_sequences=["capital"]),
        _message(
            "a tool",
            tools=[{"name": "weather", "input_schema": CITY}],
            max_tokens=24,
            tool_choice={"type": "tool", "name": "weather"},
        ),
    ),
    _post("a chat", f"{MESSAGES}/count_tokens", messages=PARIS),
    _post("a text", "/tokenize", prompt=UNICODE, return_token_strs=True),
    _post("a chat", "/tokenize", messages=PARIS),
    _post("tokens", "/detokenize", tokens=[504, 905, 1600]),
    Asked("/version", "/version", None, method="GET"),
    Asked("/health", "/health", None, method="GET"),
]

REFUSED = [
    *both_ways(
        _chat("too long", 400, messages=[{"role": "user", "content": "one " * 2100}]),
        _chat("too much to answer", 400, max_tokens=5000),
        _completion("too long", 400, prompt="one " * 2100),
        _message("too long", 400, messages=[{"role": "user", "content": "one " * 2100}]),
        _response("too long", 400, input="one " * 2100),
    ),
    _chat("no messages", 400, messages=[]),
    _chat("messages of a wrong type", 400, messages="Hi"),
    _chat(
        "a picture",
        400,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
                ],
            }
        ],
    ),
    _chat("a temperature of a wrong type", 400, temperature="hot"),
    _chat("a temperature below zero", 400, temperature=-1),
    _chat("top_p", 400, top_p=2),
    _chat("no tokens", 400, max_tokens=0),
    _chat("fewer tokens than none", 400, max_tokens=-1),
    _chat("no choices", 400, n=0),
    _chat("two greedy choices", 400, n=2),
    _chat("too many logprobs", 400, logprobs=True, top_logprobs=99),
    _chat("usage without a stream", 400, **USAGE),
    _chat(
        "a tool that isn't there",
        400,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "other"}},
    ),
    _chat("a tool without tools", 400, tool_choice="required"),
    _chat("a format of no kind", 400, response_format={"type": "no_such_kind"}),
    _chat(
        "a schema of no kind",
        400,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "no_such_type"}},
        },
    ),
    _chat("a bias of no token", 400, logit_bias={"x": 1}),
    _completion("a prompt of a wrong type", 400, prompt={"a": 1}),
    _completion("tokens that aren't there", 400, prompt=[10**6]),
    _completion("too many logprobs", 400, logprobs=99),
    _response("no input", 400, input=None),
    _message("no limit", 400, max_tokens=None),
    _message("no messages", 400, messages=[]),
    _post("neither text nor chat", "/tokenize", 400),
    _post("tokens of a wrong type", "/detokenize", 400, tokens="x"),
    _post("a model that doesn't embed", "/v1/embeddings", 404, input="x"),
    _post("a model that doesn't score", "/v1/score", 404, text_1="x", text_2="y"),
    _post("a model that doesn't classify", "/classify", 404, input="x"),
    Asked(
        "a model that doesn't hear",
        TRANSCRIPTIONS,
        SOUND[0],
        status=404,
        headers={"content-type": SOUND[1]},
    ),
]


def _own(name: str, ours: int, theirs: int, why: str, **request: Any) -> Asked:
    made: dict[str, Any] = {"path": CHAT, "body": {"model": NAME, "messages": PARIS, **SHORT}}
    return Asked(name, status=theirs, ours=ours, why=why, **{**made, **request})


SHORT = {"temperature": 0, "max_tokens": 1}
EDGE = "refused at the edge, before a worker is asked"
STATE = "a pool keeps no state between requests"
FORM = {"content-type": "multipart/form-data; boundary=x"}

BY_DESIGN = [
    _own("an unknown model", 404, 404, EDGE, body={"model": "gpt-4", "messages": PARIS}),
    _own("no JSON", 400, 400, EDGE, body=b'{"model": '),
    _own("no object", 400, 400, EDGE, body=b"[]"),
    _own("no body", 400, 400, EDGE, body=b""),
    _own("no UTF-8", 400, 400, EDGE, body=b'{"model": "\xff"}'),
    _own("NaN, which JSON hasn't", 400, 400, EDGE, body=b'{"temperature": NaN}'),
    _own("a wrong content type", 415, 400, EDGE, headers={"content-type": "text/plain"}),
    _own(
        "JSON by another name",
        200,
        400,
        "the gateway takes all of JSON's types",
        headers={"content-type": "application/vnd.api+json"},
    ),
    _own("a wrong method", 405, 405, EDGE, method="GET", body=None),
    _own("an unknown path", 404, 404, EDGE, path="/v1/nope"),
    _own(
        "an earlier response",
        400,
        404,
        STATE,
        path=RESPONSES,
        body={"model": NAME, "input": "Hi", "previous_response_id": "resp_1"},
    ),
    _own(
        "a background response",
        400,
        400,
        STATE,
        path=RESPONSES,
        body={"model": NAME, "input": "Hi", "background": True},
    ),
    _own("a stored response", 404, 404, STATE, path=f"{RESPONSES}/resp_1", method="GET", body=None),
    _own("no form", 415, 404, EDGE, path=TRANSCRIPTIONS),
    _own("a broken form", 400, 404, EDGE, path=TRANSCRIPTIONS, body=b"x", headers=FORM),
]

EMBEDDING = [
    _post("a text", "/v1/embeddings", input="Hello there"),
    _post("several", "/v1/embeddings", input=["Hello", UNICODE]),
    _post("tokens", "/v1/embeddings", input=[504, 905]),
    _post("base64", "/v1/embeddings", input="Hello", encoding_format="base64"),
    _post("a chat", "/v1/embeddings", messages=PARIS),
    _post("too long", "/v1/embeddings", 400, input="one " * 2100),
    _post("of a wrong type", "/v1/embeddings", 400, input={"a": 1}),
    _post("of a format of no kind", "/v1/embeddings", 400, input="x", encoding_format="x"),
    _post("texts", "/v2/embed", texts=["Hello"], embedding_types=["float"]),
    _post("a text", "/pooling", input="Hello"),
    _post("a pair", "/v1/score", text_1="A cat", text_2=["A dog", "Taxes"]),
    _post("a pair", "/score", text_1="A cat", text_2="A dog"),
    _post("half a pair", "/score", 400, text_1="A cat"),
    _post("documents", "/v1/rerank", query="A cat", documents=["A dog", "Taxes"]),
    _post("documents", "/v2/rerank", query="A cat", documents=["A dog", "Taxes"], top_n=1),
    _post("documents", "/rerank", query="A cat", documents=["A dog", "Taxes"]),
    _post("no documents", "/rerank", 400, query="A cat"),
    _post("a text", "/tokenize", prompt="Hello"),
    _post("a model that doesn't chat", CHAT, 404, messages=PARIS),
    _post("a model that doesn't classify", "/classify", 404, input="x"),
]

CLASSIFYING = [
    _post("a text", "/classify", input="Hello"),
    _post("several", "/classify", input=["Hello", UNICODE]),
    _post("no text", "/classify", 400),
    _post("a text", "/pooling", input="Hello"),
]
