"""The changes to vLLM's core, on classes made like vLLM's: what they do, and what they leave."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from worker.engine import vllm_patches
from worker.engine.vllm_patches import KEY

END = 9
"""The token with which reasoning ends."""


def params(*tokens: int) -> Any:
    return SimpleNamespace(extra_args={KEY: list(tokens)} if tokens else None)


# --- the scheduler's request ---


@pytest.fixture
def request_class() -> Any:
    class Request:
        def __init__(self, sampling_params: Any) -> None:
            self.outputs: list[int] = []
            self.prefill_stats: Any = "some"
            self.sampling_params = sampling_params

        @classmethod
        def from_engine_core_request(cls, request: Any, block_hasher: Any) -> Any:
            return cls(request.sampling_params)

        def append_output_token_ids(self, tokens: list[int]) -> None:
            self.outputs += tokens

    vllm_patches.change_request(Request)
    return Request


def test_a_continued_request_begins_with_its_outputs(request_class: Any) -> None:
    made = request_class.from_engine_core_request(SimpleNamespace(sampling_params=params(1, 2)), 0)
    assert type(made) is request_class
    assert made.outputs == [1, 2]
    assert made.prefill_stats is None


@pytest.mark.parametrize("sampling", [params(), None, SimpleNamespace(extra_args={"other": 1})])
def test_any_other_request_is_as_it_was(request_class: Any, sampling: Any) -> None:
    made = request_class.from_engine_core_request(SimpleNamespace(sampling_params=sampling), 0)
    assert made.outputs == []
    assert made.prefill_stats == "some"


# --- the runner's ---


def test_the_runner_knows_the_outputs_in_a_list_of_its_own() -> None:
    @dataclass
    class CachedRequestState:
        sampling_params: Any
        output_token_ids: list[int]

        def __post_init__(self) -> None:
            self.completed = True

    vllm_patches.change_runner_state(CachedRequestState)
    sampling = params(1, 2)
    state = CachedRequestState(sampling, [])
    assert state.completed
    assert state.output_token_ids == [1, 2]
    state.output_token_ids.append(3)
    assert sampling.extra_args == {KEY: [1, 2]}
    assert CachedRequestState(params(), []).output_token_ids == []
    assert CachedRequestState(None, []).output_token_ids == []


# --- grammars ---


@dataclass
class Grammar:
    accepted: list[int] = field(default_factory=list)
    refuses: int = -1

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        if self.refuses in tokens:
            return False
        self.accepted += tokens
        return True


class Manager:
    """Where the grammar begins, as vLLM tells it: after the token that ends the reasoning."""

    def __init__(self, grammar: Grammar, *, reasons: bool) -> None:
        self.grammar, self.reasons = grammar, reasons
        self.seen: list[list[int]] = []

    def _create_grammar(self, request: Any) -> Grammar:
        return self.grammar

    def _get_constraint_bounds(
        self, request: Any, tokens: list[int], spec_tokens_committed: bool
    ) -> tuple[int, int]:
        assert spec_tokens_committed
        self.seen.append(list(request.all_token_ids))
        if not self.reasons:
            return 0, 0
        return (1, 1) if END in tokens else (2, 2)


def asked(sampling: Any, *, over: bool | None = None) -> Any:
    return SimpleNamespace(
        request_id="r",
        sampling_params=sampling,
        prompt_token_ids=[100],
        all_token_ids="all of them",
        structured_output_request=SimpleNamespace(reasoning_ended=over),
    )


@pytest.fixture
def manager_class() -> Any:
    class Fresh(Manager):
        pass

    vllm_patches.change_grammar(Fresh)
    return Fresh


def test_a_grammar_is_taken_to_where_the_outputs_end(manager_class: Any) -> None:
    manager = manager_class(Grammar(), reasons=False)
    request = asked(params(1, 2, 3))
    assert manager._create_grammar(request).accepted == [1, 2, 3]
    assert request.structured_output_request.reasoning_ended
    assert request.all_token_ids == "all of them"


def test_it_begins_where_the_reasoning_has_ended(manager_class: Any) -> None:
    manager = manager_class(Grammar(), reasons=True)
    assert manager._create_grammar(asked(params(1, 2, END, 4, END))).accepted == [4, END]
    # Each token with what was there before it, as when it was sampled.
    assert manager.seen == [[100, 1], [100, 1, 2], [100, 1, 2, END]]


def test_reasoning_that_goes_on_leaves_it_where_it_begins(manager_class: Any) -> None:
    request = asked(params(1, 2), over=False)
    assert manager_class(Grammar(), reasons=True)._create_grammar(request).accepted == []
    assert request.structured_output_request.reasoning_ended is False


def test_reasoning_that_was_over_before_is_not_looked_for(manager_class: Any) -> None:
    manager = manager_class(Grammar(), reasons=True)
    assert manager._create_grammar(asked(params(1, 2), over=True)).accepted == [1, 2]
    assert manager.seen == []


def test_outputs_that_the_grammar_refuses_fail_the_request(manager_class: Any) -> None:
    manager = manager_class(Grammar(refuses=2), reasons=False)
    with pytest.raises(ValueError, match="grammar"):
        manager._create_grammar(asked(params(1, 2)))


def test_any_other_grammar_is_as_it_was(manager_class: Any) -> None:
    assert manager_class(Grammar(), reasons=False)._create_grammar(asked(params())).accepted == []


# --- versions ---


@pytest.mark.parametrize(
    ("version", "applies"),
    [("0.32.0", True), ("0.32.1+cpu", True), ("0.3.2", False), ("0.31.0", False), ("dev", False)],
)
def test_only_releases_that_were_tested_are_changed(version: str, applies: bool) -> None:
    assert vllm_patches.applies_to(version) == applies
