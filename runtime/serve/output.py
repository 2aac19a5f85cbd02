"""One output as its parser reads it: content, reasoning, calls of tools, and its end."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from specbuild.runtime.request import TokenEvent
from specbuild.runtime.serve.parsers.parser import Delta, OutputParser
from specbuild.runtime.serve.token_batches import TokenBatch


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
        tracks_tokens: bool = False,
        hidden_end_tokens: Collection[int] = (),
        single_call: bool = False,
    ) -> None:
        self._hidden_ends = hidden_end_tokens
        self._single_call = single_call
        self._parser = parser
        self._tracks_tokens = tracks_tokens
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

    def add(self, batch: TokenBatch) -> list[Delta]:
        """What a turn adds; where it ends the output, :attr:`finish_reason` is set."""
        deltas: list[Delta] = []
        last = batch.tokens[-1] if batch.tokens and batch.finish_reason == "stop" else None
        for token in batch.tokens:
            self.tokens.append(token)
            is_hidden = token is last and token.token_id in self._hidden_ends
            token_deltas = [] if is_hidden else self._push(token)
            self.cached_tokens += token.cached_tokens
            self.reasoning_tokens += any(delta.reasoning for delta in token_deltas)
            deltas += token_deltas
            if self._parser.stopped:
                break
        if batch.finish_reason is not None or self._parser.stopped:
            truncated = batch.finish_reason == "length"
            deltas += self._with_tokens(self._parser.finish(truncated=truncated))
        if self._single_call:
            deltas = [delta for delta in deltas if not delta.tool]
        self._collect(deltas)
        if batch.finish_reason is not None or self._parser.stopped:
            self.finish_reason = self._finish_reason(batch.finish_reason)
        return deltas

    def _push(self, token: TokenEvent) -> list[Delta]:
        was_content = self._parser.in_content
        deltas = self._parser.push(token.token_id)
        if was_content and self._parser.in_content:
            self._incomplete.append(token)
        deltas = self._with_tokens(deltas)
        if not self._parser.in_content:
            self._incomplete.clear()
        return deltas

    def _with_tokens(self, deltas: list[Delta]) -> list[Delta]:
        """The first one of content has the tokens that it completes."""
        index = next((i for i, delta in enumerate(deltas) if delta.content), None)
        if index is None or not self._tracks_tokens:
            return deltas
        delta_with_tokens = replace(deltas[index], tokens=tuple(self._incomplete))
        self._incomplete.clear()
        return [*deltas[:index], delta_with_tokens, *deltas[index + 1 :]]

    def _finish_reason(self, finish_reason: str | None) -> str:
        if self._parser.stopped or finish_reason is None:
            return "stop"
        # What was cut off is no call yet.
        return "tool_calls" if self.calls and finish_reason == "stop" else finish_reason

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
