"""Text of tokens that come one at a time: whole characters only, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specbuild.runtime.errors import EngineFileError

# Ids of which no text has come: so many cannot belong to one character, whose bytes are four.
_MAX_WAITING = 12
_CHARACTER_IDS = 4

# Returns the text that a token id completes, or None.
Step = Callable[[int], str | None]


class Decode(Protocol):
    """Text of token ids, all at once or one at a time."""

    def __call__(self, ids: Sequence[int], /) -> str:
        """Return the text of ``ids``."""
        ...

    def steps(self) -> Step:
        """Return a function that is called with one id after the other.

        It returns the text that an id adds to that of the ids before it, or None if it adds none or
        the text ends within a character. It raises EngineFileError where an id changes the text of
        the ids before it.
        """
        ...


def _no_text(_token_id: int) -> None:
    """Take the place of steps that failed."""


class Detokenizer:
    """Text of ids that come one at a time; a character appears when its last byte is there."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._step = decode.steps()
        # The ids of the last piece of text, and those since, of which no text has come.
        self._context: list[int] = []
        self._waiting: list[int] = []
        # Characters of the context that the next piece repeats.
        self._num_repeated = 0

    def push(self, token_id: int) -> str:
        """The text that this id completes, possibly none."""
        try:
            text = self._step(token_id)
        except EngineFileError:
            self._waiting.append(token_id)
            return self._begin_again(len(self._waiting))
        if text is not None and not self._waiting and not self._num_repeated:
            # Nearly all tokens.
            self._context = [token_id]
            return text
        self._waiting.append(token_id)
        if text is None:
            return self._move_on() if len(self._waiting) > _MAX_WAITING else ""
        self._context, self._waiting = self._waiting, []
        if self._num_repeated:
            text, self._num_repeated = text[self._num_repeated :], 0
        return text

    def _move_on(self) -> str:
        """The text of ids that waited for long, such as bytes of no character; else none.

        Else each id would be decoded again with all that follow it.
        """
        text = self._decode([*self._context, *self._waiting])
        most = len(self._waiting) - _CHARACTER_IDS
        for count in range(most, most - _CHARACTER_IDS, -1):
            # Within a character the bytes before are text of their own.
            if text.startswith(self._decode([*self._context, *self._waiting[:count]])):
                return self._begin_again(count)
        return ""

    def _begin_again(self, count: int) -> str:
        """The text of the first ids that wait. Steps go on behind them, with a few for context."""
        before = len(self._decode(self._context))
        text = self._decode([*self._context, *self._waiting[:count]])[before:]
        self._context = self._waiting[max(0, count - _CHARACTER_IDS) : count]
        self._waiting = self._waiting[count:]
        self._step = self._decode.steps()
        try:
            pieces = [self._step(token_id) or "" for token_id in (*self._context, *self._waiting)]
        except EngineFileError:
            # The ids wait until they are decoded together.
            self._step = _no_text
            return text
        self._num_repeated = max(0, len(self._decode(self._context)) - len("".join(pieces)))
        return text

    def flush(self) -> str:
        """What is left at the end: an unfinished character shows as a replacement character."""
        if not self._waiting:
            return ""
        before = len(self._decode(self._context))
        text = self._decode([*self._context, *self._waiting])[before:]
        self._context, self._waiting = [], []
        return text


@dataclass(frozen=True)
class StopRule:
    """Strings that end a text, and whether the text includes the one that ended it."""

    strings: tuple[str, ...] = ()
    include: bool = False


Stop = StopRule | Sequence[str]


class StopText:
    """Text that comes in pieces, up to the first stop string.

    What may turn out to begin a stop string is held back until that is decided.
    """

    def __init__(self, stop: Stop) -> None:
        rule = stop if isinstance(stop, StopRule) else StopRule(tuple(stop))
        self._stop, self._include = rule.strings, rule.include
        self._held = ""
        self._parts: list[str] = []
        self.stopped = False
        # The stop string that ended the text.
        self.matched: str | None = None

    @property
    def emitted(self) -> str:
        """All text given out so far."""
        return "".join(self._parts)

    def push(self, new: str) -> str:
        """Text to give out now; ``stopped`` turns true where ``new`` completes a stop string."""
        if not self._stop:
            self._parts.append(new)
            return new
        if self.stopped:
            return ""
        text = self._held + new
        ends = [(text.find(stop), len(stop), stop) for stop in self._stop if stop in text]
        if ends:
            self.stopped = True
            place, length, self.matched = min(ends)
            text, self._held = text[: place + length * self._include], ""
        else:
            keep = max((begun(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._parts.append(text)
        return text

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        self._parts.append(held)
        return held


class TextStream:
    """A request's text: incremental, up to the first stop string."""

    def __init__(self, decode: Decode, stop: Stop) -> None:
        self._detokenizer = Detokenizer(decode)
        self._text = StopText(stop)

    @property
    def emitted(self) -> str:
        """All text given out so far."""
        return self._text.emitted

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._text.stopped

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._text.matched

    def push(self, token_id: int) -> str:
        """Text to give out with this token; ``stopped`` turns true where it completes a stop."""
        return self._text.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        if self.stopped:
            return ""
        return self._text.push(self._detokenizer.flush()) + self._text.finish()


def begun(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark``, short of all of it."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
