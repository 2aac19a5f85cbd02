"""Outputs with markers in the text: ``<think>`` around reasoning, and markers of tool calls.

``<think>`` is written by the model, or by the template at the end of the prompt (DeepSeek, Qwen3,
GLM). For tool calls see tool_call_formats.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from specbuild.runtime.serve.parsers.arguments import Tools, UnclosedTextError
from specbuild.runtime.serve.parsers.parser import ChatPrompt, Decode, Delta
from specbuild.runtime.serve.parsers.tool_call_formats import ToolCallFormat
from specbuild.runtime.text.stream import Detokenizer, Stop, StopText, begun

THINK, THINK_END = "<think>", "</think>"
# Markers that arguments of a call may contain before the call is rejected.
_MAX_UNCLOSED = 16
_MAX_MARKER_LENGTH = 32


class ReasoningState(Enum):
    """The state of the assistant's reasoning at the end of the prompt."""

    OPEN = "the output starts within reasoning"
    CLOSED = "the output starts with content"
    UNMARKED = "the output may start with <think>"


def reasoning_state(prompt: ChatPrompt) -> ReasoningState:
    """Return the state of the reasoning at the end of a rendered prompt.

    The template decides it. With ``enable_thinking`` false, Qwen3's template ends the prompt with
    empty reasoning. Without ``thinking``, DeepSeek-V3.1's ends it with ``</think>``. Markers
    elsewhere in the prompt belong to earlier messages.
    """
    if prompt.continued:
        is_open = prompt.continued.rfind(THINK) > prompt.continued.rfind(THINK_END)
        return ReasoningState.OPEN if is_open else ReasoningState.CLOSED
    text = prompt.text.rstrip()
    if text.endswith(THINK):
        return ReasoningState.OPEN
    return ReasoningState.CLOSED if text.endswith(THINK_END) else ReasoningState.UNMARKED


class MarkerParser:
    """Splits an output at its markers.

    ``reasoning`` is the state at the end of the prompt; None if the model does not reason.
    ``calls`` is the format of tool calls, and ``tools`` are the tools that may be called. A call
    ends open reasoning. Text between call markers that is not a valid call stays text. A call that
    is truncated by the token limit is omitted. ``decode`` must keep special tokens, because markers
    are special tokens in some vocabularies. The tokens of ``dropped``, such as the end of sequence,
    are omitted.
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
        # "start", "think", "content", "section" or "call". The last two occur within "think" or
        # "content", which is the outer state then.
        self._state = "content" if reasoning is None else "start"
        if reasoning is ReasoningState.OPEN:
            self._state = "think"
        self._outer_state = self._state
        self._in_section = False
        self._has_reasoning_begun = False
        # A call ended the reasoning, whose end marker may still follow.
        self._may_end_reasoning = False
        self._buffer = ""
        self._num_calls = 0
        self._begin_call()

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found in the content."""
        return self._stop.stopped

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the content, or None."""
        return self._stop.matched

    @property
    def in_content(self) -> bool:
        """Whether neither reasoning nor a call is open."""
        return self._state in ("start", "content")

    def push(self, token_id: int) -> list[Delta]:
        """Return the deltas that a token completes."""
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
        """Decide whether the output starts with reasoning, after optional white space, or with
        content.
        """
        stripped = self._buffer.lstrip()
        if not stripped.startswith(THINK) and THINK.startswith(stripped) and not final:
            return None
        self._state = "think" if stripped.startswith(THINK) else "content"
        return []

    def _read_text(self, *, final: bool, truncated: bool) -> list[Delta] | None:
        """Read reasoning or content up to the marker that ends it."""
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
        """Read up to the next call of a section. Other text in a section is content."""
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
        """Reset the state of the current call."""
        self._is_call = False
        self._search_start = self._num_unclosed = 0
        self._next_begin: int | None = None

    def _read_call(self, *, final: bool, truncated: bool) -> list[Delta] | None:
        """Read a call up to its end marker. Text that is not a call stays text."""
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
        while (match := _first_marker(buffer, end_markers, self._search_start)) is not None:
            index, marker = match
            self._search_start = index + len(marker)
            try:
                call = call_format.read(buffer[:index], self._tools)
            except UnclosedTextError:
                if marker == call_format.begin and self._next_begin is None:
                    self._next_begin = index
                self._num_unclosed += 1
                if self._num_unclosed <= _MAX_UNCLOSED:
                    continue
                call = None
            end = self._search_start if marker == call_format.end else index
            if call is not None:
                return self._accept_call(call, end)
            return self._reject_call(end if self._next_begin is None else self._next_begin)
        if not final:
            self._search_start = max(self._search_start, len(buffer) - _MAX_MARKER_LENGTH)
            return None
        return self._read_unclosed_call(truncated=truncated)

    def _read_unclosed_call(self, *, truncated: bool) -> list[Delta]:
        """Read a call without an end marker, at the end of the output."""
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
        """Return the deltas of a call, which is the first ``length`` characters of the buffer."""
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
        """Return the first ``length`` characters of the buffer, and the marker before them, as
        text.
        """
        assert self._calls is not None
        text = self._calls.begin + self._buffer[:length]
        self._end_call(length)
        return self._text_deltas(text)

    def _end_call(self, length: int) -> None:
        self._buffer = self._buffer[length:]
        self._state = "section" if self._in_section else self._outer_state
        self._begin_call()

    def _text_deltas(self, text: str, *, flush: bool = False) -> list[Delta]:
        """Return text as a delta of the open reasoning or content."""
        state = self._outer_state if self._state in ("call", "section") else self._state
        if state == "think":
            return [Delta(reasoning=text)] if text else []
        visible_text = self._stop.push(text) + (self._stop.finish() if flush else "")
        return [Delta(visible_text)] if visible_text else []

    def _text_before(
        self, markers: Sequence[str], *, final: bool, truncated: bool
    ) -> tuple[str, str]:
        """Return the buffered text before the first marker, and the marker.

        An incomplete marker stays in the buffer.
        """
        buffer = self._buffer
        if "<" not in buffer:  # every marker starts with it
            self._buffer = ""
            return buffer, ""
        match = _first_marker(buffer, markers, 0)
        if match is not None:
            index, marker = match
            self._buffer = buffer[index + len(marker) :]
            return buffer[:index], marker
        num_held = max((begun(buffer, marker) for marker in markers), default=0)
        text = buffer[: len(buffer) - num_held]
        self._buffer = "" if final else buffer[len(text) :]
        # A single character is more likely text than an incomplete marker.
        return (buffer if final and not (truncated and num_held > 1) else text), ""


def _first_marker(text: str, markers: Sequence[str], start: int) -> tuple[int, str] | None:
    """Return the index of the first marker from ``start`` on, and the marker."""
    matches = ((text.find(marker, start), marker) for marker in markers)
    return min((match for match in matches if match[0] >= 0), default=None)
