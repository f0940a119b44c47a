"""Thinning: whatever the events are, joining gives them back byte for byte."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from shared.protocol import Item
from worker.template import Template


def thin_all(events: Iterable[bytes]) -> list[tuple[tuple[bytes, bytes] | None, Item]]:
    """Thin a stream as the outbox does: per event the template that it brings, and the item."""
    template = Template()
    thinned = []
    for event in events:
        item = template.thin(event)
        fresh, template.fresh = template.fresh, None
        thinned.append((fresh, item))
    return thinned


def join(thinned: Iterable[tuple[tuple[bytes, bytes] | None, Item]]) -> list[bytes]:
    """Put events together again as the gateway does."""
    prefix = suffix = b""
    events = []
    for fresh, item in thinned:
        if fresh is not None:
            prefix, suffix = fresh
        events.append(prefix + item + suffix if isinstance(item, bytes) else item[0])
    return events


def chat_event(text: str, n: int = 0, name: str = "cmpl-1") -> bytes:
    body = {
        "id": name,
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [{"index": n, "delta": {"content": text}, "finish_reason": None}],
    }
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def size(item: Item) -> int:
    return len(item) if isinstance(item, bytes) else len(item[0])


def _random_events(rng: random.Random) -> list[bytes]:
    """Streams that share much or little, change in the middle, and hold any byte."""
    alphabet = [b"a", b"b", b"\xc3", b"\xa9", b"\x00", b'"', b"aa", b"\n"]
    events = []
    for _ in range(rng.randint(1, 4)):
        head = b"".join(rng.choices(alphabet, k=rng.choice([0, 3, 40, 200])))
        tail = b"".join(rng.choices(alphabet, k=rng.choice([0, 3, 40, 200])))
        for _ in range(rng.randint(1, 15)):
            middle = b"".join(rng.choices(alphabet, k=rng.choice([0, 0, 1, 5, 80])))
            cut = rng.choice([None, None, None, 1, 50])
            events.append((head + middle + tail)[:cut] or b"x")
    return events


@pytest.mark.parametrize("seed", range(300))
def test_joining_is_the_inverse_of_thinning(seed: int) -> None:
    events = _random_events(random.Random(seed))
    assert join(thin_all(events)) == events


def test_the_events_of_a_stream_become_thin() -> None:
    events = [chat_event(f" word{i}") for i in range(50)]
    thinned = thin_all(events)
    assert join(thinned) == events
    assert [fresh for fresh, _ in thinned].count(None) == 49
    assert sum(size(item) for _, item in thinned[2:]) < 50 * 10


def test_an_opening_of_another_form_does_not_keep_the_events_thick() -> None:
    opening = chat_event("").replace(b'"content": ""', b'"role": "assistant", "content": ""')
    events = [opening, *(chat_event(f" word{i}") for i in range(50))]
    thinned = thin_all(events)
    assert join(thinned) == events
    assert sum(size(item) for _, item in thinned[3:]) < 50 * 10


def test_multibyte_text_may_be_split_but_comes_back_whole() -> None:
    # All of them share the first byte of a character: the prefix ends inside it.
    events = [chat_event(text) for text in "éèêëàâäçï"]
    thinned = thin_all(events)
    assert join(thinned) == events
    assert any(isinstance(i, bytes) and i and i[0] & 0xC0 == 0x80 for _, i in thinned)


def test_events_that_do_not_fit_go_whole_and_the_template_stays() -> None:
    events = [chat_event("a"), chat_event("b"), b": comment\n\n", chat_event("c"), b"x\n\n"]
    thinned = thin_all(events)
    assert join(thinned) == events
    assert thinned[2] == (None, (b": comment\n\n",))
    assert thinned[3][0] is None
    assert isinstance(thinned[3][1], bytes)


def test_a_stream_that_has_changed_is_learnt_again() -> None:
    events = [chat_event(str(i)) for i in range(10)]
    events += [chat_event(str(i), name="another") for i in range(20)]
    thinned = thin_all(events)
    assert join(thinned) == events
    assert sum(fresh is not None for fresh, _ in thinned) == 2
    assert all(isinstance(item, bytes) for _, item in thinned[-10:])


def test_events_that_have_little_in_common_get_no_template() -> None:
    rng = random.Random(1)
    events = [b"data: " + rng.randbytes(60).hex().encode() + b"\n\n" for _ in range(30)]
    thinned = thin_all(events)
    assert all(fresh is None and isinstance(item, tuple) for fresh, item in thinned)


def test_beginning_and_end_do_not_overlap() -> None:
    """The shorter event is all prefix and suffix: they may not both claim the same bytes."""
    long, short = b"ab" * 40 + b"ab" * 40, b"ab" * 40
    for events in ([long, short, long], [short, long, short], [short, short, long]):
        assert join(thin_all(events)) == events
