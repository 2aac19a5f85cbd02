"""Text of tokens that come one at a time: whole characters only, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_INCOMPLETE = "\ufffd"  # what a decoder gives for the first bytes of a longer character
# Ids that are decoded again with a new one, at most. To move on takes a decoding of its own.
_MOST_CONTEXT = 8
# Ids of which no text has come: so many cannot belong to one character, whose bytes are four.
_MAX_WAITING = 12
_CHARACTER_IDS = 4


class Detokenizer:
    """Text of ids that come one at a time; a character appears when its last byte is there.

    Only a few ids before the last complete character are decoded again: enough context that a
    decoder which strips leading space does not strip the middle of the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        # Where the context begins, what is read, and the text of the ids in between.
        self._context = 0
        self._read = 0
        self._before = ""

    def push(self, token_id: int) -> str:
        """The text that this id completes, possibly none."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._context :])
        before = self._before
        if text.endswith(_INCOMPLETE) or len(text) <= len(before):
            return self._move_on(text)
        piece, self._read = self._read, len(self._ids)
        if self._read - self._context > _MOST_CONTEXT:
            self._context, self._before = piece, self._decode(self._ids[piece:])
        else:
            self._before = text
        return text[len(before) :]

    def _move_on(self, text: str) -> str:
        """The text of ids that waited for long, such as bytes of no character; else none.

        Else each id would be decoded again with all that follow it.
        """
        count = len(self._ids)
        if count - self._read <= _MAX_WAITING:
            return ""
        for end in range(count - _CHARACTER_IDS, count - 2 * _CHARACTER_IDS, -1):
            whole = self._decode(self._ids[self._context : end])
            # Within a character the bytes before are text of their own.
            if text.startswith(whole):
                new = whole[len(self._before) :]
                self._context, self._read = end - _CHARACTER_IDS, end
                self._before = self._decode(self._ids[self._context : end])
                return new
        return ""

    def flush(self) -> str:
        """What is left at the end: an unfinished character shows as a replacement character."""
        text, before = self._decode(self._ids[self._context :]), self._before
        self._context = self._read = len(self._ids)
        self._before = ""
        return text[len(before) :]


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

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Stop) -> None:
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
