"""Outputs with marks in the text: ``<think>`` around reasoning, and the marks of calls.

Either the model or the end of the prompt writes ``<think>`` (DeepSeek, Qwen3, GLM). For calls see
call_forms.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from specbuild.runtime.serve.parsers.arguments import Tools, UnclosedTextError
from specbuild.runtime.serve.parsers.parser import ChatPrompt, Decode, Delta
from specbuild.runtime.serve.parsers.tool_call_formats import ToolCallFormat
from specbuild.runtime.text.stream import Detokenizer, Stop, StopText, begun

THINK, THINK_END = "<think>", "</think>"
# Marks that may be part of a text in a call's arguments, before the call is taken for none.
_MAX_UNCLOSED = 16
_MAX_MARKER_LENGTH = 32


class ReasoningState(Enum):
    """What a prompt's end does with the thought of the assistant's turn."""

    OPEN = "the output begins inside a thought"
    CLOSED = "the output begins with the answer"
    UNMARKED = "the output opens a thought, or has none"


def reasoning_state(prompt: ChatPrompt) -> ReasoningState:
    """Return the state of the thought at the end of a rendered prompt.

    The template decides it: Qwen3 with ``enable_thinking`` false ends the prompt with an empty
    thought, DeepSeek-V3.1 without ``thinking`` with ``</think>``. Marks elsewhere in the prompt
    belong to earlier messages.
    """
    if prompt.continued:
        is_open = prompt.continued.rfind(THINK) > prompt.continued.rfind(THINK_END)
        return ReasoningState.OPEN if is_open else ReasoningState.CLOSED
    text = prompt.text.rstrip()
    if text.endswith(THINK):
        return ReasoningState.OPEN
    return ReasoningState.CLOSED if text.endswith(THINK_END) else ReasoningState.UNMARKED


class MarkerParser:
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
        reasoning: ReasoningState | None,
        calls: ToolCallFormat | None = None,
        tools: Tools = (),
        dropped: Sequence[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stop = StopText(stop)
        self._dropped = frozenset(dropped)
        self._calls, self._tools = calls, tools
        self._section: tuple[str, ...] = () if calls is None else calls.section or ()
        self._call_markers = () if calls is None else (*self._section[:1], calls.begin)
        # "start", "think" or "content", and inside of these "section" and "call".
        self._state = "content" if reasoning is None else "start"
        if reasoning is ReasoningState.OPEN:
            self._state = "think"
        self._outer_state = self._state
        self._in_section = False
        self._has_reasoning_begun = False
        # A call ended the thought: the mark of its end may still come.
        self._may_end_reasoning = False
        self._buffer = ""
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
        self._buffer += self._detokenizer.push(token_id)
        return self._advance(final=False, truncated=False)

    def finish(self, *, truncated: bool = False) -> list[Delta]:
        """See :class:`OutputParser`."""
        self._buffer += self._detokenizer.flush()
        deltas = self._advance(final=True, truncated=truncated)
        rest = self._stop.finish()
        return [*deltas, Delta(rest)] if rest else deltas

    def _advance(self, *, final: bool, truncated: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while not self._stop.stopped and (self._buffer or (final and self._state == "call")):
            match self._state:
                case "start":
                    new_deltas = self._read_start(final=final)
                case "call":
                    new_deltas = self._read_call(final=final, truncated=truncated)
                case "section":
                    new_deltas = self._read_section(final=final, truncated=truncated)
                case _:
                    new_deltas = self._read_text(final=final, truncated=truncated)
            if new_deltas is None:
                break
            deltas += new_deltas
        return deltas

    def _read_start(self, *, final: bool) -> list[Delta] | None:
        """The output may open a thought, behind white space; else it begins with content."""
        stripped = self._buffer.lstrip()
        if not stripped.startswith(THINK) and THINK.startswith(stripped) and not final:
            return None
        self._state = "think" if stripped.startswith(THINK) else "content"
        return []

    def _read_text(self, *, final: bool, truncated: bool) -> list[Delta] | None:
        """Reasoning or content, up to the mark that ends it."""
        is_reasoning = self._state == "think"
        if is_reasoning and not self._has_reasoning_begun:
            stripped = self._buffer.lstrip()
            if THINK.startswith(stripped) and stripped != THINK and not final:
                return None
            self._has_reasoning_begun = True
            self._buffer = stripped.removeprefix(THINK)
        markers = self._call_markers
        if is_reasoning or self._may_end_reasoning:
            markers = (*markers, THINK_END)
        text, marker = self._text_before(markers, final=final, truncated=truncated)
        if not text and not marker:
            return None
        deltas = self._text_deltas(text)
        if marker == THINK_END:
            self._state = "content"
            self._may_end_reasoning = False
        elif marker:
            if not is_reasoning:
                deltas += self._text_deltas("", flush=True)
            self._outer_state = self._state
            self._in_section = bool(self._section) and marker == self._section[0]
            self._state = "section" if self._in_section else "call"
        return deltas

    def _read_section(self, *, final: bool, truncated: bool) -> list[Delta] | None:
        """In a section of calls, where other text is content all the same."""
        assert self._calls is not None
        begin, end = self._calls.begin, self._section[1]
        markers = {
            self._buffer.find(marker): marker for marker in (begin, end) if marker in self._buffer
        }
        if not markers and not final:
            return None
        index = min(markers, default=len(self._buffer))
        marker = markers.get(index, "")
        text = self._buffer[:index].strip()
        self._buffer = self._buffer[index + len(marker) :]
        deltas = [] if truncated and not marker else self._text_deltas(text)
        if marker == begin:
            self._state = "call"
        elif marker == end:
            self._state, self._in_section = self._outer_state, False
        return deltas

    def _begin_call(self) -> None:
        """Forget what is known of the last call."""
        self._is_call = False
        self._searched = self._num_unclosed = 0
        self._next_begin: int | None = None

    def _read_call(self, *, final: bool, truncated: bool) -> list[Delta] | None:
        """A call up to the mark that ends it; text where it is none."""
        call_format, buffer = self._calls, self._buffer
        assert call_format is not None
        if not self._is_call:
            begins = call_format.begins_call(buffer.lstrip())
            self._is_call = begins is True
            if begins is False:
                return self._reject_call(0)
        end_markers = [call_format.end, call_format.begin, *self._section[1:]]
        if self._outer_state == "think":
            end_markers.append(THINK_END)
        while (match := _first_marker(buffer, end_markers, self._searched)) is not None:
            index, marker = match
            self._searched = index + len(marker)
            try:
                call = call_format.read(buffer[:index], self._tools)
            except UnclosedTextError:
                if marker == call_format.begin and self._next_begin is None:
                    self._next_begin = index
                self._num_unclosed += 1
                if self._num_unclosed <= _MAX_UNCLOSED:
                    continue
                call = None
            end = self._searched if marker == call_format.end else index
            if call is not None:
                return self._accept_call(call, end)
            return self._reject_call(end if self._next_begin is None else self._next_begin)
        if not final:
            self._searched = max(self._searched, len(buffer) - _MAX_MARKER_LENGTH)
            return None
        return self._read_unclosed_call(truncated=truncated)

    def _read_unclosed_call(self, *, truncated: bool) -> list[Delta]:
        """A call that no mark ended."""
        call_format, buffer = self._calls, self._buffer
        assert call_format is not None
        if truncated:
            self._end_call(len(buffer))
            return []
        if self._next_begin is not None:
            return self._reject_call(self._next_begin)
        try:
            call = call_format.read(buffer, self._tools)
        except UnclosedTextError:
            call = None
        return (
            self._reject_call(len(buffer)) if call is None else self._accept_call(call, len(buffer))
        )

    def _accept_call(self, call: tuple[str, str], length: int) -> list[Delta]:
        """A call of so many characters of what is held."""
        assert self._calls is not None
        name, arguments = call
        number, self._num_calls = self._num_calls, self._num_calls + 1
        call_id = "" if self._calls.call_id is None else self._calls.call_id(name, number)
        if self._outer_state == "think":
            self._outer_state, self._may_end_reasoning = "content", True
        self._end_call(length)
        return [
            Delta(tool=number, name=name, call_id=call_id),
            Delta(tool=number, arguments=arguments),
        ]

    def _reject_call(self, length: int) -> list[Delta]:
        """So many characters are no call: they are text, with the mark before them."""
        assert self._calls is not None
        text = self._calls.begin + self._buffer[:length]
        self._end_call(length)
        return self._text_deltas(text)

    def _end_call(self, length: int) -> None:
        self._buffer = self._buffer[length:]
        self._state = "section" if self._in_section else self._outer_state
        self._begin_call()

    def _text_deltas(self, text: str, *, flush: bool = False) -> list[Delta]:
        """Text of the thought or of the content that is open, around a call or not."""
        state = self._outer_state if self._state in ("call", "section") else self._state
        if state == "think":
            return [Delta(reasoning=text)] if text else []
        shown = self._stop.push(text) + (self._stop.finish() if flush else "")
        return [Delta(shown)] if shown else []

    def _text_before(
        self, markers: Sequence[str], *, final: bool, truncated: bool
    ) -> tuple[str, str]:
        """The held text before the first mark, and the mark; the beginning of one stays held."""
        buffer = self._buffer
        if "<" not in buffer:  # every mark begins with it
            self._buffer = ""
            return buffer, ""
        match = _first_marker(buffer, markers, 0)
        if match is not None:
            index, marker = match
            self._buffer = buffer[index + len(marker) :]
            return buffer[:index], marker
        num_kept = max((begun(buffer, marker) for marker in markers), default=0)
        text = buffer[: len(buffer) - num_kept]
        self._buffer = "" if final else buffer[len(text) :]
        # One sign is more likely text than the beginning of a mark.
        return (buffer if final and not (truncated and num_kept > 1) else text), ""


def _first_marker(text: str, markers: Sequence[str], start: int) -> tuple[int, str] | None:
    """The place of the first mark from ``start`` on, and the mark."""
    matches = ((text.find(marker, start), marker) for marker in markers)
    return min((match for match in matches if match[0] >= 0), default=None)
