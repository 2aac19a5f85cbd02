"""The tokens of each choice of a call, by engine step."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from specbuild.runtime.request import Event, FinishEvent, TokenEvent
from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.generation import Generation
from specbuild.runtime.serve.usage import FINISH_REASONS

_GUIDE_FAILED = (
    "the output could not continue under its constraint: the grammar reached a limit, or no token "
    "of the model fits; use a simpler schema or grammar"
)
_TIMED_OUT = "the request exceeded its timeout; increase timeout or lower max_tokens"


@dataclass(slots=True)
class TokenBatch:
    """Tokens of one choice from one engine step, and OpenAI's finish reason if it ends there."""

    choice: int
    tokens: list[TokenEvent] = field(default_factory=list)
    finish_reason: str | None = None

    def split_by_token(self) -> list[TokenBatch]:
        """Return a part for each token; the last one ends the output as this batch does."""
        parts = [TokenBatch(self.choice, [token]) for token in self.tokens]
        parts[-1].finish_reason = self.finish_reason
        return parts

    def split_by_source(self) -> list[TokenBatch]:
        """Return parts whose tokens all come from the draft or all from the target."""
        parts = [
            TokenBatch(self.choice, list(tokens))
            for _, tokens in groupby(self.tokens, key=lambda token: token.from_draft)
        ]
        last = parts.pop().tokens if parts else []
        return [*parts, TokenBatch(self.choice, last, self.finish_reason)]


def source_fields(tokens: Sequence[TokenEvent]) -> dict[str, Any]:
    """Return the fields that ``return_draft_tokens`` adds to a chunk."""
    return {"from_draft": any(token.from_draft for token in tokens), "token_count": len(tokens)}


class TokenBatches:
    """The batches of a generation, in the order of arrival.

    Without a generation, ``num_choices`` outputs end at once, without tokens.
    With ``splits_by_source`` a batch has tokens of the draft or of the target, but not of both.
    :meth:`aclose` aborts unfinished requests, also before the first batch: an asynchronous
    generator that has not started runs no ``finally``.
    """

    def __init__(
        self,
        generation: Generation | None,
        *,
        splits_by_source: bool = False,
        num_choices: int = 0,
    ) -> None:
        self._generation = generation
        self._splits_by_source = splits_by_source
        self._steps = _empty_steps(num_choices) if generation is None else self._iterate(generation)

    def steps(self) -> AsyncGenerator[list[TokenBatch], None]:
        """Return the iterator over the batches of one engine step after the other."""
        return self._steps

    async def __aiter__(self) -> AsyncGenerator[TokenBatch, None]:
        async for step in self._steps:
            for batch in step:
                yield batch

    def receive_directly(self, receive: Callable[[list[Event]], bool | None]) -> None:
        """See :meth:`Generation.receive_directly`."""
        if self._generation is not None:
            self._generation.receive_directly(receive)

    async def aclose(self) -> None:
        """Abort unfinished requests."""
        if self._generation is not None:
            self._generation.cancel()
        await self._steps.aclose()

    async def _iterate(self, generation: Generation) -> AsyncGenerator[list[TokenBatch], None]:
        async for events in generation:
            yield self.step_of(events)

    def step_of(self, events: Sequence[Event]) -> list[TokenBatch]:
        """Return the batches of the events of one engine step. ApiError if a request failed."""
        tokens: dict[int, list[TokenEvent]] = {}
        finish_reasons: dict[int, str] = {}
        for event in events:
            if isinstance(event, FinishEvent):
                if event.record.finish_reason == "deadline":
                    raise ApiError(504, _TIMED_OUT, param="timeout", code="deadline_exceeded")
                if event.record.finish_reason == "guide_failed":
                    raise ApiError(400, _GUIDE_FAILED, code="guide_failed")
                finish_reasons[event.request] = FINISH_REASONS[event.record.finish_reason]
            else:
                tokens.setdefault(event.request, []).append(event)
        batches = [
            TokenBatch(choice, tokens.get(choice, []), finish_reasons.get(choice))
            for choice in tokens | finish_reasons
        ]
        if not self._splits_by_source:
            return batches
        return [part for batch in batches for part in batch.split_by_source()]


async def _empty_steps(num_choices: int) -> AsyncGenerator[list[TokenBatch], None]:
    yield [TokenBatch(choice, [], "length") for choice in range(num_choices)]


async def collect_outputs(batches: TokenBatches, choices: int) -> list[TokenBatch]:
    """Return the complete outputs, by choice."""
    tokens: list[list[TokenEvent]] = [[] for _ in range(choices)]
    finish_reasons: list[str | None] = [None] * choices
    async with aclosing(batches):
        async for batch in batches:
            tokens[batch.choice] += batch.tokens
            finish_reasons[batch.choice] = batch.finish_reason
    return [
        TokenBatch(i, *output) for i, output in enumerate(zip(tokens, finish_reasons, strict=True))
    ]
