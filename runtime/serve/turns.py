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
_LATE = "the request was not done within its timeout; allow more, or ask for less"


@dataclass(frozen=True)
class Turn:
    """Tokens of one choice; ``finish_reason`` in OpenAI's words where it ends with them."""

    choice: int
    tokens: list[TokenEvent] = field(default_factory=list)
    finish_reason: str | None = None

    def by_source(self) -> list[Turn]:
        """The turn in parts whose tokens are all of the draft, or all of the target."""
        parts = [
            Turn(self.choice, list(tokens))
            for _, tokens in groupby(self.tokens, key=lambda token: token.from_draft)
        ]
        last = parts.pop().tokens if parts else []
        return [*parts, Turn(self.choice, last, self.finish_reason)]


def source(tokens: Sequence[TokenEvent]) -> dict[str, Any]:
    """What ``return_draft_tokens`` adds to a chunk: tokens of one source, and how many."""
    return {"from_draft": any(token.from_draft for token in tokens), "token_count": len(tokens)}


class Turns:
    """Turns of a generation by choice, as they come; ``by_source``: in parts of one source each.

    :meth:`aclose` aborts what is left, also before the first turn: an asynchronous generator that
    has not begun runs no ``finally``.
    """

    def __init__(self, generation: Generation, *, by_source: bool = False) -> None:
        self._generation = generation
        self._turns = _turns_of(generation, by_source)

    def __aiter__(self) -> AsyncGenerator[Turn, None]:
        return self._turns

    async def aclose(self) -> None:
        """Abort what is left."""
        self._generation.cancel()
        await self._turns.aclose()


async def _turns_of(generation: Generation, by_source: bool) -> AsyncGenerator[Turn, None]:
    async for batch in generation:
        tokens: dict[int, list[TokenEvent]] = {}
        ends: dict[int, str] = {}
        for event in batch:
            if isinstance(event, FinishEvent):
                if event.record.finish_reason == "deadline":
                    raise ApiError(504, _LATE, param="timeout", code="deadline_exceeded")
                if event.record.finish_reason == "guide_failed":
                    raise ApiError(400, _GUIDE_FAILED, code="guide_failed")
                ends[event.request] = FINISH_REASONS[event.record.finish_reason]
            else:
                tokens.setdefault(event.request, []).append(event)
        for choice in tokens | ends:
            turn = Turn(choice, tokens.get(choice, []), ends.get(choice))
            for part in turn.by_source() if by_source else [turn]:
                yield part


async def merged(turns: Turns, choices: int) -> list[Turn]:
    """Whole outputs, by choice."""
    tokens: list[list[TokenEvent]] = [[] for _ in range(choices)]
    ends: list[str | None] = [None] * choices
    async with aclosing(turns):
        async for turn in turns:
            tokens[turn.choice] += turn.tokens
            ends[turn.choice] = turn.finish_reason
    return [Turn(i, *each) for i, each in enumerate(zip(tokens, ends, strict=True))]
