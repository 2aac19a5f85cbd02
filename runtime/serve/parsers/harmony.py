"""Harmony, the format of GPT-OSS: messages in channels, between control tokens.

    <|start|>assistant<|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.F <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

The prompt ends with the first ``<|start|>assistant``. The parser tolerates deviations. Text outside
of messages is skipped. A message may start before the previous one ended. If no message is for the
user, the text that was skipped last is the content. (OpenAI, "Harmony response format".)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from specbuild.runtime.serve.parsers.parser import Delta
from specbuild.runtime.text.stream import Decode, Stop, TextStream

CONTROL_TOKENS = ("start", "channel", "message", "end", "return", "call", "constrain")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."
_CHANNELS = ("analysis", "commentary", "final")


class HarmonyParser:
    """Parses Harmony. ``control`` maps the names of CONTROL_TOKENS to the engine's token ids.

    Analysis is reasoning, a message to a function is a tool call, and all other messages are
    content, including commentary without a recipient. Stop strings are searched in content only.
    """

    def __init__(self, control: Mapping[str, int], decode: Decode, stop: Stop) -> None:
        self._names = {token_id: name for name, token_id in control.items()}
        self._decode = decode
        self._stop = stop
        # Token ids of the header, by the control token that precedes them; None between messages.
        self._header: dict[str, list[int]] | None = {"start": []}
        self._header_part: list[int] = self._header["start"]
        self._body: TextStream | None = None
        self._kind = "content"
        self._num_calls = 0
        self._has_answer = False
        self.stopped = False
        self.stop_text: str | None = None

    @property
    def in_content(self) -> bool:
        """Whether a message for the user is open."""
        return self._body is not None and self._kind == "content"

    def skip(self, ids: Sequence[int]) -> None:
        """Process the part of the assistant's turn that the prompt contains. It is not output."""
        for token_id in ids:
            self.push(token_id)
        self.stopped = False
        if self._body is not None:
            self._body = self._new_body()

    def push(self, token_id: int) -> list[Delta]:
        """Return the deltas that a token completes."""
        name = self._names.get(token_id)
        if name is None and self._body is None:
            self._header_part.append(token_id)
            return []
        if name is None:
            assert self._body is not None
            return self._delta(self._body, self._body.push(token_id))
        if name == "message":
            return self._begin_message()
        deltas = self._end_message()
        if name == "start":
            self._header = {}
        elif name == "channel":
            self._header = self._header or {}
        if name in ("start", "channel", "constrain") and self._header is not None:
            self._header_part = self._header[name] = []
        elif not self._header_part:
            # Keep text outside of messages: it may become the content.
            self._header, self._header_part = None, []
        return deltas

    def finish(self, *, truncated: bool = False) -> list[Delta]:
        """Return the text that was held back, or else the text that was skipped last."""
        deltas = self._end_message()
        if self._has_answer or not self._header_part:
            return deltas
        text = TextStream(self._decode, self._stop)
        skipped = "".join([*map(text.push, self._header_part), text.finish()])
        if self._header is not None and "channel" in self._header:
            channel, _, content = skipped.partition(" ")
            skipped = content if channel in _CHANNELS else skipped
            if truncated and (skipped is not content or _RECIPIENT.search(skipped)):
                skipped = ""
        return [*deltas, Delta(skipped)] if skipped else deltas

    def _begin_message(self) -> list[Delta]:
        """Start the message of the header. Without a header there is no message."""
        if self._header is None:
            return []
        role, channel = (self._decode(self._header.get(part, [])) for part in ("start", "channel"))
        self._header, self._header_part = None, []
        recipient = _RECIPIENT.search(channel) or _RECIPIENT.search(role)
        if recipient is not None:
            self._kind = "tool"
            self._body = self._new_body()
            self._num_calls += 1
            self._has_answer = True
            return [Delta(tool=self._num_calls - 1, name=recipient[1].removeprefix(_FUNCTIONS))]
        is_reasoning = channel.split()[:1] == ["analysis"]
        self._kind = "reasoning" if is_reasoning else "content"
        self._has_answer = self._has_answer or not is_reasoning
        self._body = self._new_body()
        return []

    def _new_body(self) -> TextStream:
        return TextStream(self._decode, self._stop if self._kind == "content" else ())

    def _end_message(self) -> list[Delta]:
        """End the open message, if any, and return its last delta."""
        body, self._body = self._body, None
        return [] if body is None else self._delta(body, body.finish())

    def _delta(self, body: TextStream, text: str) -> list[Delta]:
        self.stopped = self.stopped or body.stopped
        self.stop_text = self.stop_text or body.matched
        if not text:
            return []
        if self._kind == "tool":
            return [Delta(tool=self._num_calls - 1, arguments=text)]
        return [Delta(reasoning=text) if self._kind == "reasoning" else Delta(text)]
