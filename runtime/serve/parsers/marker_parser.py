"""Outputs with markers in the text: around reasoning, such as ``<think>``, and of tool calls.

The model writes the marker of reasoning, or the template does at the end of the prompt (DeepSeek,
Qwen3, GLM). For tool calls see tool_call_formats.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.runtime.serve.parsers.arguments import Tools, UnclosedTextError
from specbuild.runtime.serve.parsers.parser import ContentStop, Delta
from specbuild.runtime.serve.parsers.reasoning import THINK, ReasoningMarkers, ReasoningState
from specbuild.runtime.serve.parsers.tool_call_formats import Calls, ToolCallFormat
from specbuild.runtime.text.stream import Decode, Detokenizer, Stop, StopText, begun

# Markers that arguments of a call may contain before the call is rejected.
_MAX_UNCLOSED = 16
_MAX_MARKER_LENGTH = 32


class MarkerParser(ContentStop):
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
        self._stop: StopText = StopText(stop)
        self._dropped = frozenset(dropped)
        self._think, self._think_end = THINK.begin, THINK.end
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

    def between(self, markers: ReasoningMarkers) -> MarkerParser:
        """Return the parser itself, with other markers of reasoning, before the first token."""
        self._think, self._think_end = markers.begin, markers.end
        return self

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
        begins = stripped.startswith(self._think)
        if not begins and self._think.startswith(stripped) and not final:
            return None
        self._state = "think" if begins else "content"
        return []

    def _read_text(self, *, final: bool, truncated: bool) -> list[Delta] | None:
        """Read reasoning or content up to the marker that ends it."""
        is_reasoning = self._state == "think"
        if is_reasoning and not self._has_reasoning_begun:
            stripped = self._buffer.lstrip()
            if self._think.startswith(stripped) and stripped != self._think and not final:
                return None
            self._has_reasoning_begun = True
            self._buffer = stripped.removeprefix(self._think)
        markers = self._call_markers
        if is_reasoning or self._may_end_reasoning:
            markers = (*markers, self._think_end)
        text, marker = self._text_before(markers, final=final, truncated=truncated)
        if not text and not marker:
            return None
        deltas = self._text_deltas(text)
        if marker == self._think_end:
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
        ends = () if call_format.end is None else (call_format.end,)
        end_markers = [*ends, call_format.begin, *self._section[1:]]
        if self._outer_state == "think":
            end_markers.append(self._think_end)
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
        if truncated and call_format.end is not None:
            self._end_call(len(buffer))
            return []
        if self._next_begin is not None:
            return self._reject_call(self._next_begin)
        try:
            call = call_format.read(buffer, self._tools)
        except UnclosedTextError:
            call = None
        if call is not None:
            return self._accept_call(call, len(buffer))
        if truncated:
            self._end_call(len(buffer))
            return []
        return self._reject_call(len(buffer))

    def _accept_call(self, calls: Calls, length: int) -> list[Delta]:
        """Return the deltas of calls, which are the first ``length`` characters of the buffer."""
        assert self._calls is not None
        if self._outer_state == "think":
            self._outer_state, self._may_end_reasoning = "content", True
        self._end_call(length)
        deltas = []
        for name, arguments in calls if isinstance(calls, list) else [calls]:
            number, self._num_calls = self._num_calls, self._num_calls + 1
            call_id = "" if self._calls.call_id is None else self._calls.call_id(name, number)
            deltas += [
                Delta(tool=number, name=name, call_id=call_id),
                Delta(tool=number, arguments=arguments),
            ]
        return deltas

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
        for marker in markers:
            if marker[0] in buffer:
                break
        else:
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
