"""Outputs with marks in the text: ``<think>`` around reasoning, and the marks of calls.

Either the model or the end of the prompt writes ``<think>`` (DeepSeek, Qwen3, GLM). For calls see
call_forms.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from specbuild.runtime.serve.parsers.call_forms import CallForm, Tools
from specbuild.runtime.serve.parsers.parser import ChatPrompt, Decode, Delta
from specbuild.runtime.text.stream import Detokenizer, StopText, begun

THINK, THINK_END = "<think>", "</think>"


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

    ``thought`` is the state that the prompt leaves; None where the model has no thoughts.
    ``calls`` is the form of calls, of which ``tools`` may be called; what stands between its marks
    and is none stays content. ``decode`` keeps special tokens, which marks are in some
    vocabularies; those named ``dropped``, such as ends of sequence, are left out.
    """

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str],
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
        self._state = "content" if thought is None else "start"
        if thought is Thought.OPEN:
            self._state = "think"
        self._begun = False
        self._held = ""
        self._called = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found in content."""
        return self._stop.stopped

    @property
    def in_content(self) -> bool:
        """Whether neither reasoning nor a call is open."""
        return self._state in ("start", "content")

    def push(self, token_id: int) -> list[Delta]:
        """What became complete with a token."""
        if token_id in self._dropped:
            return []
        return self._advance(self._detokenizer.push(token_id), final=False)

    def finish(self) -> list[Delta]:
        """What was held back."""
        deltas = self._advance(self._detokenizer.flush(), final=True)
        rest = self._stop.finish()
        return [*deltas, Delta(rest)] if rest else deltas

    def _advance(self, new: str, *, final: bool) -> list[Delta]:
        self._held += new
        deltas: list[Delta] = []
        while (found := self._next(final=final)) is not None:
            deltas += found
        return deltas

    def _next(self, *, final: bool) -> list[Delta] | None:
        """One part of what is held; None where no more can be said yet."""
        if self._state == "start":
            return self._start(final=final)
        if self._state == "think":
            return self._reasoning(final=final)
        if self._state == "call":
            return self._call(final=final)
        if self._state == "section":
            return self._between_calls()
        form, mark = self._calls, ""
        if form is not None:
            mark = form.section[0] if form.section else form.begin
        text, met = self._until(mark, final=final)
        if met:
            self._state = "section" if form is not None and form.section else "call"
        if not text and not met:
            return None
        shown = self._stop.push(text) + (self._stop.finish() if met else "")
        return [Delta(shown)] if shown else []

    def _start(self, *, final: bool) -> list[Delta] | None:
        """The output may open a thought, behind white space; else it begins with content."""
        opened = self._held.lstrip()
        if not opened.startswith(THINK) and THINK.startswith(opened) and not final:
            return None
        self._state = "think" if opened.startswith(THINK) else "content"
        return []

    def _reasoning(self, *, final: bool) -> list[Delta] | None:
        if not self._begun:
            opened = self._held.lstrip()
            if THINK.startswith(opened) and opened != THINK and not final:
                return None
            self._begun = True
            self._held = opened.removeprefix(THINK)
        text, met = self._until(THINK_END, final=final)
        if met:
            self._state = "content"
        if not text and not met:
            return None
        return [Delta(reasoning=text)] if text else []

    def _between_calls(self) -> list[Delta] | None:
        """In a section of calls, where what is none of them says nothing."""
        assert self._calls is not None and self._calls.section is not None
        marks = {self._calls.begin: "call", self._calls.section[1]: "content"}
        places = {self._held.find(mark): mark for mark in marks if mark in self._held}
        if not places:
            return None
        first = min(places)
        self._state = marks[places[first]]
        self._held = self._held[first + len(places[first]) :]
        return []

    def _call(self, *, final: bool) -> list[Delta] | None:
        form = self._calls
        assert form is not None
        body, mark, rest = self._held.partition(form.end)
        if not mark and not final:
            return None
        self._state, self._held = "section" if form.section else "content", rest
        called = form.read(body, self._tools)
        if called is None:
            return [Delta(f"{form.begin}{body}{mark}")]
        self._called += 1
        name, arguments = called
        tool = self._called - 1
        return [Delta(tool=tool, name=name), Delta(tool=tool, arguments=arguments)]

    def _until(self, mark: str, *, final: bool) -> tuple[str, bool]:
        """The held text before a mark, and whether the mark is there; a begun mark is held."""
        text, met, rest = self._held.partition(mark) if mark else (self._held, "", "")
        if met:
            self._held = rest
            return text, True
        keep = 0 if final or not mark else begun(text, mark)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False
