"""Changes to vLLM's engine core, so that it takes a request that has outputs already.

To the core such a request is like one that it had preempted: its prompt and its outputs are
computed again, and then it goes on. All that vLLM does with outputs (penalties, bad words, minimum
and maximum length, grammars) sees them as the request's own. Each change acts only on a request
whose sampling parameters carry recorded tokens, which clients can't send: the proxy drops what they
put there.
"""

from __future__ import annotations

from copy import copy
from typing import Any

KEY = "headrace_recorded"
"""Where the recorded tokens are in a request's `SamplingParams.extra_args`."""

VERSIONS = ((0, 32),)
"""Releases on which the tests have shown that continued answers are exact."""


def applies_to(version: str) -> bool:
    """Tell whether the changes are known to be right for a release of vLLM."""
    return any(version.startswith(f"{major}.{minor}.") for major, minor in VERSIONS)


def recorded(params: Any) -> list[int]:
    """Return the tokens that a request has from earlier attempts."""
    extra = params.extra_args if params is not None else None
    return extra.get(KEY, []) if extra else []


def install() -> None:
    """Change the classes in this process, which is vLLM's. Safe to call several times."""
    from vllm.v1.request import Request

    if getattr(Request, KEY, False):
        return
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    change_request(Request)
    change_runner_state(CachedRequestState)
    change_grammar(StructuredOutputManager)
    setattr(Request, KEY, True)


def change_request(request_class: Any) -> None:
    """Give the scheduler's request its outputs."""
    make = request_class.from_engine_core_request.__func__

    def from_engine_core_request(cls: Any, request: Any, block_hasher: Any) -> Any:
        made = make(cls, request, block_hasher)
        if tokens := recorded(request.sampling_params):
            made.append_output_token_ids(tokens)
            # The cache may hold more of it than its prompt, which these can't express.
            made.prefill_stats = None
        return made

    request_class.from_engine_core_request = classmethod(from_engine_core_request)


def change_runner_state(state_class: Any) -> None:
    """Give the V1 runner's copy of the request its outputs; the V2 runner is sent them."""
    complete = state_class.__post_init__

    def __post_init__(self: Any) -> None:
        complete(self)
        if tokens := recorded(self.sampling_params):
            self.output_token_ids = list(tokens)

    state_class.__post_init__ = __post_init__


def change_grammar(manager_class: Any) -> None:
    """Take a request's grammar to where its outputs end."""
    create = manager_class._create_grammar

    def _create_grammar(self: Any, request: Any) -> Any:
        grammar = create(self, request)
        if tokens := recorded(request.sampling_params):
            advance(self, request, grammar, tokens)
        return grammar

    manager_class._create_grammar = _create_grammar


def advance(manager: Any, request: Any, grammar: Any, tokens: list[int]) -> None:
    """Have a grammar accept tokens, from where a reasoning model's answer begins.

    As vLLM does with what it has just sampled, one token at a time, until the reasoning has ended.
    """
    then = copy(request)
    then.all_token_ids = list(request.prompt_token_ids or ())
    accepted: list[int] = []
    for at, token in enumerate(tokens):
        if request.structured_output_request.reasoning_ended:
            accepted += tokens[at:]
            break
        then.all_token_ids.append(token)
        start, _ = manager._get_constraint_bounds(then, [token], spec_tokens_committed=True)
        if start <= 1:
            request.structured_output_request.reasoning_ended = True
            accepted += [token][start:]
    if accepted and not grammar.accept_tokens(request.request_id, accepted):
        raise ValueError("the recorded tokens don't follow the grammar")
