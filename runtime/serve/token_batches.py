"""What the turns of the engine give each choice of a call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from specbuild.runtime.request import FinishEvent, TokenEvent
from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.service import Generation
from specbuild.runtime.serve.usage import FINISH_REASONS

_GUIDE_FAILED = (
    "the output could not go on in the form that was asked for: its grammar met a limit, or none "
    "of the model's tokens continues it; ask for a simpler form"
)
_TIMED_OUT = "the request was not done within its timeout; allow more, or ask for less"


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of one choice; ``finish_reason`` in OpenAI's words where it ends with them."""

    choice: int
    tokens: list[TokenEvent] = field(default_factory=list)
    finish_reason: str | None = None

    def split_by_source(self) -> list[TokenBatch]:
        """The turn in parts whose tokens are all of the draft, or all of the target."""
        parts = [
            TokenBatch(self.choice, list(tokens))
            for _, tokens in groupby(self.tokens, key=lambda token: token.from_draft)
        ]
        last = parts.pop().tokens if parts else []
        return [*parts, TokenBatch(self.choice, last, self.finish_reason)]


def source_fields(tokens: Sequence[TokenEvent]) -> dict[str, Any]:
    """What ``return_draft_tokens`` adds to a chunk: tokens of one source, and how many."""
    return {"from_draft": any(token.from_draft for token in tokens), "token_count": len(tokens)}


class TokenBatches:
    """Turns of a generation by choice, as they come; ``by_source``: in parts of one source each.

    :meth:`aclose` aborts what is left, also before the first turn: an asynchronous generator that
    has not begun runs no ``finally``.
    """

    def __init__(self, generation: Generation, *, splits_by_source: bool = False) -> None:
        self._generation = generation
        self._batches = _iterate_batches(generation, splits_by_source)

    def __aiter__(self) -> AsyncGenerator[TokenBatch, None]:
        return self._batches

    async def aclose(self) -> None:
        """Abort what is left."""
        self._generation.cancel()
        await self._batches.aclose()


async def _iterate_batches(
    generation: Generation, splits_by_source: bool
) -> AsyncGenerator[TokenBatch, None]:
    async for events in generation:
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
        for choice in tokens | finish_reasons:
            batch = TokenBatch(choice, tokens.get(choice, []), finish_reasons.get(choice))
            for part in batch.split_by_source() if splits_by_source else [batch]:
                yield part


async def collect_outputs(batches: TokenBatches, choices: int) -> list[TokenBatch]:
    """Whole outputs, by choice."""
    tokens: list[list[TokenEvent]] = [[] for _ in range(choices)]
    finish_reasons: list[str | None] = [None] * choices
    async with aclosing(batches):
        async for batch in batches:
            tokens[batch.choice] += batch.tokens
            finish_reasons[batch.choice] = batch.finish_reason
    return [
        TokenBatch(i, *output) for i, output in enumerate(zip(tokens, finish_reasons, strict=True))
    ]
