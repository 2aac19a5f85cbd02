"""What the turns of the engine give each choice of a call."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from specbuild.runtime.request import FinishEvent, TokenEvent
from specbuild.runtime.serve.service import Generation
from specbuild.runtime.serve.usage import FINISH_REASONS


@dataclass(frozen=True)
class Turn:
    """Tokens of one choice; ``finish_reason`` in OpenAI's words where it ends with them."""

    choice: int
    tokens: list[TokenEvent] = field(default_factory=list)
    finish_reason: str | None = None


Turns = AsyncGenerator[Turn, None]


async def turns_of(generation: Generation) -> Turns:
    """Turns as they come, by choice; closing it aborts what is left."""
    try:
        async for batch in generation:
            tokens: dict[int, list[TokenEvent]] = {}
            ends: dict[int, str] = {}
            for event in batch:
                if isinstance(event, FinishEvent):
                    ends[event.request] = FINISH_REASONS[event.record.finish_reason]
                else:
                    tokens.setdefault(event.request, []).append(event)
            for choice in tokens | ends:
                yield Turn(choice, tokens.get(choice, []), ends.get(choice))
    finally:
        generation.cancel()


async def merged(turns: Turns, choices: int) -> list[Turn]:
    """Whole outputs, by choice."""
    tokens: list[list[TokenEvent]] = [[] for _ in range(choices)]
    ends: list[str | None] = [None] * choices
    async with aclosing(turns):
        async for turn in turns:
            tokens[turn.choice] += turn.tokens
            ends[turn.choice] = turn.finish_reason
    return [Turn(i, *each) for i, each in enumerate(zip(tokens, ends, strict=True))]
