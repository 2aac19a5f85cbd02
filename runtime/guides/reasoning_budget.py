"""A limit on the tokens of reasoning, after which the end of the reasoning is forced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Imported by what needs arrays: command lines are read without numpy.
    import numpy as np


@dataclass(frozen=True)
class ReasoningBudget:
    """At most ``tokens`` tokens of reasoning.

    Reasoning begins with the token ids ``start`` and ends with the token ``end``. If reasoning
    ``is_open``, the output starts within it. Tokens between the two are counted, over all parts of
    the output. Once the budget is used, the next token of reasoning is ``end``, and no reasoning
    begins again.
    """

    tokens: int
    start: tuple[int, ...]
    end: int
    is_open: bool

    def forced(self, output: np.ndarray) -> int | None:
        """Return the token that must follow ``output``, int32 [n]; None if there is a choice."""
        is_open, used = self._state(output)
        return self.end if is_open and used >= self.tokens else None

    def refused(self, output: np.ndarray) -> int | None:
        """Return the token that must not follow, since it would begin reasoning again."""
        is_open, used = self._state(output)
        if is_open or used < self.tokens or not _ends_with(output, self.start[:-1]):
            return None
        return self.start[-1]

    def _state(self, output: np.ndarray) -> tuple[bool, int]:
        """Return whether reasoning is open after ``output``, and the number of its tokens."""
        starts = (output == self.start[-1]).nonzero()[0] + 1
        marks = sorted(
            [(int(s), True) for s in starts if _ends_with(output[:s], self.start)]
            + [(int(e), False) for e in (output == self.end).nonzero()[0]]
        )
        is_open, begin, used = self.is_open, 0, 0
        for position, begins in marks:
            if is_open and not begins:
                used += position - begin
            elif not is_open and begins:
                begin = position
            is_open = begins
        return is_open, used + (len(output) - begin if is_open else 0)


def _ends_with(output: np.ndarray, tokens: tuple[int, ...]) -> bool:
    return tuple(output[max(0, len(output) - len(tokens)) :].tolist()) == tokens
