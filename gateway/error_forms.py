"""The form of errors: OpenAI's, or Anthropic's where its protocol is spoken."""

from __future__ import annotations

from typing import Any

from shared.errors import HeadraceError

_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Form:
    """OpenAI's: what every path has that has no other."""

    event = b""
    """The line before an error's data in a stream."""

    def body(self, error: HeadraceError) -> dict[str, Any]:
        """Return an error as JSON's objects."""
        return error.body()


class AnthropicForm(Form):
    """Anthropic's: its types stand for our codes."""

    event = b"event: error\n"

    def body(self, error: HeadraceError) -> dict[str, Any]:
        otherwise = "invalid_request_error" if 400 <= error.status < 499 else "api_error"
        kind = _ANTHROPIC_TYPES.get(error.status, otherwise)
        return {"type": "error", "error": {"type": kind, "message": error.message}}


OPENAI = Form()
ANTHROPIC = AnthropicForm()


def form_of(path: str) -> Form:
    """Return the form of the errors at a path."""
    return ANTHROPIC if path in _ANTHROPIC_PATHS else OPENAI
