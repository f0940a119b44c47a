"""Which requests' answers can be continued by another engine: those that the tests prove.

Whatever a body holds that isn't listed here (a new field, a picture) means no: the answer of such a
request ends with an error if its worker is lost after something of it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

CARRIED = frozenset(
    # What the prompt is made of: made anew, it is the same.
    "model messages prompt tools add_generation_prompt continue_final_message add_special_tokens "
    "documents chat_template chat_template_kwargs reasoning_effort include_reasoning "
    "truncate_prompt_tokens truncation_side "
    # How tokens are chosen, from the prompt and all outputs so far.
    "temperature top_p top_k min_p seed frequency_penalty presence_penalty repetition_penalty "
    "logit_bias allowed_token_ids bad_words response_format structured_outputs tool_choice "
    "parallel_tool_calls "
    # Where it ends.
    "max_tokens max_completion_tokens min_tokens stop stop_token_ids ignore_eos "
    "include_stop_str_in_output "
    # How it is told.
    "stream stream_options stream_interval skip_special_tokens spaces_between_special_tokens "
    "return_token_ids "
    # What the engine doesn't see.
    "user metadata store service_tier safety_identifier prompt_cache_key priority "
    "length_penalty".split()
)

OFF: Mapping[str, object] = {
    "n": 1,
    "best_of": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "use_beam_search": False,
    "echo": False,
    "suffix": "",
}
"""Fields that must be as if they weren't there. None always is."""


def continuable(path: str, body: bytes) -> bool:
    """Tell whether a lost answer to this request can be continued, token by token."""
    one_prompt = PATHS.get(path)
    if one_prompt is None:
        return False
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    if not isinstance(fields, dict) or fields.get("stream") is not True:
        return False
    for name, value in fields.items():
        if value is None or name in CARRIED:
            continue
        off = OFF.get(name)
        # Of the same type: `"logprobs": 0` isn't False, it asks a completion for some.
        if type(value) is not type(off) or value != off:
            return False
    return one_prompt(fields)


def is_text_chat(fields: dict[str, Any]) -> bool:
    """Tell whether a conversation is of text alone."""
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return False
    for message in messages:
        if not isinstance(message, dict):
            return False
        content = message.get("content")
        if isinstance(content, list):
            if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
                return False
        elif content is not None and not isinstance(content, str):
            return False
    return True


def is_one_prompt(fields: dict[str, Any]) -> bool:
    """Tell whether there is one prompt, as text or as tokens."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        return all(isinstance(token, int) for token in prompt) or len(prompt) == 1
    return isinstance(prompt, str)


PATHS: Mapping[str, Callable[[dict[str, Any]], bool]] = {
    "/v1/chat/completions": is_text_chat,
    "/v1/completions": is_one_prompt,
}
