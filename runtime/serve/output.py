"""One output, parsed into content, reasoning, tool calls and a finish reason."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from specbuild.runtime.request import TokenEvent
from specbuild.runtime.serve.parsers.parser import Delta, OutputParser
from specbuild.runtime.serve.token_batches import TokenBatch


@dataclass
class ToolCall:
    """A tool call, which may be incomplete."""

    name: str
    pieces: list[str] = field(default_factory=list)
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def arguments(self) -> str:
        """The arguments as the model wrote them."""
        return "".join(self.pieces)


class Output:
    """Collects the deltas of a parser. ``tokens`` ends with the output or with a stop string.

    With ``tracks_tokens`` content deltas have their tokens. If the last token is one of
    ``hidden_end_tokens``, its text is omitted. With ``single_call`` only the first tool call is
    kept.
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
        # Content tokens whose text the parser still holds back.
        self._pending_tokens: list[TokenEvent] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        self.tokens: list[TokenEvent] = []
        self.reasoning_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None

    @property
    def content(self) -> str:
        """The content so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the output, or None."""
        return self._parser.stop_text

    def add(self, batch: TokenBatch) -> list[Delta]:
        """Return the deltas of a batch, and set :attr:`finish_reason` if it ends the output."""
        deltas: list[Delta] = []
        parser, finish_reason = self._parser, batch.finish_reason
        last = batch.tokens[-1] if batch.tokens and finish_reason == "stop" else None
        for token in batch.tokens:
            self.tokens.append(token)
            is_hidden = token is last and token.token_id in self._hidden_ends
            token_deltas = [] if is_hidden else self._push(token)
            self.cached_tokens += token.cached_tokens
            if [True for delta in token_deltas if delta.reasoning]:
                self.reasoning_tokens += 1
            deltas += token_deltas
            if parser.stopped:
                break
        ends = finish_reason is not None or parser.stopped
        if ends:
            truncated = finish_reason == "length"
            deltas += self._with_tokens(parser.finish(truncated=truncated))
        if self._single_call:
            deltas = [delta for delta in deltas if not delta.tool]
        self._collect(deltas)
        if ends:
            self.finish_reason = self._finish_reason(finish_reason)
        return deltas

    def _push(self, token: TokenEvent) -> list[Delta]:
        if not self._tracks_tokens:
            return self._parser.push(token.token_id)
        was_content = self._parser.in_content
        deltas = self._parser.push(token.token_id)
        if was_content and self._parser.in_content:
            self._pending_tokens.append(token)
        deltas = self._with_tokens(deltas)
        if not self._parser.in_content:
            self._pending_tokens.clear()
        return deltas

    def _with_tokens(self, deltas: list[Delta]) -> list[Delta]:
        """Add the pending tokens to the first content delta, which completes their text."""
        if not self._tracks_tokens:
            return deltas
        index = next((i for i, delta in enumerate(deltas) if delta.content), None)
        if index is None:
            return deltas
        delta_with_tokens = replace(deltas[index], tokens=tuple(self._pending_tokens))
        self._pending_tokens.clear()
        return [*deltas[:index], delta_with_tokens, *deltas[index + 1 :]]

    def _finish_reason(self, finish_reason: str | None) -> str:
        if self._parser.stopped or finish_reason is None:
            return "stop"
        # A truncated output may end within a call.
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
