"""Has the batch generate, and hands what comes out of it to the client.

Sequences are in the batch for exactly as long as somebody is there to take their outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from worker.engine.interface import Delta
from worker.engine.simulated_answers import DONE, Answer
from worker.engine.simulated_app import Exchange
from worker.engine.simulated_batch import Batch, Sequence
from worker.engine.simulated_outputs import GenerationError, Output, Outputs
from worker.engine.simulated_requests import RequestError


async def stream(
    batch: Batch, exchange: Exchange, answer: Answer, sequences: list[Sequence], outputs: Outputs
) -> None:
    """Answer event by event. The 200 goes out before the first token, as vLLM's does."""
    replayed, ended = _replay(exchange, sequences, outputs)
    deltas = exchange.call.deltas if exchange.call and len(sequences) == 1 else []
    with _submitted(batch, sequences, ended=ended):
        await exchange.start_stream()
        try:
            left, seen = len(sequences), 0
            opening = answer.opening()
            while left:
                ready = await outputs.take()
                for event in opening:
                    await exchange.send_event(event)
                opening = []
                for output in ready:
                    left -= output.finish is not None
                    seen += 1
                    if seen > replayed:
                        # Beside the event that shows it: the worker records them together.
                        deltas.append(_delta(output))
                    await exchange.send_event(answer.event(output))
            if answer.usage_chunk:
                await exchange.send_event(answer.usage_event())
        except GenerationError as error:
            failure = RequestError(500, str(error), kind="InternalServerError")
            await exchange.send_event(failure.event())
        await exchange.send_event(DONE)
        await exchange.end_stream()


async def collect(batch: Batch, sequences: list[Sequence], outputs: Outputs) -> list[list[Output]]:
    """Wait for all sequences to end and return what each produced."""
    collected: list[list[Output]] = [[] for _ in sequences]
    with _submitted(batch, sequences):
        left = len(sequences)
        while left:
            try:
                ready = await outputs.take()
            except GenerationError as error:
                raise RequestError(500, str(error), kind="InternalServerError") from None
            for output in ready:
                left -= output.finish is not None
                collected[output.choice].append(output)
    return collected


@contextmanager
def _submitted(batch: Batch, sequences: list[Sequence], *, ended: bool = False) -> Iterator[None]:
    """Have the sequences generated meanwhile, unless they have ended already."""
    try:
        for sequence in sequences:
            if sequence.call is not None and sequence.limit:
                sequence.call.tokens.append(sequence.tokens)
            if not ended:
                batch.submit(sequence)
        yield
    finally:
        for sequence in sequences:
            batch.remove(sequence)


def _replay(exchange: Exchange, sequences: list[Sequence], outputs: Outputs) -> tuple[int, bool]:
    """Put out again what earlier attempts have generated, and have the sequence go on from there.

    Returns how many outputs that makes, and whether the answer had ended with them.
    """
    call = exchange.call
    if call is None or not call.resume or len(sequences) != 1:
        return 0, False
    sequence, replayed, ended = sequences[0], 0, False
    for tokens, finish, _ in call.resume:
        ended = finish is not None
        for token in tokens[:-1]:
            outputs.put(Output(sequence.choice, token, None))
        outputs.put(Output(sequence.choice, tokens[-1] if tokens else None, finish))
        sequence.tokens += tokens
        replayed += max(len(tokens), 1)
    call.usage.completion_tokens = len(sequence.tokens)
    return replayed, ended


def _delta(output: Output) -> Delta:
    return ([] if output.token is None else [output.token]), output.finish, None
