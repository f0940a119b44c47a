"""The simulated model's language: a tokenizer, and the tokens that a prompt is answered with.

Token k of an answer depends on the prompt, the seed, the choice and k alone, so a test can compute
what a client should have read, whoever generated it and however often it was interrupted.

Ids below 256 are single bytes, ids above are words. Text that holds no word of the vocabulary thus
costs one token a byte: `"x" * 100` is a prompt of exactly 100 tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec

_PUNCTUATION = [".", ",", ";", "!", "?"]
_ASCII_WORDS = """
    the a of and to in that it with as for on at by from or not this which all when there can more
    about into time only new some could these two first then any like water long river stone light
    north south east west morning evening winter summer house garden window paper letter engine
    wheel copper silver iron glass bridge valley mountain forest meadow harbour island current
    channel basin gate mill stream race sluice turbine level measure number answer question reason
    simple quiet narrow steady patient early late under over between across toward always never
    often rather almost however because although turns runs carries holds opens closes rises falls
    begins ends follows returns remains
""".split()
# Two, three and four bytes of UTF-8 a character: relays must never split them.
_MULTIBYTE_WORDS = ["né", "über", "señal", "поток", "水車", "日本語", "→", "🙂", "🌊"]

_WORDS = _PUNCTUATION + [f" {word}" for word in _ASCII_WORDS + _MULTIBYTE_WORDS]
_FIRST_WORD = 256
_IDS = {word: _FIRST_WORD + index for index, word in enumerate(_WORDS)}
_WORD_COUNT = len(_WORDS)

VOCABULARY_SIZE = _FIRST_WORD + _WORD_COUNT
JSON_PIECES: list[bytes] = [b""] * _FIRST_WORD + [msgspec.json.encode(word) for word in _WORDS]
"""Each word as a JSON string, by token id: escaping once here is most of an event's cost saved."""

_SPLIT = re.compile(r" ?\w+| ?[^\w\s]|\s")
_MASK = (1 << 64) - 1


def tokenize(text: str) -> list[int]:
    """Return the token ids of a text; `detokenize` gives the text back."""
    ids: list[int] = []
    for piece in _SPLIT.findall(text):
        word = _IDS.get(piece)
        if word is None:
            ids.extend(piece.encode("utf-8", "surrogatepass"))
        else:
            ids.append(word)
    return ids


def detokenize(ids: Iterable[int]) -> str:
    """Return the text of token ids. Raises `ValueError` for an id outside the vocabulary."""
    parts = bytearray()
    for token in ids:
        if not 0 <= token < VOCABULARY_SIZE:
            raise ValueError(f"Token id {token} is out of vocabulary")
        if token < _FIRST_WORD:
            parts.append(token)
        else:
            parts += _WORDS[token - _FIRST_WORD].encode()
    return parts.decode("utf-8", "replace")


def word(token: int) -> str:
    """Return the text of one generated token."""
    return _WORDS[token - _FIRST_WORD]


def answer_base(prompt: str, seed: int = 0, choice: int = 0) -> int:
    """Return the number that an answer's tokens follow from."""
    told = f"{seed}:{choice}:{prompt}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(told, digest_size=8).digest(), "big")


def token_at(base: int, k: int) -> int:
    """Return token `k` (from 0) of the answer with this base: one round of splitmix64."""
    mixed = (base + k * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return _FIRST_WORD + (mixed >> 33) % _WORD_COUNT


def expected_tokens(prompt: str, n_tokens: int, choice: int = 0, *, seed: int = 0) -> list[int]:
    """Return the token ids that a prompt is answered with."""
    base = answer_base(prompt, seed, choice)
    return [token_at(base, k) for k in range(n_tokens)]


def expected_text(prompt: str, n_tokens: int, choice: int = 0, *, seed: int = 0) -> str:
    """Return the text that a prompt is answered with. For a chat, the prompt is `chat_prompt()`."""
    return "".join(word(token) for token in expected_tokens(prompt, n_tokens, choice, seed=seed))


def expected_embedding(text: str, size: int) -> list[float]:
    """Return the vector that a text is embedded as: between -1 and 1, exact in 32 bits."""
    return [(token % 129 - 64) / 64 for token in expected_tokens(text, size)]


def chat_prompt(messages: Sequence[dict[str, object]]) -> str:
    """Return a chat as one prompt: the messages' texts, one a line, with no template around them.

    A chat of a single message is thus answered as its text is, and costs the same tokens.
    """
    return "\n".join(_content_text(message.get("content")) for message in messages)


def _content_text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(text for text in texts if isinstance(text, str))
    return ""
