"""What the simulated engine answers at each path, from a request to the sequences that it needs."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from worker.engine.interface import Model
from worker.engine.simulated_answers import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    embedding_fields,
    model_fields,
)
from worker.engine.simulated_app import Endpoint, Exchange
from worker.engine.simulated_batch import Batch
from worker.engine.simulated_batch import Sequence as Generated
from worker.engine.simulated_delivery import collect, stream
from worker.engine.simulated_faults import NO_FAULTS, Faults, FaultSyntaxError, read_faults
from worker.engine.simulated_outputs import Outputs
from worker.engine.simulated_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    RequestError,
    TokenizeRequest,
    check_prompt,
    decode,
    prompt_texts,
    token_limit,
    token_text,
)
from worker.engine.simulated_text import (
    answer_base,
    chat_prompt,
    detokenize,
    expected_embedding,
    tokenize,
)


@dataclass(frozen=True)
class Limits:
    """What bounds every answer. None is no bound but the model's length."""

    max_model_len: int
    default_max_tokens: int | None
    max_tokens_ceiling: int | None
    answer_tokens: int | None
    embedding_size: int


class Endpoints:
    """The engine's endpoints, over one batch."""

    def __init__(
        self,
        batch: Batch,
        models: Sequence[Model],
        limits: Limits,
        *,
        faults: bool,
        created: int | None,
        stamps: bool = False,
    ) -> None:
        self._batch = batch
        self._models = models
        self._limits = limits
        self._faults = faults
        self._created = created
        self._clock = (lambda: batch.stepped_at_ns) if stamps else None

    def table(self) -> dict[tuple[str, str], Endpoint]:
        return {
            ("POST", "/v1/chat/completions"): self.chat,
            ("POST", "/v1/completions"): self.completion,
            ("POST", "/v1/embeddings"): self.embedding,
            ("POST", "/tokenize"): self.tokenize,
            ("POST", "/detokenize"): self.detokenize,
            ("GET", "/v1/models"): self.list_models,
        }

    async def chat(self, exchange: Exchange) -> None:
        request = decode(ChatRequest, exchange.body)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        prompts = [chat_prompt(request.messages)]
        await self._generate(exchange, request, prompts, ChatAnswer, logprobs)

    async def completion(self, exchange: Exchange) -> None:
        request = decode(CompletionRequest, exchange.body)
        prompts = prompt_texts(request.prompt)
        await self._generate(exchange, request, prompts, CompletionAnswer, request.logprobs)

    async def embedding(self, exchange: Exchange) -> None:
        request = decode(EmbeddingRequest, exchange.body)
        model = self._model(request.model)
        prompts = prompt_texts(request.input)
        outputs = Outputs()
        sequences = []
        for index, prompt in enumerate(prompts):
            tokens = len(tokenize(prompt))
            check_prompt(tokens, self._limits.max_model_len)
            faults = self._read_faults(prompt, request.headrace_fault)
            sequences.append(
                Generated(
                    index, 0, tokens, 0, outputs, exchange.request_id, "stop", faults, exchange.call
                )
            )
        total = sum(sequence.prompt_tokens for sequence in sequences)
        _count_prompt(exchange, total)
        if await exchange.while_connected(collect(self._batch, sequences, outputs)) is None:
            await exchange.send_json(None)
            return
        vectors: list[list[float] | str] = []
        for prompt in prompts:
            vector = expected_embedding(prompt, self._limits.embedding_size)
            vectors.append(_base64(vector) if request.encoding_format == "base64" else vector)
        await exchange.send_json(
            embedding_fields(exchange.request_id, self._now(), model, vectors, total)
        )

    def resumable(self, path: str, body: bytes) -> bool:
        """Tell whether a lost stream can be continued here: as with vLLM, one answer at a time."""
        try:
            if path == "/v1/chat/completions":
                return (decode(ChatRequest, body).n or 1) == 1
            if path == "/v1/completions":
                request = decode(CompletionRequest, body)
                return (request.n or 1) == 1 and len(prompt_texts(request.prompt)) == 1
        except RequestError:
            pass
        return False

    async def tokenize(self, exchange: Exchange) -> None:
        request = decode(TokenizeRequest, exchange.body)
        self._model(request.model)
        text = request.prompt
        if request.messages is not None:
            text = chat_prompt(request.messages)
        if text is None:
            raise RequestError(400, "Either prompt or messages is required", param="prompt")
        tokens = tokenize(text)
        fields = {
            "count": len(tokens),
            "max_model_len": self._limits.max_model_len,
            "tokens": tokens,
            "token_strs": [detokenize([t]) for t in tokens] if request.return_token_strs else None,
        }
        await exchange.send_json(fields)

    async def detokenize(self, exchange: Exchange) -> None:
        request = decode(DetokenizeRequest, exchange.body)
        self._model(request.model)
        await exchange.send_json({"prompt": token_text(request.tokens)})

    async def list_models(self, exchange: Exchange) -> None:
        cards = [model_fields(model, self._now()) for model in self._models]
        await exchange.send_json({"object": "list", "data": cards})

    async def _generate(
        self,
        exchange: Exchange,
        request: GenerationRequest,
        prompts: list[str],
        kind: type[Answer],
        logprobs: int | None,
    ) -> None:
        model = self._model(request.model)
        outputs = Outputs()
        sequences: list[Generated] = []
        for prompt in prompts:
            sequences += self._plan(exchange, request, prompt, outputs, len(sequences))
        choices = request.n or 1
        prompt_tokens = sum(sequence.prompt_tokens for sequence in sequences[::choices])
        _count_prompt(exchange, prompt_tokens)
        answer = kind(
            exchange.request_id,
            created=self._now(),
            model=model,
            prompt_tokens=prompt_tokens,
            choices=len(sequences),
            logprobs=logprobs,
            usage_chunk=request.usage_chunk,
            usage_throughout=request.usage_throughout,
            clock=self._clock,
        )
        if request.stream:
            await exchange.while_connected(
                stream(self._batch, exchange, answer, sequences, outputs)
            )
            return
        collected = await exchange.while_connected(collect(self._batch, sequences, outputs))
        await exchange.send_body(b"null" if collected is None else answer.body(collected))

    def _plan(
        self,
        exchange: Exchange,
        request: GenerationRequest,
        prompt: str,
        outputs: Outputs,
        first_index: int,
    ) -> list[Generated]:
        """Return the sequences for a prompt, not yet submitted: another may still be refused."""
        tokens = len(tokenize(prompt))
        limits = self._limits
        own = exchange.call.max_tokens if exchange.call else 0
        ceilings = [one for one in (limits.max_tokens_ceiling, own or None) if one is not None]
        limit = token_limit(
            request,
            tokens,
            max_model_len=limits.max_model_len,
            default=limits.default_max_tokens,
            ceiling=min(ceilings, default=None),
        )
        faults = self._read_faults(prompt, request.headrace_fault)
        stops = faults.tokens is not None
        if faults.tokens is not None:
            limit = faults.tokens
        elif limits.answer_tokens is not None and limits.answer_tokens <= limit:
            limit, stops = limits.answer_tokens, True
        return [
            Generated(
                first_index + choice,
                answer_base(prompt, request.seed or 0, choice),
                tokens,
                limit,
                outputs,
                exchange.request_id,
                "stop" if stops else "length",
                faults,
                exchange.call,
            )
            for choice in range(request.n or 1)
        ]

    def _model(self, name: str | None) -> str:
        if not name:
            return self._models[0].name
        if all(model.name != name for model in self._models):
            message = f"The model `{name}` does not exist."
            raise RequestError(404, message, kind="NotFoundError", param="model")
        return name

    def _read_faults(self, prompt: str, field: object) -> Faults:
        if not self._faults:
            return NO_FAULTS
        try:
            return read_faults(prompt, field)
        except FaultSyntaxError as error:
            raise RequestError(400, str(error), param="headrace_fault") from None

    def _now(self) -> int:
        return int(time.time()) if self._created is None else self._created


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _count_prompt(exchange: Exchange, tokens: int) -> None:
    if exchange.call is not None:
        exchange.call.usage.prompt_tokens = tokens
