"""Outputs with marks in the text: ``<think>`` around reasoning, and the marks of calls.

Either the model or the end of the prompt writes ``<think>`` (DeepSeek, Qwen3, GLM). For calls see
call_forms.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from specbuild.runtime.serve.parsers.arguments import Tools, UnclosedTextError
from specbuild.runtime.serve.parsers.call_forms import CallForm
from specbuild.runtime.serve.parsers.parser import ChatPrompt, Decode, Delta
from specbuild.runtime.text.stream import Detokenizer, Stop, StopText, begun

THINK, THINK_END = "<think>", "</think>"
# Marks that may be part of a text in a call's arguments, before the call is taken for none.
_MAX_UNCLOSED = 16
_LONGEST_MARK = 32


class Thought(Enum):
    """What a prompt's end does with the thought of the assistant's turn."""

    OPEN = "the output begins inside a thought"
    CLOSED = "the output begins with the answer"
    UNMARKED = "the output opens a thought, or has none"


def thought_of(prompt: ChatPrompt) -> Thought:
    """Return the state of the thought at the end of a rendered prompt.

    The template decides it: Qwen3 with ``enable_thinking`` false ends the prompt with an empty
    thought, DeepSeek-V3.1 without ``thinking`` with ``</think>``. Marks elsewhere in the prompt
    belong to earlier messages.
    """
    if prompt.continued:
        is_open = prompt.continued.rfind(THINK) > prompt.continued.rfind(THINK_END)
        return Thought.OPEN if is_open else Thought.CLOSED
    end = prompt.text.rstrip()
    if end.endswith(THINK):
        return Thought.OPEN
    return Thought.CLOSED if end.endswith(THINK_END) else Thought.UNMARKED


class MarkedParser:
    """Splits an output at its marks.

    ``thought`` is the state that the prompt leaves; None where the model has no thoughts. ``calls``
    is the form of calls, of which ``tools`` may be called. A call ends a thought that is open. What
    is between its marks and is none stays text; the beginning of a call that a limit cut off is
    left out. ``decode`` keeps special tokens, which marks are in some vocabularies; those of
    ``dropped``, such as ends of sequence, are left out.
    """

    def __init__(
        self,
        decode: Decode,
        stop: Stop,
        *,
        thought: Thought | None,
        calls: CallForm | None = None,
        tools: Tools = (),
        dropped: Sequence[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stop = StopText(stop)
        self._dropped = frozenset(dropped)
        self._calls, self._tools = calls, tools
        self._section: tuple[str, ...] = () if calls is None else calls.section or ()
        self._call_marks = () if calls is None else (*self._section[:1], calls.begin)
        # "start", "think" or "content", and inside of these "section" and "call".
        self._state = "content" if thought is None else "start"
        if thought is Thought.OPEN:
            self._state = "think"
        self._outer = self._state
        self._in_section = False
        self._thought_begun = False
        # A call ended the thought: the mark of its end may still come.
        self._end_of_thought_due = False
        self._held = ""
        self._num_calls = 0
        self._begin_call()

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found in content."""
        return self._stop.stopped

    @property
    def in_content(self) -> bool:
        """Whether neither reasoning nor a call is open."""
        return self._state in ("start", "content")

    def push(self, token_id: int) -> list[Delta]:
        """Return what became complete with a token."""
        if token_id in self._dropped:
            return []
        self._held += self._detokenizer.push(token_id)
        return self._advance(final=False, truncated=False)

    def finish(self, *, truncated: bool = False) -> list[Delta]:
        """See :class:`OutputParser`."""
        self._held += self._detokenizer.flush()
        deltas = self._advance(final=True, truncated=truncated)
        rest = self._stop.finish()
        return [*deltas, Delta(rest)] if rest else deltas

    def _advance(self, *, final: bool, truncated: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while not self._stop.stopped and (self._held or (final and self._state == "call")):
            match self._state:
                case "start":
                    found = self._read_start(final=final)
                case "call":
                    found = self._read_call(final=final, truncated=truncated)
                case "section":
                    found = self._read_section(final=final, truncated=truncated)
                case _:
                    found = self._read_text(final=final, truncated=truncated)
            if found is None:
                break
            deltas += found
        return deltas

    def _read_start(self, *, final: bool) -> list[Delta] | None:
        """The output may open a thought, behind white space; else it begins with content."""
        opened = self._held.lstrip()
        if not opened.startswith(THINK) and THINK.startswith(opened) and not final:
            return None
        self._state = "think" if opened.startswith(THINK) else "content"
        return []

    def _read_text(self, *, final: bool, truncated: bool) -> list[Delta] | None:
        """Reasoning or content, up to the mark that ends it."""
        in_thought = self._state == "think"
        if in_thought and not self._thought_begun:
            opened = self._held.lstrip()
            if THINK.startswith(opened) and opened != THINK and not final:
                return None
            self._thought_begun = True
            self._held = opened.removeprefix(THINK)
        marks = self._call_marks
        if in_thought or self._end_of_thought_due:
            marks = (*marks, THINK_END)
        text, mark = self._until(marks, final=final, truncated=truncated)
        if not text and not mark:
            return None
        shown = self._text(text)
        if mark == THINK_END:
            self._state = "content"
            self._end_of_thought_due = False
        elif mark:
            if not in_thought:
                shown += self._text("", flush=True)
            self._outer = self._state
            self._in_section = bool(self._section) and mark == self._section[0]
            self._state = "section" if self._in_section else "call"
        return shown

    def _read_section(self, *, final: bool, truncated: bool) -> list[Delta] | None:
        """In a section of calls, where other text is content all the same."""
        assert self._calls is not None
        begin, end = self._calls.begin, self._section[1]
        places = {self._held.find(mark): mark for mark in (begin, end) if mark in self._held}
        if not places and not final:
            return None
        first = min(places, default=len(self._held))
        mark = places.get(first, "")
        text = self._held[:first].strip()
        self._held = self._held[first + len(mark) :]
        shown = [] if truncated and not mark else self._text(text)
        if mark == begin:
            self._state = "call"
        elif mark == end:
            self._state, self._in_section = self._outer, False
        return shown

    def _begin_call(self) -> None:
        """Forget what is known of the last call."""
        self._is_call = False
        self._searched = self._num_unclosed = 0
        self._next_begin: int | None = None

    def _read_call(self, *, final: bool, truncated: bool) -> list[Delta] | None:
        """A call up to the mark that ends it; text where it is none."""
        form, held = self._calls, self._held
        assert form is not None
        if not self._is_call:
            verdict = form.begins_call(held.lstrip())
            self._is_call = verdict is True
            if verdict is False:
                return self._no_call(0)
        ends = [form.end, form.begin, *self._section[1:]]
        if self._outer == "think":
            ends.append(THINK_END)
        while (found := _first_mark(held, ends, self._searched)) is not None:
            place, mark = found
            self._searched = place + len(mark)
            try:
                call = form.read(held[:place], self._tools)
            except UnclosedTextError:
                if mark == form.begin and self._next_begin is None:
                    self._next_begin = place
                self._num_unclosed += 1
                if self._num_unclosed <= _MAX_UNCLOSED:
                    continue
                call = None
            behind = self._searched if mark == form.end else place
            if call is not None:
                return self._call(call, behind)
            return self._no_call(behind if self._next_begin is None else self._next_begin)
        if not final:
            self._searched = max(self._searched, len(held) - _LONGEST_MARK)
            return None
        return self._read_end(truncated=truncated)

    def _read_end(self, *, truncated: bool) -> list[Delta]:
        """A call that no mark ended."""
        form, held = self._calls, self._held
        assert form is not None
        if truncated:
            self._end_call(len(held))
            return []
        if self._next_begin is not None:
            return self._no_call(self._next_begin)
        try:
            call = form.read(held, self._tools)
        except UnclosedTextError:
            call = None
        return self._no_call(len(held)) if call is None else self._call(call, len(held))

    def _call(self, call: tuple[str, str], length: int) -> list[Delta]:
        """A call of so many characters of what is held."""
        assert self._calls is not None
        name, arguments = call
        number, self._num_calls = self._num_calls, self._num_calls + 1
        call_id = "" if self._calls.call_id is None else self._calls.call_id(name, number)
        if self._outer == "think":
            self._outer, self._end_of_thought_due = "content", True
        self._end_call(length)
        return [
            Delta(tool=number, name=name, call_id=call_id),
            Delta(tool=number, arguments=arguments),
        ]

    def _no_call(self, length: int) -> list[Delta]:
        """So many characters are no call: they are text, with the mark before them."""
        assert self._calls is not None
        text = self._calls.begin + self._held[:length]
        self._end_call(length)
        return self._text(text)

    def _end_call(self, length: int) -> None:
        self._held = self._held[length:]
        self._state = "section" if self._in_section else self._outer
        self._begin_call()

    def _text(self, text: str, *, flush: bool = False) -> list[Delta]:
        """Text of the thought or of the content that is open, around a call or not."""
        state = self._outer if self._state in ("call", "section") else self._state
        if state == "think":
            return [Delta(reasoning=text)] if text else []
        shown = self._stop.push(text) + (self._stop.finish() if flush else "")
        return [Delta(shown)] if shown else []

    def _until(self, marks: Sequence[str], *, final: bool, truncated: bool) -> tuple[str, str]:
        """The held text before the first mark, and the mark; the beginning of one stays held."""
        held = self._held
        if "<" not in held:  # every mark begins with it
            self._held = ""
            return held, ""
        found = _first_mark(held, marks, 0)
        if found is not None:
            place, mark = found
            self._held = held[place + len(mark) :]
            return held[:place], mark
        keep = max((begun(held, mark) for mark in marks), default=0)
        text = held[: len(held) - keep]
        self._held = "" if final else held[len(text) :]
        # One sign is more likely text than the beginning of a mark.
        return (held if final and not (truncated and keep > 1) else text), ""


def _first_mark(text: str, marks: Sequence[str], start: int) -> tuple[int, str] | None:
    """The place of the first mark from ``start`` on, and the mark."""
    places = ((text.find(mark, start), mark) for mark in marks)
    return min((found for found in places if found[0] >= 0), default=None)
