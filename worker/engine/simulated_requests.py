"""Request bodies that the simulated engine reads, and the errors that it answers with.

Numbers are read as leniently as vLLM reads them (`"5"` and `1.0` are integers), unknown fields are
ignored, and messages follow vLLM's, so that a client meets the same refusals from both engines.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import msgspec

from worker.engine.simulated_text import detokenize

T = TypeVar("T")
Choices = Annotated[int, msgspec.Meta(ge=1, le=16384)]
Prompts = str | list[str | int | list[int]]


class RequestError(Exception):
    """A request is refused; the answer is its status with OpenAI's error body."""

    def __init__(
        self, status: int, message: str, *, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return {"error": error}

    def event(self) -> bytes:
        """Return the error as vLLM sends it in a stream: the one event with spaces in its JSON."""
        return f"data: {json.dumps(self.body())}\n\n".encode()


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What the two generating endpoints have in common."""

    model: str | None = None
    n: Choices | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    headrace_fault: dict[str, Any] | None = None

    @property
    def usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_throughout(self) -> bool:
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: Prompts
    logprobs: int | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    input: Prompts
    model: str | None = None
    encoding_format: str = "float"
    headrace_fault: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


def decode(kind: type[T], body: bytes) -> T:
    """Read a body as a request of this kind, or refuse it with 400."""
    try:
        # Two passes: decoding straight into a union of lists gives messages that name no field.
        request = msgspec.convert(msgspec.json.decode(body), kind, strict=False)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        param = "body" + where.rstrip("`")
        raise RequestError(
            400, f"1 validation error:\n  {message}", kind="Bad Request", param=param
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"Invalid JSON: {error}", kind="Bad Request") from None
    if isinstance(request, GenerationRequest):
        _check(request)
    return request


def _check(request: GenerationRequest) -> None:
    """Refuse what the fields' types can't."""
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            400,
            "Stream options can only be defined when `stream=True`.",
            param="stream_options",
        )


def given_max_tokens(request: GenerationRequest) -> tuple[int | None, str]:
    """Return the limit that the body sets, if it does, and the field's name."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def token_limit(
    request: GenerationRequest,
    prompt_tokens: int,
    *,
    max_model_len: int,
    default: int | None,
    ceiling: int | None,
) -> int:
    """Return how many tokens the answer may have. Raises `RequestError` if that is none."""
    check_prompt(prompt_tokens, max_model_len)
    given, param = given_max_tokens(request)
    if given is not None and given > max_model_len:
        raise RequestError(
            400,
            f"{param}={given} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            param=param,
        )
    limits = (max_model_len - prompt_tokens, default if given is None else given, ceiling)
    limit = min(each for each in limits if each is not None)
    if limit < 1:
        raise RequestError(400, f"max_tokens must be at least 1, got {limit}.", param="max_tokens")
    return limit


def check_prompt(prompt_tokens: int, max_model_len: int) -> None:
    """Refuse a prompt that is empty or longer than the model's context."""
    if prompt_tokens == 0:
        raise RequestError(400, "The decoder prompt cannot be empty")
    if prompt_tokens > max_model_len:
        raise RequestError(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"contains {prompt_tokens} input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt.",
            param="input_tokens",
        )


def prompt_texts(given: Prompts) -> list[str]:
    """Return the prompts as texts. A list of numbers is one prompt."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError(400, "At least one prompt is required", param="prompt")
    numbers = [item for item in given if isinstance(item, int)]
    if len(numbers) == len(given):
        return [token_text(numbers)]
    texts = []
    for item in given:
        if isinstance(item, int):
            raise RequestError(400, "Prompts are texts or lists of token ids", param="prompt")
        texts.append(item if isinstance(item, str) else token_text(item))
    return texts


def token_text(tokens: list[int]) -> str:
    """Return the text of token ids that a client sent."""
    try:
        return detokenize(tokens)
    except ValueError as error:
        raise RequestError(400, str(error)) from None
