"""The protocol of output parsers, and the parser of outputs that are content only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specbuild.runtime.request import TokenEvent
from specbuild.runtime.text.stream import Decode, Stop, StopText, TextStream


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered chat: the prompt that an output continues.

    ``continued`` is the content of the assistant's message that the output continues; it is empty
    if the template opened a new turn. ``num_past_calls`` is the number of tool calls in earlier
    messages.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    continued: str = ""
    num_past_calls: int = 0


@dataclass(slots=True)
class Delta:
    """A piece of an output. Most tokens have one.

    ``tool`` is the index of a tool call. The first delta of a call has its name, the others have
    ``arguments``. ``call_id`` is the call's id, empty if any id will do. ``tokens`` are the
    content's tokens if they were requested.
    """

    content: str = ""
    reasoning: str = ""
    tool: int | None = None
    name: str | None = None
    arguments: str = ""
    call_id: str = ""
    tokens: tuple[TokenEvent, ...] = ()


class OutputParser(Protocol):
    """Parses the tokens of one output in order. It never raises: invalid parts become content."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the content. Later tokens must be discarded."""
        ...

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the content, or None."""
        ...

    @property
    def in_content(self) -> bool:
        """Whether the current position is in content."""
        ...

    def push(self, token_id: int) -> list[Delta]:
        """Return the deltas that a token completes."""
        ...

    def finish(self, *, truncated: bool = False) -> list[Delta]:
        """Return the deltas that were held back, after the last token.

        If the token limit ``truncated`` the output, an incomplete call is omitted.
        """
        ...


class ContentStop:
    """The stop properties of a parser whose ``_stop`` searches the content for stop strings."""

    _stop: StopText | TextStream

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the content."""
        return self._stop.stopped

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the content, or None."""
        return self._stop.matched


class TextParser(ContentStop):
    """Parses outputs that consist of content only."""

    in_content = True

    def __init__(self, decode: Decode, stop: Stop) -> None:
        self._stop: TextStream = TextStream(decode, stop)

    def push(self, token_id: int) -> list[Delta]:
        """Return the text that the token completes."""
        text = self._stop.push(token_id)
        return [Delta(text)] if text else []

    def finish(self, *, truncated: bool = False) -> list[Delta]:
        """Return the rest of the text."""
        del truncated
        text = self._stop.finish()
        return [Delta(text)] if text else []
