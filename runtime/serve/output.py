"""One output as its parser reads it: content, reasoning, calls of tools, and its end."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from specbuild.runtime.request import TokenEvent
from specbuild.runtime.serve.parsers.parser import Delta, OutputParser
from specbuild.runtime.serve.turns import Turn


@dataclass
class ToolCall:
    """A call of a function, as it comes."""

    name: str
    pieces: list[str] = field(default_factory=list)
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def arguments(self) -> str:
        """The model's own words."""
        return "".join(self.pieces)


class Output:
    """Collects what a parser reads. ``tokens`` are those up to the end or a stop string.

    ``by_delta``: deltas of content have their tokens. The text of a last token that is one of
    ``hidden_ends`` is left out. With ``single_call`` calls after the first one are left out.
    """

    def __init__(
        self,
        parser: OutputParser,
        *,
        by_delta: bool = False,
        hidden_ends: Collection[int] = (),
        single_call: bool = False,
    ) -> None:
        self._hidden_ends = hidden_ends
        self._single_call = single_call
        self._parser = parser
        self._by_delta = by_delta
        # Tokens of content whose text is not complete.
        self._incomplete: list[TokenEvent] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        self.tokens: list[TokenEvent] = []
        self.reasoning_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None

    @property
    def content(self) -> str:
        """The answer so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    def take(self, turn: Turn) -> list[Delta]:
        """What a turn adds; where it ends the output, :attr:`finish_reason` is set."""
        deltas: list[Delta] = []
        end = turn.tokens[-1] if turn.tokens and turn.finish_reason == "stop" else None
        for token in turn.tokens:
            self.tokens.append(token)
            hidden = token is end and token.token_id in self._hidden_ends
            found = [] if hidden else self._push(token)
            self.cached_tokens += token.cached_tokens
            self.reasoning_tokens += any(delta.reasoning for delta in found)
            deltas += found
            if self._parser.stopped:
                break
        if turn.finish_reason is not None or self._parser.stopped:
            truncated = turn.finish_reason == "length"
            deltas += self._with_tokens(self._parser.finish(truncated=truncated))
        if self._single_call:
            deltas = [delta for delta in deltas if not delta.tool]
        self._collect(deltas)
        if turn.finish_reason is not None or self._parser.stopped:
            self.finish_reason = self._end(turn.finish_reason)
        return deltas

    def _push(self, token: TokenEvent) -> list[Delta]:
        before = self._parser.in_content
        found = self._parser.push(token.token_id)
        if before and self._parser.in_content:
            self._incomplete.append(token)
        found = self._with_tokens(found)
        if not self._parser.in_content:
            self._incomplete.clear()
        return found

    def _with_tokens(self, deltas: list[Delta]) -> list[Delta]:
        """The first one of content has the tokens that it completes."""
        place = next((i for i, delta in enumerate(deltas) if delta.content), None)
        if place is None or not self._by_delta:
            return deltas
        whole = replace(deltas[place], tokens=tuple(self._incomplete))
        self._incomplete.clear()
        return [*deltas[:place], whole, *deltas[place + 1 :]]

    def _end(self, given: str | None) -> str:
        if self._parser.stopped or given is None:
            return "stop"
        # What was cut off is no call yet.
        return "tool_calls" if self.calls and given == "stop" else given

    def _collect(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.tool is None:
                self._content.append(delta.content)
                self._reasoning.append(delta.reasoning)
            elif delta.name is not None:
                call = ToolCall(delta.name)
                self.calls.append(replace(call, id=delta.call_id) if delta.call_id else call)
            else:
                self.calls[delta.tool].pieces.append(delta.arguments)
